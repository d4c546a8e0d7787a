"""Images in folders: what is decoded, what an epoch depends on, and one clear line for whatever is wrong."""

import os
import sys

import numpy as np
import pytest
import torch

from ifso.data import open_data
from ifso.data.compatibility import check_fits
from ifso.data.decoding import Loading, TestFiles, workers_for
from ifso.data.image_folder import DecodedImages
from ifso.errors import DataError

pytest.importorskip("torchvision")
Image = pytest.importorskip("PIL.Image")

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")

MEAN, DEVIATION = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
COUNTS = {"train": {"cat": 5, "dog": 4, "eel": 4}, "val": {"cat": 2, "eel": 3}}


def slope(height=60, width=80):
    """Red grows from left to right, green from top to bottom, both from 0 to 255."""
    down, right = (np.linspace(0, 255, size) for size in (height, width))
    green, red = np.meshgrid(down, right, indexing="ij")
    return Image.fromarray(np.stack([red, green, np.full_like(red, 100)], -1).round().astype(np.uint8))


@pytest.fixture
def root(tmp_path):
    random = np.random.default_rng(0)
    for part, classes in COUNTS.items():
        for name, count in classes.items():
            (tmp_path / part / name).mkdir(parents=True)
            for index in range(count):
                pixels = random.integers(0, 256, (6, 8, 3), np.uint8)
                image = Image.fromarray(pixels).resize((70 + index, 50), Image.Resampling.BICUBIC)
                image.save(tmp_path / part / name / f"{index}.JPEG")
    return tmp_path


def opened(root, **options):
    return open_data(f"imagenet:{root}", **{"workers": 0, **options})


def refused(root, **options):
    with pytest.raises(DataError) as caught:
        opened(root, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def same(first, second):
    pairs = list(zip(first, second, strict=True))
    return bool(pairs) and all(torch.equal(x, u) and torch.equal(y, v) for (x, y), (u, v) in pairs)


def pixels_of(images):
    """Back from normalised images [N, 3, H, W] to numbers from 0 to 255, [N, H, W, 3]."""
    return (images.numpy().transpose(0, 2, 3, 1) * DEVIATION + MEAN) * 255


class TestContents:
    def test_shapes_classes_and_lengths(self, root):
        data = opened(root)
        assert (data.classes, data.num_classes, data.input_shape) == (("cat", "dog", "eel"), 3, (3, 224, 224))
        assert data.example_inputs().shape == (1, 3, 224, 224)
        batches = data.train_batches(4)
        found = list(batches)
        assert len(batches) == len(found) == 3
        for x, y in found:
            assert (x.shape, x.dtype, y.shape, y.dtype) == ((4, 3, 224, 224), torch.float32, (4,), torch.int64)
        assert sorted(torch.cat([y for _, y in data.train_batches(4, drop_last=False)]).tolist()) == (
            [0] * 5 + [1] * 4 + [2] * 4
        )

    def test_the_middle_of_test_images_as_pillow_makes_it(self, root):
        (x, y), names = next(iter(opened(root).test_batches())), ["cat/0", "cat/1", "eel/0", "eel/1", "eel/2"]
        assert y.tolist() == [0, 0, 2, 2, 2]
        for found, name in zip(pixels_of(x), names, strict=True):
            image = Image.open(root / "val" / f"{name}.JPEG")
            width = int(256 * image.width / image.height)
            large = image.resize((width, 256), Image.Resampling.BILINEAR)
            left = round((width - 224) / 2)
            expected = np.asarray(large.crop((left, 16, left + 224, 240)))
            assert np.abs(found - expected).max() < 1.6

    def test_training_images_are_windows_of_8_to_100_percent(self, tmp_path):
        for part in ("train", "val"):
            (tmp_path / part / "slope").mkdir(parents=True)
            for index in range(60):
                slope().save(tmp_path / part / "slope" / f"{index}.png")
        (x, _) = next(iter(opened(tmp_path).train_batches(60)))
        red, green = (pixels_of(x)[:, 20:-20, 20:-20, colour] for colour in (0, 1))
        slopes = [(np.diff(red, axis=2).mean((1, 2)) * 224 / 255), (np.diff(green, axis=1).mean((1, 2)) * 224 / 255)]
        share = np.abs(slopes[0]) * slopes[1]
        ratio = np.abs(slopes[0]) * 80 / (slopes[1] * 60)
        assert 0.06 < share.min() < 0.3
        assert 0.7 < share.max() < 1.05
        assert 0.7 < ratio.min() < 0.9
        assert 1.1 < ratio.max() < 1.4
        assert 15 <= (slopes[0] < 0).sum() <= 45
        assert red.min() > -1
        assert red.max() < 256

    def test_other_colours_become_red_green_and_blue(self, tmp_path):
        for part in ("train", "val"):
            (tmp_path / part / "a").mkdir(parents=True)
        image = slope(256, 256)
        kept = {"0.JPEG": "L", "1.JPEG": "CMYK", "2.png": "RGBA", "3.png": "P", "4.JPG": "RGB"}
        for name, mode in kept.items():
            image.convert(mode).save(tmp_path / "val" / "a" / name)
        Image.fromarray(np.full((256, 256), 65535, np.uint16)).save(tmp_path / "val" / "a" / "5.png")
        image.save(tmp_path / "train" / "a" / "one.jpg")
        (x, _) = next(iter(opened(tmp_path).test_batches()))
        found = pixels_of(x)
        for index, name in enumerate(kept):
            expected = np.asarray(Image.open(tmp_path / "val" / "a" / name).convert("RGB"))[16:240, 16:240]
            assert np.abs(found[index] - expected).max() < 1.6, name
        assert np.allclose(found[5], 255, atol=0.01)

    def test_validation_is_cut_from_the_training_set(self, root):
        whole, data = opened(root), opened(root, validation=4, seed=2)
        assert (len(data.train), len(data.validation), len(data.test)) == (9, 4, 5)
        assert sorted([*data.train.names, *data.validation.names]) == list(whole.train.names)
        assert sum(len(y) for _, y in data.validation_batches(3)) == 4
        assert list(opened(root, validation=4, seed=2).train.names) == list(data.train.names)
        with pytest.raises(DataError, match="without a validation part"):
            whole.validation_batches()

    def test_fits_a_network_or_not(self, root):
        network = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 2))
        with pytest.raises(DataError, match="has 3 classes, but the network 2 outputs"):
            check_fits(network, opened(root))


class TestEpochs:
    def test_workers_change_nothing(self, root):
        alone, workers = opened(root, seed=4).train_batches(3), opened(root, seed=4, workers=2).train_batches(3)
        assert same(alone, workers)
        assert same(alone, workers)
        workers.set_epoch(0)
        alone.set_epoch(0)
        next(iter(workers))
        first, second = iter(workers), iter(workers)
        both = list(zip(first, second, strict=True))
        alone.set_epoch(1)
        assert same(alone, [pair[0] for pair in both])
        assert same(alone, [pair[1] for pair in both])
        tests = opened(root, workers=2).test_batches(2)
        assert len(tests) == 3
        assert same(tests, opened(root).test_batches(2))

    def test_epochs_and_seeds_differ_and_come_again(self, root):
        batches = opened(root, seed=1).train_batches(6)
        first, second = list(batches), list(batches)
        assert not same(first, second)
        assert not same(first, list(opened(root, seed=2).train_batches(6)))
        batches.set_epoch(0)
        assert same(batches, first)

    def test_an_image_looks_different_in_every_epoch(self, root):
        source = opened(root).train_batches(6).source
        assert torch.equal(source.batch(0, [3])[0], source.batch(0, [3])[0])
        assert not torch.equal(source.batch(0, [3])[0], source.batch(1, [3])[0])

    def test_without_augmentation(self, root):
        data = opened(root)
        middles = {image.numpy().tobytes() for image in data.first_batch()[0]}
        seen = {image.numpy().tobytes() for x, _ in data.train_batches(1, augment=False) for image in x}
        assert len(seen) == 13
        assert middles < seen

    def test_ranks_together_see_the_joint_batch(self, root):
        alone = opened(root, seed=4).train_batches(6)
        parts = [opened(root, seed=4, rank=rank, ranks=2).train_batches(3) for rank in (0, 1)]
        assert len(alone) == len(parts[0]) == len(parts[1]) == 2
        for (x, y), *shares in zip(alone, *parts, strict=True):
            assert torch.equal(torch.cat([images for images, _ in shares]), x)
            assert torch.equal(torch.cat([labels for _, labels in shares]), y)
        x, y = next(iter(opened(root).test_batches()))
        for rank in (0, 1):
            mine = opened(root, rank=rank, ranks=2).test_batches(2)
            found = list(mine)
            assert len(mine) == len(found)
            assert torch.equal(torch.cat([images for images, _ in found]), x[rank::2])

    def test_global_random_state_is_neither_read_nor_changed(self, root):
        state, expected = torch.get_rng_state(), list(opened(root).train_batches(6))
        list(opened(root, workers=1).train_batches(6))
        assert torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(99)
        assert same(opened(root).train_batches(6), expected)


def dies(image):
    os._exit(1)


class TestBadInput:
    @pytest.mark.parametrize("workers", [0, 1])
    @pytest.mark.parametrize("damage", ["cut", "empty", "words"])
    def test_a_damaged_image_is_named(self, root, workers, damage):
        file = root / "val" / "eel" / "1.JPEG"
        file.write_bytes({"cut": file.read_bytes()[:500], "empty": b"", "words": b"no image at all"}[damage])
        with pytest.raises(DataError) as caught:
            list(opened(root, workers=workers).test_batches(2))
        message = str(caught.value)
        assert message.startswith(f"{file} cannot be read as an image: ")
        assert message.endswith("; replace or remove it")
        assert "\n" not in message
        assert ".cpp" not in message

    def test_a_file_that_went_away(self, root):
        data = opened(root)
        (root / "val" / "cat" / "0.JPEG").unlink()
        with pytest.raises(DataError, match=r"cat/0\.JPEG cannot be read"):
            data.example_inputs()

    def test_a_worker_that_dies(self, root):
        source = DecodedImages(opened(root).test, dies, 0)
        batches = TestFiles(source, batch_size=5, loading=Loading(torch.device("cpu"), 1))
        with pytest.raises(DataError, match=r"failed: DataLoader worker .* exited .*; give fewer workers") as caught:
            list(batches)
        assert "\n" not in str(caught.value)

    def test_folders(self, root, tmp_path):
        assert "there is no folder" in refused(tmp_path / "none")
        assert "https://image-net.org" in refused(tmp_path / "none")
        assert "train/CLASS/*.JPEG" in refused(tmp_path / "none")
        (root / "val" / "fox").mkdir()
        assert f"{root / 'val' / 'fox'} is of a class that {root / 'train'} lacks;" in refused(root)
        (root / "val" / "gnu").mkdir()
        assert "lacks (1 more like it); both need the same class folders" in refused(root)
        (root / "train" / "fox").mkdir()
        (root / "train" / "gnu").mkdir()
        assert f"{root / 'train' / 'fox'} holds no image (.jpeg, .jpg, .png, .webp); fill" in refused(root)

    @pytest.mark.parametrize("part", ["train", "val"])
    def test_missing_parts(self, root, part):
        (root / part).rename(root / "elsewhere")
        assert f"{root} holds no folder {part}; give the one that holds train/CLASS" in refused(root)
        (root / part).mkdir()
        assert f"{root / part} holds no class folders; put" in refused(root)
        (root / part / "a.JPEG").write_bytes(b"")
        assert f"{root / part} holds images but no class folders; put" in refused(root)
        for name in COUNTS[part]:
            (root / part / name).mkdir()
        (root / part / "cat" / "notes.txt").write_text("no image")
        assert f"{root / part} holds not a single image" in refused(root)

    def test_what_is_left_out_is_said(self, root):
        assert opened(root).notes == ()
        (root / "train" / "cat" / "a.bmp").write_bytes(b"")
        (root / "train" / "cat" / "more").mkdir()
        (root / "train" / "cat" / ".hidden").write_bytes(b"")
        (note,) = opened(root).notes
        assert note.startswith(f"{root / 'train'}: 2 files or folders that do not end like an image (.jpeg, ")
        assert note.endswith("are left out, the first is cat/a.bmp")

    def test_without_torchvision(self, root, monkeypatch):
        monkeypatch.setitem(sys.modules, "torchvision", None)
        assert 'pip install "ifso[vision]"' in refused(root)

    @pytest.mark.parametrize("workers", [-1, 1.0, True, "all"])
    def test_bad_numbers_of_workers(self, root, workers):
        assert f"got workers={workers!r}" in refused(root, workers=workers)

    def test_batches_that_cannot_be(self, root):
        with pytest.raises(DataError, match="batches of 14 cannot be filled by 13 training images"):
            opened(root).train_batches(14)
        with pytest.raises(DataError, match=r"batch size must be .* got 0"):
            opened(root).test_batches(0)


def test_cores_are_divided_among_the_ranks_of_a_machine(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    assert workers_for(None) == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert workers_for(None) == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert workers_for(None) == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_the_gpu(root):
    ours = opened(root, device="cuda", workers=1).train_batches(4)
    for (x, y), (u, v) in zip(ours, opened(root).train_batches(4), strict=True):
        assert x.is_cuda
        assert torch.allclose(x.cpu(), u, atol=1e-5)
        assert torch.equal(y.cpu(), v)
