"""What a run says at its beginning where somebody may have forgotten something."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from ifso.graph.channel_graph import ChannelGraph
from ifso.pruning.budget import FLOPS, Budget
from ifso.surgery.recipe import recipe_of

AS_GOOD_AS_GUESSING = 0.95
"""A trained classifier has a smaller cross entropy than this share of that of a guess."""


def reminders(model: nn.Module, graph: ChannelGraph, budget: Budget, loss: float, batch: Any) -> list[str]:
    """Notes on a network that looks untrained or was pruned before, and on FLOPs; ``loss`` is that of ``batch``."""
    notes = _untrained(graph, loss, batch), _pruned_before(model), FLOPS if budget.in_flops else None
    return [note for note in notes if note]


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


def _pruned_before(model: nn.Module) -> str | None:
    earlier = recipe_of(model)
    if earlier is None or not earlier.removed_units:
        return None
    first, last = earlier.cost_before.get("macs", 0), earlier.cost_after.get("macs", 0)
    left = f" to {last / first:.1%} of its MACs" if first else ""
    return (
        f"the network was pruned before{left}; this budget is a share of what was left then. If that is not meant (a "
        "cell of a notebook that ran twice), make the network anew"
    )
