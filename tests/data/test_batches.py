"""Batches: what an epoch depends on, what augmentation does to an image, and that nothing else is touched."""

import itertools
import random

import numpy as np
import pytest
import torch

from ifso.data.batches import Augmentation, Images, TestBatches, TrainBatches
from ifso.errors import DataError

MOVES = Augmentation(2, mirror=True)


def images(count=50, channels=3, size=8):
    generator = torch.Generator().manual_seed(3)
    pixels = torch.randint(0, 256, (count, channels, size, size), dtype=torch.uint8, generator=generator)
    mean, deviation = torch.arange(1.0, channels + 1), torch.arange(2.0, channels + 2)
    return Images(pixels, torch.arange(count), mean.view(-1, 1, 1), deviation.view(-1, 1, 1))


def training(seed=0, batch_size=16, drop_last=True, augmentation=MOVES, data=None):
    return TrainBatches(
        data or images(), batch_size=batch_size, augmentation=augmentation, drop_last=drop_last, seed=seed
    )


def numpy_state():
    return np.random.get_state()[1].tolist()  # noqa: NPY002 (the state that users have)


def same(first, second):
    first, second = list(first), list(second)
    return len(first) == len(second) and all(
        torch.equal(a, b) for one, other in zip(first, second, strict=True) for a, b in zip(one, other, strict=True)
    )


class TestEpochs:
    def test_set_epoch_gives_the_epoch_again_bit_for_bit(self):
        batches = training()
        epochs = [list(batches) for _ in range(3)]
        assert not any(same(a, b) for a, b in itertools.combinations(epochs, 2))
        batches.set_epoch(1)
        assert same(batches, epochs[1])
        assert same(batches, epochs[2])

    def test_a_fresh_object_gives_the_same_epochs(self):
        batches, again = training(), training()
        list(batches)
        again.set_epoch(1)
        assert same(batches, again)

    def test_epochs_depend_on_the_seed(self):
        assert not same(training(seed=0), training(seed=1))
        assert same(training(seed=7), training(seed=7))

    def test_iterators_at_the_same_time_are_different_epochs_and_do_not_disturb_each_other(self):
        batches = training()
        first, second = iter(batches), iter(batches)
        pairs = list(zip(first, second, strict=True))
        batches.set_epoch(0)
        assert same(batches, (a for a, _ in pairs))
        assert same(batches, (b for _, b in pairs))

    def test_global_random_state_is_neither_read_nor_changed(self):
        states = torch.get_rng_state(), numpy_state(), random.getstate()
        first = list(training())
        assert torch.equal(torch.get_rng_state(), states[0])
        assert numpy_state() == states[1]
        assert random.getstate() == states[2]
        torch.manual_seed(12345)
        assert same(training(), first)

    @pytest.mark.parametrize(("drop_last", "sizes"), [(True, [16, 16, 16]), (False, [16, 16, 16, 2])])
    def test_every_image_comes_once(self, drop_last, sizes):
        batches = training(drop_last=drop_last)
        found = list(batches)
        assert [len(labels) for _, labels in found] == sizes
        assert len(batches) == len(sizes)
        labels = torch.cat([labels for _, labels in found])
        assert len(labels.unique()) == len(labels) == sum(sizes)
        assert labels.tolist() != sorted(labels.tolist())

    def test_types_and_normalisation_without_augmentation(self):
        data = images()
        for x, y in training(data=data, augmentation=None):
            assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
            mean, deviation = (torch.tensor(v).view(1, 3, 1, 1) for v in ([1.0, 2.0, 3.0], [2.0, 3.0, 4.0]))
            assert torch.allclose(x, (data.pixels[y].float() - mean) / deviation)

    @pytest.mark.parametrize("size", [0, -1, 2.0, True, None])
    def test_bad_batch_sizes(self, size):
        with pytest.raises(DataError, match="batch size"):
            training(batch_size=size)
        with pytest.raises(DataError, match="batch size"):
            TestBatches(images(), batch_size=size)

    def test_a_batch_larger_than_the_data(self):
        with pytest.raises(DataError, match="batches of 51 cannot be filled by 50 training images"):
            training(batch_size=51)
        assert [len(y) for _, y in training(batch_size=51, drop_last=False)] == [50]


class TestTest:
    def test_all_images_in_order_every_time(self):
        data = images()
        batches = TestBatches(data, batch_size=20)
        for _ in range(2):
            found = list(batches)
            assert len(batches) == len(found) == 3
            assert torch.cat([y for _, y in found]).tolist() == list(range(50))
            assert torch.equal(torch.cat([x for x, _ in found]), data.normalized(data.pixels))


def by_hand(image, row, column, mirrored, shift):
    """One image [C, H, W] moved pixel by pixel."""
    channels, height, width = image.shape
    out = torch.zeros_like(image)
    for c, i, j in itertools.product(range(channels), range(height), range(width)):
        source = width - 1 - j if mirrored else j
        y, x = i + row - shift, source + column - shift
        if 0 <= y < height and 0 <= x < width:
            out[c, i, j] = image[c, y, x]
    return out


class TestAugmentation:
    @pytest.mark.parametrize(
        ("shift", "mirror", "shape"), [(2, True, (3, 6, 5)), (1, False, (1, 4, 4)), (0, True, (2, 3, 3))]
    )
    def test_moves_images_as_written_out(self, shift, mirror, shape):
        augmentation, generator = Augmentation(shift, mirror), torch.Generator().manual_seed(0)
        pixels = torch.randint(1, 256, (40, *shape), dtype=torch.uint8)
        moves = augmentation.draw(40, generator)
        moved = augmentation(pixels, moves)
        assert moved.dtype == torch.uint8
        for image, (row, column, mirrored), out in zip(pixels, moves.tolist(), moved, strict=True):
            assert torch.equal(out, by_hand(image, row, column, mirrored, shift))

    def test_all_moves_occur_and_equally_often(self):
        moves = Augmentation(1, mirror=True).draw(9000, torch.Generator().manual_seed(0))
        counts = torch.bincount(moves @ torch.tensor([6, 2, 1]), minlength=18)
        assert len(counts) == 18
        assert counts.min() > 400
        assert counts.max() < 600

    def test_no_mirror_where_none_is_wanted(self):
        assert Augmentation(4, mirror=False).draw(100, torch.Generator())[:, 2].sum() == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnTheGpu:
    def test_batches_are_those_of_the_cpu(self):
        for ours, theirs in zip(training(data=images().to("cuda")), training(), strict=True):
            assert ours[0].is_cuda
            assert torch.allclose(ours[0].cpu(), theirs[0])
            assert torch.equal(ours[1].cpu(), theirs[1])

    def test_nothing_waits_for_the_device_within_an_epoch(self):
        batches = iter(training(data=images().to("cuda")))
        next(batches)
        torch.cuda.set_sync_debug_mode("error")
        try:
            assert len(list(batches)) == 2
        finally:
            torch.cuda.set_sync_debug_mode("default")
