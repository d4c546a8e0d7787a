"""Teachers: whether they suit a network, and their logits for every image in every augmentation, computed once.

A crop out of a padded image and a mirror make 162 variants of a CIFAR image. A run of 200 epochs asks the teacher 200
times about each image; a table of its logits asks 162 times, and serves all runs with that teacher.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from ifso.common.batches import same_random_numbers
from ifso.common.text import describe_error
from ifso.common.torch_state import eval_mode
from ifso.data.base import Data, detects, has_own_loss
from ifso.data.batches import Augmentation, ExtendedBatches, TrainBatches
from ifso.data.compatibility import SAMPLES, answer, check_fits
from ifso.errors import IfsoError, TrainingError
from ifso.tasks.classification import check_same_classes, logits_in
from ifso.training.losses import check_distillable_pair
from ifso.training.precision import autocast
from ifso.training.triton_conv import narrow_layers

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
        with eval_mode(teacher), autocast(precision, device), narrow_layers(precision, device):
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
