"""``ifso.cost`` and ``ifso.unit_costs``, and whether a smaller network costs what was promised."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from ifso.common.module_state import named_tensors
from ifso.errors import StaleGraphError
from ifso.graph.channel_graph import ChannelGraph, Keep
from ifso.graph.naming import wiring_difference, wiring_of

MAC_KINDS = ("conv", "linear", "matmul")

KINDS: Mapping[str, tuple[str, ...]] = {
    "macs": MAC_KINDS, "conv_macs": ("conv",), "params": ("parameter",), "activations": ("activation",),
}  # fmt: skip
"""Costs that a budget can be about, and the kinds of terms that each adds up."""


@dataclass(frozen=True)
class Cost:
    """What a network costs on the traced inputs.

    ``macs`` is the sum of the first three: half of what ``torch.utils.flop_counter`` reports.

    Attributes:
        conv_macs: multiply-adds of convolutions (what the paper counts).
        linear_macs: those of layers with a weight matrix.
        matmul_macs: those of products of activations (attention).
        params: parameters.
        activations: the numbers that convolutions and matrix products write.
    """

    conv_macs: int
    linear_macs: int
    matmul_macs: int
    params: int
    activations: int

    @property
    def macs(self) -> int:
        """Multiply-adds of convolutions, linear layers and other matrix products."""
        return self.conv_macs + self.linear_macs + self.matmul_macs

    def as_dict(self) -> dict[str, int]:
        """All numbers by name."""
        return {"macs": self.macs, **asdict(self)}

    def __str__(self) -> str:
        return (
            f"{self.macs:,} MACs (conv {self.conv_macs:,} + linear {self.linear_macs:,} "
            f"+ matmul {self.matmul_macs:,}), {self.params:,} parameters, {self.activations:,} activations"
        )


def cost(model: nn.Module, graph: ChannelGraph, keep: Keep | None = None) -> Cost:
    """Cost of what ``keep`` leaves of the traced model, counted without running it.

    Args:
        model: the one that was traced.
        graph: from :func:`ifso.trace`.
        keep: for each group a bool tensor, True for units that stay; everything by default.

    Returns:
        Multiply-adds, parameters and activations.

    Raises:
        KeepError: ``keep`` does not fit the graph.
        StaleGraphError: the graph is of another model.

    >>> from ifso.graph.tracing import trace
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> graph = trace(net, torch.zeros(1, 3, 8, 8))
    >>> cost(net, graph).macs == 6 * 6 * 9 * 3 * 8 + 4 * 4 * 9 * 8 * 4
    True
    >>> cost(net, graph, {"0": torch.arange(8) < 6}).params
    388
    """
    check_fits(model, graph)
    return count(graph, graph.kept(keep))


def count(graph: ChannelGraph, kept: Tensor) -> Cost:
    """Cost of what a bool vector of :meth:`ChannelGraph.kept` leaves of the model that was traced."""
    counts: Counter[str] = Counter()
    for term in graph.terms:
        counts[term.kind] += term.count(kept)
    return Cost(*(counts[kind] for kind in (*MAC_KINDS, "parameter", "activation")))


@dataclass(frozen=True, eq=False)
class UnitCosts:
    """What the removal of each unit of a group, alone, would save [size].

    Attributes:
        macs: multiply-adds of convolutions, linear layers and matrix products.
        conv_macs: those of convolutions.
        params: parameters.
        activations: numbers that convolutions and matrix products write, the paper's ΔMem: the sum over the unit's
            producers of N·H·W of their outputs.
    """

    macs: Tensor
    conv_macs: Tensor
    params: Tensor
    activations: Tensor


def unit_costs(graph: ChannelGraph, keep: Keep | None = None) -> dict[str, UnitCosts]:
    """Count what each kept unit would save, given what else is kept.

    Args:
        graph: from :func:`ifso.trace`.
        keep: for each group a bool tensor, True for units that stay; everything by default.

    Returns:
        The savings by group; 0 for units that are gone.

    Raises:
        KeepError: ``keep`` does not fit the graph.
    """
    kept = graph.kept(keep)
    saved = {kind: torch.zeros(graph.num_units, dtype=torch.long, device="cpu") for kind in KINDS}
    for term in graph.terms:
        savings = term.savings(kept)
        for kind, terms in KINDS.items():
            if term.kind in terms:
                saved[kind] += savings
    return {
        group.name: UnitCosts(**{kind: savings[group.units] for kind, savings in saved.items()})
        for group in graph.groups
    }


def check_fits(model: nn.Module, graph: ChannelGraph) -> None:
    """Refuse a model whose parameters or modules are not those the graph was traced from."""
    tensors = named_tensors(model)
    for term in graph.terms:
        if term.kind == "parameter" and (term.where not in tensors or tuple(tensors[term.where].shape) != term.shape):
            now = tuple(tensors[term.where].shape) if term.where in tensors else "missing"
            raise StaleGraphError(
                f"the graph was traced from another model: {term.where} was {term.shape} and is {now}; "
                "call ifso.trace again (after ifso.compact_, too)"
            )
    changed = wiring_difference(graph.wiring, wiring_of(model))
    if changed is not None:
        raise StaleGraphError(f"the graph was traced from another model: {changed}; call ifso.trace again")


def recount(original: ChannelGraph, kept: Tensor, smaller: ChannelGraph) -> list[str]:
    """What the ``smaller`` network's own graph counts otherwise than the ``original`` promises for ``kept``, in words.

    A network whose course values decide, such as the second stage of a detector, may look at more or fewer regions than
    it did when the original was traced: there every layer must cost the same for each row. Linear layers and products
    are not told apart: a layer left with one input and one output may be recorded as a product.
    """
    promised, found = count(original, kept).as_dict(), count(smaller, smaller.kept(None)).as_dict()
    wrong = [kind for kind in KINDS if found[kind] != promised[kind]]
    if not original.on_real_tensors or "params" in wrong:
        return [f"{kind} {found[kind]:,} instead of {promised[kind]:,}" for kind in wrong]
    return _differing_rows(original, kept, smaller) if wrong else []


def _differing_rows(original: ChannelGraph, kept: Tensor, smaller: ChannelGraph) -> list[str]:
    """A place may hold several terms: one of the smaller network must cost, for each row, what one of them does."""
    wanted: dict[tuple[str, str], list[tuple[int, list[int], int]]] = {}
    for term in original.terms:
        here = wanted.setdefault((term.kind, term.where), [])
        rest = math.prod(size for dim, size in enumerate(term.shape) if dim not in term.varying)
        if rest:
            here.append((len(term.shape), term.varying, term.count(kept) // rest))
    strange = []
    for term in smaller.terms:
        place = f"{term.kind} in {term.where or 'the model'}"
        known = wanted.get((term.kind, term.where))
        if known is None:
            strange.append(f"{place} is new")
        elif known and 0 not in term.shape:
            alike = [(dims, per_row) for rank, dims, per_row in known if rank == len(term.shape)]
            if all(math.prod(term.shape[dim] for dim in dims) != per_row for dims, per_row in alike):
                strange.append(f"{place} costs otherwise for each row: its shape is {term.shape}")
    return list(dict.fromkeys(strange))
