"""What ``ifso.trace`` returns: which channels must go together, which must stay, and why.

A *unit* is the smallest thing that can be removed: one channel and every slice of every parameter coupled to it.
Units are numbered through the whole network; a *group* is a run of units whose slices lie in the same parameters.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ifso.errors import KeepError
from ifso.graph.naming import Wiring

if TYPE_CHECKING:
    from ifso.graph.layouts import Term

STAYS = -1
"""The unit number of a slice that belongs to no unit and is never removed."""

Keep = Mapping[str, Tensor]
"""For each named group a bool tensor over its units: True stays, False goes. Groups left out stay whole."""


@dataclass(frozen=True, eq=False)
class Member:
    """A parameter (or buffer) axis that loses slices when units of the group are removed.

    Attributes:
        parameter: its name in the model.
        dim: the axis.
        role: ``"produces"`` (the units are computed by these slices), ``"consumes"`` (they are read by them) or
            ``"follows"`` (norms, biases, gains).
        owner: for each position along ``dim`` the unit of the group it belongs to, or -1. In a grouped convolution it
            has a row for each output channel, since positions along ``dim`` 1 mean other channels in each group.
        size: units of the group.
    """

    parameter: str
    dim: int
    role: str
    owner: Tensor
    size: int

    @cached_property
    def index(self) -> tuple[tuple[int, ...], ...]:
        """For each unit of the group the positions along ``dim`` that it owns."""
        owner = self.owner.reshape(-1, self.owner.shape[-1])
        positions = torch.arange(owner.shape[-1], device="cpu").expand(owner.shape)
        taken = owner >= 0
        pairs = torch.stack([owner[taken], positions[taken]], 1).unique(dim=0)
        counts = torch.bincount(pairs[:, 0], minlength=self.size).tolist()
        return tuple(tuple(part.tolist()) for part in pairs[:, 1].split(counts))


@dataclass(frozen=True)
class Group:
    """Units that are coupled in the same places.

    Attributes:
        name: that of the first layer that makes the units.
        first: the number of its first unit in the whole network.
        size: how many units there are.
        members: the axes that lose slices with them.
        flags: why zeros alone would not be the same as removal, such as ``"layer norm"``.
    """

    name: str
    first: int
    size: int
    members: tuple[Member, ...]
    flags: frozenset[str] = frozenset()

    @property
    def units(self) -> slice:
        """Where the group's units stand among all units of the network."""
        return slice(self.first, self.first + self.size)


@dataclass(frozen=True)
class Frozen:
    """A parameter axis, or a part of it, that cannot be pruned.

    Attributes:
        parameter: its name in the model.
        dim: the axis.
        reason: why, in words.
        index: the positions along the axis.
    """

    parameter: str
    dim: int
    reason: str
    index: tuple[int, ...]


@dataclass(frozen=True)
class Balance:
    """Rows of ``blocks`` [blocks, size] hold unit numbers; each row must keep equally many. ``where`` asked for it."""

    blocks: Tensor
    where: str

    def counts(self, kept: Tensor) -> Tensor:
        """Number of slices each block keeps, from the bool vector of :meth:`ChannelGraph.kept`."""
        return kept[self.blocks].sum(1)


@dataclass(frozen=True)
class Layout:
    """Which unit each slice of a parameter or buffer belongs to.

    Every layer is an integer tensor broadcastable to ``shape`` that holds unit numbers (``STAYS`` where nothing goes);
    an element survives if all its layers do. ``interleave[dim] = g`` says that the axis is a shuffle of ``g`` blocks,
    so that the surviving slices must be dealt out to the blocks in turn.
    """

    shape: tuple[int, ...]
    layers: tuple[Tensor, ...]
    interleave: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class SizeAttribute:
    """A Python number on a module that equals a number of channels and must follow it.

    ``labels`` [rows, n] are the unit numbers along the axis it measures: its new value is how many of a row are kept
    (rows that keep any keep equally many).
    ``position`` is the place in a tuple or list attribute, None for a plain int.
    """

    module: str
    name: str
    position: int | None
    labels: Tensor

    def value(self, kept: Tensor) -> int:
        """The number for what is kept."""
        return int(kept[self.labels].sum(-1).max())

    def changes(self, kept: Tensor) -> bool:
        """Return whether the number is another one for what is kept."""
        return self.value(kept) != self.labels.shape[-1]


@dataclass
class ChannelGraph:
    """The coupled channels of one network, as found by :func:`ifso.trace`.

    Attributes:
        groups: units that go together, in the order of the network.
        frozen: what cannot be pruned, with reasons.
        balances: units of which equally many must stay.
        layouts: which unit each slice of a parameter or buffer belongs to, by name.
        attributes: Python numbers that follow the channels.
        terms: blocks of elements that costs add up.
        inputs: the example inputs.
        output_shapes: shapes of the outputs on them.
        reductions: calls that take statistics over channels, with the units they see.
        unmasked: parameters and dims of which a mask leaves alone what is removed.
        gains: gains that are masked for a normed weight: the parameter and dim they stand for, by name.
        written: names of what the model writes while it runs.
        wiring: class and settings of each module, by name.
        modes: which modules were in train mode.
        on_real_tensors: whether the model ran with values, since they decide its course.
        recording: what was recorded, for removals to be rehearsed.
        notes: what a user should know of the trace.
    """

    groups: tuple[Group, ...]
    frozen: tuple[Frozen, ...]
    balances: tuple[Balance, ...]
    layouts: dict[str, Layout]
    attributes: tuple[SizeAttribute, ...]
    terms: tuple[Term, ...]
    inputs: Any
    output_shapes: tuple[tuple[int, ...], ...]
    reductions: dict[Any, Any] = field(default_factory=dict, repr=False)
    unmasked: frozenset[tuple[str, int]] = frozenset()
    gains: dict[str, tuple[str, int]] = field(default_factory=dict, repr=False)
    written: frozenset[str] = frozenset()
    wiring: Wiring = field(default_factory=dict, repr=False)
    modes: tuple[bool, ...] = field(default=(), repr=False)
    on_real_tensors: bool = False
    recording: Any = field(default=None, repr=False)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._by_name = {group.name: group for group in self.groups}

    @property
    def num_units(self) -> int:
        """Units in all groups together."""
        return sum(group.size for group in self.groups)

    def group(self, name: str) -> Group:
        """The group of that name."""
        if name not in self._by_name:
            known = ", ".join(list(self._by_name)[:5])
            raise KeepError(f"no group named {name!r} in this graph; groups are {known}, … (see graph.groups)")
        return self._by_name[name]

    def masking(self, name: str) -> Layout | None:
        """What of a parameter or buffer is zero while units are masked: all but its ``unmasked`` dims; None if nothing.

        A weight norm would divide the rows of removed channels by a length of zero: its ``gains``, by name with the
        parameter and dim they are for, are zero instead.
        """
        layout = self.layouts.get(name)
        if layout is None:
            return None
        spared = {dim for parameter, dim in self.unmasked if parameter == name}
        layers = [item for item in layout.layers if not any(item.shape[dim] > 1 for dim in spared)]
        return replace(layout, layers=tuple(layers)) if layers else None

    def keep_all(self) -> dict[str, Tensor]:
        """A ``keep`` that removes nothing."""
        return {group.name: torch.ones(group.size, dtype=torch.bool, device="cpu") for group in self.groups}

    def kept(self, keep: Keep | None) -> Tensor:
        """``keep`` as one bool vector over all units, with a last entry True so that ``kept[STAYS]`` is True."""
        kept = torch.ones(self.num_units + 1, dtype=torch.bool, device="cpu")
        if keep is not None and not isinstance(keep, Mapping):
            raise KeepError(f"keep must be {{group name: bool tensor}}, got {type(keep).__name__}")
        if keep is not None and not keep and self.groups:
            raise KeepError("keep is empty; give {group name: bool tensor}, starting from graph.keep_all()")
        for name, choice in (keep or {}).items():
            group = self.group(name)
            choice = torch.as_tensor(choice).cpu()
            if choice.dtype != torch.bool:
                raise KeepError(f"keep[{name!r}] has dtype {choice.dtype}; give a bool tensor (True stays)")
            if choice.shape != (group.size,):
                raise KeepError(
                    f"keep[{name!r}] has shape {tuple(choice.shape)}; group {name!r} has {group.size} units"
                )
            kept[group.units] = choice
        return kept

    def __str__(self) -> str:
        from ifso.graph.printing import render

        return render(self)


def by_group(graph: ChannelGraph, vector: Tensor) -> dict[str, Tensor]:
    """The parts of a vector over all units, copied, by name of the group."""
    return {group.name: vector[group.units].clone() for group in graph.groups}


def group_of(graph: ChannelGraph, unit: int) -> Group:
    """The group of a unit, by its number in the whole network."""
    return graph.groups[bisect_right(graph.groups, unit, key=lambda group: group.first) - 1]
