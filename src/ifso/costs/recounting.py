"""Does a smaller network cost what was promised, where values decide how many rows a layer sees?"""

from __future__ import annotations

import math

from torch import Tensor

from ifso.costs.counting import count
from ifso.costs.terms import Term
from ifso.graph.channel_graph import ChannelGraph

COMPARED = ("macs", "conv_macs", "params", "activations")
"""Costs that a budget can be about. A linear layer left with one input and one output may be recorded as a product."""

_Place = tuple[str, str]
"""(kind, where) of a term."""


def recount(original: ChannelGraph, kept: Tensor, smaller: ChannelGraph) -> list[str]:
    """What the ``smaller`` network's own graph counts otherwise than the ``original`` promises for ``kept``, in words.

    A network whose course values decide, such as the second stage of a detector, may look at more or fewer regions than
    it did when the original was traced: there every layer must cost the same for each row.
    """
    promised, found = count(original, kept).as_dict(), count(smaller, smaller.kept(None)).as_dict()
    wrong = [kind for kind in COMPARED if found[kind] != promised[kind]]
    if not original.on_real_tensors or "params" in wrong:
        return [f"{kind} {found[kind]:,} instead of {promised[kind]:,}" for kind in wrong]
    return _differing_rows(original, kept, smaller) if wrong else []


def _differing_rows(original: ChannelGraph, kept: Tensor, smaller: ChannelGraph) -> list[str]:
    wanted: dict[_Place, set[tuple[int, int]]] = {}
    varying: dict[_Place, list[int]] = {}
    for term in original.terms:
        place, dims = (term.kind, term.where), varying_dims(term)
        varying[place] = dims
        rest = math.prod(size for dim, size in enumerate(term.shape) if dim not in dims)
        if rest:
            wanted.setdefault(place, set()).add((len(term.shape), term.count(kept) // rest))
    strange = []
    for term in smaller.terms:
        place = (term.kind, term.where)
        if place not in varying:
            strange.append(f"{term.kind} in {term.where or 'the model'} is new")
            continue
        per_row = (len(term.shape), math.prod(term.shape[dim] for dim in varying[place]))
        if math.prod(term.shape) and place in wanted and per_row not in wanted[place]:
            strange.append(f"{term.kind} in {term.where or 'the model'} costs {per_row[1]:,} for each row")
    return list(dict.fromkeys(strange))


def varying_dims(term: Term) -> list[int]:
    """Dims of a term along which units change."""
    return [dim for dim in range(len(term.shape)) if any(layer.shape[dim] > 1 for layer in term.distinct)]
