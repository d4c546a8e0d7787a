"""Distillation: losses to a teacher, of classifiers and detectors; does it suit a network; its logits in a table.

A crop out of a padded image and a mirror make 162 variants of a CIFAR image. A run of 200 epochs asks the teacher 200
times about each image; a table of its logits asks 162 times, and serves all runs with that teacher.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ifso.common.batches import same_random_numbers
from ifso.common.distributed import is_distributed, sum_over_ranks
from ifso.common.loss_fn import LossFn
from ifso.common.module_state import unwrapped
from ifso.common.tensors import to_float32
from ifso.common.text import describe_error
from ifso.common.torch_state import eval_mode
from ifso.data.base import Data, detects, has_own_loss
from ifso.data.batches import Augmentation, ExtendedBatches, TrainBatches
from ifso.data.compatibility import SAMPLES, answer, check_fits
from ifso.errors import IfsoError, TrainingError
from ifso.tasks.classification import check_same_classes, logits_in, mixed_cross_entropy
from ifso.tasks.detection import detection_losses
from ifso.training.precision import autocast
from ifso.training.triton_layers import triton_layers


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


CHUNK = 5000

SHARE = 0.25
"""The share of the free memory of the GPU that a table may take."""


def variants_per_image(batches: Any) -> int | None:
    """How many images the augmentation makes of one; None where that is not known."""
    if not isinstance(batches, TrainBatches):
        return None
    augmentation = batches.augmentation
    return 1 if augmentation is None else (2 * augmentation.shift + 1) ** 2 * (1 + augmentation.mirror)


def cache_pays_off(batches: Any, epochs: int, classes: int) -> bool:
    """Return whether a table is less work than asking the teacher in ``epochs`` epochs, and there is room for it."""
    count = variants_per_image(batches)
    if count is None or count > epochs:
        return False
    device = batches.images.pixels.device
    room = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 4 * 2**30
    return 2 * len(batches.images) * count * classes <= SHARE * room


class TeacherCache:
    """The teacher's logits [images, variants, classes] in float16."""

    def __init__(self, logits: Tensor, shift: int) -> None:
        self._logits, self._side = logits, 2 * shift + 1

    @classmethod
    @torch.no_grad()
    def of(cls, teacher: nn.Module, batches: TrainBatches, precision: str = "float32") -> TeacherCache:
        """Ask the teacher in eval mode about every variant of every training image."""
        images, augmentation, parts = batches.images, batches.augmentation, []
        moves = torch.zeros(1, 3, dtype=torch.int64) if augmentation is None else _all_moves(augmentation)
        device = images.pixels.device
        with eval_mode(teacher), autocast(precision, device), triton_layers(precision, device):
            for first in range(0, len(images), CHUNK):
                rows = torch.arange(first, min(first + CHUNK, len(images)), device=device)
                parts.append(torch.stack([_teacher_logits(teacher, batches, rows, move) for move in moves], 1))
        return cls(torch.cat(parts), 0 if augmentation is None else augmentation.shift)

    def __call__(self, order: Tensor, moves: Tensor | None) -> Tensor:
        """The logits [N, classes] of these images after these moves."""
        if moves is None:
            return self._logits[order, 0]
        mirrors = self._logits.shape[1] // self._side**2
        variant = (moves[:, 0] * self._side + moves[:, 1]) * mirrors + moves[:, 2]
        return self._logits[order, variant]


def _all_moves(augmentation: Augmentation) -> Tensor:
    """Every move that can be drawn [variants, 3], in the order of the table.

    >>> _all_moves(Augmentation(shift=0, mirror=True)).tolist()
    [[0, 0, 0], [0, 0, 1]]
    """
    corners, mirrors = range(2 * augmentation.shift + 1), range(1 + augmentation.mirror)
    return torch.tensor(list(itertools.product(corners, corners, mirrors)))


def _teacher_logits(teacher: nn.Module, batches: TrainBatches, rows: Tensor, move: Tensor) -> Tensor:
    images, _ = batches.make(rows, move.to(rows.device).expand(len(rows), 3))
    logits = logits_in(teacher(images))
    check_same_classes(logits, logits)
    return logits.to(torch.float16)


class BatchesWithLogits(ExtendedBatches):
    """Batches of (images, labels, the teacher's logits), from training batches and a cache."""

    def __init__(self, batches: TrainBatches, cache: TeacherCache) -> None:
        super().__init__(batches)
        self._cache = cache

    def make(self, order: Tensor, moves: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """A batch of the training batches with its logits."""
        images, labels = self.base.make(order, moves)
        return images, labels, self._cache(order, moves)


def check_teacher(teacher: nn.Module, network: nn.Module, data: Data) -> None:
    """Raise if ``network`` cannot learn from ``teacher`` on ``data``; both are left as they were.

    Both see the first images in eval mode. Nothing is distilled on data with a loss of its own, which is not tried.

    >>> from ifso.data import open_data
    >>> nine, ten = (nn.Sequential(nn.Flatten(), nn.Linear(64, classes)) for classes in (9, 10))
    >>> check_teacher(nine, ten, open_data("digits"))
    Traceback (most recent call last):
    ...
    ifso.errors.TrainingError: the teacher knows 9 classes and the network 10; give a teacher for the same data
    """
    if not detects(data) and has_own_loss(data):
        return
    check_fits(network, data)
    with same_random_numbers():
        images = data.first_batch()[0]
    try:
        if detects(data):
            check_distillable_pair(teacher, network, list(images)[:1])
        else:
            check_same_classes(*(answer(model, images[:SAMPLES]) for model in (teacher, network)))
    except IfsoError:
        raise
    except Exception as error:
        raise TrainingError(
            f"the teacher, {type(teacher).__name__}, failed on the first images of {data.name} "
            f"({describe_error(error)}); give a teacher for the same data"
        ) from error
