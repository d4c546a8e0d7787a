"""A training run that is watched, interrupted and resumed: to the same bits, or refused in one line."""

import copy
import itertools

import pytest
import torch
from torch import nn

from ifso.data import open_data
from ifso.errors import DataError, DivergedError, RunError
from ifso.tasks.classification import cross_entropy
from ifso.training.checkpoint import FILE, load_checkpoint
from ifso.training.settings import TrainSettings
from ifso.training.trainer import Trainer, TrainerHooks, fit, fit_side_by_side

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Stopped(Exception):
    """Somebody pressed a key."""


class Tied(nn.Sequential):
    """Batch norm and dropout, two layers with the same weight, and a buffer that no checkpoint holds."""

    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 4), nn.Linear(4, 3))
        self[3].weight = self[0].weight
        self.register_buffer("table", torch.ones(2), persistent=False)


def batches(count=4, size=6):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 4, generator=generator), torch.randint(3, (size,), generator=generator))
        for _ in range(count)
    ]


def short(**changes):
    return TrainSettings(**{"epochs": 4, "lr": 0.1, "schedule": "cosine", "seed": 5, **changes})


def stop_after(number):
    def on_epoch(epoch):
        if epoch.number == number:
            raise Stopped

    return on_epoch


def steep(model, batch):
    """A loss whose gradients, times 2¹⁶, are too large for float16."""
    return 50 * cross_entropy(model, batch)


def interrupted(model, data, settings, number, folder, save_every=0.0, loss_fn=cross_entropy):
    hooks = TrainerHooks(on_epoch=stop_after(number), folder=folder, save_every=save_every)
    with pytest.raises(Stopped):
        fit(model, data, settings, hooks=hooks, loss_fn=loss_fn)


def same(first, second):
    return all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())


RESUMED = {
    "plain": {"momentum": 0.0},
    "momentum": {"nesterov": True, "weight_decay": 1e-2},
    "average": {"ema": 0.9},
    "half precision": {"precision": "fp16", "lr": 2e-3},
}


class TestResume:
    @pytest.mark.parametrize("name", RESUMED)
    def test_gives_the_bits_of_a_run_without_interruption(self, tmp_path, name):
        torch.manual_seed(0)
        start, settings, data = Tied(), short(**RESUMED[name]), batches()
        loss_fn = steep if name == "half precision" else cross_entropy
        whole = copy.deepcopy(start)
        wanted = fit(whole, data, settings, loss_fn=loss_fn)
        assert not same(whole, start)
        for number in (1, 3):
            folder = tmp_path / f"{number}"
            interrupted(copy.deepcopy(start), data, settings, number, folder, loss_fn=loss_fn)
            torch.manual_seed(number)
            model = Tied()
            found = fit(model, data, settings, hooks=TrainerHooks(folder=folder), loss_fn=loss_fn)
            assert same(model, whole)
            assert [(epoch.number, epoch.loss, epoch.lr) for epoch in found] == [
                (epoch.number, epoch.loss, epoch.lr) for epoch in wanted
            ]

    def test_the_factor_of_float16_had_changed(self, tmp_path):
        """Otherwise the test above would not see whether it is restored."""
        torch.manual_seed(0)
        interrupted(Tied(), batches(), short(**RESUMED["half precision"]), 1, tmp_path, loss_fn=steep)
        assert load_checkpoint(tmp_path, "cpu")[1]["scaling"]["scale"] < 2**16

    def test_more_than_once_and_on_shuffled_batches(self, tmp_path):
        data, settings = open_data("digits"), short(ema=0.8, epochs=3)
        torch.manual_seed(0)
        start = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 10))
        whole = copy.deepcopy(start)
        fit(whole, data.train_batches(200), settings)
        for number in (1, 2):
            interrupted(copy.deepcopy(start), data.train_batches(200), settings, number, tmp_path)
        model = copy.deepcopy(start)
        fit(model, data.train_batches(200), settings, hooks=TrainerHooks(folder=tmp_path))
        assert same(model, whole)

    def test_of_a_run_that_is_over_trains_no_more(self, tmp_path):
        torch.manual_seed(0)
        trained, again = Tied(), Tied()
        epochs = fit(trained, batches(), short(ema=0.9), hooks=TrainerHooks(folder=tmp_path))

        def never(model, batch):
            raise AssertionError("there was nothing left to train")

        found = fit(again.eval(), batches(), short(ema=0.9), loss_fn=never, hooks=TrainerHooks(folder=tmp_path))
        assert found == epochs
        assert same(again, trained)
        assert not again.training

    def test_leaves_the_global_random_numbers_alone(self, tmp_path):
        interrupted(Tied(), batches(), short(), 2, tmp_path)
        model, state = Tied(), torch.get_rng_state()
        fit(model, batches(), short(), hooks=TrainerHooks(folder=tmp_path))
        assert torch.equal(torch.get_rng_state(), state)

    def test_of_something_else_is_refused_in_one_line(self, tmp_path):
        interrupted(Tied(), batches(), short(), 2, tmp_path)
        hooks = TrainerHooks(folder=tmp_path)
        for model, settings, message in (
            (nn.Linear(4, 3), short(), f"{tmp_path} is of another network: weight is float32"),
            (Tied().double(), short(), "0.weight is float64 .4, 4. and was float32"),
            (Tied(), short(lr=0.2, ema=0.9), "other settings: lr is 0.2 and was 0.1; ema is 0.9 and was 0.0"),
        ):
            before = copy.deepcopy(model)
            with pytest.raises(RunError, match=message) as caught:
                fit(model, batches(), settings, hooks=hooks)
            assert "\n" not in str(caught.value)
            assert same(model, before)

    def test_checkpoints_are_written_when_it_is_time_and_at_the_end(self, tmp_path):
        interrupted(Tied(), batches(), short(), 3, tmp_path, save_every=60.0)
        assert not (tmp_path / FILE).exists()
        fit(Tied(), batches(), short(), hooks=TrainerHooks(folder=tmp_path, save_every=60.0))
        assert len(load_checkpoint(tmp_path, "cpu")[1]["epochs"]) == 4

    def test_a_run_that_diverged_stays_at_its_last_good_epoch(self, tmp_path):
        good = batches()
        bad = [(torch.full_like(x, torch.nan), y) for x, y in good]

        class Worse:
            def __init__(self):
                self.epoch = 0

            def __len__(self):
                return 4

            def set_epoch(self, epoch):
                self.epoch = epoch

            def __iter__(self):
                return iter(good if self.epoch < 2 else bad)

        with pytest.raises(DivergedError, match="in epoch 3 of training"):
            fit(Tied(), Worse(), short(), hooks=TrainerHooks(folder=tmp_path, save_every=0.0))
        tensors, facts = load_checkpoint(tmp_path, "cpu")
        assert len(facts["epochs"]) == 2
        assert all(tensor.isfinite().all() for tensor in tensors.values() if tensor.is_floating_point())


class TestHooks:
    def test_when_a_network_is_evaluated(self):
        seen = []
        hooks = TrainerHooks(lambda model: {"top1": 50.0}, every=3, final=2, on_epoch=seen.append)
        fit(Tied(), batches(), short(epochs=8), hooks=hooks)
        assert [epoch.number for epoch in seen if epoch.measures == {"top1": 50.0}] == [3, 6, 7, 8]
        assert all(epoch.measures in ({}, {"top1": 50.0}) for epoch in seen)

    def test_what_is_evaluated_is_the_average_and_what_is_kept(self):
        model, weights = Tied(), []

        def look(model):
            weights.append(model[4].weight.detach().clone())
            model.eval()
            return {}

        unseen = copy.deepcopy(model)
        fit(model, batches(), short(ema=0.9), hooks=TrainerHooks(look))
        assert torch.equal(weights[-1], model[4].weight)
        fit(unseen, batches(), short(ema=0.9))
        assert same(model, unseen)

    def test_the_average_is_not_the_last_weights(self):
        torch.manual_seed(0)
        averaged = Tied()
        plain = copy.deepcopy(averaged)
        fit(averaged, batches(), short(ema=0.9))
        fit(plain, batches(), short())
        assert torch.equal(averaged[0].weight, averaged[3].weight)
        assert not torch.allclose(averaged[4].weight, plain[4].weight)
        assert averaged[1].num_batches_tracked == plain[1].num_batches_tracked == 16


class TestLane:
    def test_it_goes_on_step_by_step(self):
        model, seen = Tied().eval(), []
        lane = Trainer(model, batches(), short(epochs=2), hooks=TrainerHooks(on_epoch=seen.append))
        run, before = lane.run(), copy.deepcopy(model)
        assert same(model, before)
        weights = [model[0].weight.detach().clone() for _ in itertools.islice(run, 3)]
        assert not torch.equal(weights[0], weights[1])
        assert (model.training, seen) == (True, [])
        assert sum(1 for _ in run) == 2 * 4 - 3
        assert (model.training, len(seen), lane.done == seen) == (False, 2, True)

    def test_closed_early_it_gives_modes_back(self):
        model = Tied().eval()
        run = Trainer(model, batches(), short()).run()
        next(run)
        assert model.training
        run.close()
        assert not model.training

    def test_without_batches(self):
        with pytest.raises(DataError, match="ran out before the first one"):
            list(Trainer(Tied(), iter(()), short()).run())


@gpu
@pytest.mark.parametrize("name", RESUMED)
def test_resumed_on_a_gpu_it_draws_the_same_numbers(tmp_path, name):
    """A captured step with dropout: other random numbers would make a difference of more than a thousandth."""
    data, settings = open_data("digits", device="cuda"), short(epochs=3, **{"lr": 0.05, **RESUMED[name]})
    torch.manual_seed(0)
    start = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Dropout(0.5), nn.ReLU(), nn.Linear(32, 10)).cuda()
    whole, model = copy.deepcopy(start), copy.deepcopy(start)
    lane = Trainer(whole, data.train_batches(200), settings)
    assert fit_side_by_side([lane]) == [None]
    assert lane.notes == []
    interrupted(copy.deepcopy(start), data.train_batches(200), settings, 2, tmp_path)
    fit(model, data.train_batches(200), settings, hooks=TrainerHooks(folder=tmp_path))
    for found, wanted in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
