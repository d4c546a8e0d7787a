"""Losses to a teacher, of classifiers and detectors, and sums of losses with names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ifso.common.distributed import is_distributed, mean_over_ranks, sum_over_ranks
from ifso.common.loss_fn import LossFn
from ifso.common.module_state import unwrapped
from ifso.common.tensors import to_float32
from ifso.common.torch_state import eval_mode
from ifso.errors import TrainingError
from ifso.tasks.classification import check_same_classes, logits_in, mixed_cross_entropy
from ifso.tasks.detection import detection_losses


def distillation(
    teacher: nn.Module,
    *,
    temperature: float = 4.0,
    weight: float = 0.9,
    label_smoothing: float = 0.0,
    mixed: bool = False,
) -> LossFn:
    """The loss to labels and to a teacher (Hinton et al., 2015), which is asked in eval mode.

    (1 − weight) · cross entropy + weight · T² · KL(teacher ‖ model), both logits divided by the temperature T.
    Without weight the teacher is not asked. With ``mixed`` it is asked about the mixed images, and the cross entropy is
    :func:`mixed_cross_entropy`.
    """

    def answer(batch: Any) -> Tensor:
        with torch.no_grad(), eval_mode(teacher):
            return logits_in(teacher(batch[0]))

    return distillation_from_logits(
        answer, temperature=temperature, weight=weight, label_smoothing=label_smoothing, mixed=mixed
    )


def distillation_from_logits(
    logits_of: Callable[[Any], Tensor],
    *,
    temperature: float = 4.0,
    weight: float = 0.9,
    label_smoothing: float = 0.0,
    mixed: bool = False,
) -> LossFn:
    """:func:`distillation` with the teacher's logits [N, classes] of a batch given rather than computed.

    A batch may hold more than (images, labels), such as those logits:

    >>> loss_fn = distillation_from_logits(lambda batch: batch[2], temperature=1.0, weight=1.0)
    >>> even, sure = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 50.0]])
    >>> round(float(loss_fn(nn.Identity(), (even, torch.tensor([0]), sure))), 4)
    0.6931
    """

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        images, labels, *more = batch
        given = logits_of(batch) if weight else None
        logits = logits_in(model(images))
        if mixed:
            hard = mixed_cross_entropy(logits, labels, *more, label_smoothing=label_smoothing)
        else:
            hard = F.cross_entropy(logits, labels, label_smoothing=label_smoothing)
        if given is None:
            return hard
        check_same_classes(given, logits)
        target, answer = (F.log_softmax(to_float32(each) / temperature, 1) for each in (given.detach(), logits))
        soft = F.kl_div(answer, target, reduction="batchmean", log_target=True)
        return (1 - weight) * hard + weight * temperature**2 * soft

    return loss_fn


LossesOf = Callable[[nn.Module, Any], Mapping[str, Tensor]]
"""``losses_of(model, batch)`` gives scalars by name."""


class NamedLosses:
    """A ``loss_fn(model, batch)``: the sum of what ``losses_of`` gives, with means of its parts over batches.

    >>> loss_fn = NamedLosses(lambda model, batch: {"class": model(batch).sum(), "box": model(batch).mean()})
    >>> [float(loss_fn(nn.Identity(), batch)) for batch in (torch.ones(2), torch.zeros(2))]
    [3.0, 0.0]
    >>> loss_fn.pop_means(), loss_fn.pop_means()
    ({'class': 1.0, 'box': 0.5}, {})
    """

    def __init__(self, losses_of: LossesOf) -> None:
        self.losses_of = losses_of
        self._sums: dict[str, Tensor] = {}
        self._count = 0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The sum of the losses."""
        losses = self.losses_of(model, batch)
        for name, loss in losses.items():
            self._sums[name] = self._sums.get(name, 0.0) + loss.detach()
        self._count += 1
        return torch.stack(list(losses.values())).sum()

    def pop_means(self) -> dict[str, float]:
        """The mean of each part since the last call, over the batches of all processes."""
        if not self._count:
            return {}
        names, total = list(self._sums), torch.stack(list(self._sums.values()))
        means = mean_over_ranks(total, self._count)
        self._sums, self._count = {}, 0
        return dict(zip(names, means.tolist(), strict=True))


CONFIDENT = 0.3
"""The score of a class from which on the teacher knows where a box is."""

SCORES, BOXES, CENTRE = "cls_logits", "bbox_regression", "bbox_ctrness"
NEEDED = "distillation of detectors is for RetinaNet and FCOS: a transform, a backbone and a head with sigmoid scores"


def detector_distillation(teacher: nn.Module, *, weight: float = 0.5, temperature: float = 1.0) -> LossesOf:
    """Losses by name: (1 − weight) · those of the boxes, and weight · :func:`distillation_losses`.

    The teacher, in eval mode, sees the pixels that the student saw. Both must be like torchvision's RetinaNet and FCOS,
    with the same anchors and classes.
    """
    check_distillable(teacher, "teacher")

    def losses_of(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        check_distillable(unwrapped(model), "network")
        with recorded_answers(model) as seen:
            hard = detection_losses(model, batch)
        soft = distillation_losses(_answers(seen.get("head"), "network"), _ask(teacher, seen["images"]), temperature)
        return {
            **{name: (1 - weight) * loss for name, loss in hard.items()},
            **{f"distilled_{name}": weight * loss for name, loss in soft.items()},
        }

    return losses_of


def distillation_losses(
    student: Mapping[str, Tensor], teacher: Mapping[str, Tensor], temperature: float
) -> dict[str, Tensor]:
    """The distance of the student's answers from the teacher's, over all anchors of all images.

    With scores p = σ(z/T) of the teacher, q of the student, and N anchors at which the teacher is confident (a score
    σ(z) above :data:`CONFIDENT`; N is 1 at least):

    - classes: T² · Σ |p − q| · KL(p ‖ q) / N over all anchors and classes. The factor |p − q| leaves the many anchors
      at which both see nothing without weight.
    - boxes: Σ |student − teacher|₁ / N over the confident anchors, as they are coded by the head.
    - centres (FCOS): Σ KL(σ(teacher) ‖ σ(student)) / N over those.

    N is of the batch, not of each image: an image in which the teacher sees little would outweigh the others. Under
    ``torch.distributed`` it is of the joint batch, so that the mean over processes is the loss of one process.

    >>> teacher = {"cls_logits": torch.tensor([[[9.0], [-9.0]]]), "bbox_regression": torch.zeros(1, 2, 4)}
    >>> student = {"cls_logits": torch.tensor([[[9.0], [-9.0]]]), "bbox_regression": torch.ones(1, 2, 4)}
    >>> {name: float(loss) for name, loss in distillation_losses(student, teacher, 1.0).items()}
    {'classes': 0.0, 'boxes': 4.0}
    """
    for name in teacher:
        if name not in student or student[name].shape != teacher[name].shape:
            shape = list(student[name].shape) if name in student else "nothing"
            raise TrainingError(
                f"{name} of the network is {shape} and of the teacher {list(teacher[name].shape)}; "
                "give a teacher with the same anchors and classes"
            )
    target, answer = (each[SCORES] / temperature for each in (teacher, student))
    confident = teacher[SCORES].sigmoid().amax(-1) > CONFIDENT
    gap = (target.sigmoid() - answer.sigmoid()).abs()
    distances = {
        "classes": temperature**2 * (gap * _divergence(target, answer)).sum(-1),
        "boxes": (student[BOXES] - teacher[BOXES]).abs().sum(-1) * confident,
    }
    if CENTRE in teacher:
        distances["centres"] = _divergence(teacher[CENTRE], student[CENTRE]).sum(-1) * confident
    count = sum_over_ranks(confident.sum()).clamp(min=1) / (dist.get_world_size() if is_distributed() else 1)
    return {name: distance.sum() / count for name, distance in distances.items()}


def _divergence(target: Tensor, answer: Tensor) -> Tensor:
    """KL(p ‖ q) of Bernoulli distributions with p = σ(target), q = σ(answer), for each element."""
    p = target.sigmoid()
    cross = F.binary_cross_entropy_with_logits(answer, p, reduction="none")
    return cross - F.binary_cross_entropy_with_logits(target, p, reduction="none")


def check_distillable_pair(teacher: nn.Module, network: nn.Module, images: Any) -> None:
    """Raise unless both are made alike, with the same anchors and classes for a list of images."""
    for who, model in (("teacher", teacher), ("network", network)):
        check_distillable(model, who)
    for name in ("image_mean", "image_std"):
        own, other = (getattr(model.get_submodule("transform"), name, None) for model in (network, teacher))
        if own != other:
            raise TrainingError(
                f"{name} is {own} of the network and {other} of the teacher, which sees the pixels that the network "
                "sees; give a teacher with the same"
            )
    with torch.no_grad(), eval_mode(network), recorded_answers(network) as seen:
        network(images)
    distillation_losses(_answers(seen.get("head"), "network"), _ask(teacher, seen["images"]), 1.0)


def check_distillable(model: nn.Module, who: str) -> None:
    """Raise unless the network is made like torchvision's RetinaNet and FCOS."""
    from torchvision.models.detection.ssd import SSD

    whole = all(isinstance(getattr(model, name, None), nn.Module) for name in ("transform", "backbone", "head"))
    if not whole or isinstance(model, SSD):
        raise TrainingError(f"the {who} is {type(model).__name__}; {NEEDED}; train without --distill")


@contextmanager
def recorded_answers(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Record a pass of the model: its resized ``images`` [N, 3, H, W] and the outputs of its ``head``."""
    seen: dict[str, Any] = {}
    network = unwrapped(model)
    hooks = [
        network.get_submodule("transform").register_forward_hook(lambda *args: seen.update(images=args[2][0].tensors)),
        network.get_submodule("head").register_forward_hook(lambda *args: seen.update(head=args[2])),
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def _ask(teacher: Any, images: Tensor) -> dict[str, Tensor]:
    """The teacher's answers at every anchor for images [N, 3, H, W] that are resized already."""
    with eval_mode(teacher):
        features = teacher.backbone(images)
        answers = teacher.head([features] if isinstance(features, Tensor) else list(features.values()))
    return _answers(answers, "teacher")


def _answers(answers: Any, who: str) -> dict[str, Tensor]:
    """Scores [N, anchors, classes] and codes of boxes [N, anchors, 4], in float32."""
    if not isinstance(answers, Mapping) or not {SCORES, BOXES} <= answers.keys():
        found = ", ".join(answers) if isinstance(answers, Mapping) else type(answers).__name__
        raise TrainingError(f"the head of the {who} gives {found}, not {SCORES} and {BOXES}; {NEEDED}")
    return {name: to_float32(answers[name]) for name in (SCORES, BOXES, CENTRE) if name in answers}
