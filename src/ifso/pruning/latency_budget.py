"""A latency budget: before the run layers are timed, and their sum corrected by a smaller network that is timed, too.

After the run the smaller network is timed; where it is slower than promised, the run goes on by a corrected model.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ifso.common.distributed import from_first
from ifso.common.module_state import copy_of
from ifso.costs.latency import LatencyModel, measure_latency
from ifso.errors import UnreachableBudget
from ifso.graph.channel_graph import ChannelGraph
from ifso.pruning.budget import phases
from ifso.pruning.cost_tracker import Ledger
from ifso.pruning.moves import Moves
from ifso.pruning.selection import TOLERANCE, Target, check_reachable, select, smallest_shares
from ifso.pruning.settings import Settings
from ifso.surgery.compact import compact_

if TYPE_CHECKING:
    from ifso.pruning.run import Run

MOST_CALIBRATIONS, TIMES = 3, 3
"""How often a run goes on, and how often the smaller network is timed each time."""

PAIRS, RUNS = 7, 5
"""How often two networks are timed in turn, and with how many passes each time."""

BEFORE_REFUSAL = 21
"""How often, if a budget seems out of reach: on a busy machine the first times may be wrong."""


def timed(model: nn.Module, graph: ChannelGraph, moves: Moves, settings: Settings) -> dict[str, Any]:
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
        compact_(trial, graph, {group.name: ledger.kept[group.units] for group in graph.groups})

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


def keep_latency(run: Run) -> None:
    """Measure; where the network is slower than its model said, correct the model and go on."""
    last = phases(run.settings.schedule, run.settings.budget, run.settings.units_per_step)[-1]
    for left in range(MOST_CALIBRATIONS, -1, -1):
        known = run.progress.latency
        assert known is not None
        known |= _timed_now(run, known["before"])
        share, wanted = known["share"], run.settings.budget.latency or 1.0
        if share <= wanted + max(TOLERANCE, known["spread"] / known["before"]):
            return
        modelled = run.ledger.shares()["latency"]
        corrected = LatencyModel.from_json(known["model"]).calibrated(modelled, share)
        why = _no_further(run, corrected) if left else f"{MOST_CALIBRATIONS} corrections were made"
        if why:
            run.say(f"latency: measured {share:.1%}, modelled {modelled:.1%}; the run ends here, since {why}")
            return
        run.say(f"latency: measured {share:.1%}, modelled {modelled:.1%}; the model was corrected and the run goes on")
        known["model"] = corrected.to_json()
        run.reopen()
        run.reach(last)
        run.finish_surgery()


def _no_further(run: Run, latency: LatencyModel) -> str | None:
    """Why a run cannot go on by a corrected model of latency; None if it can."""
    if not run.network.told_apart:
        return "its units can no longer be told apart"
    ledger = Ledger(run.network.original, extra={"latency": latency.weights(run.network.original)})
    smallest = smallest_shares(ledger, run.moves, Target(run.settings.budget))["latency"]
    if smallest > (run.settings.budget.latency or 1.0):
        return f"no smaller network is below {smallest:.1%}"
    return None


def measured_latency(run: Run) -> dict[str, Any] | None:
    """Seconds before and after, the share and its spread; None if nobody asked for latency."""
    known = run.progress.latency
    if known is None:
        return None
    if "after" not in known:
        known |= _timed_now(run, known["before"])
    return {name: known[name] for name in ("before", "after", "share", "spread")}


def _timed_now(run: Run, before: float) -> dict[str, float]:
    """Seconds of the smaller network, on the first rank, when the machine was least busy with other things."""
    times = [measure_latency(run.network.model, run.network.graph.inputs) for _ in range(TIMES)]
    now = min(times, key=lambda latency: latency.median)
    return from_first({"after": now.median, "share": now.median / before, "spread": now.spread})
