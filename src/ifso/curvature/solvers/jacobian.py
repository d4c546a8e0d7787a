"""The Gauss-Newton matrix from a few backward passes per sample, inverted exactly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ifso.curvature.ggn_rows import obstacle, sample_rows
from ifso.curvature.objective import System
from ifso.curvature.solvers.protocol import Solution, checked_positive, checked_vector
from ifso.errors import ScoreError


@dataclass(frozen=True)
class JacobianRows:
    """Solve (RᵀR + diag(D) + λI) u = v with the rows of :mod:`ifso.curvature.ggn_rows`.

    ``rank`` rows per sample at ``rank`` backward passes; as many as the model has outputs give the Gauss-Newton matrix
    itself. All of the spectrum is there, which conjugate gradients need a product each to find. For models with up to
    256 outputs per sample whose weights are in conv, linear and (in eval mode) batch-norm layers.
    """

    damping: float = 1e-3
    rank: int = 3

    def __post_init__(self) -> None:
        checked_positive("jacobian", damping=self.damping, rank=self.rank)

    def solve(self, system: System, v: Tensor) -> Solution:
        """u, with the residual in RᵀR + diag(D) + λI."""
        v = checked_vector(system, v)
        norm = float(v.norm())
        if norm == 0:
            return Solution(torch.zeros_like(v), 0.0, 0)
        factors = self.factors(system)
        u = factors.solve(v, self.damping)
        residual = float((v - factors.times(u) - self.damping * u).norm()) / norm
        return Solution(u, residual, self.rank)

    def factors(self, system: System) -> Factors:
        """R and D, restricted to the weights that may move."""
        if system.curvature != "gauss-newton":
            raise ScoreError("solver 'jacobian' has the Gauss-Newton matrix; use solver='cg' for the Hessian")
        why = obstacle(system.objective, self.rank)
        if why:
            raise ScoreError(f"solver 'jacobian' does not fit this network: {why}; use solver='cg'")
        rows, diagonal = sample_rows(system.objective, self.rank)
        return Factors(system.restrict(rows), system.restrict(diagonal), system.support)


class Factors:
    """RᵀR + diag(D), over the weights of ``support``."""

    def __init__(self, rows: Tensor, diagonal: Tensor, support: Tensor | None) -> None:
        self._support, self._size = support, rows.shape[1]
        if support is not None:
            self._places = support.nonzero()[:, 0]
            rows, diagonal = rows[:, self._places], diagonal[self._places]
        self._rows, self._diagonal = rows, diagonal
        self._square = rows.t() @ rows if rows.shape[1] <= rows.shape[0] else None

    def times(self, vector: Tensor) -> Tensor:
        """(RᵀR + D)·vector."""
        inner = self._gather(vector)
        return self._scatter(self._rows.t() @ (self._rows @ inner) + self._diagonal * inner)

    def solve(self, vector: Tensor, damping: float) -> Tensor:
        """(RᵀR + D + λI)⁻¹·vector, in the smaller of the two spaces."""
        inner, shifted = self._gather(vector), self._diagonal + damping
        if self._square is not None:
            factor = torch.linalg.cholesky(self._square + torch.diag(shifted))
            return self._scatter(torch.cholesky_solve(inner[:, None], factor)[:, 0])
        scaled = self._rows / shifted
        gram = self._rows @ scaled.t()
        gram.diagonal().add_(1)
        weights = torch.cholesky_solve((scaled @ inner)[:, None], torch.linalg.cholesky(gram))[:, 0]
        return self._scatter(inner / shifted - weights @ scaled)

    def _gather(self, vector: Tensor) -> Tensor:
        return vector if self._support is None else vector[self._places]

    def _scatter(self, vector: Tensor) -> Tensor:
        if self._support is None:
            return vector
        return vector.new_zeros(self._size).index_copy_(0, self._places, vector)
