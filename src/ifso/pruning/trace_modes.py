"""The graph of a network that runs more of itself in one mode than in the other, as detectors and GoogLeNet do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import nn

from ifso.common.torch_state import same_modes
from ifso.errors import TraceError
from ifso.graph.channel_graph import ChannelGraph
from ifso.graph.tracing import trace
from ifso.graph.units import UNUSED
from ifso.pruning.recovery import norms_of


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
    if not idle and not (mode and _answers(graph) > 1):
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


def _answers(graph: ChannelGraph) -> int:
    """How many outputs have values for each sample or place, as losses have not."""
    return sum(bool(shape) for shape in graph.output_shapes)


def _idle(graph: ChannelGraph) -> set[str]:
    """Parameters that take no part in what was traced."""
    return {frozen.parameter for frozen in graph.frozen if frozen.reason == UNUSED}
