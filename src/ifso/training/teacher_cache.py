"""What a teacher says about every image in every augmentation, asked once: distillation then costs next to nothing.

A crop out of a padded image and a mirror make 162 variants of a CIFAR image. A run of 200 epochs asks the teacher 200
times about each image; a table of its answers asks 162 times, and serves all runs with that teacher.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from ifso.common.torch_state import eval_mode
from ifso.data.batches import Augmentation, ExtendedBatches, TrainBatches
from ifso.tasks.classification import refuse_other_classes
from ifso.training.precision import autocast
from ifso.training.triton_conv import narrow_layers

CHUNK = 5000
SHARE = 0.25
"""Of the memory that is free on the GPU, which a table may take."""


def variants(batches: Any) -> int | None:
    """Into how many images the augmentation makes one; None where that is not known."""
    if not isinstance(batches, TrainBatches):
        return None
    augmentation = batches.augmentation
    return 1 if augmentation is None else (2 * augmentation.shift + 1) ** 2 * (1 + augmentation.mirror)


def pays(batches: Any, epochs: int, classes: int) -> bool:
    """Is a table quicker than asking the teacher in every step of ``epochs`` epochs, and is there room for it?"""
    count = variants(batches)
    if count is None or count > epochs:
        return False
    device = batches.images.pixels.device
    room = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 4 * 2**30
    return 2 * len(batches.images) * count * classes <= SHARE * room


class Answers:
    """The teacher's logits [images, variants, classes] in float16."""

    def __init__(self, logits: Tensor, shift: int) -> None:
        self._logits, self._side = logits, 2 * shift + 1

    @classmethod
    @torch.no_grad()
    def of(cls, teacher: nn.Module, batches: TrainBatches, precision: str = "float32") -> Answers:
        """Ask the teacher, in eval mode, about every variant of every training image."""
        images, augmentation, parts = batches.images, batches.augmentation, []
        moves = torch.zeros(1, 3, dtype=torch.int64) if augmentation is None else _all_moves(augmentation)
        device = images.pixels.device
        with eval_mode(teacher), autocast(precision, device), narrow_layers(precision, device):
            for first in range(0, len(images), CHUNK):
                places = torch.arange(first, min(first + CHUNK, len(images)), device=images.pixels.device)
                parts.append(torch.stack([_asked(teacher, batches, places, move) for move in moves], 1))
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


def _asked(teacher: nn.Module, batches: TrainBatches, places: Tensor, move: Tensor) -> Tensor:
    images, _ = batches.make(places, move.to(places.device).expand(len(places), 3))
    answer = teacher(images)
    refuse_other_classes(answer, answer)
    return answer.to(torch.float16)


class TaughtBatches(ExtendedBatches):
    """Batches of (images, labels, the teacher's logits), from training batches and a table of answers."""

    def __init__(self, batches: TrainBatches, answers: Answers) -> None:
        super().__init__(batches)
        self._answers = answers

    def make(self, order: Tensor, moves: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """A batch of the training batches with its answers."""
        images, labels = self.base.make(order, moves)
        return images, labels, self._answers(order, moves)
