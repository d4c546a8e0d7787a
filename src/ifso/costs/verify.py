"""Does a smaller network cost what was promised, where values decide how many rows a layer sees?"""

from __future__ import annotations

import math

from torch import Tensor

from ifso.costs.cost import count
from ifso.graph.channel_graph import ChannelGraph
from ifso.graph.terms import Term

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
    """A place may hold several terms: one of the smaller network must cost, for each row, what one of them does."""
    wanted: dict[_Place, list[tuple[int, list[int], int]]] = {}
    for term in original.terms:
        dims = varying_dims(term)
        here = wanted.setdefault((term.kind, term.where), [])
        rest = math.prod(size for dim, size in enumerate(term.shape) if dim not in dims)
        if rest:
            here.append((len(term.shape), dims, term.count(kept) // rest))
    strange = []
    for term in smaller.terms:
        place = f"{term.kind} in {term.where or 'the model'}"
        known = wanted.get((term.kind, term.where))
        if known is None:
            strange.append(f"{place} is new")
        elif known and 0 not in term.shape and not any(_costs_as(term, *one) for one in known):
            strange.append(f"{place} costs otherwise for each row: its shape is {term.shape}")
    return list(dict.fromkeys(strange))


def _costs_as(term: Term, rank: int, dims: list[int], per_row: int) -> bool:
    return len(term.shape) == rank and math.prod(term.shape[dim] for dim in dims) == per_row


def varying_dims(term: Term) -> list[int]:
    """Dims of a term along which units change."""
    return [dim for dim in range(len(term.shape)) if any(layer.shape[dim] > 1 for layer in term.distinct)]
