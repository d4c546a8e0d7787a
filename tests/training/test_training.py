"""Training and evaluating: accuracy and losses by hand, SGD written out in float64, the same run for the same seed."""

import copy
import math

import pytest
import torch
from torch import nn

from ifso.data import open_data
from ifso.errors import DataError, DivergedError, TrainingError
from ifso.models import create_model
from ifso.tasks.classification import classification, cross_entropy
from ifso.training.distillation import distillation
from ifso.training.evaluation import evaluate
from ifso.training.settings import TrainSettings
from ifso.training.trainer import TrainerHooks, fit


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 7))


def batches(count=3, size=6):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 4, generator=generator), torch.randint(7, (size,), generator=generator))
        for _ in range(count)
    ]


def short(**changes):
    return TrainSettings(**{"epochs": 2, "lr": 0.1, "schedule": "cosine", "nesterov": True, **changes})


class TestEvaluate:
    def test_counts_as_by_hand_over_uneven_batches(self):
        torch.manual_seed(0)
        x, y = torch.randn(31, 7), torch.randint(7, (31,))
        found = evaluate(nn.Identity(), [(x[:20], y[:20]), (x[20:], y[20:])])
        order = x.argsort(1, descending=True)
        assert found.samples == 31
        assert found.top1 == pytest.approx(100 * sum(int(o[0] == t) for o, t in zip(order, y, strict=True)) / 31)
        assert found.top5 == pytest.approx(100 * sum(int(t in o[:5]) for o, t in zip(order, y, strict=True)) / 31)
        truth = -sum(math.log(row.double().softmax(0)[t]) for row, t in zip(x, y, strict=True)) / 31
        assert found.loss == pytest.approx(truth, rel=1e-6)

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_what_is_not_finite_is_never_right(self, bad):
        logits, labels = torch.full((4, 7), bad), torch.zeros(4, dtype=torch.long)
        found = evaluate(nn.Identity(), [(logits, labels)])
        assert (found.top1, found.top5) == (0.0, 0.0)
        assert math.isnan(found.loss)
        logits[1:] = torch.arange(7.0, 0.0, -1.0)
        logits[1, 6], logits[2:, 6] = -math.inf, 9.0
        found = evaluate(nn.Identity(), [(logits, labels)])
        assert (found.top1, found.top5) == (25.0, 75.0)

    def test_eval_mode_within_and_all_modes_back(self):
        model = Net()
        model[1].eval()
        before = copy.deepcopy(model.state_dict())
        first, second = evaluate(model, batches()), evaluate(model, batches())
        assert first == second
        assert [module.training for module in model] == [True, False, True, True, True]
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())

    def test_modes_come_back_after_an_error(self):
        model = Net()
        with pytest.raises(RuntimeError):
            evaluate(model, [(torch.zeros(2, 3), torch.zeros(2))])
        assert model.training

    def test_bad_input(self):
        with pytest.raises(DataError, match="nothing to evaluate on"):
            evaluate(Net(), [])
        with pytest.raises(DataError, match=r"gave \(2, 3, 4\) for 2 labels"):
            evaluate(nn.Identity(), [(torch.zeros(2, 3, 4), torch.zeros(2))])


class TestDistillation:
    def test_as_written_out(self):
        torch.manual_seed(0)
        student, teacher = nn.Linear(4, 7).double(), Net().double()
        x, y = torch.randn(5, 4, dtype=torch.float64), torch.randint(7, (5,))
        found = distillation(teacher, temperature=3.0, weight=0.8)(student, (x, y))
        assert teacher.training
        with torch.no_grad():
            p, logits = (teacher.eval()(x) / 3).softmax(1), student(x)
            q = (logits / 3).softmax(1)
            truth = 0.2 * cross_entropy(student, (x, y)) + 0.8 * 9 * (p * (p / q).log()).sum(1).mean()
        assert found.item() == pytest.approx(truth.item(), rel=1e-12)

    def test_the_teacher_gets_no_gradient_and_keeps_its_statistics(self):
        teacher, student = Net(), nn.Linear(4, 7)
        before = copy.deepcopy(teacher.state_dict())
        distillation(teacher)(student, batches()[0]).backward()
        assert all(parameter.grad is None for parameter in teacher.parameters())
        assert all(torch.equal(value, before[key]) for key, value in teacher.state_dict().items())
        assert student.weight.grad.abs().sum() > 0


# ------------------------------------------------------------------------------------------------ SGD, written out

EPOCHS, STEPS = 5, 3
TOTAL = EPOCHS * STEPS
EVEN = [0.4] * TOTAL
CHOICES = {
    "constant": ({"schedule": "constant"}, EVEN),
    "steps at 60 and 80 %": ({"schedule": "step"}, [0.4] * 9 + [0.04] * 3 + [0.004] * 3),
    "cosine": ({"schedule": "cosine"}, [0.4 * (1 + math.cos(math.pi * step / TOTAL)) / 2 for step in range(TOTAL)]),
    "warm-up": (
        {"schedule": "step", "warm_up": 2.0},
        [0.4 * step / 6 for step in range(6)] + [0.4] * 3 + [0.04] * 3 + [0.004] * 3,
    ),
    "nesterov": ({"schedule": "constant", "nesterov": True}, EVEN),
    "no momentum": ({"schedule": "constant", "momentum": 0.0}, EVEN),
    "decay of matrices only": ({"schedule": "constant", "weight_decay": 0.1, "decay_all": False}, EVEN),
    "decay of all": ({"schedule": "constant", "weight_decay": 0.1}, EVEN),
    "micro-batches": ({"schedule": "constant", "accumulate": 3, "batch": 6}, EVEN),
    "clipped": ({"schedule": "constant", "clip": 0.2}, EVEN),
    "average": ({"schedule": "constant", "ema": 0.6}, EVEN),
    "smoothed labels": ({"schedule": "constant", "label_smoothing": 0.2}, EVEN),
    "all of it": (
        {
            "schedule": "step", "nesterov": True, "weight_decay": 0.05, "decay_all": False, "accumulate": 2, "batch": 6,
            "clip": 0.3, "ema": 0.8, "label_smoothing": 0.1,
        },
        [0.4] * 9 + [0.04] * 3 + [0.004] * 3,
    ),
}  # fmt: skip


def mlp():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 7)).double()


def loss_by_hand(weights, x, y, smoothing):
    first, bias, second, other = weights
    logits = torch.tanh(x @ first.T + bias) @ second.T + other
    target = torch.full_like(logits, smoothing / 7)
    target[torch.arange(len(y)), y] += 1 - smoothing
    return -(target * (logits - logits.exp().sum(1, keepdim=True).log())).sum(1).mean()


def gradients_by_hand(weights, x, y, settings):
    leaves = [weight.clone().requires_grad_() for weight in weights]
    loss = loss_by_hand(leaves, x, y, settings.label_smoothing)
    gradients = list(torch.autograd.grad(loss, leaves))
    norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients))
    if settings.clip:
        gradients = [gradient * min(1.0, settings.clip / (norm + 1e-6)) for gradient in gradients]
    return loss.item(), gradients


def sgd_by_hand(weights, data, settings, rates):
    """What is kept, and the mean loss of every epoch."""
    velocity, average, losses = [torch.zeros_like(weight) for weight in weights], list(weights), []
    for step, lr in enumerate(rates):
        loss, gradients = gradients_by_hand(weights, *data[step % STEPS], settings)
        losses.append(loss)
        for place, weight in enumerate(weights):
            decays = settings.decay_all or weight.dim() == 2
            gradient = gradients[place] + (settings.weight_decay * weight if decays else 0)
            velocity[place] = settings.momentum * velocity[place] + gradient
            move = gradient + settings.momentum * velocity[place] if settings.nesterov else velocity[place]
            weights[place] = weight - lr * move
        kept = min(settings.ema, (1 + step) / (10 + step))
        average = [kept * mean + (1 - kept) * weight for mean, weight in zip(average, weights, strict=True)]
    return average, [sum(losses[first : first + STEPS]) / STEPS for first in range(0, TOTAL, STEPS)]


@pytest.mark.parametrize("name", CHOICES)
def test_fit_is_sgd_as_written_out(name):
    changes, rates = CHOICES[name]
    settings = TrainSettings(**{"epochs": EPOCHS, "lr": 0.4, **changes})
    data = [(x.double(), y) for x, y in batches(STEPS)]
    model = mlp()
    wanted, losses = sgd_by_hand([weight.detach().clone() for weight in model.parameters()], data, settings, rates)
    epochs = fit(model, data, settings, loss_fn=classification(settings.label_smoothing))
    for found, truth in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(found.detach(), truth, rtol=1e-12, atol=1e-12)
    assert [epoch.number for epoch in epochs] == [1, 2, 3, 4, 5]
    assert [epoch.loss for epoch in epochs] == pytest.approx(losses, rel=1e-5)
    assert [epoch.lr for epoch in epochs] == pytest.approx(rates[STEPS - 1 :: STEPS], rel=1e-12)


def test_the_choices_differ():
    """Each of them changes the weights by far more than the precision of the test above."""
    data = [(x.double(), y) for x, y in batches(STEPS)]
    found = []
    for changes, rates in CHOICES.values():
        settings = TrainSettings(**{"epochs": EPOCHS, "lr": 0.4, **changes})
        kept, _ = sgd_by_hand([weight.detach().clone() for weight in mlp().parameters()], data, settings, rates)
        found.append(torch.cat([weight.flatten() for weight in kept]))
    same = {("constant", "micro-batches")}
    for one, first in enumerate(CHOICES):
        for other, second in list(enumerate(CHOICES))[one + 1 :]:
            if (first, second) not in same:
                assert float((found[one] - found[other]).abs().max()) > 1e-4, (first, second)


class TestFit:
    def test_the_same_seed_gives_the_same_weights_with_dropout(self):
        torch.manual_seed(0)
        start, data, found = Net(), batches(), []
        for seed, global_seed in ((3, 1), (3, 2), (4, 1)):
            model = copy.deepcopy(start)
            torch.manual_seed(global_seed)
            state = torch.get_rng_state()
            fit(model, data, short(seed=seed))
            assert torch.equal(torch.get_rng_state(), state)
            found.append(model[0].weight)
        assert torch.equal(found[0], found[1])
        assert not torch.equal(found[0], found[2])

    def test_epochs_of_the_batches_are_set(self):
        data = open_data("digits")
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        other, shuffled = copy.deepcopy(model), data.train_batches(200)
        next(iter(shuffled))
        fit(model, shuffled, short())
        fit(other, data.train_batches(200), short())
        assert torch.equal(model[1].weight, other[1].weight)

    def test_modes_callback_and_frozen_parameters(self):
        model, seen = Net().eval(), []
        model[1].train()
        model[4].requires_grad_(False)
        frozen, moving = model[4].weight.clone(), model[0].weight.clone()
        statistics = model[1].running_mean.clone()
        fit(model, batches(), short(), hooks=TrainerHooks(on_epoch=seen.append))
        assert [module.training for module in (model, *model)] == [False, False, True, False, False, False]
        assert [epoch.number for epoch in seen] == [1, 2]
        assert torch.equal(model[4].weight, frozen)
        assert not torch.equal(model[0].weight, moving)
        assert not torch.equal(model[1].running_mean, statistics)

    def test_after_an_error_modes_and_random_numbers_are_as_before(self):
        model, state = Net().eval(), torch.get_rng_state()

        def fail(model, batch):
            raise KeyError("a loss of the user's")

        with pytest.raises(KeyError):
            fit(model, batches(), short(), loss_fn=fail)
        assert not any(module.training for module in model.modules())
        assert torch.equal(torch.get_rng_state(), state)

    def test_batches_without_a_length(self):
        class Stream:
            def __iter__(self):
                return iter(batches())

        epochs = fit(Net(), Stream(), short())
        assert [epoch.lr for epoch in epochs] == pytest.approx([0.05 + 0.05 * 0.5**0.5, 0.05 - 0.05 * 0.5**0.5])

    def test_no_epochs_change_nothing(self):
        model = Net()
        before = copy.deepcopy(model.state_dict())
        assert fit(model, batches(), short(epochs=0, ema=0.9)) == []
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())

    def test_distillation_without_a_teacher_is_refused(self):
        with pytest.raises(TrainingError, match=r"distill=0.9 needs a teacher; give loss_fn=distillation\(teacher\)"):
            fit(Net(), batches(), TrainSettings(epochs=1, batch=6, distill=0.9))

    def test_the_loss_has_the_label_smoothing_of_the_settings(self):
        torch.manual_seed(0)
        model = nn.Linear(4, 7)
        given, plain = copy.deepcopy(model), copy.deepcopy(model)
        settings = TrainSettings(epochs=1, batch=6, label_smoothing=0.2)
        fit(model, batches(), settings)
        fit(given, batches(), settings, loss_fn=classification(0.2))
        fit(plain, batches(), settings, loss_fn=classification(0.0))
        assert torch.equal(model.weight, given.weight)
        assert not torch.equal(model.weight, plain.weight)

    def test_it_learns_the_digits(self):
        data = open_data("digits")
        torch.manual_seed(0)
        model = create_model("ifso:resnet8-digits")
        fit(model, data.train_batches(64), short(epochs=3, lr=0.05, schedule="one-cycle", weight_decay=5e-4))
        assert evaluate(model, data.test_batches()).top1 > 90

    @pytest.mark.parametrize(("precision", "error"), [("bf16", 2e-2), ("fp16", 2e-3)])
    def test_half_precision_is_close_to_full(self, precision, error):
        full, half = mlp().float(), mlp().float()
        start, layers = full[0].weight.detach().clone(), []
        half[0].register_forward_hook(lambda _, inputs, output: layers.append(output.dtype))
        fit(full, batches(), short(clip=0.2))
        fit(half, batches(), short(clip=0.2, precision=precision))
        assert set(layers) == {torch.bfloat16 if precision == "bf16" else torch.float16}
        assert half[0].weight.dtype == torch.float32
        moved, apart = (float((each - full[0].weight).detach().norm()) for each in (start, half[0].weight))
        assert 0 < apart < error * moved

    def test_micro_batches_that_do_not_divide_a_batch(self):
        with pytest.raises(TrainingError, match="a batch of 6 cannot be cut into 4 equal micro-batches"):
            fit(Net(), batches(), short(accumulate=4, batch=8))

    def test_bad_input(self):
        with pytest.raises(DataError, match="nothing to train on"):
            fit(Net(), [], short())
        with pytest.raises(TrainingError, match="Flatten has no parameter to train"):
            fit(nn.Flatten(), batches(), short())
        nothing = torch.full((4, 4), float("nan")), torch.zeros(4, dtype=torch.long)
        with pytest.raises(DivergedError, match="loss was nan in epoch 1 of training: batch 0 of them, from 0"):
            fit(Net(), [nothing], short())
