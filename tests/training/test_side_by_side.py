"""Networks trained side by side: each becomes what it becomes alone, whatever happens to the others."""

import copy
import weakref

import pytest
import torch
from torch import nn

from ifso.data import open_data
from ifso.errors import DataError, DivergedError
from ifso.models import create_model
from ifso.tasks.classification import cross_entropy
from ifso.training.settings import TrainSettings
from ifso.training.trainer import RoundRobin, Trainer, TrainerHooks, fit, fit_side_by_side

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def batches(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(6, 4, generator=generator), torch.randint(3, (6,), generator=generator)) for _ in range(count)]


def network(width):
    torch.manual_seed(width)
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))


KINDS = {
    5: (batches(2, 0), TrainSettings(epochs=1, lr=0.1)),
    8: (batches(5, 1), TrainSettings(epochs=4, lr=0.2, schedule="one-cycle", ema=0.9)),
    6: (batches(3, 2), TrainSettings(epochs=2, lr=0.1, schedule="cosine", nesterov=True, accumulate=2, seed=3)),
}
"""Batches and settings by the width of the network: they differ in length, and in all else."""


def same(first, second):
    return all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())


def alone(width):
    model = network(width)
    return model, fit(model, *KINDS[width])


def test_side_by_side_is_one_after_another():
    lanes = [Trainer(network(width), *kind) for width, kind in KINDS.items()]
    assert fit_side_by_side(lanes) == [None, None, None]
    for lane, width in zip(lanes, KINDS, strict=True):
        model, epochs = alone(width)
        assert not same(model, network(width))
        assert same(lane.model, model)
        assert [(epoch.loss, epoch.lr) for epoch in lane.done] == [(epoch.loss, epoch.lr) for epoch in epochs]


def test_what_failed_holds_no_memory_that_others_could_use():
    class Large:
        pass

    kept = []

    def failing(model, batch):
        held = Large()
        kept.append(weakref.ref(held))
        raise ValueError("no")

    def failed(model, batch):
        try:
            return failing(model, batch)
        except ValueError as error:
            raise DataError("the batch will not do") from error

    lane = Trainer(network(5), batches(2, 0), TrainSettings(epochs=1), loss_fn=failed)
    (failure,) = fit_side_by_side([lane])
    assert str(failure) == "the batch will not do"
    assert [each() for each in kept] == [None]


def test_they_take_turns():
    steps = []

    def named(name):
        def loss_fn(model, batch):
            steps.append(name)
            return cross_entropy(model, batch)

        return loss_fn

    settings = TrainSettings(epochs=1)
    lanes = [Trainer(network(5), batches(count, 0), settings, loss_fn=named(count)) for count in (1, 3, 2)]
    fit_side_by_side(lanes)
    assert steps == [1, 3, 2, 3, 2, 3]


def test_one_that_fails_does_not_stop_the_others():
    nothing = torch.full((4, 4), torch.nan), torch.zeros(4, dtype=torch.long)
    settings = TrainSettings(epochs=3)
    lanes = [
        Trainer(network(8), *KINDS[8]),
        Trainer(network(5).eval(), [nothing], settings),
        Trainer(network(5), [], settings),
        Trainer(network(6), *KINDS[6]),
    ]
    failures = fit_side_by_side(lanes)
    assert [type(failure) for failure in failures] == [type(None), DivergedError, DataError, type(None)]
    assert not lanes[1].model.training
    assert same(lanes[0].model, alone(8)[0])
    assert same(lanes[3].model, alone(6)[0])


def test_an_interruption_stops_all_and_gives_their_modes_back():
    models = [network(5).eval(), network(8).eval()]

    def interrupt(epoch):
        raise KeyboardInterrupt

    lanes = [Trainer(models[0], *KINDS[8]), Trainer(models[1], *KINDS[5], hooks=TrainerHooks(on_epoch=interrupt))]
    state = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt) as caught:
        fit_side_by_side(lanes)
    assert caught.tb is not None
    assert not any(module.training for model in models for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


def test_nobody_to_train():
    assert fit_side_by_side([]) == []


def test_a_crew_takes_more_on_while_it_works():
    crew, ended = RoundRobin(), []
    crew.add(Trainer(network(5), *KINDS[5]), lambda failure: ended.append(("first", failure)))
    late = Trainer(network(6), *KINDS[6])
    while crew.size:
        crew.turn()
        if ended == [("first", None)] and late.done == []:
            crew.add(late, lambda failure: ended.append(("late", failure)))
            ended.append("added")
    assert ended == [("first", None), "added", ("late", None)]
    assert same(late.model, alone(6)[0])


def double(model, batch):
    return cross_entropy(model, (batch[0].double(), batch[1]))


@gpu
def test_side_by_side_on_a_gpu_is_one_after_another():
    """Each with a CUDA graph on a stream of its own; in float64, where the order of sums hardly matters."""
    data = open_data("digits", device="cuda")
    choices = [
        TrainSettings(epochs=1, lr=0.05, batch=128),
        TrainSettings(epochs=3, lr=0.02, batch=64, schedule="one-cycle", ema=0.9),
        TrainSettings(epochs=2, lr=0.05, batch=200, schedule="cosine", nesterov=True),
    ]
    torch.manual_seed(0)
    start = create_model("ifso:resnet8-digits").double().cuda()
    lanes = [
        Trainer(copy.deepcopy(start), data.train_batches(settings.batch), settings, loss_fn=double)
        for settings in choices
    ]
    assert fit_side_by_side(lanes) == [None, None, None]
    assert [lane.notes for lane in lanes] == [[], [], []]
    for lane, settings in zip(lanes, choices, strict=True):
        model = copy.deepcopy(start)
        epochs = fit(model, data.train_batches(settings.batch), settings, loss_fn=double)
        assert [epoch.loss for epoch in lane.done] == pytest.approx([epoch.loss for epoch in epochs], rel=1e-5)
        for found, wanted in zip(lane.model.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-8)
