"""Training on batches that a user made: what is random in them follows the seed, and goes on after an interruption."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ifso.data import open_data
from ifso.data.from_file import DeviceBatches
from ifso.errors import DataError, DivergedError
from ifso.training.settings import TrainSettings
from ifso.training.steps import OneEpoch, batches_of
from ifso.training.trainer import TrainerHooks, fit

SETTINGS = TrainSettings(epochs=4, lr=0.1, schedule="constant")


class Augmented(Dataset):
    """Every image is shifted by three kinds of random numbers."""

    def __len__(self):
        return 12

    def __getitem__(self, place):
        noise = torch.rand(4) + float(np.random.rand()) + random.random()  # noqa: NPY002 (what users use)
        return noise + place, place % 3


def loader(**options):
    return DataLoader(Augmented(), batch_size=4, shuffle=True, **options)


def network(dropout=0.2):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(dropout), nn.ReLU(), nn.Linear(6, 3))


def elsewhere(seed):
    """The user's process has drawn other numbers since."""
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)


def states():
    _, keys, place, *_ = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().tolist(), keys.tolist(), place, random.getstate()


def trained(batches, drawn=1, hooks=None, dropout=0.2, **changes):
    model = network(dropout)
    elsewhere(drawn)
    before = states()
    try:
        fit(model, batches, TrainSettings(**{**SETTINGS.as_dict(), **changes}), hooks=hooks)
    finally:
        assert states() == before
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


LOADERS = {
    "global states": loader,
    "a generator of its own": lambda: loader(generator=torch.Generator().manual_seed(5)),
    "from a file": lambda: DeviceBatches(loader(generator=torch.Generator()), "cpu", "own.py:data"),
}


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_the_seed_alone_says_what_is_trained(make):
    first, again, other = (trained(make(), drawn, dropout=0.0, seed=seed) for drawn, seed in ((1, 0), (2, 0), (1, 3)))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_interrupted_and_resumed_is_not_interrupted(make, tmp_path):
    def stop(epoch):
        if epoch.number == 2:
            raise Interrupted

    whole = trained(make())
    with pytest.raises(Interrupted):
        trained(make(), hooks=TrainerHooks(on_epoch=stop, folder=tmp_path, save_every=0.0))
    resumed = trained(make(), 9, hooks=TrainerHooks(folder=tmp_path))
    assert torch.equal(resumed, whole)


def test_an_epoch_is_one_of_the_stream_and_differs_from_the_next():
    def drawn(epoch):
        return torch.cat([images for images, _ in OneEpoch(loader(), 0, epoch)])

    assert torch.equal(drawn(2), drawn(2))
    assert not torch.equal(drawn(2), drawn(3))


def test_ours_and_lists_are_gone_through_as_they_are():
    ours, held = open_data("digits").train_batches(700), [1, 2]
    found = [images for images, _ in batches_of(ours, 0, 3)]
    ours.set_epoch(3)
    assert all(torch.equal(one, other) for one, (other, _) in zip(found, ours, strict=True))
    assert not isinstance(batches_of(ours, 0, 3), OneEpoch)
    assert list(batches_of(held, 0, 1)) == held


def test_a_generator_lasts_for_one_epoch():
    batches = [(torch.ones(2, 4), torch.tensor([0, 1]))] * 2
    fit(network(), iter(batches), TrainSettings(epochs=1))
    with pytest.raises(DataError, match="nothing to train on: the batches ran out before the first one"):
        fit(network(), iter(batches), SETTINGS)
    with pytest.raises(DataError, match=r"train_batches is one batch \(Tensor\)"):
        fit(network(), torch.ones(3, 4), SETTINGS)


def test_what_is_drawn_while_a_bad_batch_is_looked_for_is_put_back():
    class Bad(Augmented):
        def __getitem__(self, place):
            return super().__getitem__(place)[0] * torch.nan, 0

    with pytest.raises(DivergedError, match="batch 0 of them"):
        trained(DataLoader(Bad(), batch_size=4))
