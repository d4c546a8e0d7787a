"""Counting what survives: every cost is a number of elements that belong to units.

A convolution makes ``positions × O × I/g`` multiply-adds, a weight has ``O × I/g × k × k`` numbers, an activation
``N × C × H × W``. Each is a :class:`Term`: a block of elements, some axes of which belong to units. What is left for a
``keep``, and what each unit would save, follow from counting, without running the model again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ifso.graph.channel_graph import STAYS
from ifso.graph.layouts import varying_dims

if TYPE_CHECKING:
    from ifso.graph.channel_ids import Labels
    from ifso.graph.units import Units


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
    terms = [
        Term(op.kind, op.where, op.shape, _live([units.of[layer] for layer in op.layers])) for op in labels.operations
    ]
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.nn.Parameter):
            layout = units.layouts.get(name)
            terms.append(Term("parameter", name, tuple(tensor.shape), layout.layers if layout else ()))
    return tuple(terms)


def _live(layers: list[Tensor]) -> tuple[Tensor, ...]:
    return tuple(layer for layer in layers if bool((layer != STAYS).any()))
