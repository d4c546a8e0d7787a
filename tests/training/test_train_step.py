"""The steps of an epoch: the right rate and batch at each, and a captured step that is the plain one."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ifso.data import open_data
from ifso.errors import DataError, ScoreError, TrainingError
from ifso.models import create_model
from ifso.tasks.classification import cross_entropy
from ifso.training.optimizers import rates
from ifso.training.settings import TrainSettings
from ifso.training.steps import NO_GRAPH, PlainSteps, TrainStep, can_capture
from ifso.training.trainer import Trainer, fit_side_by_side

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Told:
    """Batches that can only be walked through, so that no step of them is captured."""

    def __init__(self, batches):
        self._batches = batches

    def __len__(self):
        return len(self._batches)

    def __iter__(self):
        return iter(self._batches)

    def set_epoch(self, epoch):
        self._batches.set_epoch(epoch)


class Notebook:
    """A stand-in for a TrainStep that writes down its calls."""

    def __init__(self, settings):
        self.settings, self.rates, self.batches = settings, [], []

    def set_rate(self, lr):
        self.rates.append(lr)

    def __call__(self, batch):
        self.batches.append(batch)


class Numbered:
    """Batches named after their epoch."""

    epoch = 7

    def __len__(self):
        return 3

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([f"{self.epoch}.{number}" for number in range(3)])


class TestPlainSteps:
    def test_every_step_has_its_rate_and_batch(self):
        settings = TrainSettings(epochs=2, lr=0.5, schedule="cosine")
        notebook = Notebook(settings)
        steps = PlainSteps(notebook, Numbered())
        for number in range(2):
            assert list(steps.epoch(number)) == [True] * 3
            assert steps.count == 3
        assert notebook.batches == ["0.0", "0.1", "0.2", "1.0", "1.1", "1.2"]
        assert notebook.rates == pytest.approx(rates(settings, 3), rel=1e-14)

    def test_without_a_length_the_rate_changes_once_an_epoch(self):
        notebook = Notebook(TrainSettings(epochs=4, lr=1.0, schedule="cosine"))
        list(PlainSteps(notebook, (name for name in "abc")).epoch(2))
        assert notebook.batches == ["a", "b", "c"]
        assert notebook.rates == pytest.approx([0.5 + 0.5 * math.cos(math.pi * 2.5 / 4)] * 3)

    @pytest.mark.parametrize(
        ("settings", "wanted"),
        [
            ({"epochs": 1, "schedule": "cosine"}, [0.5]),
            ({"epochs": 1, "schedule": "one-cycle"}, [0.75]),
            ({"epochs": 4, "schedule": "one-cycle"}, [0.5, 0.5 + 0.25 * 3**0.5, 0.5, 0.5 - 0.25 * 3**0.5]),
            ({"epochs": 5, "schedule": "step"}, [1, 1, 1, 0.1, 0.01]),
            ({"epochs": 3, "schedule": "step"}, [1, 1, 0.1]),
            ({"epochs": 5, "schedule": "step", "warm_up": 2}, [0.25, 0.75, 1, 0.1, 0.01]),
            ({"epochs": 5, "schedule": "step", "warm_up": 0.25}, [1, 1, 1, 0.1, 0.01]),
            ({"epochs": 3, "schedule": "constant", "warm_up": 1}, [0.5, 1, 1]),
            ({"epochs": 3, "schedule": "cosine", "warm_up": 1}, [0.5, 0.5 + 0.5**1.5, 0.5 - 0.5**1.5]),
        ],
    )
    def test_without_a_length_no_epoch_is_lost(self, settings, wanted):
        notebook = Notebook(TrainSettings(lr=1.0, **settings))
        for number in range(settings["epochs"]):
            list(PlainSteps(notebook, iter("ab")).epoch(number))
        assert notebook.rates == pytest.approx([lr for lr in wanted for _ in "ab"])

    def test_batches_beyond_their_length_have_the_last_rate(self):
        class Short(Numbered):
            def __len__(self):
                return 2

        notebook = Notebook(TrainSettings(epochs=1, lr=1.0, schedule="cosine"))
        list(PlainSteps(notebook, Short()).epoch(0))
        assert notebook.rates == pytest.approx([1.0, 0.5, 0.5])

    def test_a_step_is_taken_only_when_it_is_asked_for(self):
        notebook = Notebook(TrainSettings(epochs=1))
        run = PlainSteps(notebook, Numbered()).epoch(0)
        assert notebook.batches == []
        next(run)
        assert notebook.batches == ["0.0"]


class TestCapturable:
    def test_batches_held_in_memory_and_of_one_size(self):
        data, able, unable = open_data("digits"), SimpleNamespace(capturable=True), SimpleNamespace(capturable=False)
        assert can_capture(able, data.train_batches(100))
        assert not can_capture(able, data.train_batches(100, drop_last=False))
        assert not can_capture(able, Told(data.train_batches(100)))
        assert not can_capture(able, [next(iter(data.train_batches(100)))])
        assert not can_capture(unable, data.train_batches(100))

    def test_not_on_a_cpu(self):
        assert not TrainStep(nn.Linear(2, 2), TrainSettings(), cross_entropy).capturable


class TestTrainStep:
    def test_a_loss_that_cannot_be_learned_from(self):
        model = nn.Linear(4, 3)
        for loss_fn, message in (
            (lambda model, batch: model(batch).mean().detach(), "the loss has no gradient"),
            (lambda model, batch: model(batch), r"tensor of shape \(2, 3\); it must return a scalar"),
        ):
            with pytest.raises(ScoreError, match=message):
                TrainStep(model, TrainSettings(), loss_fn)(torch.ones(2, 4))

    def test_parts_of_nested_batches(self):
        seen = []

        def loss_fn(model, batch):
            seen.append((batch["x"].tolist(), batch["more"][0].tolist(), batch["name"], batch["scale"].item()))
            return model(batch["x"]).mean()

        x = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
        batch = {"x": x, "more": [torch.arange(4)], "name": "a", "scale": torch.tensor(2.0)}
        train_step = TrainStep(nn.Linear(1, 1), TrainSettings(accumulate=2), loss_fn)
        train_step(batch)
        assert seen == [([[1.0], [2.0]], [0, 1], "a", 2.0), ([[3.0], [4.0]], [2, 3], "a", 2.0)]
        batch["x"] = torch.ones(3, 1)
        with pytest.raises(TrainingError, match="a batch of 3 cannot be cut into 2 equal micro-batches"):
            train_step(batch)

    def test_a_loss_that_cannot_be_differentiated(self):
        class Backward(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, error):
                ctx.error = error
                return x.clone()

            @staticmethod
            def backward(ctx, gradient):
                raise ctx.error

        def in_place(model, batch):
            y = model(batch).exp()
            y += 1
            return y.mean()

        def failing(error):
            return lambda model, batch: Backward.apply(model(batch).mean(), error)

        model, x = nn.Linear(4, 3), torch.ones(2, 4)
        with pytest.raises(TrainingError, match=r"by an inplace operation.*\); let the network and") as caught:
            TrainStep(model, TrainSettings(), in_place)(x)
        assert "\n" not in str(caught.value)
        with pytest.raises(TrainingError, match=r"differentiated \(KeyError: 'of a user'\); check that backward"):
            TrainStep(model, TrainSettings(), failing(KeyError("of a user")))(x)
        for error in (torch.OutOfMemoryError("CUDA out of memory"), DataError("a line of ours")):
            with pytest.raises(type(error), match=str(error)):
                TrainStep(model, TrainSettings(), failing(error))(x)

    def test_channels_last(self):
        model = nn.Conv2d(3, 4, 3)
        train_step = TrainStep(model, TrainSettings(channels_last=True), cross_entropy)
        assert model.weight.is_contiguous(memory_format=torch.channels_last)
        assert train_step.state()["momentum.weight"].is_contiguous(memory_format=torch.channels_last)


# ----------------------------------------------------------------------------------------------------- on a GPU


def double(model, batch):
    return cross_entropy(model, (batch[0].double(), batch[1]))


CAPTURED = {
    "plain": {},
    "average, clipping, micro-batches": {"ema": 0.9, "clip": 0.5, "accumulate": 2, "nesterov": True},
    "spared biases, channels last": {"decay_all": False, "weight_decay": 5e-3, "channels_last": True},
}


@gpu
@pytest.mark.parametrize("name", CAPTURED)
def test_captured_steps_are_plain_steps(name):
    """In float64, where the order of sums hardly matters."""
    data = open_data("digits", device="cuda")
    settings = TrainSettings(**{"epochs": 3, "lr": 0.05, "schedule": "one-cycle", "batch": 128, **CAPTURED[name]})
    torch.manual_seed(0)
    start = create_model("ifso:resnet8-digits").double().cuda()
    models = copy.deepcopy(start), copy.deepcopy(start)
    batches = data.train_batches(128), Told(data.train_batches(128))
    lanes = [Trainer(model, each, settings, loss_fn=double) for model, each in zip(models, batches, strict=True)]
    assert [can_capture(TrainStep(start, settings, double), each) for each in batches] == [True, False]
    for lane in lanes:
        assert fit_side_by_side([lane]) == [None]
        assert lane.notes == []
    captured, plain = lanes
    assert [epoch.loss for epoch in captured.done] == pytest.approx([epoch.loss for epoch in plain.done], rel=1e-5)
    assert [epoch.lr for epoch in captured.done] == pytest.approx([epoch.lr for epoch in plain.done], rel=1e-6)
    for key, wanted in plain.model.state_dict().items():
        torch.testing.assert_close(captured.model.state_dict()[key], wanted, rtol=1e-6, atol=1e-7)
    assert captured.model.bn1.num_batches_tracked == 3 * 11 * settings.accumulate


@gpu
def test_a_step_that_looks_at_its_result_runs_uncaptured_and_says_so():
    data = open_data("digits", device="cuda")
    settings = TrainSettings(epochs=2, lr=0.05, batch=200)
    torch.manual_seed(0)
    start = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Dropout(0.5), nn.Linear(32, 10)).cuda()

    def looking(model, batch):
        loss = cross_entropy(model, batch)
        return loss if loss.item() < 1e9 else 0 * loss

    looked = Trainer(copy.deepcopy(start), data.train_batches(200), settings, loss_fn=looking)
    plain = Trainer(copy.deepcopy(start), Told(data.train_batches(200)), settings)
    assert fit_side_by_side([looked]) == fit_side_by_side([plain]) == [None]
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert len(looked.notes) == 1
    assert "cannot be captured as a CUDA graph" in looked.notes[0]
    torch.testing.assert_close(looked.model[1].weight, plain.model[1].weight, rtol=1e-4, atol=1e-5)
    assert float(torch.rand(2, device="cuda").sum()) > 0


@gpu
def test_a_step_that_draws_on_the_cpu_runs_uncaptured_and_says_so():
    """A graph would keep what was drawn once."""
    data = open_data("digits", device="cuda")

    def at_random(model, batch):
        return cross_entropy(model, batch) * (1.0 + float(torch.rand(1)))

    lane = Trainer(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).cuda(), data.train_batches(200),
                TrainSettings(epochs=1, lr=0.05, batch=200), loss_fn=at_random)  # fmt: skip
    assert fit_side_by_side([lane]) == [None]
    assert lane.notes == [f"{NO_GRAPH} (the network or its loss draws random numbers on the CPU); it runs without"]


@gpu
def test_bfloat16_steps_with_triton_layers_learn_like_full_ones():
    data = open_data("digits", device="cuda")
    losses = {}
    for precision in ("float32", "bf16", "fp16"):
        torch.manual_seed(0)
        model = create_model("ifso:resnet8-digits").cuda()
        settings = TrainSettings(
            epochs=4, lr=0.1, batch=64, schedule="one-cycle", precision=precision, channels_last=True
        )
        lane = Trainer(model, data.train_batches(64), settings)
        assert fit_side_by_side([lane]) == [None]
        losses[precision] = lane.done[-1].loss
    assert losses["bf16"] == pytest.approx(losses["float32"], rel=0.3)
    assert losses["fp16"] == pytest.approx(losses["float32"], rel=0.3)
