"""For one network: training to convergence, scores, masks, and for each the true loss change and its estimates."""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ifso
from ifso.common.loss_fn import LossFn
from ifso.criteria import registry
from ifso.errors import IfsoError, ScoreError
from ifso.graph.channel_graph import ChannelGraph
from ifso.tasks.classification import cross_entropy
from ifso_repro.figure1.networks import Problem, Stop

Removed = dict[str, list[int]]
_TRIES = 200


def draw_masks(graph: ChannelGraph, count: int, sizes: Sequence[int], seed: int) -> list[Removed]:
    """Up to ``count`` different masks: every single unit, then subsets that take the ``sizes`` in turn.

    Subsets are drawn over all units of the network, and drawn again if a group would be left empty. If there are more
    single units than ``count``, those are spread over the network.
    """
    single = [(unit,) for unit in range(graph.num_units)]
    if count < len(single):
        return [_by_group(graph, single[index * len(single) // count]) for index in range(count)]
    random = torch.Generator().manual_seed(seed)
    chosen: list[tuple[int, ...]] = list(single)
    for turn in range(count - len(single) if sizes else 0):
        subset = _subset(graph, sizes[turn % len(sizes)], set(chosen), random)
        if subset is not None:
            chosen.append(subset)
    return [_by_group(graph, units) for units in chosen]


def _subset(
    graph: ChannelGraph, size: int, taken: set[tuple[int, ...]], random: torch.Generator
) -> tuple[int, ...] | None:
    """A new subset of that size, or None if there seems to be none."""
    for _ in range(_TRIES):
        units = tuple(sorted(torch.randperm(graph.num_units, generator=random)[:size].tolist()))
        removed = _by_group(graph, units)
        if units not in taken and all(len(removed.get(group.name, ())) < group.size for group in graph.groups):
            return units
    return None


def _by_group(graph: ChannelGraph, units: Sequence[int]) -> Removed:
    removed: Removed = {}
    for group in graph.groups:
        inside = [unit - group.first for unit in units if group.first <= unit < group.first + group.size]
        if inside:
            removed[group.name] = inside
    return removed


def keep(graph: ChannelGraph, removed: Removed) -> dict[str, Tensor]:
    """As :func:`ifso.masked` takes it."""
    kept = graph.keep_all()
    for name, units in removed.items():
        kept[name][units] = False
    return kept


def size(removed: Removed) -> int:
    """How many units go.

    >>> size({"0": [1, 4], "3": [0]})
    3
    """
    return sum(len(units) for units in removed.values())


ADAM_RATE = 1e-2

HISTORY = 30


@dataclass(frozen=True)
class Descent:
    """One loss for each evaluation of the gradient, and the largest entry of the last gradient."""

    losses: tuple[float, ...]
    largest_gradient: float
    converged: bool

    @property
    def last(self) -> float:
        """The loss at the end, which is what counts: no best of all."""
        return self.losses[-1]


def lbfgs_(problem: Problem, stop: Stop) -> Descent:
    """L-BFGS with a strong-Wolfe line search until it has converged.

    Its memory is dropped after each ``stop.patience`` evaluations, where it may have got stuck at a kink of ReLU.
    """
    losses: list[float] = []

    def closure() -> Tensor:
        value = _backward(problem)
        losses.append(float(value))
        return value

    while True:
        start = len(losses)
        evaluations = min(stop.patience, max(1, stop.most - start))
        torch.optim.LBFGS(
            problem.parameters, max_iter=evaluations, max_eval=evaluations, history_size=HISTORY,
            tolerance_grad=stop.gradient, tolerance_change=0, line_search_fn="strong_wolfe",
        ).step(closure)  # fmt: skip
        closure()
        largest = _largest(problem)
        converged = largest <= stop.gradient or losses[start] - losses[-1] < stop.fall
        if converged or len(losses) >= stop.most:
            return Descent(tuple(losses), largest, converged)


def adam_(problem: Problem, steps: int) -> Descent:
    """Adam from a rate of 0.01 down to 0 along a cosine: what a first-order trainer needs."""
    optimizer = torch.optim.Adam(problem.parameters, ADAM_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
    losses = []
    for _ in range(steps):
        losses.append(float(_backward(problem)))
        optimizer.step()
        schedule.step()
    losses.append(float(_backward(problem)))
    return Descent(tuple(losses), _largest(problem), converged=False)


def _largest(problem: Problem) -> float:
    return max(float(parameter.grad.abs().max()) for parameter in problem.parameters if parameter.grad is not None)


def _backward(problem: Problem) -> Tensor:
    for parameter in problem.parameters:
        parameter.grad = None
    value = problem.loss()
    value.backward()
    return value.detach()


def evaluations_until(losses: Sequence[float], target: float) -> int | None:
    """How many evaluations it took to see a loss of at most ``target``; None if it was never seen.

    >>> evaluations_until([3.0, 2.0, 1.0], 2.5)
    2
    """
    return next((number for number, loss in enumerate(losses, 1) if loss <= target), None)


DEFAULT_STEPS: int = inspect.signature(ifso.true_loss_change).parameters["path_steps"].default
"""K where the user gives none."""

VARIANTS: dict[str, dict[str, Any]] = {
    "ifso, L2 in the loss": {},
    "ifso, L2 in the loss, H⁻¹ by cg": {"inverse": "cg", "curvature": "gauss-newton"},
}


def train_(problem: Problem) -> dict[str, Any]:
    """Bring the network to W*; returns what that took, and where it ended."""
    settings = problem.settings
    first = adam_(problem, settings.adam_steps) if settings.adam_steps else None
    end = lbfgs_(problem, settings.train)
    with torch.no_grad():
        right = (problem.model(problem.batch[0]).argmax(1) == problem.batch[1]).double().mean()
    return {
        "loss": end.last,
        "accuracy": float(right),
        "gradients": len(end.losses) + (len(first.losses) if first else 0),
        "largest_gradient": end.largest_gradient,
        "converged": end.converged,
    }


def all_scores(problem: Problem) -> tuple[dict[str, dict[str, list[float]]], dict[str, str]]:
    """Scores of every criterion on the batch, and why some do not apply to this network.

    All look at the cross entropy alone, as where weight decay is a matter of the optimizer; ``VARIANTS`` of the
    paper's score look at the loss that was trained.
    """
    scored: dict[str, dict[str, list[float]]] = {}
    refused: dict[str, str] = {}
    plans: dict[str, tuple[str, LossFn, dict[str, Any]]] = {
        name: (name, cross_entropy, {}) for name in registry.names()
    }
    plans["random"] = "random", cross_entropy, {"seed": problem.seed}
    plans |= {label: ("ifso", problem.loss_fn, options) for label, options in VARIANTS.items()}
    for label, (name, loss_fn, options) in plans.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                scores = ifso.score(problem.model, problem.graph, loss_fn, [problem.batch], name, **options)
        except ScoreError as error:
            refused[label] = " ".join(str(error).split())
            continue
        scored[label] = {group: values.tolist() for group, values in scores.items()}
    return scored, refused


def summed(scores: Mapping[str, list[float]], removed: Removed) -> float:
    """A criterion's word on a mask: the sum over the units that go.

    >>> summed({"0": [1.0, 2.0], "3": [4.0, 8.0]}, {"0": [1], "3": [0]})
    6.0
    """
    return sum(scores[group][unit] for group, units in removed.items() for unit in units)


def measure(problem: Problem, removed: Removed, base: float, *, first_order: bool) -> dict[str, Any]:
    """One mask: ΔL_ex, ΔL_gt after retraining from W*, and the estimates for every number of path steps."""
    kept = keep(problem.graph, removed)
    with torch.no_grad(), ifso.masked(problem.model, problem.graph, kept):
        existing = float(problem.loss()) - base
    truth, retraining = _retrain(problem, kept, base, first_order=first_order)
    return {
        "removed": removed,
        "size": size(removed),
        "truth": truth,
        "existing": existing,
        "retraining": retraining,
        "estimates": estimates(problem, removed),
    }


def estimates(problem: Problem, removed: Removed) -> dict[str, dict[str, Any]]:
    """What is said of a mask without retraining, by the number of path steps."""
    kept = keep(problem.graph, removed)
    return {
        str(count): _estimate(problem, kept, count) for count in sorted({*problem.settings.path_steps, DEFAULT_STEPS})
    }


def _retrain(
    problem: Problem, kept: dict[str, Tensor], base: float, *, first_order: bool
) -> tuple[float, dict[str, Any]]:
    """ΔL_gt and what it took; W* is put back."""
    settings = problem.settings
    before = {name: value.clone() for name, value in problem.model.state_dict().items()}
    try:
        with ifso.masked(problem.model, problem.graph, kept):
            end = lbfgs_(problem, settings.retrain)
        near = end.last + settings.within * abs(end.last - base)
        about: dict[str, Any] = {
            "gradients": len(end.losses),
            "gradients_until_near": evaluations_until(end.losses, near),
            "largest_gradient": end.largest_gradient,
            "converged": end.converged,
        }
        if first_order:
            problem.model.load_state_dict(before)
            with ifso.masked(problem.model, problem.graph, kept):
                slow = adam_(problem, settings.first_order_steps)
            about["adam"] = {
                "gradients": len(slow.losses),
                "gradients_until_near": evaluations_until(slow.losses, near),
                "change": slow.last - base,
            }
    finally:
        problem.model.load_state_dict(before)
    return end.last - base, about


def _estimate(problem: Problem, kept: dict[str, Tensor], path_steps: int) -> dict[str, Any]:
    """What ``ifso.true_loss_change`` says, or why it says nothing."""
    start = time.process_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            change = ifso.true_loss_change(
                problem.model, problem.graph, kept, problem.loss_fn, [problem.batch], path_steps=path_steps
            )
    except IfsoError as error:
        return {"error": " ".join(str(error).split())}
    return {
        "true": change.true,
        "trust": change.trust,
        "gradients": change.gradients_spent,
        "cpu_seconds": time.process_time() - start,
        "notes": list(change.notes),
    }
