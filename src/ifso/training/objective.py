"""What a network learns from: batches, with or without what a teacher says, and the loss that goes with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ifso.common.distributed import several
from ifso.common.loss_fn import LossFn
from ifso.data.base import Data, detects
from ifso.data.batches import ExtendedBatches, TrainBatches, generator
from ifso.errors import TrainingError
from ifso.tasks.classification import cross_entropy
from ifso.tasks.detection import detection_loss, detection_losses
from ifso.training.detector_distillation import detector_distillation
from ifso.training.losses import NamedLosses, classification, distillation, distillation_from_logits
from ifso.training.settings import TrainSettings
from ifso.training.teachers import BatchesWithLogits, TeacherCache, cache_pays_off

TeacherCaches = dict[nn.Module, TeacherCache]
"""Answers that were asked for already, by the teacher."""

NO_TEACHER = "distillation needs a teacher, the network before pruning; give one, or distill=0"


def batches_and_loss(
    data: Data,
    settings: TrainSettings,
    teacher: nn.Module | None = None,
    *,
    ranks: int = 1,
    tables: TeacherCaches | None = None,
    networks: int = 1,
    say: Callable[[str], None] | None = None,
) -> tuple[Any, LossFn]:
    """Training batches of ``data`` and the loss, as the settings want them.

    A teacher on data held in memory is asked about every variant of every image beforehand, where that is less work;
    ``tables`` keeps its answers for other networks with the same teacher, ``networks`` of them in all. Mixed images
    (``cutmix``) have too many variants for that: the teacher is asked in every step.
    """
    if settings.batch % ranks:
        raise TrainingError(f"a batch of {settings.batch} cannot be shared by {ranks} processes; give a multiple")
    batches = data.train_batches(settings.batch // ranks)
    if settings.cutmix:
        batches = _mixed(data, batches, settings.cutmix)
    if detects(data):
        return batches, _detection_loss(data, settings, teacher)
    if data.loss_fn is not cross_entropy:
        return batches, _own_loss(data, settings)
    if not settings.distill:
        return batches, classification(settings.label_smoothing, mixed=settings.cutmix > 0)
    if teacher is None:
        raise TrainingError(NO_TEACHER)
    options: dict[str, Any] = {
        "temperature": settings.temperature,
        "weight": settings.distill,
        "label_smoothing": settings.label_smoothing,
    }
    table = not several() and cache_pays_off(batches, networks * settings.epochs, data.num_classes or 1000)
    if not table or not isinstance(batches, TrainBatches):
        return batches, distillation(teacher, **options, mixed=settings.cutmix > 0)
    tables = {} if tables is None else tables
    if teacher not in tables:
        if say is not None:
            say("asking the teacher about every variant of every image")
        tables[teacher] = TeacherCache.of(teacher, batches, settings.precision)
    return BatchesWithLogits(batches, tables[teacher]), distillation_from_logits(_third, **options)


def _mixed(data: Data, batches: Any, share: float) -> MixedBatches:
    """The batches with mixed images; one clear line where they cannot be mixed."""
    if detects(data):
        raise TrainingError(f"{data.name} has boxes; cutmix is for classifiers only, give 0")
    if data.loss_fn is not cross_entropy:
        raise TrainingError(f"{data.name} has a loss of its own; cutmix is for classifiers only, give 0")
    if not isinstance(batches, TrainBatches):
        raise TrainingError(f"{data.name} is not held in memory, which cutmix needs; give 0")
    return MixedBatches(batches, share)


def _third(batch: Any) -> Any:
    return batch[2]


def _detection_loss(data: Data, settings: TrainSettings, teacher: nn.Module | None) -> LossFn:
    """The losses of a detector by name, and how far it is from its teacher; one that the data brings is taken as is."""
    if settings.label_smoothing:
        raise TrainingError(f"{data.name} has boxes; label smoothing is for classifiers only")
    if settings.compile:
        raise TrainingError(f"{data.name} has boxes; detectors cannot be compiled, train without --compile")
    if data.loss_fn is not detection_loss:
        return _own_loss(data, settings)
    if not settings.distill:
        return NamedLosses(detection_losses)
    if teacher is None:
        raise TrainingError(NO_TEACHER)
    return NamedLosses(detector_distillation(teacher, weight=settings.distill, temperature=settings.temperature))


def _own_loss(data: Data, settings: TrainSettings) -> LossFn:
    if settings.distill or settings.label_smoothing:
        raise TrainingError(
            f"{data.name} has a loss of its own; distillation and label smoothing are for classifiers only"
        )
    return data.loss_fn


CORNERS = 4
"""Columns that a plan has more: top, left, bottom and right of the rectangle."""


def rectangles(count: int, size: tuple[int, int], share: float, random: torch.Generator) -> Tensor:
    """Top, left, bottom, right [count, 4] of what is pasted into each image of that size (H, W).

    Each image is mixed with probability ``share``; others have an empty rectangle. With λ uniform between 0 and 1, its
    sides are √(1 − λ) of the image's, in whole pixels, around any pixel of the image, and end at the border.

    >>> rectangles(3, (32, 32), 1.0, torch.Generator().manual_seed(0)).shape
    torch.Size([3, 4])
    >>> rectangles(1, (32, 32), 0.0, torch.Generator().manual_seed(0)).tolist()
    [[0, 0, 0, 0]]
    """
    mixed, kept, *centre = torch.rand(4, count, generator=random, dtype=torch.float64)
    whole = torch.tensor(size)
    sides = ((1 - kept).sqrt()[:, None] * whole).round().long()
    first = (torch.stack(centre, 1) * whole).long() - sides // 2
    corners = torch.cat([first, first + sides], 1).clamp(min=0).minimum(whole.repeat(2))
    return torch.where((mixed < share)[:, None], corners, 0)


def pasted(images: Tensor, corners: Tensor) -> Tensor:
    """Images [N, C, H, W] with the rectangle at ``corners`` [N, 4] from the one before in the batch, cyclically.

    >>> images = torch.tensor([[[[1, 1], [1, 1]]], [[[2, 2], [2, 2]]]])
    >>> pasted(images, torch.tensor([[0, 0, 1, 2], [0, 0, 0, 0]])).flatten(1).tolist()
    [[2, 2, 1, 1], [2, 2, 2, 2]]
    """
    top, left, bottom, right = corners[:, :, None].unbind(1)
    row, column = (torch.arange(size, device=images.device) for size in images.shape[2:])
    inside = ((row >= top) & (row < bottom))[:, :, None] & ((column >= left) & (column < right))[:, None]
    return torch.where(inside[:, None], images.roll(1, 0), images)


class MixedBatches(ExtendedBatches):
    """Batches of (images, labels, labels of the images that were pasted in, shares [N] of the area that were not).

    Rectangles depend on the seed and the number of the epoch alone; each of several processes mixes its own batches.
    """

    def __init__(self, batches: TrainBatches, share: float) -> None:
        super().__init__(batches)
        self._share = share

    def plan(self, epoch: int) -> tuple[Tensor, Tensor]:
        """As that of the training batches; the rectangles are the last four columns of the moves."""
        order, moves = self.base.plan(epoch)
        count, _, height, width = self.base.images.pixels.shape
        random = generator(self.base.seed, f"cutmix/{epoch}")
        corners = self.base.own(rectangles(count, (height, width), self._share, random))
        return order, corners if moves is None else torch.cat([moves, corners], 1)

    def make(self, order: Tensor, moves: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A batch of the training batches, mixed."""
        assert moves is not None
        images, labels = self.base.make(order, moves[:, :-CORNERS])
        corners = moves[:, -CORNERS:]
        area = (corners[:, 2:] - corners[:, :2]).prod(1)
        share = 1 - area / (images.shape[2] * images.shape[3])
        return pasted(images, corners), labels, labels.roll(1), share
