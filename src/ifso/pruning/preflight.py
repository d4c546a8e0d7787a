"""Before a run has a folder: what decides it, its graph in both modes, batches, budget, and what may be forgotten."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ifso.common.batches import first_batches, not_finite, on_device, rough_count
from ifso.common.distributed import from_first, rank, together
from ifso.common.loss_fn import LossFn, WatchedLoss
from ifso.common.module_state import copy_of
from ifso.common.torch_state import same_modes
from ifso.costs.cost import count
from ifso.costs.latency import LatencyModel, measure_latency
from ifso.criteria.base import Task
from ifso.errors import BudgetError, DataError, TraceError, UnreachableBudget
from ifso.graph.channel_graph import ChannelGraph, by_group
from ifso.graph.execution import unmarked
from ifso.graph.naming import class_name
from ifso.graph.tracing import trace
from ifso.graph.units import UNUSED
from ifso.pruning.budget import FLOPS, Budget
from ifso.pruning.cost_tracker import Ledger
from ifso.pruning.moves import Moves
from ifso.pruning.recovery import mean_loss, norms_of, refuse_spoilt_weights
from ifso.pruning.run import Progress
from ifso.pruning.scoring_loop import MakeOptimizer
from ifso.pruning.selection import Target, check_reachable, select
from ifso.pruning.settings import Settings, describe
from ifso.runs.files import refuse_other
from ifso.surgery.compact import compact_
from ifso.surgery.recipe import digest_of, recipe_of, versions

AS_GOOD_AS_GUESSING = 0.95
"""A trained classifier has a smaller cross entropy than this share of that of a guess."""

PAIRS, RUNS = 7, 5
"""How often two networks are timed in turn for a latency budget, and with how many passes each time."""

BEFORE_REFUSAL = 21
"""How often, if a budget seems out of reach: on a busy machine the first times may be wrong."""

PRUNED_HERE: WeakSet[nn.Module] = WeakSet()
"""Networks that this process has pruned."""


class Traced(NamedTuple):
    """The graph of a network, what of it is left alone (parameters and modules by name), and what may go."""

    graph: ChannelGraph
    left_alone: tuple[str, ...]
    moves: Moves


def agreed_config(
    model: nn.Module, settings: Settings, make_optimizer: MakeOptimizer, about: Mapping[str, Any]
) -> dict[str, Any]:
    """What stands in ``config.json``, the same on all ranks: what decides how the run ends, versions, what was said."""
    config = together(lambda: _config(model, settings, make_optimizer, about))
    first = from_first(config["settings"])
    together(lambda: refuse_other(config["settings"], first, "the first rank"))
    return config


def _config(
    model: nn.Module, settings: Settings, make_optimizer: MakeOptimizer, about: Mapping[str, Any]
) -> dict[str, Any]:
    some = next((parameter for parameter in model.parameters() if parameter.requires_grad), None)
    if some is None:
        raise BudgetError(f"{type(model).__name__} has no trainable parameters; set requires_grad")
    if not callable(make_optimizer):
        given = type(make_optimizer).__name__
        raise BudgetError(f"optimizer is a {given}; give a function from parameters to an optimizer")
    optimizer = make_optimizer([nn.Parameter(torch.zeros_like(some))])
    if not isinstance(optimizer, Optimizer):
        raise BudgetError(f"optimizer gave a {type(optimizer).__name__}; it must return a torch.optim.Optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise BudgetError("optimizer gave LBFGS, which evaluates the loss itself; give one that takes plain steps")
    decisive = {
        **settings.as_dict(), "optimizer": describe(optimizer), "model": class_name(model), "weights": digest_of(model),
    }  # fmt: skip
    return {"settings": decisive, "versions": versions(), "about": dict(about)}


def trace_and_moves(model: nn.Module, example_inputs: Any, settings: Settings, progress: Progress) -> Traced:
    """Trace the model in the mode that shows most of it, and find what may go."""
    with progress.timed("trace"):
        graph, left_alone, note = together(lambda: trace_widest(model, example_inputs, settings.ignore))
        progress.notes += [note] if note else []
        limits = {name: getattr(settings, name) for name in ("round_to", "min_units", "min_share", "only")}
        return Traced(graph, left_alone, together(lambda: Moves(graph, **limits)))


def without_unread(
    model: nn.Module, traced: Traced, settings: Settings, example_inputs: Any, loss_fn: LossFn, batch: Any
) -> tuple[Traced, list[str]]:
    """``traced`` without the units that the criterion cannot score, and a note on each parameter that reads them."""

    def find() -> dict[str, str]:
        graph = traced.graph
        task = Task(model, graph, WatchedLoss(loss_fn), graph.kept(None))
        with unmarked(model):
            return dict(settings.criterion.unread(task, on_device(batch, task.device)))

    unread = together(find)
    if not unread:
        return traced, []
    ignore = (*traced.left_alone, *unread)
    again = trace_and_moves(model, example_inputs, replace(settings, ignore=ignore), Progress())
    name = settings.criterion.name
    return again, [
        f"units that {parameter} reads are left alone: it is used by {use}, of which {name} knows nothing; "
        "criterion='ifso' allows for any use"
        for parameter, use in unread.items()
    ]


def checked_batches(
    model: nn.Module, graph: ChannelGraph, settings: Settings, train_batches: Iterable[Any], loss_fn: LossFn, least: int
) -> tuple[list[Any], list[str]]:
    """The first batches, ``least`` at least, and notes on what may have been forgotten.

    In a staged run they are those that it looks at. Refused are weights, batches and a first loss that are not finite.
    """
    batches = together(lambda: _first_batches(model, graph, settings, train_batches, least))
    watched = WatchedLoss(loss_fn)

    def first_loss() -> float:
        with unmarked(model):
            loss = mean_loss(model, watched, [on_device(batches[0], next(model.parameters()).device)])
        watched.where = " of the first batch"
        watched.refuse_infinite()
        return loss

    notes = [_untrained(graph, together(first_loss), batches[0]), _pruned_before(model, settings)]
    notes += [FLOPS if settings.budget.in_flops else None, _counted(settings, batches)]
    return batches, [note for note in notes if note]


def _counted(settings: Settings, batches: list[Any]) -> str | None:
    """A line if a staged run does not look at as many samples as it was asked to."""
    asked, found = settings.calibration, sum(map(rough_count, batches))
    if settings.schedule != "staged" or asked is None or found == asked:
        return None
    why = "batches are taken whole" if found > asked else "train_batches has no more"
    return f"calibration: {found:,} samples, not {asked:,} ({why})"


def _first_batches(
    model: nn.Module, graph: ChannelGraph, settings: Settings, train_batches: Iterable[Any], least: int
) -> list[Any]:
    refuse_spoilt_weights(model)
    macs = count(graph, graph.kept(None)).macs / rough_count(graph.inputs)
    samples = settings.samples(macs) if settings.schedule == "staged" else None
    batches = first_batches(train_batches, settings.seed, samples, least)
    for number, batch in enumerate(batches):
        if bool(not_finite(batch)):
            raise DataError(f"batch {number} of train_batches holds NaN or infinity; nothing was pruned")
    return batches


def check_budget(model: nn.Module, traced: Traced, settings: Settings, progress: Progress) -> None:
    """BudgetError if the budget cannot be met; all ranks count with the seconds that the first one takes."""

    def latency() -> dict[str, Any] | None:
        graph, _, moves = traced
        if not graph.num_units:
            raise BudgetError(f"nothing in {type(model).__name__} can be pruned; see graph.frozen of ifso.trace")
        plain = {kind: share for kind, share in settings.budget.targets.items() if kind != "latency"}
        if plain:
            check_reachable(graph, Ledger(graph), moves, Target(Budget(**plain)))
        if not settings.needs_latency or rank():
            return None
        with progress.timed("latency"):
            return latency_model(model, graph, moves, settings)

    progress.latency = from_first(together(latency))


def latency_model(model: nn.Module, graph: ChannelGraph, moves: Moves, settings: Settings) -> dict[str, Any]:
    """Seconds ``before`` and a ``model`` of latency, in plain values.

    For a budget, a copy that would meet it by the model, units taken at random, is compacted and timed; the model then
    knows what part of the latency does not shrink, and whether the budget can be met at all.
    """
    before, layers = measure_latency(model, graph.inputs).median, LatencyModel.measure(model, graph)
    if settings.budget.latency is not None:
        ledger = Ledger(graph, extra={"latency": layers.weights(graph)})
        target = Target(settings.budget)
        check_reachable(graph, ledger, moves, target)
        scores = torch.rand(graph.num_units, generator=torch.Generator().manual_seed(settings.seed)).double()
        select(ledger, moves, scores, target)
        trial = copy_of(model)
        compact_(trial, graph, by_group(graph, ledger.kept))

        def corrected(pairs: int) -> tuple[float, LatencyModel]:
            share, seconds = _in_turn(trial, model, graph.inputs, pairs)
            found = layers.calibrated(ledger.shares()["latency"], share)
            check_reachable(graph, Ledger(graph, extra={"latency": found.weights(graph)}), moves, target)
            return seconds, found

        try:
            before, layers = corrected(PAIRS)
        except UnreachableBudget:
            before, layers = corrected(BEFORE_REFUSAL)
    return {"before": before, "model": layers.to_json()}


def _in_turn(smaller: nn.Module, larger: nn.Module, inputs: Any, pairs: int) -> tuple[float, float]:
    """The latency of one model over that of another, and that of the other.

    Both are timed in turn, and the median over these pairs taken, since a machine may be busy with other things; the
    seconds are those when it was least so.
    """
    found = [[measure_latency(model, inputs, repeats=RUNS).median for model in (smaller, larger)] for _ in range(pairs)]
    return statistics.median(small / large for small, large in found), min(large for _, large in found)


def _untrained(graph: ChannelGraph, loss: float, batch: Any) -> str | None:
    shape = next((shape for shape in graph.output_shapes if len(shape) == 2 and shape[1] > 1), None)
    labels = batch[1] if isinstance(batch, (tuple, list)) and len(batch) == 2 else None
    if shape is None or not isinstance(labels, Tensor) or labels.dim() != 1 or labels.is_floating_point():
        return None
    guess = math.log(shape[1])
    if loss < AS_GOOD_AS_GUESSING * guess:
        return None
    return (
        f"the unpruned network looks untrained: its loss, {loss:.3g}, is no better than guessing among {shape[1]} "
        f"classes ({guess:.3g}); were trained weights loaded (--weights FILE, --pretrained; load_state_dict in Python)?"
    )


def _pruned_before(model: nn.Module, settings: Settings) -> str | None:
    """A line about earlier rounds, and what to do where this process made them, as it may not be meant then."""
    earlier = recipe_of(model)
    if earlier is None or not earlier.removed_units:
        return None
    first, last = earlier.cost_before.get("macs", 0), earlier.cost_after.get("macs", 0)
    share, asked = last / first if first else None, settings.budget.targets.get("macs")
    left = f" to {share:.1%} of its MACs" if share else ""
    total = f", {share * asked:.1%} of the original network" if share and asked else ""
    twice = ". If that is not meant (a cell of a notebook that ran twice), make the network anew"
    line = f"the network was pruned before{left}; this budget is a share of what was left then{total}"
    return f"{line}{twice if model in PRUNED_HERE else ''}"


def trace_widest(
    model: nn.Module, example_inputs: Any, ignore: tuple[str, ...]
) -> tuple[ChannelGraph, tuple[str, ...], str | None]:
    """Trace in the mode the model is in, or in the other one where only that runs, or runs more of the model.

    Heads that only train must lose their inputs, too. What such heads make themselves is left alone, as scores say
    nothing of it. Where each mode has heads of its own, no graph shows all of them, and what leads to those that it
    does not show is left alone.

    Returns:
        The graph, what was left alone for it (parameters and modules by name), and what is to be said about that.

    Raises:
        TraceError: if it runs in neither mode.
    """
    try:
        graph = trace(model, example_inputs, ignore=ignore)
    except TraceError:
        if not model.training:
            raise
        found = _traced(model, example_inputs, ignore, training=True)
        graph = found or trace(model.eval(), example_inputs, ignore=ignore)
    idle, mode = _idle(graph), model.training
    several_outputs = sum(bool(shape) for shape in graph.output_shapes) > 1  # losses have no shape
    if not idle and not (mode and several_outputs):
        return graph, ignore, None
    with same_modes(model):
        other = _traced(model, example_inputs, ignore, training=not mode) or graph
    here, there = _idle(other) - idle, idle - _idle(other)
    if not here and not there:
        return graph, ignore, None
    widest = mode if here or not there else not mode
    heads = there or here
    named = f"{min(heads)} and {len(heads) - 1} other parameters" if len(heads) > 1 else min(heads)
    if here and there:
        alone = _holding(other, lambda members: members - there if members & there else set())
        note = f"each mode has heads of its own; what leads to {named} is left alone"
    else:
        alone = _holding(other if there else graph, lambda members: members if members <= heads else set())
        where, many = "train" if widest else "eval", "" if len(heads) > 1 else "s"
        note = f"costs are those of {where} mode, in which {named} run{many}, too"
    ignore = (*ignore, *sorted(alone))
    if widest != mode:
        return _traced(model, example_inputs, ignore, training=widest) or graph, ignore, note
    return trace(model, example_inputs, ignore=ignore), ignore, note


def _traced(model: nn.Module, example_inputs: Any, ignore: tuple[str, ...], *, training: bool) -> ChannelGraph | None:
    """The graph in that mode, or None if there is none. Batch norms that cannot train on one sample do not."""
    for trains in (True, False) if training and norms_of(model) else (True,):
        model.train(training)
        for norm in norms_of(model) if not trains else ():
            norm.eval()
        with suppress(TraceError):
            return trace(model, example_inputs, ignore=ignore)
    return None


def _holding(graph: ChannelGraph, chosen: Callable[[set[str]], set[str]]) -> set[str]:
    """Parameters whose being left alone leaves groups alone: vectors among those ``chosen`` of a group, if any."""
    found = set()
    for group in graph.groups:
        names = chosen({member.parameter for member in group.members})
        found |= {name for name in names if len(graph.layouts[name].shape) == 1} or names
    return found


def _idle(graph: ChannelGraph) -> set[str]:
    """Parameters that take no part in what was traced."""
    return {frozen.parameter for frozen in graph.frozen if frozen.reason == UNUSED}
