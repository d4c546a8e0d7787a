"""An examiner finds what ``evaluate`` finds, also when the network has changed since."""

import copy

import pytest
import torch
from torch import nn

from ifso.data import open_data
from ifso.errors import DataError
from ifso.models import create_model
from ifso.training.evaluation import Evaluator, evaluate
from ifso.training.precision import autocast, tensor_cores

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def network(seed=0):
    torch.manual_seed(seed)
    return create_model("ifso:resnet8-digits")


def move(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.2 * torch.randn_like(parameter))


def test_it_is_evaluate():
    batches, model = open_data("digits").test_batches(100), network().train()
    examiner = Evaluator(batches)
    first = examiner(model)
    assert first == evaluate(model, batches)
    assert model.training
    move(model)
    assert examiner(model) == evaluate(model, batches) != first


def test_in_half_precision():
    data = open_data("digits")
    batches, model = [(images, labels) for images, labels in data.test_batches(355)], nn.Sequential(
        nn.Flatten(), nn.Linear(64, 10)
    )  # fmt: skip
    with autocast("bf16", "cpu"):
        wanted = evaluate(model, batches)
    assert Evaluator(batches, "bf16")(model) == wanted
    assert Evaluator(batches)(model) == evaluate(model, batches) != wanted


def test_bad_input():
    model = nn.Linear(4, 3)
    with pytest.raises(DataError, match="nothing to evaluate on"):
        Evaluator([])(model)
    with pytest.raises(DataError, match="label 7 is none of the 3 classes"):
        Evaluator([(torch.ones(2, 4), torch.tensor([0, 7]))])(model)


@gpu
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_on_a_gpu_it_is_evaluate(precision):
    """The last of the batches is smaller; weights change in place; a second network is another graph."""
    data = open_data("digits", device="cuda")
    batches, model = data.test_batches(100), network().cuda().train()
    examiner = Evaluator(batches, precision)

    def compare(model):
        found = examiner(model)
        with autocast(precision, "cuda"):
            wanted = evaluate(model, batches)
        assert (found.samples, wanted.samples) == (355, 355)
        assert found.loss == pytest.approx(wanted.loss, rel=1e-5 if precision == "float32" else 1e-2)
        assert abs(found.top1 - wanted.top1) <= (0.3 if precision == "float32" else 1.5)
        assert abs(found.top5 - wanted.top5) <= (0.3 if precision == "float32" else 1.5)
        return found.loss

    losses = []
    for _ in range(3):
        losses.append(compare(model))
        move(model)
        model(torch.randn(8, 1, 8, 8, device="cuda"))
    other = copy.deepcopy(model)
    move(other)
    losses += [compare(other), compare(model)]
    assert model.training
    assert len(set(losses)) == 5


@gpu
def test_on_a_gpu_labels_are_checked_first():
    data = open_data("digits", device="cuda")
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 7)).cuda()
    with pytest.raises(DataError, match="label 9 is none of the 7 classes"):
        Evaluator(data.test_batches())(model)


class Waits(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, images):
        return self.inner(images) * (1.0 if float(images.sum()) > -1e9 else 0.0)


@gpu
def test_on_a_gpu_a_network_that_cannot_be_captured_is_evaluated_as_it_comes():
    data = open_data("digits", device="cuda")
    model = Waits(network()).cuda().eval()
    examiner = Evaluator(data.test_batches(100))
    with tensor_cores("float32"):
        wanted = evaluate(model, data.test_batches(100))
    for _ in range(2):
        found = examiner(model)
        assert (found.samples, found.top1) == (wanted.samples, wanted.top1)
        assert found.loss == pytest.approx(wanted.loss, rel=1e-6)
    assert float(torch.rand(2, device="cuda").sum()) > 0
