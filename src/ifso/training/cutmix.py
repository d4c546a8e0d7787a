"""CutMix (Yun et al., 2019): a rectangle of another image is pasted into an image, which then has two labels.

With a teacher that is asked about the very pixels the network sees, this is the way of Beyer et al., "Knowledge
distillation: A good teacher is patient and consistent" (2022).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ifso.data.batches import ExtendedBatches, TrainBatches, generator

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
