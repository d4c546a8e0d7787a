"""A detector learns from its teacher: differences against a slow truth, the same pixels, and who cannot be taught."""

import copy
import itertools
import math

import pytest
import torch
from small_detectors import boxes, fcos, frozen, retina
from torch import nn
from torchvision.models import get_model

from ifso.data import open_data
from ifso.data.compatibility import check_fits, classes_of
from ifso.errors import DataError, TrainingError
from ifso.tasks.detection import detection_losses
from ifso.training.distillation import CONFIDENT, detector_distillation, distillation_losses, recorded_answers
from ifso.training.objective import batches_and_loss
from ifso.training.settings import training_recipe
from ifso.training.trainer import fit

OTHERS = ("fasterrcnn_mobilenet_v3_large_320_fpn", "ssdlite320_mobilenet_v3_large")
BATCH = next(iter(boxes().train_batches(4)))


def answers(seed, centre=False):
    random = torch.Generator().manual_seed(seed)
    shapes = {"cls_logits": (2, 5, 3), "bbox_regression": (2, 5, 4), **({"bbox_ctrness": (2, 5, 1)} if centre else {})}
    return {name: 2 * torch.randn(shape, generator=random, dtype=torch.float64) for name, shape in shapes.items()}


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def divergence(given, said):
    p, q = sigmoid(given), sigmoid(said)
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def slow_differences(student, teacher, temperature):
    """One anchor after the other."""
    classes = drawn = centres = 0.0
    count = 0
    for place in itertools.product(range(2), range(5)):
        given, said = (each["cls_logits"][place].tolist() for each in (teacher, student))
        for z, y in zip(given, said, strict=True):
            gap = abs(sigmoid(z / temperature) - sigmoid(y / temperature))
            classes += temperature**2 * gap * divergence(z / temperature, y / temperature)
        if max(map(sigmoid, given)) > CONFIDENT:
            count += 1
            drawn += float((teacher["bbox_regression"][place] - student["bbox_regression"][place]).abs().sum())
            if "bbox_ctrness" in teacher:
                centres += divergence(*(float(each["bbox_ctrness"][place]) for each in (teacher, student)))
    found = {"classes": classes / count, "boxes": drawn / count}
    return {**found, "centres": centres / count} if "bbox_ctrness" in teacher else found


@pytest.mark.parametrize("centre", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_against_a_slow_truth(centre, temperature):
    student, teacher = answers(1, centre), answers(2, centre)
    found = distillation_losses(student, teacher, temperature)
    assert {name: float(loss) for name, loss in found.items()} == pytest.approx(
        slow_differences(student, teacher, temperature), rel=1e-10
    )


def test_a_teacher_that_sees_nothing_moves_no_box():
    student, teacher = answers(1), {**answers(2), "cls_logits": torch.full((2, 5, 3), -9.0, dtype=torch.float64)}
    found = distillation_losses(student, teacher, 1.0)
    assert float(found["boxes"]) == 0
    assert math.isfinite(float(found["classes"]))


@pytest.mark.parametrize("make", [retina, fcos])
def test_nothing_is_left_to_learn_from_a_twin(make):
    """In eval mode, in which norms are the same; the teacher is asked about the very pixels that the student saw."""
    model = make().eval()
    found = detector_distillation(copy.deepcopy(model).train(), weight=0.25)(model, BATCH)
    wanted = detection_losses(model, BATCH)
    soft = {name: float(loss.detach()) for name, loss in found.items() if name.startswith("distilled_")}
    assert soft == pytest.approx(dict.fromkeys(soft, 0.0), abs=1e-6)
    assert soft.keys() >= {"distilled_classes", "distilled_boxes"}
    for name, loss in wanted.items():
        torch.testing.assert_close(found[name], 0.75 * loss)


def test_the_teacher_stays_as_it_was():
    teacher, model = retina(), retina()
    before, modes = copy.deepcopy(teacher.state_dict()), [module.training for module in teacher.modules()]
    settings = training_recipe("detection", epochs=1, batch=4, lr=0.05, warm_up_steps=0, distill=0.5)
    data = boxes()
    batches, loss_fn = batches_and_loss(data, settings, teacher)
    [epoch] = fit(model, batches, settings, loss_fn=loss_fn)
    assert all(torch.equal(value, teacher.state_dict()[name]) for name, value in before.items())
    assert [module.training for module in teacher.modules()] == modes
    assert not any(parameter.grad is not None for parameter in teacher.parameters())
    assert epoch.losses["distilled_classes"] > 0
    assert sum(epoch.losses.values()) == pytest.approx(epoch.loss, rel=1e-5)


def test_a_student_draws_near():
    data, teacher = boxes(), frozen()
    with torch.no_grad():
        teacher.head.classification_head.cls_logits.bias.fill_(0.5)
    settings = training_recipe("detection", epochs=8, batch=4, lr=0.05, warm_up_steps=0, distill=1.0)
    batches, loss_fn = batches_and_loss(data, settings, teacher)
    epochs = fit(frozen(), batches, settings, loss_fn=loss_fn)
    assert epochs[-1].losses["distilled_classes"] < 0.1 * epochs[0].losses["distilled_classes"]
    assert epochs[-1].losses["classification"] == 0


def test_hooks_are_gone_afterwards():
    model = retina()
    with recorded_answers(model) as seen:
        detection_losses(model, BATCH)
    assert seen["images"].shape == (4, 3, 64, 64)
    assert seen["head"]["cls_logits"].shape[0] == 4
    assert not model.head._forward_hooks
    assert not model.transform._forward_hooks


class Boxless(nn.Module):
    """Fits nothing."""

    def forward(self, images, targets=None):
        return images


class TestRefused:
    @pytest.mark.parametrize("name", OTHERS)
    def test_detectors_of_other_kinds(self, name):
        teacher = get_model(name, weights=None, weights_backbone=None)
        with pytest.raises(
            TrainingError, match=rf"the teacher is {type(teacher).__name__}; distillation of detectors is"
        ):
            detector_distillation(teacher)
        with pytest.raises(TrainingError, match=rf"the network is {type(teacher).__name__}; "):
            detector_distillation(retina())(teacher, BATCH)

    def test_a_teacher_with_other_classes(self):
        with pytest.raises(
            TrainingError, match=r"cls_logits of the network is \[4, 160, 4\] and of the teacher \[4, 160"
        ):
            detector_distillation(retina(classes=5))(retina(), BATCH)

    def test_fcos_and_retinanet(self):
        with pytest.raises(TrainingError, match="give a teacher with the same anchors and classes"):
            detector_distillation(fcos())(retina(), BATCH)


class TestFitting:
    def test_how_many_classes(self):
        assert [classes_of(model) for model in (retina(), fcos(classes=7), nn.Linear(1, 1))] == [4, 7, None]
        made = {name: get_model(name, weights=None, weights_backbone=None, num_classes=6) for name in OTHERS}
        assert {name: classes_of(model) for name, model in made.items()} == dict.fromkeys(OTHERS, 6)

    def test_more_categories_than_the_head_has(self):
        with pytest.raises(
            DataError, match=r"has 3 categories, so 4 classes with the background, but the network has 3; "
        ):
            check_fits(retina(classes=3), boxes())
        check_fits(retina(classes=9), boxes())

    @pytest.mark.parametrize("model", [nn.Sequential(nn.Flatten(), nn.Linear(64, 9)), Boxless()])
    def test_no_detector(self, model):
        with pytest.raises(DataError, match="has boxes, but"):
            check_fits(model, boxes())

    def test_a_detector_for_labels(self):
        with pytest.raises(
            DataError, match="digits has a label for each image and no boxes, but the network is a dete"
        ):
            check_fits(retina(), open_data("digits"))

    def test_modes_and_statistics_stay(self):
        model = retina()
        before = copy.deepcopy(model.state_dict())
        check_fits(model, boxes())
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
        assert model.training
