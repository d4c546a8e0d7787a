"""The batches that a network learns from, and the loss that goes with them, with or without a teacher.

CutMix (Yun et al., 2019) pastes a rectangle of another image into an image, which then has two labels. With a teacher
that is asked about the mixed images it is the method of Beyer et al., "Knowledge distillation: A good teacher is
patient and consistent" (2022). Mixup (Zhang et al., 2018) blends two images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ifso.common.batches import shared_size
from ifso.common.distributed import is_distributed, mean_over_ranks
from ifso.common.loss_fn import LossFn
from ifso.data.base import Data, detects, has_own_loss
from ifso.data.batches import Epochs, ExtendedBatches, TrainBatches, generator
from ifso.data.decoding import TrainFiles
from ifso.data.from_file import FileData
from ifso.errors import TrainingError
from ifso.tasks.classification import classification
from ifso.tasks.detection import detection_losses
from ifso.training.distillation import (
    BatchesWithLogits,
    LossesOf,
    TeacherCache,
    cache_pays_off,
    detector_distillation,
    distillation,
    distillation_from_logits,
)
from ifso.training.settings import TrainSettings

TeacherCaches = dict[nn.Module, TeacherCache]
"""The cached logits of each teacher."""


def batches_and_loss(
    data: Data,
    settings: TrainSettings,
    teacher: nn.Module | None = None,
    *,
    ranks: int = 1,
    caches: TeacherCaches | None = None,
    networks: int = 1,
    say: Callable[[str], None] | None = None,
) -> tuple[Any, LossFn]:
    """Training batches of ``data`` and the loss for the settings.

    Where that is less work, a teacher's logits for every variant of every image in memory are computed beforehand;
    ``caches`` keeps them for other networks with the same teacher, ``networks`` of them in all. Mixed images
    (``cutmix``, ``mixup``) have too many variants for that: the teacher is asked in every step.
    """
    each = shared_size(settings.batch, ranks)
    _check_options(data, settings, teacher)
    if ranks > 1 and not isinstance(data, FileData) and say is not None:
        say(f"batches: {settings.batch} samples, shared by {ranks} processes: {each} of each batch on each of them")
    batches = data.train_batches(each)
    if settings.mixes:
        batches = _mixed_batches(data, batches, settings)
    if has_own_loss(data):
        return batches, data.loss_fn
    if teacher is not None and settings.distill:
        return _distilled(data, batches, settings, teacher, {} if caches is None else caches, networks, say)
    if detects(data):
        return batches, NamedLosses(detection_losses)
    return batches, classification(settings.label_smoothing, mixed=settings.mixes)


def _mixed_batches(data: Data, batches: Any, settings: TrainSettings) -> MixedBatches | MixedFiles:
    if isinstance(batches, TrainBatches):
        return MixedBatches(batches, settings.cutmix, settings.mixup)
    if isinstance(batches, TrainFiles):
        return MixedFiles(batches, settings.cutmix, settings.mixup)
    raise TrainingError(f"{data.name} is neither held in memory nor in image files; cutmix and mixup need that, give 0")


def _distilled(
    data: Data,
    batches: Any,
    settings: TrainSettings,
    teacher: nn.Module,
    caches: TeacherCaches,
    networks: int,
    say: Callable[[str], None] | None,
) -> tuple[Any, LossFn]:
    options: dict[str, Any] = {"temperature": settings.temperature, "weight": settings.distill}
    if detects(data):
        return batches, NamedLosses(detector_distillation(teacher, **options))
    options["label_smoothing"] = settings.label_smoothing
    cached = not is_distributed() and cache_pays_off(batches, networks * settings.epochs, data.num_classes or 1000)
    if not cached or not isinstance(batches, TrainBatches):
        return batches, distillation(teacher, **options, mixed=settings.mixes)
    if teacher not in caches:
        if say is not None:
            say("asking the teacher about every variant of every image")
        caches[teacher] = TeacherCache.of(teacher, batches, settings.precision)
    return BatchesWithLogits(batches, caches[teacher]), distillation_from_logits(lambda batch: batch[2], **options)


def _check_options(data: Data, settings: TrainSettings, teacher: nn.Module | None) -> None:
    """Raise if the settings ask for what the data, its loss or the teacher cannot give."""
    boxes, own_loss = detects(data), has_own_loss(data)
    if settings.mixes and (boxes or own_loss):
        has, which = "boxes" if boxes else "a loss of its own", "cutmix" if settings.cutmix else "mixup"
        raise TrainingError(f"{data.name} has {has}; {which} is for classifiers only, give 0")
    if boxes and settings.label_smoothing:
        raise TrainingError(f"{data.name} has boxes; label smoothing is for classifiers only")
    if boxes and settings.compile:
        raise TrainingError(f"{data.name} has boxes; detectors cannot be compiled, train without --compile")
    if own_loss and (settings.distill or settings.label_smoothing):
        raise TrainingError(
            f"{data.name} has a loss of its own; distillation and label smoothing are for classifiers only"
        )
    if settings.distill and teacher is None:
        raise TrainingError("distillation needs a teacher, the network before pruning; give one, or distill=0")


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


CORNERS = 4
"""Columns that are added to a plan: top, left, bottom and right of the rectangle."""


def rectangles(count: int, size: tuple[int, int], share: float, random: torch.Generator) -> Tensor:
    """Top, left, bottom, right [count, 4] of the rectangle pasted into each image of that size (H, W).

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


PARTS = 2**16
"""In so many parts a plan says how much of an image is its own."""


def own_parts(count: int, share: float, random: torch.Generator) -> Tensor:
    """Of each image, how many of its :data:`PARTS` stay its own when it is blended with another [count].

    Each is blended with probability ``share``, and then with λ uniform between 0 and 1.

    >>> own_parts(2, 0.0, torch.Generator().manual_seed(0)).tolist()
    [65536, 65536]
    """
    mixed, kept = torch.rand(2, count, generator=random, dtype=torch.float64)
    return torch.where(mixed < share, (kept * PARTS).round().long(), PARTS)


def mixed(images: Tensor, labels: Tensor, corners: Tensor, own: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A batch (images, labels, other labels, shares [N] of the first ones) of images mixed with the one before.

    ``corners`` [N, 4] are rectangles that are pasted in; of the others ``own`` [N] of :data:`PARTS` stay their own.

    >>> images = torch.tensor([[[[4.0, 4.0]]], [[[8.0, 8.0]]]])
    >>> corners, own = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0]]), torch.tensor([PARTS, PARTS // 4])
    >>> found, labels, others, shares = mixed(images, torch.tensor([0, 1]), corners, own)
    >>> found.flatten(1).tolist(), others.tolist(), shares.tolist()
    ([[8.0, 4.0], [5.0, 5.0]], [1, 0], [0.5, 0.25])
    """
    area = (corners[:, 2:] - corners[:, :2]).prod(1)
    share, pasted_in = 1 - area / (images.shape[2] * images.shape[3]), pasted(images, corners)
    if own is None:
        return pasted_in, labels, labels.roll(1), share
    blend = torch.where(area > 0, 1.0, own / PARTS)
    weight = blend[:, None, None, None]
    blended = torch.where(weight < 1, weight * images + (1 - weight) * images.roll(1, 0), pasted_in)
    return blended, labels, labels.roll(1), torch.where(area > 0, share, blend)


class MixedBatches(ExtendedBatches):
    """Batches of (images, labels, labels of the images that were mixed in, shares [N] that are not theirs).

    How images are mixed depends on the seed and the number of the epoch alone; each of several processes mixes its own
    batches. ``share`` of them are pasted into, ``blend`` of the others are blended.
    """

    def __init__(self, batches: TrainBatches, share: float, blend: float = 0.0) -> None:
        super().__init__(batches)
        self._share, self._blend = share, blend

    def plan(self, epoch: int) -> tuple[Tensor, Tensor]:
        """As that of the training batches; rectangles, and parts if images are blended, are the last columns."""
        order, moves = self.base.plan(epoch)
        count, _, height, width = self.base.images.pixels.shape
        random = generator(self.base.seed, f"cutmix/{epoch}")
        corners = self.base.own(rectangles(count, (height, width), self._share, random))
        if self._blend:
            parts = own_parts(count, self._blend, generator(self.base.seed, f"mixup/{epoch}"))
            corners = torch.cat([corners, self.base.own(parts[:, None])], 1)
        return order, corners if moves is None else torch.cat([moves, corners], 1)

    def make(self, order: Tensor, moves: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A batch of the training batches, mixed."""
        assert moves is not None
        own = moves[:, -1] if self._blend else None
        moves = moves[:, :-1] if self._blend else moves
        images, labels = self.base.make(order, moves[:, :-CORNERS])
        return mixed(images, labels, moves[:, -CORNERS:], own)


class MixedFiles(Epochs):
    """The same of images in files."""

    def __init__(self, batches: TrainFiles, share: float, blend: float = 0.0) -> None:
        self._base, self._share, self._blend = batches, share, blend
        self.batch_size, self._indices = batches.batch_size, batches._indices

    def _batches(self, epoch: int) -> Iterator[Any]:
        first = int(self._indices[0]) if len(self._indices) else 0
        random = generator(self._base.source.seed, f"mixed/{epoch}/{first}")
        for images, labels in self._base._batches(epoch):
            count, _, height, width = images.shape
            corners = rectangles(count, (height, width), self._share, random).to(images.device)
            own = own_parts(count, self._blend, random).to(images.device) if self._blend else None
            yield mixed(images, labels, corners, own)
