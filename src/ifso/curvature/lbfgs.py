"""Quasi-Newton steps from a curvature that is already there: L-BFGS whose first inverse Hessian is a quadratic model's.

A step costs one gradient, where a new model would cost several; the pairs (s, y) also pick up what the Gauss-Newton
matrix leaves out of the Hessian. The model's damping is halved after every full step, so that flat directions get
their turn, and raised when a step was too long.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ifso.curvature.masked_model import Removal
from ifso.curvature.objective import Objective

_SHRINK, _ENOUGH, _TRIALS = 0.3, 1e-4, 6
_EASE, _TIGHTEN, _SMALLEST, _HOPELESS = 0.5, 4.0, 1e-5, 1e6


@dataclass(frozen=True)
class Polished:
    """Where the steps ended.

    ``left`` is the Newton decrement ½gᵀH⁻¹g there, ``agreement`` the real over the predicted fall of all steps
    together (None if no step was taken).
    """

    weights: Tensor
    loss: float
    gradient: Tensor
    left: float
    agreement: float | None


class SecantInverse:
    """H⁻¹ as a product: a first inverse (C + λI)⁻¹, corrected by pairs (s, y = Hs)."""

    def __init__(self, first: Callable[[Tensor, float], Tensor], damping: float) -> None:
        self._first, self.damping = first, damping
        self._pairs: list[tuple[Tensor, Tensor, float]] = []

    def add(self, step: Tensor, change: Tensor) -> None:
        """Keep a pair if it has positive curvature."""
        product = float(step @ change)
        if product > 1e-10 * float(step.norm() * change.norm()):
            self._pairs.append((step, change, 1 / product))

    def forget(self) -> bool:
        """Drop all pairs; False if there were none."""
        had = bool(self._pairs)
        self._pairs.clear()
        return had

    def __call__(self, vector: Tensor) -> Tensor:
        """H⁻¹·vector by the two-loop recursion."""
        shares = []
        for step, change, scale in reversed(self._pairs):
            shares.append(scale * float(step @ vector))
            vector = vector - shares[-1] * change
        vector = self._first(vector, self.damping)
        for (step, change, scale), share in zip(self._pairs, reversed(shares), strict=True):
            vector = vector + (share - scale * float(change @ vector)) * step
        return vector


def polish(objective: Objective, removal: Removal, weights: Tensor, secant: SecantInverse, steps: int) -> Polished:
    """Up to ``steps`` steps with backtracking from ``weights``, which must be in the model."""
    loss, gradient = _gradient(objective, removal)
    first, predicted = loss, 0.0
    for _ in range(steps):
        direction = secant(gradient)
        slope = float(gradient @ direction)
        length, after = _line(objective, removal, weights, direction, loss, slope)
        if after is None:
            if not secant.forget() and secant.damping > _HOPELESS:
                break
            secant.damping *= _TIGHTEN
            continue
        predicted += slope * (length - length**2 / 2)
        secant.damping = max(_SMALLEST, secant.damping * _EASE) if length == 1 else secant.damping * _TIGHTEN
        secant.add(-length * direction, after[1] - gradient)
        weights = weights - length * direction
        loss, gradient = after
    removal.put(weights)
    left = max(0.0, 0.5 * float(gradient @ secant(gradient)))
    return Polished(weights, loss, gradient, left, (first - loss) / predicted if predicted else None)


def _line(
    objective: Objective, removal: Removal, weights: Tensor, direction: Tensor, loss: float, slope: float
) -> tuple[float, tuple[float, Tensor] | None]:
    """The length that lowers the loss enough, with loss and gradient there; None if none does."""
    length = 1.0
    for trial in range(_TRIALS):
        removal.put(weights - length * direction)
        reached = objective.loss(or_infinity=True) if trial else math.nan
        if not trial or reached < loss - _ENOUGH * length * slope:
            after = _gradient(objective, removal)
            if after[0] < loss - _ENOUGH * length * slope:
                return length, after
        length *= _SHRINK
    return length, None


def _gradient(objective: Objective, removal: Removal) -> tuple[float, Tensor]:
    loss, gradient = objective.gradient(or_infinity=True)
    return loss, gradient * removal.support if math.isfinite(loss) else torch.zeros_like(gradient)
