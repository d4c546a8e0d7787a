"""JPEGs in one .npz: what is decoded, how it is split, and one clear line for whatever is wrong."""

import io

import numpy as np
import pytest
import torch

from ifso.data import open_data
from ifso.data.batches import every_nth
from ifso.errors import DataError

pytest.importorskip("torchvision")
Image = pytest.importorskip("PIL.Image")

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")

LABELS = (2, 0, 2, 1, 0, 2, 1, 2)
TRAIN, TEST = [0, 1, 3, 5], [2, 4, 6, 7]
"""Places in the file: the first and third of each class, the second and fourth."""


def jpeg(shade, size=(224, 224), form="JPEG"):
    buffer = io.BytesIO()
    Image.fromarray(np.full((size[1], size[0], 3), shade, np.uint8)).save(buffer, form)
    return np.frombuffer(buffer.getvalue(), np.uint8)


def arrays(files=None, labels=LABELS):
    """Image i has the shade 20·i."""
    files = [jpeg(20 * place) for place in range(len(labels))] if files is None else files
    offsets = np.cumsum([0, *map(len, files)])
    return {"data": np.concatenate(files), "offsets": offsets, "labels": np.array(labels)}


@pytest.fixture
def opened(tmp_path):
    def write(content=None, **options):
        np.savez(tmp_path / "few.npz", **(arrays() if content is None else content))
        return open_data(f"jpegs:{tmp_path / 'few.npz'}", **{"workers": 0, **options})

    return write


def places(images):
    """Which files they are, by their shade."""
    shade = images.mean((2, 3)) * torch.tensor([0.229, 0.224, 0.225]) + torch.tensor([0.485, 0.456, 0.406])
    assert shade.std(1).max() < 0.01
    return (shade.mean(1) * 255 / 20).round().int().tolist()


def test_every_second_image_of_a_class_is_for_the_test(opened):
    data = opened()
    images, labels = next(iter(data.test_batches()))
    assert (images.shape, images.dtype, labels.dtype) == ((4, 3, 224, 224), torch.float32, torch.int64)
    assert places(images) == TEST
    assert labels.tolist() == [LABELS[place] for place in TEST]
    images, labels = next(iter(data.train_batches(4, augment=False)))
    assert sorted(places(images)) == TRAIN
    assert labels.tolist() == [LABELS[place] for place in places(images)]
    assert (data.num_classes, data.input_shape, data.example_inputs().shape) == (3, (3, 224, 224), (1, 3, 224, 224))


def test_the_seed_shuffles_training_images(opened):
    labels = tuple(np.arange(40) // 2)
    content = arrays([jpeg(6 * place) for place in range(40)], labels)
    first, again, other = (
        torch.cat([y for _, y in opened(content, seed=seed).train_batches(7, augment=False, drop_last=False)]).tolist()
        for seed in (0, 0, 1)
    )
    assert first == again
    assert first != other
    assert sorted(first) == sorted(other) == list(range(20))


def test_a_validation_part_and_ranks(opened):
    data = opened(validation=1)
    assert len(next(iter(data.validation_batches()))[1]) == 1
    assert len(data.train) == 3
    dealt = [places(next(iter(opened(rank=rank, ranks=2).test_batches()))[0]) for rank in (0, 1)]
    assert dealt == [TEST[::2], TEST[1::2]]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_rank_may_have_nothing_to_test(opened, workers):
    batches = opened(validation=1, rank=1, ranks=2, workers=workers).validation_batches()
    assert (len(batches), list(batches)) == (0, [])


def test_images_are_as_they_are_in_the_file(opened):
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (7, 7, 3), np.uint8).repeat(32, 0).repeat(32, 1)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=95)
    data = opened(arrays([np.frombuffer(buffer.getvalue(), np.uint8)] * 2, (0, 0)))
    mean, deviation = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    shown = (data.example_inputs()[0].numpy().transpose(1, 2, 0) * deviation + mean) * 255
    expected = np.asarray(Image.open(buffer)).astype(float)
    assert np.abs(shown - expected).max() < 4


@pytest.mark.parametrize("n", [2, 5])
def test_every_nth_keeps_the_order_of_the_file(n):
    labels = torch.randint(5, (100,), generator=torch.Generator().manual_seed(0))
    found = every_nth(labels, n)
    for label in range(5):
        assert found[labels == label].tolist() == [place % n == n - 1 for place in range(int((labels == label).sum()))]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": np.zeros(9, np.int64)}, "data is int64 of shape (9,); give the bytes of all JPEG files"),
        ({"offsets": np.array([0.0, 1.0])}, "offsets is float64 of shape (2,); give where each image begins"),
        ({"offsets": np.array([0])}, "offsets is int64 of shape (1,)"),
        ({"offsets": np.array([0, 5, 3, *range(6, 12)])}, "offsets do not grow from 0 to"),
        ({"offsets": np.arange(9) * 10**9}, "offsets do not grow from 0 to"),
        ({"offsets": np.arange(9) - 1}, "offsets do not grow from 0 to"),
        ({"labels": np.zeros(3, np.int64)}, "labels has shape (3,) for 8 images"),
        ({"labels": np.full(8, -1)}, "labels holds labels from -1 to -1"),
        ({"labels": np.arange(8)}, "has one image of each class"),
    ],
)
def test_arrays_that_will_not_do(change, message, opened):
    with pytest.raises(DataError) as caught:
        opened({**arrays(), **change})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_without_its_arrays(tmp_path):
    np.savez(tmp_path / "a.npz", data=np.zeros(3, np.uint8))
    with pytest.raises(DataError, match="holds no offsets and no labels"):
        open_data(f"jpegs:{tmp_path / 'a.npz'}")
    with pytest.raises(DataError, match="there is no file"):
        open_data(f"jpegs:{tmp_path / 'b.npz'}")
    with pytest.raises(DataError, match="did you mean jpegs:PATH"):
        open_data(f"jpeg:{tmp_path / 'b.npz'}")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (jpeg(0, (100, 80)), "image 2 cannot be used: it has 100×80 pixels; give 224×224"),
        (jpeg(0, form="PNG"), "image 2 cannot be used: it is no JPEG"),
        (jpeg(0)[:300], "image 2 cannot be used"),
        (np.zeros(50, np.uint8), "image 2 cannot be used"),
    ],
)
def test_an_image_that_will_not_do_is_named(file, message, opened):
    files = [jpeg(20 * place) for place in range(8)]
    files[2] = file
    data = opened(arrays(files))
    with pytest.raises(DataError) as caught:
        list(data.test_batches())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
