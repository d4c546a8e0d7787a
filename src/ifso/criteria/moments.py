"""Means and covariances of what layers read, added up batch by batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDING = 1e-12
"""A variance that is so small a share of E[x²] stands for a constant."""


@dataclass
class Moments:
    """Sums over rows a of what layers read, in groups that do not meet: Σ d dᵀ [groups, k, k] and Σ d [groups, k].

    d = a − ``shift``, the mean of the first rows: so nothing is lost in float32 where a mean is far larger than the
    spread around it.

    >>> moments = Moments.of(torch.tensor([[[1.0, 1000.0], [3.0, 1001.0]]]))
    >>> moments.mean(), moments.matrix(centred=True)
    (tensor([[   2.0000, 1000.5000]], dtype=torch.float64), tensor([[[1.0000, 0.5000],
             [0.5000, 0.2500]]], dtype=torch.float64))
    """

    products: Tensor
    sums: Tensor
    shift: Tensor
    rows: int = 0

    @classmethod
    def of(cls, rows: Tensor) -> Moments:
        """Those of [groups, rows, k], in float32 or better."""
        groups, _, columns = rows.shape
        dtype = torch.promote_types(rows.dtype, torch.float32)
        moments = cls(
            torch.zeros(groups, columns, columns, dtype=dtype, device=rows.device),
            torch.zeros(groups, columns, dtype=dtype, device=rows.device),
            rows.to(dtype).mean(1).nan_to_num(0, 0, 0),
        )
        moments.add(rows)
        return moments

    def empty(self) -> Moments:
        """Those of no rows, with the same shift."""
        return Moments(torch.zeros_like(self.products), torch.zeros_like(self.sums), self.shift)

    def add(self, rows: Tensor) -> None:
        """Take in [groups, rows, k]."""
        rows = rows.to(self.products.dtype) - self.shift.unsqueeze(1)
        self.products.baddbmm_(rows.transpose(1, 2), rows)
        self.sums += rows.sum(1)
        self.rows += rows.shape[1]

    def over(self, reduce: Callable[[Tensor], Tensor]) -> Moments:
        """Those of the rows of all processes, in float64 and without a shift; ``reduce`` is a sum over them."""
        sums, shift = self.sums.double(), self.shift.double()
        total = sums + self.rows * shift
        products = self.products.to(torch.float64, copy=True)
        products.baddbmm_(torch.stack([total, shift], 2), torch.stack([shift, sums], 1))  # in place: they may be wide
        products, total = reduce(products), reduce(total)
        rows = int(reduce(torch.tensor(float(self.rows), device=sums.device)))
        return Moments(products, total, torch.zeros_like(total), rows)

    def mean(self) -> Tensor:
        """E[a] [groups, k], in float64."""
        return self.sums.double() / self.rows + self.shift.double()

    def matrix(self, centred: bool) -> Tensor:
        """Covariance, or second moment, [groups, k, k], in float64; zero where only rounding is left."""
        shifted, mean = self.sums.double() / self.rows, self.mean()
        matrix = self.products.to(torch.float64, copy=True).div_(self.rows)
        matrix.baddbmm_(shifted.unsqueeze(2), shifted.unsqueeze(1), alpha=-1)
        variance = matrix.diagonal(dim1=1, dim2=2)
        rounding = 16 * torch.finfo(self.products.dtype).eps * shifted.square()
        constant = (variance <= ROUNDING * (variance + mean.square())) | (variance <= rounding)
        matrix.masked_fill_(constant.unsqueeze(2) | constant.unsqueeze(1), 0)
        return matrix if centred else matrix.baddbmm_(mean.unsqueeze(2), mean.unsqueeze(1))


@dataclass
class Halves:
    """Moments of two halves of the samples, with one shift: what one half says can be tried on the other.

    >>> halves = Halves.of(torch.arange(12.0).view(1, 6, 2), samples=3, number=0)
    >>> [half.rows for half in halves.parts], halves.whole().mean()
    ([2, 4], tensor([[5., 6.]], dtype=torch.float64))
    """

    parts: tuple[Moments, Moments]

    @classmethod
    def of(cls, rows: Tensor, samples: int, number: int) -> Halves:
        """Those of the first rows [groups, samples · positions, k] that are seen."""
        shift = Moments.of(rows)
        halves = cls((shift.empty(), shift.empty()))
        halves.add(rows, samples, number)
        return halves

    def add(self, rows: Tensor, samples: int, number: int) -> None:
        """Take in [groups, samples · positions, k] of batch ``number``."""
        first = in_first_half(samples, number) * (rows.shape[1] // max(samples, 1))
        for half, part in zip(self.parts, (rows[:, :first], rows[:, first:]), strict=True):
            if part.shape[1]:
                half.add(part)

    @property
    def rows(self) -> int:
        """How many were added."""
        return sum(half.rows for half in self.parts)

    def over(self, reduce: Callable[[Tensor], Tensor]) -> Halves:
        """Those of the rows of all processes, see :meth:`Moments.over`."""
        one, other = self.parts
        return Halves((one.over(reduce), other.over(reduce)))

    def whole(self) -> Moments:
        """Those of all samples."""
        one, other = self.parts
        return Moments(one.products + other.products, one.sums + other.sums, one.shift, one.rows + other.rows)

    def apart(self) -> tuple[Moments, Moments]:
        """For either half what is known without it, or the whole if that is nothing."""
        one, other = self.parts
        return (other, one) if one.rows and other.rows else (self.whole(), self.whole())


def in_first_half(samples: int, number: int) -> int:
    """How many of the samples of batch ``number`` are in the first half: a single one in every other batch.

    >>> in_first_half(8, 0), in_first_half(1, 0), in_first_half(1, 1)
    (4, 1, 0)
    """
    return samples // 2 if samples > 1 else samples * (1 - number % 2)


def mean_size(diagonal: Tensor, counted: Tensor) -> Tensor:
    """The mean of a matrix's diagonal over the columns that are ``counted`` and not constant; 1 if there are none.

    >>> mean_size(torch.tensor([2.0, 4.0, 0.0, 9.0]), torch.tensor([True, True, True, False]))
    tensor(3.)
    """
    alive = counted & (diagonal > 0)
    return diagonal[alive].mean() if bool(alive.any()) else diagonal.new_ones(())
