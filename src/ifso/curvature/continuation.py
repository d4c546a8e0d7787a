"""Follow the minimum of the loss while the mask of removed units goes from 1 to 0.

On the way the surviving weights obey dW/dm = −H⁻¹ ∂²L/∂W∂m (the implicit derivative of Proposition 2). A step takes
the mask to its next value and there solves (C + λI) u = ∂L/∂W: since ∂L/∂W at the new mask is, to first order, what was
left of it plus ∂²L/∂W∂m Δm, this is the predictor and Newton's corrector at once, for one gradient and no product.
The damping λ is chosen by reading the real loss (Levenberg–Marquardt).

Curvature is what costs most, and it moves less than the gradient: where the model can be solved for another gradient,
that of the path's first step serves until the units are gone, and a second one for what follows. Then
:mod:`ifso.curvature.lbfgs` goes on at one gradient a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from ifso.curvature.lbfgs import Polished, SecantInverse, polish
from ifso.curvature.masked_model import Removal
from ifso.curvature.objective import Objective
from ifso.curvature.quadratic_models import Quadratic
from ifso.errors import ScoreError

_FACTOR = 8.0
_SMALLEST = 1e-7


@dataclass(frozen=True)
class Effort:
    """How much work a path is.

    ``corrections`` at each mask on the way and ``last_corrections`` when the units are gone, each with the loss read at
    ``trials`` dampings or a few more; then ``polish`` quasi-Newton steps. ``renew`` measures the curvature at every
    correction instead of twice. ``bend`` > 1 makes the steps of the mask smaller towards its end.
    """

    corrections: int = 1
    last_corrections: int = 1
    polish: int = 24
    trials: int = 2
    renew: bool = False
    bend: float = 1.0

    def __post_init__(self) -> None:
        for name in ("corrections", "last_corrections", "trials", "bend"):
            if not getattr(self, name) > 0:
                raise ScoreError(f"Effort: {name}={getattr(self, name)} must be above 0")
        if self.polish < 0:
            raise ScoreError(f"Effort: polish={self.polish} must not be negative")


def schedule(steps: int, bend: float = 1.0) -> list[float]:
    """Values of the mask on the way from 1 to 0.

    >>> schedule(4)
    [0.75, 0.5, 0.25, 0.0]
    """
    return [(1 - step / steps) ** bend for step in range(1, steps + 1)]


@dataclass(frozen=True)
class Point:
    """After one correction: the mask, the loss reached, the damping, and fall of the loss / predicted fall."""

    mask: float
    loss: float
    damping: float
    agreement: float


@dataclass
class Walk:
    """The path walked so far; ``model`` is the last quadratic model, measured where the mask was ``model_mask``.

    ``steepest`` is the norm of the gradient when the units had just gone.
    """

    weights: Tensor
    damping: float
    points: list[Point] = field(default_factory=list)
    model: Quadratic | None = None
    model_mask: float = 1.0
    steepest: float = 0.0


class Follower:
    """Walks the path; ``model_at(gradient)`` makes the quadratic model where the network is now."""

    def __init__(
        self, removal: Removal, objective: Objective, model_at: Callable[[Tensor], Quadratic], effort: Effort
    ) -> None:
        self._removal, self._objective, self._model_at, self._effort = removal, objective, model_at, effort

    def walk(self, steps: int, damping: float) -> tuple[Walk, Polished]:
        """All steps; the removed units are gone at the end."""
        walk = Walk(self._removal.start(), damping)
        for mask in schedule(steps, self._effort.bend):
            with self._removal.at(mask):
                for _ in range(self._effort.corrections if mask else self._effort.last_corrections):
                    if not self._correct(walk, mask):
                        break
                if mask == 0:
                    return walk, self._polish(walk)
        raise AssertionError("a schedule ends at 0")

    def _polish(self, walk: Walk) -> Polished:
        inverse = walk.model.inverse if walk.model is not None else lambda vector, damping: vector / (1 + damping)
        self._removal.put(walk.weights)
        secant = SecantInverse(inverse, walk.damping)
        return polish(self._objective, self._removal, walk.weights, secant, self._effort.polish)

    def _correct(self, walk: Walk, mask: float) -> bool:
        """One damped step of the surviving weights; False if no damping lowers the loss."""
        self._removal.put(walk.weights)
        before, gradient = self._objective.gradient()
        gradient = gradient * self._removal.support
        norm = float(gradient.norm())
        walk.steepest = max(walk.steepest, norm) if mask == 0 else 0.0
        if norm == 0:
            return False
        model = self._model(walk, mask, gradient)
        damping, loss = self._search(walk, model, before)
        if not loss < before:
            return False
        walk.weights = walk.weights - model.solve(damping)
        walk.damping = max(damping, _SMALLEST)
        walk.points.append(Point(mask, loss, damping, (before - loss) / model.decrease(damping)))
        return True

    def _model(self, walk: Walk, mask: float, gradient: Tensor) -> Quadratic:
        """The model at hand for this gradient, or a new one: at the start, and when the units have just gone."""
        held = walk.model
        if held is not None and not self._effort.renew and (mask or not walk.model_mask):
            again = held.with_gradient(gradient)
            if again is not None:
                walk.model = again
                return again
        walk.model, walk.model_mask = self._model_at(gradient), mask
        return walk.model

    def _search(self, walk: Walk, model: Quadratic, before: float) -> tuple[float, float]:
        """The damping with the lowest real loss, near the last one; raised as far as needed if the loss rises."""
        read: dict[float, float] = {}

        def loss_at(damping: float) -> float:
            self._removal.put(walk.weights - model.solve(damping))
            read[damping] = self._objective.loss(or_infinity=True)
            return read[damping]

        best, loss = walk.damping, loss_at(walk.damping)
        while before <= loss and len(read) < 3 * self._effort.trials:
            best *= _FACTOR
            loss = loss_at(best)
        for factor in (1 / _FACTOR, _FACTOR):
            while len(read) < self._effort.trials and best * factor not in read and best * factor >= _SMALLEST:
                other = loss_at(best * factor)
                if other >= loss:
                    break
                best, loss = best * factor, other
        return best, loss
