"""What is left when units go: shapes, slices and masks of tensors, from a :class:`Layout`, and counts of elements.

Every cost is a number of elements that belong to units. A convolution makes ``positions × O × I/g`` multiply-adds, a
weight has ``O × I/g × k × k`` numbers, an activation ``N × C × H × W``. Each is a :class:`Term`: a block of elements,
some axes of which belong to units. What is left for a ``keep``, and what each unit would save, follow from counting,
without running the model again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ifso.errors import KeepError
from ifso.graph.channel_graph import STAYS, Layout

if TYPE_CHECKING:
    from ifso.graph.channel_ids import Labels
    from ifso.graph.units import Units


def varying_dims(layer: Tensor) -> list[int]:
    """Dims along which a layer's unit number changes."""
    return [dim for dim, size in enumerate(layer.shape) if size > 1]


def surviving(layout: Layout, kept: Tensor) -> Tensor:
    """Bool tensor broadcastable to the shape: which elements stay."""
    alive = torch.ones([1] * len(layout.shape), dtype=torch.bool, device="cpu")
    for layer in layout.layers:
        alive = alive & kept[layer]
    return alive


def kept_length(v: Tensor, alive: Tensor, dim: int) -> Tensor:
    """‖v'‖/‖v‖ over all dims but one, for what is alive of ``v``, with 1 for the sizes of the others.

    >>> kept_length(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[True, False]]), 0)
    tensor([[0.6000],
            [1.0000]])
    """
    rest = [other for other in range(v.dim()) if other != dim]
    before, after = (x.square().sum(rest, keepdim=True).sqrt() for x in (v, v * alive))
    return torch.where(before > 0, after / before, 1)


def kept_indices(layout: Layout, kept: Tensor) -> dict[int, Tensor] | None:
    """Positions to keep along each dim, in their new order; None if they differ from row to row."""
    if any(len(varying_dims(layer)) != 1 for layer in layout.layers):
        return None
    result = {}
    for layer in layout.layers:
        (dim,) = varying_dims(layer)
        alive = kept[layer.flatten()]
        result[dim] = _dealt(alive, layout.interleave[dim]) if dim in layout.interleave else alive.nonzero().flatten()
    return result


def _dealt(alive: Tensor, period: int) -> Tensor:
    """Positions of the survivors of ``period`` interleaved blocks, one of each block in turn.

    >>> _dealt(torch.tensor([1, 0, 0, 1, 1, 1]).bool(), 2)   # blocks (0 2 4) and (1 3 5) keep 0 4 and 3 5
    tensor([0, 3, 4, 5])

    Blocks of one slice each are in order already. Blocks that lost all are left out.
    """
    if alive.numel() == period:
        return alive.nonzero().flatten()
    blocks = alive.view(-1, period).t()
    if len(set(blocks.sum(1).tolist()) - {0}) > 1:
        raise KeepError(
            "the blocks of a channel shuffle keep different numbers; pass keep through ifso.balance(graph, keep)"
        )
    places = torch.arange(alive.numel(), device="cpu").view(-1, period).t()
    return places[blocks].view(int(blocks.any(1).sum()), -1).t().flatten()


def compact_shape(layout: Layout, kept: Tensor, name: str) -> tuple[int, ...]:
    """Shape of what is left; a :class:`KeepError` if that is no full block."""
    indices = kept_indices(layout, kept)
    if indices is not None:
        return tuple(len(indices[dim]) if dim in indices else size for dim, size in enumerate(layout.shape))
    alive = surviving(layout, kept)
    shape = list(layout.shape)
    rows = alive.any(1, keepdim=True)
    shape[0] = int(rows.sum()) if rows.shape[0] > 1 else shape[0]
    counts = alive.sum(1, keepdim=True)[rows].unique().tolist()
    if alive.shape[1] > 1:
        if len(counts) != 1:
            raise KeepError(
                f"{name}: its groups keep different numbers of channels; pass keep through ifso.balance(graph, keep)"
            )
        shape[1] = counts[0]
    return tuple(shape)


def compact(tensor: Tensor, layout: Layout, kept: Tensor, name: str) -> Tensor:
    """The slices of ``tensor`` that stay, as a new tensor in the same memory format."""
    indices = kept_indices(layout, kept)
    if indices is not None:
        result = tensor
        for dim, index in indices.items():
            if len(index) < result.shape[dim] or dim in layout.interleave:
                result = result.index_select(dim, index.to(tensor.device))
    else:
        shape = compact_shape(layout, kept, name)
        alive = surviving(layout, kept)
        if 1 in layout.interleave:
            result = _rows_dealt(tensor, alive.flatten(1), layout.interleave[1])
        else:
            result = tensor[alive.expand(layout.shape).to(tensor.device)].reshape(shape)
    return in_format_of(result, tensor)


def _rows_dealt(tensor: Tensor, alive: Tensor, period: int) -> Tensor:
    """Each row [O, I/g, …] reads a shuffled axis: its survivors are dealt out in turn."""
    rows = alive.any(1).nonzero().flatten()
    columns = torch.stack([_dealt(alive[row], period) for row in rows]).to(tensor.device)
    kept_rows = tensor.index_select(0, rows.to(tensor.device))
    index = columns.view(*columns.shape, *[1] * (tensor.dim() - 2)).expand(*columns.shape, *tensor.shape[2:])
    return kept_rows.gather(1, index)


def in_format_of(result: Tensor, like: Tensor) -> Tensor:
    """``result`` in the memory format (channels_last …) of ``like``."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    wanted = formats.get(like.dim())
    if wanted is not None and like.is_contiguous(memory_format=wanted) and not like.is_contiguous():
        return result.contiguous(memory_format=wanted)
    return result.contiguous()


@dataclass(frozen=True, eq=False)
class Term:
    """A block of ``shape`` elements; ``layers`` hold unit numbers broadcastable to it. ``kind`` says what it counts."""

    kind: str
    where: str
    shape: tuple[int, ...]
    layers: tuple[Tensor, ...]

    @cached_property
    def distinct(self) -> list[Tensor]:
        """The layers without repetition: one of equal ones, and length 1 along dims where nothing changes."""
        distinct: list[Tensor] = []
        for layer in self.layers:
            for dim, size in enumerate(layer.shape):
                first = layer.narrow(dim, 0, 1)
                if size > 1 and bool((layer == first).all()):
                    layer = first
            if not any(torch.equal(layer, earlier) for earlier in distinct):
                distinct.append(layer)
        return distinct

    @cached_property
    def varying(self) -> list[int]:
        """Dims along which units change."""
        return sorted({dim for layer in self.distinct for dim in varying_dims(layer)})

    @cached_property
    def lines(self) -> list[tuple[int, Tensor]] | None:
        """(dim, unit numbers) per layer if each varies along one dim of its own, else None.

        What survives is then the product of the numbers of kept slices: Π over dims.
        """
        lines: list[tuple[int, Tensor]] = []
        for layer in self.distinct:
            dims = varying_dims(layer)
            if len(dims) != 1 or any(dim == dims[0] for dim, _ in lines):
                return None
            lines.append((dims[0], layer.flatten()))
        return lines

    @cached_property
    def _core(self) -> tuple[int, list[Tensor]]:
        """(times, layers on the dims that belong to units)."""
        times = math.prod(size for dim, size in enumerate(self.shape) if dim not in self.varying)
        core_shape = [self.shape[dim] for dim in self.varying]
        layers = [
            layer.reshape([layer.shape[dim] for dim in self.varying]).expand(core_shape) for layer in self.distinct
        ]
        return times, layers

    def count(self, kept: Tensor) -> int:
        """Elements that survive."""
        if self.lines is not None:
            sizes = list(self.shape)
            for dim, units in self.lines:
                sizes[dim] = int(kept[units].sum())
            return math.prod(sizes)
        times, layers = self._core
        return times * int(_alive(layers, kept).sum())

    def savings(self, kept: Tensor) -> Tensor:
        """For each unit that is kept, the elements its removal alone would take away [units]."""
        total = kept.numel() - 1
        if not self.layers:
            return torch.zeros(total, dtype=torch.long, device="cpu")
        if self.lines is not None:
            return self._separable_savings(kept, total)
        times, layers = self._core
        alive = _alive(layers, kept)
        chosen = torch.stack([layer[alive] for layer in layers])
        result = torch.zeros(total + 1, dtype=torch.long, device="cpu")
        for place, row in enumerate(chosen):
            new = torch.ones(row.shape, dtype=torch.bool, device="cpu")
            for earlier in chosen[:place]:
                new &= earlier != row
            result += torch.bincount(torch.where(new, row, total).remainder(total + 1), minlength=total + 1)
        return result[:total] * times

    def _separable_savings(self, kept: Tensor, total: int) -> Tensor:
        """Π sizes − Π (sizes − own), in integers."""
        assert self.lines is not None
        rest = math.prod(size for dim, size in enumerate(self.shape) if all(dim != d for d, _ in self.lines))
        before, after = rest, torch.full((total,), rest, device="cpu")
        for _, units in self.lines:
            alive = units[kept[units]]
            own = torch.bincount(alive[alive != STAYS], minlength=total)
            before *= alive.numel()
            after = after * (alive.numel() - own)
        return before - after


def _alive(layers: list[Tensor], kept: Tensor) -> Tensor:
    return torch.stack([kept[layer] for layer in layers]).all(0)


def terms_of(labels: Labels, units: Units, tensors: Mapping[str, Tensor]) -> tuple[Term, ...]:
    """All terms of a traced model: its products, the activations they make, its parameters."""
    terms = []
    for op in labels.operations:
        layers = [units.of[layer] for layer in op.layers]
        going = tuple(layer for layer in layers if bool((layer != STAYS).any()))
        terms.append(Term(op.kind, op.where, op.shape, going))
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.nn.Parameter):
            layout = units.layouts.get(name)
            terms.append(Term("parameter", name, tuple(tensor.shape), layout.layers if layout else ()))
    return tuple(terms)
