"""A latency budget before the run: layers timed, and the sum corrected by a smaller network that was really timed."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import nn

from ifso.common.module_state import copy_of
from ifso.costs.latency import LatencyModel, measure_latency
from ifso.errors import UnreachableBudget
from ifso.graph.channel_graph import ChannelGraph
from ifso.pruning.cost_tracker import Ledger
from ifso.pruning.moves import Moves
from ifso.pruning.selection import Target, check_reachable, select
from ifso.pruning.settings import Settings
from ifso.surgery.compact import compact_

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
