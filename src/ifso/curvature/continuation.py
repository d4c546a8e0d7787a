"""Follow the minimum of the loss while the mask of removed units goes from 1 to 0, and end with L-BFGS.

On the way the surviving weights obey dW/dm = −H⁻¹ ∂²L/∂W∂m (the implicit derivative of Proposition 2). A step takes
the mask to its next value and there solves (C + λI) u = ∂L/∂W: since ∂L/∂W at the new mask is, to first order, what was
left of it plus ∂²L/∂W∂m Δm, this is the predictor and Newton's corrector at once, for one gradient and no product.
The damping λ is chosen by reading the real loss (Levenberg–Marquardt).

Curvature is what costs most, and it moves less than the gradient: where the model can be solved for another gradient,
that of the first step serves until the units are gone, and a second one for what follows.

The L-BFGS steps at the end cost one gradient each. Their first inverse Hessian is that of the quadratic model; the
pairs (s, y) also pick up what the Gauss-Newton matrix leaves out of the Hessian. The model's damping is halved after
every full step, so that flat directions get their turn, and raised when a step was too long.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace

import torch
from torch import Tensor

from ifso.common.torch_state import forget_caches
from ifso.costs.cost import check_fits
from ifso.curvature.objective import Objective, QuadraticModel, Solver, System
from ifso.curvature.products import Products
from ifso.curvature.solvers import ConjugateGradients, Identity, JacobianRows
from ifso.curvature.solvers.iterative import lanczos_model
from ifso.curvature.solvers.jacobian import RowsModel
from ifso.curvature.weight_space import survivors
from ifso.errors import ScoreError
from ifso.graph.balancing import check_keep
from ifso.graph.channel_graph import STAYS, ChannelGraph, Keep
from ifso.graph.reductions import ExactReductions
from ifso.surgery.mask import masked

_DAMPING_FACTOR, _LEAST_DAMPING = 8.0, 1e-7
_BACKTRACK, _ARMIJO, _LINE_SEARCH_STEPS = 0.3, 1e-4, 6
_RELAX, _TIGHTEN, _LEAST_LBFGS_DAMPING, _MOST_LBFGS_DAMPING = 0.5, 4.0, 1e-5, 1e6


@dataclass(frozen=True)
class ContinuationOptions:
    """How much work a path is.

    ``corrections`` at each mask on the way and ``last_corrections`` when the units are gone, each with the loss read at
    ``trials`` dampings or a few more; then ``lbfgs_steps``. ``renew`` measures the curvature at every correction
    instead of twice. ``exponent`` > 1 makes the steps of the mask smaller towards its end.
    """

    corrections: int = 1
    last_corrections: int = 1
    lbfgs_steps: int = 24
    trials: int = 2
    renew: bool = False
    exponent: float = 1.0

    def __post_init__(self) -> None:
        for name in ("corrections", "last_corrections", "trials", "exponent"):
            if not getattr(self, name) > 0:
                raise ScoreError(f"effort: {name} must be above 0, got {getattr(self, name)}")
        if self.lbfgs_steps < 0:
            raise ScoreError(f"effort: lbfgs_steps must be 0 or more, got {self.lbfgs_steps}")


def mask_schedule(steps: int, exponent: float = 1.0) -> list[float]:
    """Values of the mask on the way from 1 to 0.

    >>> mask_schedule(4)
    [0.75, 0.5, 0.25, 0.0]
    """
    return [(1 - step / steps) ** exponent for step in range(1, steps + 1)]


@dataclass(frozen=True)
class Point:
    """After one correction: the mask, the loss reached, the damping, and fall of the loss / predicted fall."""

    mask: float
    loss: float
    damping: float
    agreement: float


@dataclass
class Continuation:
    """The state on the path; ``model`` is the last quadratic model, measured where the mask was ``model_mask``.

    ``steepest`` is the norm of the gradient when the units had just gone.
    """

    weights: Tensor
    damping: float
    points: list[Point] = field(default_factory=list)
    model: QuadraticModel | None = None
    model_mask: float = 1.0
    steepest: float = 0.0


@dataclass(frozen=True)
class ContinuationSolver:
    """Predictor-corrector along the mask, by quadratic models that fit the ``solver``."""

    masked: MaskedModel
    system: System
    solver: Solver
    options: ContinuationOptions

    def solve(self, steps: int, damping: float) -> tuple[Continuation, LbfgsResult]:
        """All steps and the L-BFGS steps after them; the removed units are gone at the end."""
        state = Continuation(self.masked.start(), damping)
        for mask in mask_schedule(steps, self.options.exponent):
            with self.masked.at(mask):
                for _ in range(self.options.corrections if mask else self.options.last_corrections):
                    if not self._correct(state, mask):
                        break
                if mask == 0:
                    model = state.model
                    inverse = (lambda vector, damping: vector / (1 + damping)) if model is None else model.inverse
                    self.masked.assign_(state.weights)
                    first = LbfgsInverse(inverse, state.damping)
                    steps = self.options.lbfgs_steps
                    return state, minimize_lbfgs(self.system.objective, self.masked, state.weights, first, steps)
        raise AssertionError("a schedule ends at 0")

    def _correct(self, state: Continuation, mask: float) -> bool:
        """Take one damped step of the surviving weights; return whether some damping lowers the loss."""
        self.masked.assign_(state.weights)
        before, gradient = self.system.objective.gradient()
        gradient = gradient * self.masked.support
        norm = float(gradient.norm())
        state.steepest = max(state.steepest, norm) if mask == 0 else 0.0
        if norm == 0:
            return False
        model = self._model(state, mask, gradient)
        damping, loss = self._search(state, model, before)
        if not loss < before:
            return False
        state.weights = state.weights - model.solve(damping)
        state.damping = max(damping, _LEAST_DAMPING)
        state.points.append(Point(mask, loss, damping, (before - loss) / model.decrease(damping)))
        return True

    def _model(self, state: Continuation, mask: float, gradient: Tensor) -> QuadraticModel:
        """The last model for this gradient, or a new one: at the start, and when the units have just gone."""
        model = None
        if state.model is not None and not self.options.renew and (mask or not state.model_mask):
            model = state.model.with_gradient(gradient)
        if model is None:
            model, state.model_mask = quadratic_model(self.solver, self.system, gradient), mask
        state.model = model
        return model

    def _search(self, state: Continuation, model: QuadraticModel, before: float) -> tuple[float, float]:
        """The damping with the lowest real loss, near the last one; raised as far as needed if the loss rises."""
        losses: dict[float, float] = {}

        def loss_at(damping: float) -> float:
            self.masked.assign_(state.weights - model.solve(damping))
            losses[damping] = self.system.objective.loss(or_infinity=True)
            return losses[damping]

        best, loss = state.damping, loss_at(state.damping)
        while before <= loss and len(losses) < 3 * self.options.trials:
            best *= _DAMPING_FACTOR
            loss = loss_at(best)
        for factor in (1 / _DAMPING_FACTOR, _DAMPING_FACTOR):
            while len(losses) < self.options.trials and best * factor not in losses and best * factor >= _LEAST_DAMPING:
                other = loss_at(best * factor)
                if other >= loss:
                    break
                best, loss = best * factor, other
        return best, loss


@dataclass(frozen=True)
class LbfgsResult:
    """Where the steps ended.

    ``left`` is the Newton decrement ½gᵀH⁻¹g there, ``agreement`` the real over the predicted fall of all steps
    together (None if no step was taken).
    """

    weights: Tensor
    loss: float
    gradient: Tensor
    left: float
    agreement: float | None


class LbfgsInverse:
    """H⁻¹ as a product: a first inverse (C + λI)⁻¹, corrected by pairs (s, y = Hs)."""

    def __init__(self, first: Callable[[Tensor, float], Tensor], damping: float) -> None:
        self._first, self.damping = first, damping
        self.pairs: list[tuple[Tensor, Tensor, float]] = []

    def add(self, step: Tensor, change: Tensor) -> None:
        """Keep a pair if it has positive curvature."""
        product = float(step @ change)
        if product > 1e-10 * float(step.norm() * change.norm()):
            self.pairs.append((step, change, 1 / product))

    def __call__(self, vector: Tensor) -> Tensor:
        """H⁻¹·vector by the two-loop recursion."""
        shares = []
        for step, change, scale in reversed(self.pairs):
            shares.append(scale * float(step @ vector))
            vector = vector - shares[-1] * change
        vector = self._first(vector, self.damping)
        for (step, change, scale), share in zip(self.pairs, reversed(shares), strict=True):
            vector = vector + (share - scale * float(change @ vector)) * step
        return vector


def minimize_lbfgs(
    objective: Objective, masked: MaskedModel, weights: Tensor, inverse: LbfgsInverse, steps: int
) -> LbfgsResult:
    """Up to ``steps`` steps with backtracking from ``weights``, which must be in the model."""
    loss, gradient = _gradient(objective, masked)
    first, predicted = loss, 0.0
    for _ in range(steps):
        direction = inverse(gradient)
        slope = float(gradient @ direction)
        length, after = _line_search(objective, masked, weights, direction, loss, slope)
        if after is None:
            if not inverse.pairs and inverse.damping > _MOST_LBFGS_DAMPING:
                break
            inverse.pairs.clear()
            inverse.damping *= _TIGHTEN
            continue
        predicted += slope * (length - length**2 / 2)
        relaxed = max(_LEAST_LBFGS_DAMPING, inverse.damping * _RELAX)
        inverse.damping = relaxed if length == 1 else inverse.damping * _TIGHTEN
        inverse.add(-length * direction, after[1] - gradient)
        weights = weights - length * direction
        loss, gradient = after
    masked.assign_(weights)
    left = max(0.0, 0.5 * float(gradient @ inverse(gradient)))
    return LbfgsResult(weights, loss, gradient, left, (first - loss) / predicted if predicted else None)


def _line_search(
    objective: Objective, masked: MaskedModel, weights: Tensor, direction: Tensor, loss: float, slope: float
) -> tuple[float, tuple[float, Tensor] | None]:
    """The length that lowers the loss enough, with loss and gradient there; None if none does."""
    length = 1.0
    for trial in range(_LINE_SEARCH_STEPS):
        masked.assign_(weights - length * direction)
        reached = objective.loss(or_infinity=True) if trial else math.nan
        if not trial or reached < loss - _ARMIJO * length * slope:
            after = _gradient(objective, masked)
            if after[0] < loss - _ARMIJO * length * slope:
                return length, after
        length *= _BACKTRACK
    return length, None


def _gradient(objective: Objective, masked: MaskedModel) -> tuple[float, Tensor]:
    loss, gradient = objective.gradient(or_infinity=True)
    return loss, gradient * masked.support if math.isfinite(loss) else torch.zeros_like(gradient)


def quadratic_model(solver: Solver, system: System, gradient: Tensor) -> QuadraticModel:
    """The model that fits the solver."""
    if isinstance(solver, JacobianRows):
        return RowsModel(solver.factors(system), gradient)
    if isinstance(solver, ConjugateGradients):
        return lanczos_model(system, gradient, solver.iterations)
    return SolverModel(solver, system, gradient)


def with_damping(solver: Solver, damping: float) -> Solver:
    """The solver with another λ; the identity, I/scale + λI, becomes smaller.

    >>> with_damping(Identity(scale=2.0), 0.5)
    Identity(scale=1.0)
    """
    if isinstance(solver, Identity):
        return Identity(solver.scale / (1 + damping * solver.scale))
    if is_dataclass(solver) and "damping" in {field.name for field in fields(solver)}:
        return replace(solver, damping=damping)
    return solver


class SolverModel(QuadraticModel):
    """Any solver: its own damping is replaced. Every damping that is asked for is solved anew."""

    def __init__(self, solver: Solver, system: System, gradient: Tensor) -> None:
        self._solver, self._system, self._gradient = solver, system, gradient
        self._solved: dict[float, Tensor] = {}

    def solve(self, damping: float) -> Tensor:
        """The solver's u."""
        if damping not in self._solved:
            self._solved[damping] = with_damping(self._solver, damping).solve(self._system, self._gradient).u
        return self._solved[damping]

    def decrease(self, damping: float) -> float:
        """With one product."""
        u = self.solve(damping)
        return float(self._gradient @ u - 0.5 * u @ self._system.product(u))

    def inverse(self, vector: Tensor, damping: float) -> Tensor:
        """The solver once more."""
        return with_damping(self._solver, damping).solve(self._system, vector).u


class MaskedModel:
    """A model from which ``keep`` removes units by a mask, and the weights that survive them.

    ``support`` is 1 over the surviving weights of W and 0 over the others; the mask scales the slices that read the
    removed units. At m = 0 the state is that of :func:`ifso.masked`.
    """

    def __init__(self, products: Products, graph: ChannelGraph, keep: Keep) -> None:
        check_fits(products.model, graph)
        self._kept = graph.kept(keep)
        check_keep(graph, self._kept)
        self._products, self._graph, self._keep = products, graph, keep
        self.space = products.space
        named = dict(products.model.named_parameters())
        self._reading = {reader.parameter: named[reader.parameter] for reader in products.readers}
        self._tensors = {**self._reading, **self.space.tensors}
        self._originals = {name: tensor.detach().clone() for name, tensor in self._tensors.items()}
        self._alive = survivors(self.space, graph, self._kept)
        self.support = self.space.flat(
            {name: alive.to(self._tensors[name].dtype) for name, alive in self._alive.items()}
        )

    @property
    def removed(self) -> int:
        """How many units go."""
        return int((~self._kept).sum())

    def start(self) -> Tensor:
        """W as the model had it."""
        return self.space.flat({name: self._originals[name] for name in self.space.tensors})

    def direction(self) -> Tensor:
        """∂U/∂m for U = m ⊙ W: the slices of W that read removed units, as they were; zero elsewhere."""
        names = self.space.tensors.keys() & self._reading
        return self.space.flat({name: self._originals[name] * (1 - self._factor(name, 0.0)) for name in names})

    @contextlib.contextmanager
    def at(self, m: float) -> Iterator[None]:
        """Set the removed units' mask to m; surviving weights stay as they are assigned, before and after."""
        if m == 0:
            with masked(self._products.model, self._graph, self._keep):
                yield
            return
        forget_caches(self._products.model)
        factors = {name: self._factor(name, m) for name in self._reading}
        try:
            self._scale_(factors, masked=True)
            reductions = self._graph.reductions
            exact = ExactReductions(self._products.model, reductions, self._kept) if reductions else None
            with exact or contextlib.nullcontext():
                yield
        finally:
            self._scale_(factors, masked=False)

    @torch.no_grad()
    def _scale_(self, factors: Mapping[str, Tensor], *, masked: bool) -> None:
        """Scale the slices that read removed units, or put them back."""
        for name, factor in factors.items():
            original = self._originals[name]
            tensor = self._reading[name]
            tensor.copy_(torch.where(factor == 1, tensor, original * factor if masked else original))

    def _factor(self, name: str, m: float) -> Tensor:
        tensor = self._reading[name]
        entries = torch.full((self._kept.numel(),), m, dtype=tensor.dtype, device=tensor.device)
        entries[self._kept.to(tensor.device)] = 1
        entries[STAYS] = 1
        factor = torch.ones((), dtype=tensor.dtype, device=tensor.device)
        for reader in self._products.readers:
            if reader.parameter == name:
                factor = factor * reader.spread(entries, tensor.shape)
        return factor

    @torch.no_grad()
    def assign_(self, weights: Tensor) -> None:
        """Put surviving weights into the model; the others stay as they are."""
        for name, part in self.space.split(weights).items():
            tensor = self.space.tensors[name]
            tensor.copy_(torch.where(self._alive[name], part, tensor))

    @torch.no_grad()
    def restore(self) -> None:
        """Put every weight back as it was."""
        for name, tensor in self._tensors.items():
            tensor.copy_(self._originals[name])
