"""``folder:PATH``: class folders of any images, with a size and colours of their own."""

import numpy as np
import pytest
import torch

from ifso.data import open_data
from ifso.errors import DataError

pytest.importorskip("torchvision")
Image = pytest.importorskip("PIL.Image")

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")


def write(root, *parts, count=6):
    """Images of one shade, another in each file, in ``root`` or its folders ``parts``."""
    shade = 0
    for part in parts or ("",):
        for name in ("cat", "dog"):
            (root / part / name).mkdir(parents=True)
            for index in range(count):
                shade += 5
                Image.fromarray(np.full((40, 50, 3), shade, np.uint8)).save(root / part / name / f"{index}.png")
    return root


def opened(root, **options):
    return open_data(f"folder:{root}", **{"workers": 0, **options})


def shades(batches, mean=0.0, deviation=1.0):
    """The shades of all images, by which they are known."""
    images = torch.cat([images for images, _ in batches])
    return sorted(((images.mean((1, 2, 3)) * deviation + mean) * 255).round().int().tolist())


def refused(root, **options):
    with pytest.raises(DataError) as caught:
        opened(root, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


PLAIN = {"mean": 0.0, "deviation": 1.0, "size": 16}


def test_as_imagenet_unless_told_otherwise(tmp_path):
    write(tmp_path, "train", "val")
    ours, theirs = opened(tmp_path, seed=3), open_data(f"imagenet:{tmp_path}", seed=3, workers=0)
    assert (ours.classes, ours.num_classes, ours.input_shape) == (("cat", "dog"), 2, (3, 224, 224))
    for first, second in zip(ours.train_batches(5), theirs.train_batches(5), strict=True):
        assert torch.allclose(first[0], second[0], atol=1e-5)
        assert torch.equal(first[1], second[1])


def test_size_and_colours(tmp_path):
    write(tmp_path, "train", "val")
    data = opened(f"{tmp_path},size=32,mean=0.1x0.2x0.3,deviation=0.5")
    images, labels = next(iter(data.test_batches()))
    assert (images.shape, data.input_shape, labels.tolist()) == ((12, 3, 32, 32), (3, 32, 32), [0] * 6 + [1] * 6)
    expected = (65 / 255 - torch.tensor([0.1, 0.2, 0.3])) / 0.5
    assert torch.allclose(images[0].mean((1, 2)), expected, atol=1e-6)
    again = opened(tmp_path, size=32, mean=(0.1, 0.2, 0.3), deviation=0.5)
    assert torch.equal(again.example_inputs(), data.example_inputs())
    assert next(iter(data.train_batches(4)))[0].shape == (4, 3, 32, 32)


class TestOneFolder:
    def test_is_split_in_the_same_way_for_every_seed(self, tmp_path):
        write(tmp_path)
        first, second = (opened(tmp_path, seed=seed, test=0.25, **PLAIN) for seed in (0, 1))
        tested = shades(first.test_batches())
        assert tested == shades(second.test_batches())
        assert len(tested) == 3
        trained = shades(first.train_batches(1, augment=False, drop_last=False))
        assert sorted(tested + trained) == [*range(5, 61, 5)]
        assert first.notes == (f"{tmp_path} has no folder train: 3 of its 12 images are for the test (test=0.25)",)

    def test_validation_is_cut_from_what_is_left(self, tmp_path):
        data = opened(write(tmp_path), validation=2, **PLAIN)
        parts = [data.test_batches(), data.validation_batches(), data.train_batches(1, augment=False)]
        assert [len(shades(part)) for part in parts] == [2, 2, 8]
        assert sorted(shade for part in parts for shade in shades(part)) == [*range(5, 61, 5)]

    def test_one_image_is_too_few(self, tmp_path):
        (tmp_path / "cat").mkdir()
        Image.new("RGB", (9, 9)).save(tmp_path / "cat" / "a.png")
        assert "holds 1 image; give two at least" in refused(tmp_path)
        assert "holds images but no class folders" in refused(tmp_path / "cat")
        assert refused(tmp_path / "nowhere").endswith("val/CLASS/*.JPEG, or class folders of images")


def test_val_is_for_validation_beside_test(tmp_path):
    write(tmp_path, "train", "val", "test", count=2)
    data = opened(tmp_path, **PLAIN)
    assert shades(data.validation_batches()) == [25, 30, 35, 40]
    assert shades(data.test_batches()) == [45, 50, 55, 60]
    assert len(opened(tmp_path, validation=1, **PLAIN).validation) == 1
    with pytest.raises(DataError, match="without a validation part"):
        opened(write(tmp_path / "other", "train", "val"), **PLAIN).validation_batches()


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("size=4", "size must be pixels from 8 to 4096, got size=4"),
        ("size=32x32", "got size=(32, 32)"),
        ("mean=2", "mean must be one number from 0 to 1, or three (0.5x0.5x0.5), got mean=2"),
        ("mean=0.5x0.5", "got mean=(0.5, 0.5)"),
        ("mean=nan", "got mean=nan"),
        ("mean=1e999", "got mean=inf"),
        ("size=" + "9" * 5000, "got size=999"),
        ("size=²", "got size='²'"),
        ("deviation=0", "deviation must be one number from 1e-06 to 1"),
        ("test=1", "test must be a share between 0 and 1, such as 0.2, got test=1"),
        ("test", "got test=True"),
        ("labels=ids", "has no option labels; it has size, mean, deviation, test"),
    ],
)
def test_options_that_cannot_be(option, words, tmp_path):
    assert words in refused(f"{write(tmp_path)},{option}")
