"""``ifso.true_loss_change``: what a removal costs once the other weights have settled, without retraining."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ifso.common.loss_fn import LossFn, WatchedLoss
from ifso.curvature.continuation import (
    ContinuationOptions,
    ContinuationSolver,
    MaskedModel,
    Point,
    with_damping,
)
from ifso.curvature.objective import Objective, System
from ifso.curvature.products import Products
from ifso.curvature.solvers import (
    ConjugateGradients,
    JacobianRows,
    Solution,
    Solver,
    SolverWarning,
    create_solver,
    warn_note,
)
from ifso.curvature.solvers.jacobian import MOST_OUTPUTS, obstacle
from ifso.errors import ScoreError
from ifso.graph.channel_graph import ChannelGraph, Keep

_CG_ON_PATH, _CG_LITERAL = 10, 1000
_AGREES = 0.25


@dataclass(frozen=True)
class LossChange:
    """The loss changes of one masked.

    Attributes:
        existing: ΔL_ex, with the old weights.
        true: the estimate of ΔL_gt, with weights that have settled.
        weight_update: ΔW by the name of the parameter, zero on removed slices.
        trust: 0 to 1, low if much is extrapolated or the quadratic model did not agree with the loss.
        reached: the loss change that was really read at W* + ΔW; ``true − reached`` is extrapolated.
        gradient_left: the norm of ∂L/∂W at W* + ΔW.
        agreement: the real fall of the loss over the predicted one in the last steps.
        gradients_spent: a gradient is 1, a product 2, a loss 1/3.
        path: the points of the path.
        notes: what went otherwise than expected.
    """

    existing: float
    true: float
    weight_update: Mapping[str, Tensor] = field(repr=False)
    trust: float
    reached: float
    gradient_left: float
    agreement: float
    gradients_spent: float
    path: tuple[Point, ...] = field(default=(), repr=False)
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        extrapolated = self.reached - self.true
        lines = [
            f"existing loss change   {self.existing:+.6g}   (old weights)",
            f"true loss change       {self.true:+.6g}   (weights settled; {extrapolated:.1e} of the fall extrapolated)",
            f"trust                  {self.trust:.2f}   (agreement {self.agreement:.2f}, |g| {self.gradient_left:.0e})",
            f"cost                   {self.gradients_spent:.1f} gradients",
        ]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def true_loss_change(
    model: nn.Module,
    graph: ChannelGraph,
    keep: Keep,
    loss_fn: LossFn,
    batches: Iterable[Any],
    solver: str | Solver = "auto",
    path_steps: int = 8,
    *,
    apply: bool = False,
    curvature: str = "gauss-newton",
    damping: float = 1e-3,
    effort: ContinuationOptions | None = None,
    weights: str = "all",
    curvature_batches: int | None = None,
) -> LossChange:
    """Estimate ΔL_gt, the loss change of a removal after the surviving weights have settled.

    ``path_steps=1`` is Proposition 1 literally: ΔL_ex − ½gᵀ(C + λI)⁻¹g with g and C at (W*, M̂). With more steps the
    mask of the removed units is lowered from 1 to 0 and the surviving weights follow
    (:mod:`ifso.curvature.continuation`).

    Args:
        model: with BN in eval or train mode, as it is to be judged; not changed unless ``apply``.
        graph: from :func:`ifso.trace`.
        keep: which units stay, as for :func:`ifso.masked`.
        loss_fn: ``loss_fn(model, batch)`` gives the mean loss of a batch.
        batches: the loss is its mean over these, all of equal weight.
        solver: a name or object of :mod:`ifso.curvature.solvers`. ``"auto"`` takes the rows of the Gauss-Newton matrix
            (``"jacobian"``) where the network allows it and conjugate gradients where not.
        path_steps: K; 1 is the paper.
        apply: leave ΔW in the surviving weights of the model.
        curvature: ``"gauss-newton"`` (positive semidefinite for the usual losses) or ``"hessian"`` (damped until then).
        damping: λ of Proposition 1, or that of the first step of the path.
        effort: corrections and trials on the path.
        weights: ``"all"`` trainable parameters settle, or only conv and linear ``"layers"``.
        curvature_batches: only the first so many batches are used for curvature (cheaper).

    Returns:
        The loss changes with old and with settled weights, the weight update, and how far to trust them.

    Raises:
        KeepError: ``keep`` does not fit the graph.
        ScoreError: an option is out of range, a loss or gradient is not finite, or the solver does not fit the network.
    """
    if path_steps < 1:
        raise ScoreError(f"path_steps must be 1 (Proposition 1) or more, got path_steps={path_steps}")
    if not damping > 0:
        raise ScoreError(f"damping must be above 0, got damping={damping}")
    products = Products(model, graph, WatchedLoss(loss_fn), weights=weights)
    objective = Objective(products, batches, curvature_batches=curvature_batches)
    masked = MaskedModel(products, graph, keep)
    system = System(objective, curvature, masked.support)
    chosen, notes = _choose(solver, objective, curvature, path_steps)
    if graph.reductions and path_steps > 1:
        notes.append("layers that take statistics over channels leave the removed units out from the path's start on")
    try:
        start = objective.loss()
        with masked.at(0.0):
            existing = objective.loss() - start
        if path_steps == 1:
            end = _proposition_1(masked, system, chosen, damping, notes)
        else:
            path = ContinuationSolver(masked, system, chosen, effort or ContinuationOptions())
            end = _follow(path, damping, path_steps, start, notes)
        update = end.weights - masked.start()
    finally:
        masked.restore()
    if apply:
        masked.assign_(end.weights)
    return LossChange(
        existing=existing,
        true=end.loss - end.left - start,
        weight_update=products.space.split(update),
        trust=_trust(end, start),
        reached=end.loss - start,
        gradient_left=end.gradient_left,
        agreement=end.agreement,
        gradients_spent=objective.spent,
        path=tuple(end.points),
        notes=tuple(notes),
    )


@dataclass(frozen=True)
class _End:
    """Where the weights ended: the loss read there and by how much more it is expected to fall.

    ``steepest`` is the norm of the gradient before they moved with the units gone, ``gradient_left`` the one after.
    """

    weights: Tensor
    loss: float
    left: float
    steepest: float
    gradient_left: float
    agreement: float
    points: list[Point] = field(default_factory=list)


def _choose(solver: str | Solver, objective: Objective, curvature: str, steps: int) -> tuple[Solver, list[str]]:
    """The solver, and a note where it is not the one that ``"auto"`` prefers."""
    notes = []
    if solver == "auto":
        rows = JacobianRows() if steps > 1 else JacobianRows(rank=MOST_OUTPUTS)
        why = "it has the Hessian to invert" if curvature == "hessian" else obstacle(objective, rows.rank)
        if not why:
            return rows, []
        solver, notes = "cg", [f"solver 'cg', since {why}"]
    if solver == "cg":
        return ConjugateGradients(iterations=_CG_ON_PATH if steps > 1 else _CG_LITERAL), notes
    return create_solver(solver), notes


def _proposition_1(masked: MaskedModel, system: System, solver: Solver, damping: float, notes: list[str]) -> _End:
    """ΔL_ex − ½gᵀ(C + λI)⁻¹g."""
    weights = masked.start()
    with masked.at(0.0):
        before, gradient = system.objective.gradient()
        gradient = system.restrict(gradient)
        solution = _solve(solver, system, gradient, damping, notes)
        predicted = 0.5 * float(gradient @ solution.u)
        weights = weights - solution.u
        masked.assign_(weights)
        loss, rest = system.objective.gradient()
    agreement = (before - loss) / predicted if predicted else 1.0
    left, norms = loss - (before - predicted), (float(gradient.norm()), float(system.restrict(rest).norm()))
    return _End(weights, loss, left, *norms, agreement)


def _solve(solver: Solver, system: System, gradient: Tensor, damping: float, notes: list[str]) -> Solution:
    """With as much damping as an indefinite Hessian needs."""
    for _ in range(12):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SolverWarning)
            solution = with_damping(solver, damping).solve(system, gradient)
        if "negative curvature" not in solution.note:
            break
        damping *= 10
    else:
        raise ScoreError("the Hessian stays indefinite however it is damped; use curvature='gauss-newton'")
    notes.append(f"{system.curvature} matrix damped by {damping:g}")
    if solution.note:
        notes.append(warn_note(solution.note))
    return solution


def _follow(path: ContinuationSolver, damping: float, steps: int, start: float, notes: list[str]) -> _End:
    """The loss reached at the end of the path, and what its last steps say is still to come (at most half of it)."""
    state, end = path.solve(steps, damping)
    points = state.points
    agreement = end.agreement if end.agreement is not None else points[-1].agreement if points else 1.0
    if agreement < _AGREES:
        notes.append("nothing is extrapolated: the quadratic model did not agree with the loss")
    left = min(end.left, max(0.0, end.loss - start) / 2) if agreement >= _AGREES else 0.0
    return _End(end.weights, end.loss, left, state.steepest, float(end.gradient.norm()), agreement, points)


def _trust(end: _End, start: float) -> float:
    """How far to trust the estimate.

    1 if nothing is extrapolated, the gradient is gone and the model agreed with the loss. Falls with the share that is
    extrapolated, with the share of the gradient that is left, with disagreement, and with a loss below that of the
    whole network, which a part of it can have only by luck.
    """
    change = end.loss - end.left - start
    certain = abs(change) / (abs(change) + abs(end.left)) if change or end.left else 1.0
    settled = max(0.0, 1 - end.gradient_left / end.steepest) if end.steepest else 1.0
    agreed = min(end.agreement, 1 / end.agreement) if end.agreement > 0 else 0.0
    likely = abs(start) / (abs(start) - change) if change < 0 else 1.0
    return certain * settled * agreed * likely
