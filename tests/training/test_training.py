"""The small trainer: losses and accuracy by hand, SGD against torch's, the same run for the same seed."""

import copy
import math

import pytest
import torch
from torch import nn

from ifso.data import open_data
from ifso.errors import DataError, DivergedError, IfsoError
from ifso.models import create_model
from ifso.training.evaluation import evaluate
from ifso.training.fit import Sgd, fit, rate
from ifso.training.losses import cross_entropy, distillation


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 7))


def batches(count=3, size=6):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 4, generator=generator), torch.randint(7, (size,), generator=generator))
        for _ in range(count)
    ]


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


class TestLosses:
    def test_distillation_as_written_out(self):
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


class TestFit:
    def test_is_sgd_with_a_cosine_at_every_step(self):
        torch.manual_seed(0)
        model = nn.Linear(4, 7)
        other, data = copy.deepcopy(model), batches()
        epochs = fit(model, data, 2, lr=0.3)
        optimizer = torch.optim.SGD(other.parameters(), 0.3, momentum=0.9, weight_decay=5e-4, nesterov=True)
        losses = []
        for step in range(6):
            optimizer.param_groups[0]["lr"] = 0.3 * (0.5 + 0.5 * math.cos(math.pi * step / 6))
            optimizer.zero_grad()
            loss = cross_entropy(other, data[step % 3])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert torch.equal(model.weight, other.weight)
        assert [epoch.number for epoch in epochs] == [1, 2]
        assert epochs[1].loss == pytest.approx(sum(losses[3:]) / 3)
        assert epochs[1].lr == pytest.approx(0.3 * (0.5 + 0.5 * math.cos(math.pi * 5 / 6)))

    def test_the_same_seed_gives_the_same_weights_with_dropout(self):
        torch.manual_seed(0)
        start, data, found = Net(), batches(), []
        for seed, global_seed in ((3, 1), (3, 2), (4, 1)):
            model = copy.deepcopy(start)
            torch.manual_seed(global_seed)
            state = torch.get_rng_state()
            fit(model, data, 2, lr=0.1, seed=seed)
            assert torch.equal(torch.get_rng_state(), state)
            found.append(model[0].weight)
        assert torch.equal(found[0], found[1])
        assert not torch.equal(found[0], found[2])

    def test_epochs_of_the_batches_are_set(self):
        data = open_data("digits")
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        other, shuffled = copy.deepcopy(model), data.train_batches(200)
        next(iter(shuffled))
        fit(model, shuffled, 2, lr=0.1)
        fit(other, data.train_batches(200), 2, lr=0.1)
        assert torch.equal(model[1].weight, other[1].weight)

    def test_modes_callback_and_frozen_parameters(self):
        model, seen = Net().eval(), []
        model[4].requires_grad_(False)
        frozen, moving = model[4].weight.clone(), model[0].weight.clone()
        statistics = model[1].running_mean.clone()
        fit(model, batches(), 2, lr=0.1, on_epoch=seen.append)
        assert not model.training
        assert [epoch.number for epoch in seen] == [1, 2]
        assert torch.equal(model[4].weight, frozen)
        assert not torch.equal(model[0].weight, moving)
        assert not torch.equal(model[1].running_mean, statistics)

    def test_batches_without_a_length(self):
        class Stream:
            def __iter__(self):
                return iter(batches())

        epochs = fit(Net(), Stream(), 2, sgd=Sgd(0.1))
        assert [epoch.lr for epoch in epochs] == pytest.approx([0.05, 0.0])

    def test_it_learns_the_digits(self):
        data = open_data("digits")
        torch.manual_seed(0)
        model = create_model("ifso:resnet8-digits")
        fit(model, data.train_batches(64), 3, sgd=Sgd(0.05, "one-cycle"))
        assert evaluate(model, data.test_batches()).top1 > 90

    def test_bad_input(self):
        with pytest.raises(DataError, match="nothing to train on"):
            fit(Net(), [], 1, lr=0.1)
        with pytest.raises(IfsoError, match="-1 epochs"):
            fit(Net(), batches(), -1, lr=0.1)
        with pytest.raises(IfsoError, match="rate of nan"):
            fit(Net(), batches(), 1, lr=float("nan"))
        with pytest.raises(DivergedError, match="in epoch 1 of training; lower the learning rate"):
            fit(Net(), [(torch.full((4, 4), float("nan")), torch.zeros(4, dtype=torch.long))], 1, lr=0.1)


def test_rates_begin_and_end_where_they_should():
    assert rate(0.3, "constant") == 1
    for schedule, first in (("cosine", 1), ("one-cycle", 0)):
        assert rate(0, schedule) == first
        assert rate(1, schedule) == pytest.approx(0)
        assert max(rate(part / 100, schedule) for part in range(101)) == 1
