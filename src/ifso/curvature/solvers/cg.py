"""Damped conjugate gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ifso.curvature.objective import System
from ifso.curvature.solvers.protocol import Solution, checked_positive, checked_vector, warn_note
from ifso.errors import ScoreError


@dataclass(frozen=True)
class ConjugateGradients:
    """Solve (C + λI) u = v until ‖v − (C + λI)u‖ ≤ tolerance·‖v‖, in at most ``iterations`` products.

    A direction d with dᵀ(C + λI)d ≤ 0 (negative curvature: C is indefinite and λ too small) ends it at the last u; both
    that and running out of iterations is said in the note and by a :class:`SolverWarning`. ``truncated=True`` asks for
    the first ``iterations`` steps on purpose (Martens' Hessian-free training): then running out is no news.
    """

    damping: float = 1e-3
    tolerance: float = 1e-6
    iterations: int = 200
    truncated: bool = False

    def __post_init__(self) -> None:
        checked_positive("cg", tolerance=self.tolerance, iterations=self.iterations)
        if not self.damping >= 0:
            raise ScoreError(f"solver 'cg': damping={self.damping} must not be negative")

    def solve(self, system: System, v: Tensor) -> Solution:
        """u and the residual reached."""
        v = checked_vector(system, v)
        norm = float(v.norm())
        u = torch.zeros_like(v)
        if norm == 0:
            return Solution(u, 0.0, 0)
        rest, direction = v.clone(), v.clone()
        square = float(rest @ rest)
        steps, negative = 0, False
        while steps < self.iterations and math.sqrt(square) > self.tolerance * norm:
            product = system.product(direction) + self.damping * direction
            curvature = float(direction @ product)
            steps += 1
            if curvature <= 0:
                negative = True
                break
            length = square / curvature
            u += length * direction
            rest -= length * product
            before, square = square, float(rest @ rest)
            direction = rest + (square / before) * direction
        residual = math.sqrt(square) / norm
        return Solution(u, residual, steps, self._note(residual, steps, negative))

    def _note(self, residual: float, steps: int, negative: bool) -> str:
        if negative:
            return warn_note(
                f"cg met negative curvature after {steps} iterations, relative residual {residual:.1e}; "
                f"raise damping ({self.damping:g}) or use curvature='gauss-newton'"
            )
        if residual > self.tolerance and not self.truncated:
            return warn_note(
                f"cg did not converge: relative residual {residual:.1e} after {steps} iterations, wanted "
                f"{self.tolerance:g}; raise iterations or damping ({self.damping:g})"
            )
        return ""
