"""Channel ids: what each element of each recorded tensor belongs to, and what the rules say about the ids.

Every parameter axis starts with ids of its own. Rules carry them through the tape and note relations: two ids are the
same channel (:meth:`Labels.unite`), must stay (:meth:`freeze`), are reduced over (:meth:`flag`), need equal counts
(:meth:`balance`). :mod:`ifso.graph.units` turns the notes into units.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ifso.common.tensors import placed
from ifso.graph.channel_graph import STAYS
from ifso.graph.tape import Call, FunctionKey, Ref, Tape

PRODUCES, CONSUMES = "produces", "consumes"
PADDED_FRONT, PADDED_BACK = ("front",), ("back",)
"""Names of numbers of zeros that are added beside channels."""

FROM_INPUT = "the model's input"


@dataclass(frozen=True)
class Layer:
    """Ids of a tensor's elements: as many dims as the tensor, each of full size or 1 (the id does not vary there).

    ``period`` > 0 marks an axis that is a shuffle of that many blocks: its order follows from what is kept.
    """

    ids: Tensor
    period: int = 0

    @property
    def dims(self) -> tuple[int, ...]:
        """The dims along which the id varies."""
        return tuple(dim for dim, size in enumerate(self.ids.shape) if size > 1)

    def varies(self, dim: int) -> bool:
        """Return whether the id depends on the position along ``dim``."""
        return self.ids.shape[dim] > 1


@dataclass(frozen=True)
class Axis:
    """A parameter or buffer axis: its ids are ``first … first + size - 1``."""

    name: str
    dim: int
    first: int
    size: int


@dataclass(frozen=True)
class Operation:
    """Something that costs: the number of surviving elements of ``shape`` under ``layers``. See ``ifso.costs``."""

    kind: str
    where: str
    shape: tuple[int, ...]
    layers: tuple[Tensor, ...]
    function: FunctionKey | None = None


@dataclass(frozen=True)
class MeasuredBy:
    """A module attribute (candidates in ``names``) that counts the channels in ``ids`` [n]."""

    module: str
    names: tuple[str, ...]
    position: int | None
    ids: Tensor


def compress(ids: Tensor, exact: bool = False) -> Tensor:
    """Shrink every dim along which ``ids`` is constant to size 1. ``exact`` also looks at the values.

    >>> compress(torch.arange(3).view(3, 1).expand(3, 5)).shape
    torch.Size([3, 1])
    """
    for dim, (size, stride) in enumerate(zip(ids.shape, ids.stride(), strict=True)):
        if size == 0:
            ids = ids.new_full((1,), -1).expand([1 if d == dim else s for d, s in enumerate(ids.shape)])
        elif size > 1 and (stride == 0 or (exact and bool((ids == ids.narrow(dim, 0, 1)).all()))):
            ids = ids.narrow(dim, 0, 1)
    return ids


class Labels:
    """The ids of all tensors of a tape, and everything the rules noted about them."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.notes: list[str] = []
        self.axes: list[Axis] = []
        self.size = 0
        self.edges: list[tuple[Tensor, Tensor]] = []
        self.frozen: list[tuple[Tensor, str]] = []
        self.together: list[Tensor] = []
        self.flags: list[tuple[Tensor, str, FunctionKey | None]] = []
        self.scales: list[tuple[Tensor, FunctionKey]] = []
        self.unmasked: set[tuple[str, int]] = set()
        self.gains: dict[str, tuple[str, int]] = {}
        self.roles: list[tuple[Tensor, str]] = []
        self.splits: list[tuple[Tensor, str]] = []
        self.locks: list[Tensor] = []
        self.balances: list[tuple[Tensor, str]] = []
        self.attached: list[tuple[Axis, int, Tensor]] = []
        self.ragged: dict[str, Tensor] = {}
        self.ragged_period: dict[str, int] = {}
        self.operations: list[Operation] = []
        self.sizes: list[MeasuredBy] = []
        self.uniform: set[int] = set()
        self.flexible: dict[int, set[int]] = {}
        self.views: dict[int, int] = {}
        self._layers: dict[int, tuple[Layer, ...]] = {}
        self._axes_of: dict[str, list[Axis]] = {}
        self._why: dict[int, str] = {}

    def __getitem__(self, ref: Ref) -> tuple[Layer, ...]:
        """The layers of a tensor; parameters get their own ids at first sight."""
        if ref.index not in self._layers:
            self._layers[ref.index] = self._own_ids(ref)
        return self._layers[ref.index]

    def set(self, ref: Ref | None, layers: Iterable[Layer], like: Ref | None = None) -> None:
        """Give a result its layers. Ids that vary nowhere are of a channel picked by hand: frozen."""
        if ref is None:
            return
        kept = []
        for layer in layers:
            if layer.dims:
                kept.append(layer)
            else:
                self.freeze(layer.ids, "single channels of it are picked out by position")
        self._layers[ref.index] = tuple(kept)
        if like is not None and ref.index != like.index:
            self._why.setdefault(ref.index, self.why(like))

    def why(self, ref: Ref) -> str:
        """Where an axis without channels comes from, in words."""
        if ref.index in self._why:
            return self._why[ref.index]
        kind = self.tape.values[ref.index].kind
        return {
            "input": FROM_INPUT,
            "constant": "a constant made outside the model's parameters",
            "buffer": "a buffer of fixed size",
        }.get(kind, "values that carry no channels")

    def set_why(self, ref: Ref | None, why: str) -> None:
        """Say where a tensor without channels comes from."""
        if ref is not None:
            self._why[ref.index] = why

    def shape(self, ref: Ref) -> tuple[int, ...]:
        """Shape of a recorded tensor; empty axes count as 1 so that ids can be followed through them."""
        return tuple(max(size, 1) for size in self.tape.shape(ref))

    def fresh(self, count: int) -> Tensor:
        """New ids that belong to no parameter."""
        ids = torch.arange(self.size, self.size + count, device="cpu")
        self.size += count
        return ids

    def _own_ids(self, ref: Ref) -> tuple[Layer, ...]:
        value = self.tape.values[ref.index]
        if value.kind not in ("parameter", "buffer") or not value.dtype.is_floating_point:
            return ()
        layers = []
        for dim, size in enumerate(value.shape):
            if size <= 1:
                continue
            axis = Axis(value.name, dim, self.size, size)
            self.axes.append(axis)
            self._axes_of.setdefault(value.name, []).append(axis)
            layers.append(Layer(placed(self.fresh(size), dim, len(value.shape))))
        return tuple(layers)

    def axis_of(self, ids: Tensor) -> Axis | None:
        """The parameter axis whose own ids these are, all of them and in order; else None."""
        flat = ids.flatten()
        first, last = int(flat[0]), int(flat[-1])
        if last - first + 1 != flat.numel():
            return None
        place = bisect_left(self.axes, first, key=lambda axis: axis.first)
        axis = self.axes[place] if place < len(self.axes) else None
        return axis if axis and axis.first == first and axis.size == flat.numel() else None

    # ---- what rules say -------------------------------------------------------------------------------------------

    def unite(self, a: Tensor, b: Tensor) -> None:
        """Ids at the same (broadcast) place are the same channel."""
        if a.shape != b.shape:
            a, b = torch.broadcast_tensors(a, b)
        self.edges.append((a.flatten(), b.flatten()))

    def unite_layers(self, a: Layer, b: Layer) -> None:
        """Unite two layers; the order of a shuffled axis is passed on to parameters and locked by anything else."""
        for one, other in ((a, b), (b, a)):
            axis = self.axis_of(other.ids) if len(other.dims) == 1 else None
            if axis is not None:
                self.attached.append((axis, one.period, one.ids.flatten()))
            elif one.period and one.period != other.period:
                self.lock(one)
        self.unite(a.ids, b.ids)

    def lock(self, layer: Layer) -> None:
        """The order of a shuffled axis matters: the blocks must keep the same positions."""
        if layer.period:
            self.locks.append(layer.ids.flatten().view(-1, layer.period))

    def unlock(self, layer: Layer) -> Layer:
        """The layer as one with a fixed order."""
        self.lock(layer)
        return replace(layer, period=0)

    def link_rows(self, ids: Tensor, dims: Sequence[int]) -> Tensor:
        """Unite all ids along ``dims`` (attention heads); returns the ids that stand for the rows."""
        first = ids
        for dim in dims:
            first = first.narrow(dim, 0, 1)
        self.unite(ids, first)
        return first

    def freeze(self, ids: Tensor, reason: str) -> None:
        """These channels must stay."""
        if ids.numel():
            self.frozen.append((ids.flatten(), reason))

    def keep_together(self, ids: Tensor) -> None:
        """Parts of one axis that are taken apart, or compete in a softmax: if one must stay, all must."""
        self.together.append(ids.flatten())

    def freeze_all(self, refs: Iterable[Ref], reason: str) -> None:
        """All channels of these tensors must stay."""
        for ref in refs:
            for layer in self[ref]:
                self.freeze(layer.ids, reason)

    def flag(self, ids: Tensor, flag: str, call: Call) -> None:
        """For these channels setting to zero is not the same as removing: ``call`` takes statistics over them."""
        self.flags.append((ids.flatten(), flag, call.function))

    def flags_for(self, units: Tensor) -> list[tuple[Tensor, str, FunctionKey | None]]:
        """Flags (ids, name, function) that concern ``units`` (the unit number of each id) that can go.

        The scale of an attention changes only where heads can lose a part of their channels.
        """
        found = [item for item in self.flags if bool((units[item[0]] != STAYS).any())]
        for rows, function in self.scales:
            if not bool((units[rows] == units[rows][:, :1]).all()):
                found.append((rows.flatten(), "attention scale", function))
        return found

    def role(self, ids: Tensor, role: str) -> None:
        """Parameter slices with these ids produce, or consume, channels."""
        self.roles.append((ids.flatten(), role))

    def balance(self, blocks: Tensor, where: str) -> None:
        """Every row of ``blocks`` must keep equally many."""
        self.balances.append((blocks, where))

    def split(self, blocks: Tensor, where: str) -> None:
        """An axis was cut into the rows of ``blocks``: balanced, unless each row turns out to be one unit."""
        self.splits.append((blocks, where))

    def cost(self, kind: str, call: Call, shape: Sequence[int], layers: Iterable[Tensor]) -> None:
        """Note an operation for ``ifso.costs``."""
        self.operations.append(Operation(kind, call.module, tuple(shape), tuple(layers), call.function))

    def measure(self, call: Call, names: tuple[str, ...], ids: Tensor, position: int | None = None) -> None:
        """Attribute ``names`` of the calling module counts ``ids``."""
        self.sizes.append(MeasuredBy(call.module, names, position, ids.flatten()))

    def adopt(self, ref: Ref, layers: Iterable[Layer]) -> None:
        """A tensor made in forward, the same all along some dims, is as large there as what it meets: it gets its ids.

        ``layers`` have its dims, or more in front.
        """
        shape, own = self.tape.shape(ref), list(self[ref])
        alike = range(len(shape)) if ref.index in self.uniform else self.flexible.get(ref.index, set())
        if not alike or self.tape.values[ref.index].kind != "result":
            return
        for layer in layers:
            offset = layer.ids.dim() - len(shape)
            dims = {dim - offset for dim in layer.dims}
            fits = dims <= set(alike) and all(shape[dim] == layer.ids.shape[dim + offset] for dim in dims)
            if offset >= 0 and dims and fits and not any(set(item.dims) & dims for item in own):
                own.append(replace(layer, ids=layer.ids.reshape(layer.ids.shape[offset:])))
        self._layers[ref.index] = tuple(own)

    def rigid_dim(self, layer: Layer, ref: Ref, ndim: int) -> int | None:
        """A dim where the ids of ``layer`` vary, but the tensor has a full axis of fixed size; None if there is none.

        An axis is no obstacle if the tensor has ids of its own that meet the layer (they are united, so that the units
        span that axis), or if its values are the same all along it.
        """
        if ref.index in self.uniform:
            return None
        if any(set(own.dims) & set(layer.dims) for own in self.aligned(ref, ndim)):
            return None
        shape, flexible = self.shape(ref), self.flexible.get(ref.index, set())
        offset = ndim - len(shape)
        for dim in layer.dims:
            if dim >= offset and shape[dim - offset] > 1 and dim - offset not in flexible:
                return dim
        return None

    def pass_flexible(self, refs: Sequence[Ref], outputs: Sequence[Ref]) -> None:
        """Results are the same all along a dim where every operand is."""
        for out in outputs:
            ndim = len(self.shape(out))
            dims = {dim for dim in range(ndim) if self.shape(out)[dim] > 1}
            for ref in refs:
                shape, own = self.shape(ref), self.flexible.get(ref.index, set())
                offset = ndim - len(shape)
                if ref.index not in self.uniform:
                    dims = {d for d in dims if d < offset or shape[d - offset] == 1 or d - offset in own}
            self.flexible[out.index] = dims

    # ---- combining layers -----------------------------------------------------------------------------------------

    def passing(self, ref: Ref, dims: Collection[int], reason: str) -> list[Layer]:
        """The layers of a tensor that vary along none of the dims; those of the others must stay."""
        passing = []
        for layer in self[ref]:
            if any(layer.varies(dim) for dim in dims):
                self.freeze(layer.ids, reason)
            else:
                passing.append(layer)
        return passing

    def along(self, ref: Ref, dim: int) -> Layer | None:
        """The first layer of a tensor that varies along ``dim``."""
        return next((layer for layer in self[ref] if layer.varies(dim)), None)

    def aligned(self, ref: Ref, ndim: int) -> list[Layer]:
        """Layers of a tensor with leading dims added, as broadcasting does."""
        return [
            replace(layer, ids=layer.ids.reshape((1,) * (ndim - layer.ids.dim()) + tuple(layer.ids.shape)))
            for layer in self[ref]
        ]

    def merge(self, layers: Iterable[Layer]) -> list[Layer]:
        """Layers that share a varying dim are united and kept once (the finest); others stand side by side."""
        merged: list[Layer] = []
        for layer in layers:
            if not layer.dims:
                merged.append(layer)
                continue
            for place, other in enumerate(merged):
                if other.ids is layer.ids:
                    break
                if set(layer.dims) & set(other.dims):
                    self.unite_layers(other, layer)
                    if set(layer.dims) > set(other.dims):
                        merged[place] = layer
                    if set(layer.dims) <= set(other.dims) or set(layer.dims) > set(other.dims):
                        break
            else:
                merged.append(layer)
        return merged
