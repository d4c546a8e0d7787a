"""Smoothed labels and distillation, written out in float64; answers that do not fit."""

import copy

import pytest
import torch
from torch import nn

from ifso.errors import IfsoError, ScoreError, TrainingError
from ifso.tasks.classification import classification, cross_entropy
from ifso.training.distillation import distillation, distillation_from_logits
from ifso.training.precision import PRECISIONS, autocast, check_precision, check_score_precision, scaler


@pytest.fixture
def batch():
    return torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 6, 3, 3, 1])


@pytest.fixture
def student():
    return nn.Linear(4, 7).double()


def log_probabilities(logits):
    return logits - logits.exp().sum(1, keepdim=True).log()


def test_smoothed_labels_written_out(batch, student):
    for smoothing in (0.1, 0.4):
        targets = torch.full((5, 7), smoothing / 7, dtype=torch.float64)
        targets[range(5), batch[1]] += 1 - smoothing
        truth = -(targets * log_probabilities(student(batch[0]))).sum(1).mean()
        torch.testing.assert_close(classification(smoothing)(student, batch), truth, rtol=1e-12, atol=0)


def test_without_smoothing_it_is_the_cross_entropy_itself():
    assert classification() is cross_entropy
    assert classification(0) is cross_entropy


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_distillation_written_out_with_its_gradient(batch, student, smoothing):
    teacher = nn.Linear(4, 7).double()
    other = copy.deepcopy(student)
    found = distillation(teacher, temperature=3.0, weight=0.7, label_smoothing=smoothing)(student, batch)
    found.backward()
    logits, target = other(batch[0]), (teacher(batch[0]).detach() / 3).softmax(1)
    soft = (target * (target.log() - log_probabilities(logits / 3))).sum(1).mean()
    truth = 0.3 * classification(smoothing)(other, batch) + 0.7 * 9 * soft
    truth.backward()
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=0)
    torch.testing.assert_close(student.weight.grad, other.weight.grad, rtol=1e-10, atol=1e-14)


def test_given_logits_are_as_good_as_the_teacher(batch, student):
    teacher = nn.Sequential(nn.Linear(4, 7), nn.Dropout(0.5)).double()
    computed = distillation(teacher, temperature=2.0, weight=0.5)(student, batch)
    logits = teacher[0](batch[0])
    given = distillation_from_logits(lambda batch: batch[2], temperature=2.0, weight=0.5)
    found = given(student, (*batch, logits))
    assert torch.equal(found, computed)
    found.backward()
    assert teacher[0].weight.grad is None
    assert student.weight.grad.abs().sum() > 0


def test_without_weight_nobody_asks_the_teacher(batch, student):
    found = distillation(nn.Linear(3, 3), weight=0.0)(student, batch)
    assert torch.equal(found, cross_entropy(student, batch))


def test_a_student_that_answers_like_its_teacher_has_no_soft_loss(batch, student):
    assert abs(distillation(copy.deepcopy(student), weight=1.0)(student, batch).item()) < 1e-12


def test_half_precision_logits_are_divided_in_float32(batch, student):
    student, teacher = student.float(), nn.Linear(4, 7)
    inputs = batch[0].float(), batch[1]
    with torch.autocast("cpu", torch.bfloat16):
        found = distillation(teacher)(student, inputs)
        logits, answer = student(inputs[0]).double(), teacher(inputs[0]).double()
    truth = distillation_from_logits(lambda _: answer)(nn.Identity(), (logits, inputs[1]))
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(truth.item(), rel=1e-5)


def test_a_teacher_that_does_not_fit(batch, student):
    for teacher, message in (
        (nn.Linear(4, 10).double(), "the teacher knows 10 classes and the network 7; give a teacher for the same data"),
        (nn.Unflatten(1, (2, 2)), r"the teacher returns \(5, 2, 2\); distillation takes logits"),
        (lambda images: [images], "the teacher returns list"),
    ):
        asked = distillation_from_logits(lambda batch, teacher=teacher: teacher(batch[0]))
        with pytest.raises(TrainingError, match=message) as caught:
            asked(student, batch)
        assert "\n" not in str(caught.value)
    with pytest.raises(TrainingError, match="10 classes and the network 7"):
        distillation(nn.Linear(4, 10).double())(student, batch)
    with pytest.raises(TrainingError, match="logits are of 3 images, the batch has 5"):
        distillation_from_logits(lambda batch: batch[0].new_zeros(3, 7))(student, batch)


class TestPrecision:
    def test_scaled_float16_gradients_survive(self):
        """A gradient of 1e-8, which float16 cannot hold, is there after unscaling; without scaling it is 0."""
        weight = torch.ones(1, 1, requires_grad=True)
        found = []
        for scale in (scaler("fp16", "cpu"), scaler("float32", "cpu")):
            with autocast("fp16", "cpu"):
                loss = (torch.ones(1, 1) @ weight).float().sum() * 1e-8
            optimizer = torch.optim.SGD([weight], 1.0)
            optimizer.zero_grad()
            scale.scale(loss).backward()
            scale.unscale_(optimizer)
            found.append(float(weight.grad))
        assert found == [pytest.approx(1e-8, rel=1e-2), 0.0]

    def test_only_half_precisions_change_the_dtype(self):
        dtypes = {}
        for name in PRECISIONS:
            with autocast(name, "cpu"):
                dtypes[name] = (torch.ones(1, 1) @ torch.ones(1, 1)).dtype
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}
        assert dtypes == {name: half.get(name, torch.float32) for name in PRECISIONS}
        assert [name for name in PRECISIONS if scaler(name, "cpu").is_enabled()] == ["fp16"]

    def test_refusals(self):
        for check in (check_precision, check_score_precision, lambda name: scaler(name, "cpu")):
            with pytest.raises(IfsoError, match="precision 'fp8' is unknown; choose one of float32, tf32, bf16, fp16"):
                check("fp8")
        check_precision("fp16")
        check_score_precision("bf16")
        with pytest.raises(ScoreError, match=r"cannot be computed in fp16; choose one of float32, tf32, bf16$"):
            check_score_precision("fp16")
