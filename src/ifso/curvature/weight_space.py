"""The weights ``W`` as one vector, and the masks ``M`` that scale their slices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ifso.errors import ScoreError
from ifso.graph.channel_graph import STAYS, ChannelGraph, Group, Member
from ifso.graph.layouts import surviving

WEIGHT_SETS = ("layers", "all")
_LAYER_KINDS = ("conv", "linear")


@dataclass(frozen=True)
class WeightSpace:
    """The tensors that make up ``W``, laid end to end in one vector."""

    tensors: Mapping[str, Tensor]

    @property
    def size(self) -> int:
        """Length of the vector."""
        return sum(tensor.numel() for tensor in self.tensors.values())

    def flat(self, parts: Mapping[str, Tensor | None]) -> Tensor:
        """Parts by name as one vector; a missing part counts as zeros."""
        pieces = [parts.get(name) for name in self.tensors]
        pairs = zip(pieces, self.tensors.values(), strict=True)
        return torch.cat([(like.new_zeros(like.shape) if part is None else part).reshape(-1) for part, like in pairs])

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """The vector's parts by name, in the shapes of the weights."""
        pieces = vector.split([tensor.numel() for tensor in self.tensors.values()])
        return {name: piece.view(like.shape) for (name, like), piece in zip(self.tensors.items(), pieces, strict=True)}

    def current(self) -> Tensor:
        """The weights themselves, copied into one vector."""
        return self.flat({name: tensor.detach() for name, tensor in self.tensors.items()})

    @torch.no_grad()
    def assign_(self, vector: Tensor) -> None:
        """Put the numbers of a vector into the weights."""
        for name, part in self.split(vector).items():
            self.tensors[name].copy_(part)


def weight_space(model: nn.Module, graph: ChannelGraph, weights: str = "layers") -> WeightSpace:
    """``W`` of a model: the kernels and matrices of its conv and linear layers, or ``"all"`` trainable parameters."""
    if weights not in WEIGHT_SETS:
        raise ScoreError(f"weights={weights!r} is unknown; choose one of {', '.join(WEIGHT_SETS)}")
    layers = {term.where for term in graph.terms if term.kind in _LAYER_KINDS}
    coupled = {member.parameter for group in graph.groups for member in group.members if member.role != "follows"}
    tensors = {}
    for name, parameter in model.named_parameters():
        in_layer = name in coupled or (parameter.dim() > 1 and name.rpartition(".")[0] in layers)
        if parameter.requires_grad and (weights == "all" or in_layer):
            tensors[name] = parameter
    if not tensors:
        raise ScoreError(
            f"{type(model).__name__} has no trainable conv or linear layer, so there are no weights to differentiate; "
            "check requires_grad, or choose another model"
        )
    return WeightSpace(tensors)


@dataclass(frozen=True)
class Reader:
    """A parameter whose slices along ``dim`` are scaled by mask entries.

    ``owner`` holds the number (in the whole network) of the unit that each position along ``dim`` reads, ``STAYS``
    where it reads no unit. For a grouped convolution it has a row for each output channel.
    """

    parameter: str
    dim: int
    owner: Tensor

    def spread(self, entries: Tensor, shape: torch.Size) -> Tensor:
        """Mask entries, one per unit and a last one for ``STAYS``, as a factor broadcastable to the parameter."""
        sizes = [1] * len(shape)
        sizes[self.dim] = shape[self.dim]
        if self.owner.dim() > 1:
            sizes[0] = shape[0]
        return entries[self.owner].view(sizes)

    def gather(self, parts: Tensor, num_units: int) -> Tensor:
        """Sum over the slices of each unit [num_units] of numbers of the parameter's shape."""
        kept = (0, self.dim) if self.owner.dim() > 1 else (self.dim,)
        rest = [dim for dim in range(parts.dim()) if dim not in kept]
        line = parts.sum(rest) if rest else parts
        return sum_by_unit(line, self.owner, num_units)

    def channels(self, groups: int) -> Tensor:
        """The unit of every input channel of a convolution with that many groups, or of a linear layer."""
        if self.owner.dim() == 1 and groups == 1:
            return self.owner
        rows = self.owner.expand(groups, -1) if self.owner.dim() == 1 else self.owner
        return rows.reshape(groups, -1, self.owner.shape[-1])[:, 0].flatten()


def sum_present(*parts: Tensor | None) -> Tensor | None:
    """The sum of the parts that are not None; None if all are."""
    present = [part for part in parts if part is not None]
    return sum(present[1:], present[0]) if present else None


def survivors(space: WeightSpace, graph: ChannelGraph, kept: Tensor) -> dict[str, Tensor]:
    """For each part of ``W`` a bool tensor of its shape: which weights are left when units go."""
    return {
        name: surviving(graph.layouts[name], kept).to(tensor.device).expand(tensor.shape)
        if name in graph.layouts
        else torch.ones_like(tensor, dtype=torch.bool)
        for name, tensor in space.tensors.items()
    }


def sum_by_unit(values: Tensor, owner: Tensor, num_units: int) -> Tensor:
    """Sum of the values that each unit owns; what ``STAYS`` owns is dropped."""
    total = values.new_zeros(num_units + 1)
    return total.index_add_(0, unit_indices(owner, num_units).flatten(), values.flatten())[:num_units]


def unit_indices(owner: Tensor, num_units: int) -> Tensor:
    """Indices of each owner in a vector of all units with a last entry for ``STAYS``.

    >>> unit_indices(torch.tensor([0, 1, STAYS]), 5)
    tensor([0, 1, 5])
    """
    return owner.masked_fill(owner == STAYS, num_units)


def readers(graph: ChannelGraph, device: torch.device | str = "cpu") -> list[Reader]:
    """Where the masks act: on the slices that read a unit, as in the paper.

    A unit that no weight reads (queries and keys, which meet only each other) is masked where it is made, and one that
    a weight norm reads too: a norm makes up for what is scaled before it. There gains are scaled.
    """
    return slices_of(((group, member) for group in graph.groups for member in _masked_members(group, graph)), device)


def slices_of(members: Iterable[tuple[Group, Member]], device: torch.device | str = "cpu") -> list[Reader]:
    """Each parameter and dim among these members of groups once, its units numbered through the whole network."""
    owners: dict[tuple[str, int], Tensor] = {}
    for group, member in members:
        owner = torch.where(member.owner >= 0, member.owner + group.first, STAYS)
        key = (member.parameter, member.dim)
        owners[key] = torch.maximum(owners[key], owner) if key in owners else owner
    return [Reader(name, dim, owner.to(device)) for (name, dim), owner in owners.items()]


def _masked_members(group: Group, graph: ChannelGraph) -> list[Member]:
    reading = [member for member in group.members if member.role == "consumes"]
    normed = {parameter for parameter, _ in graph.gains.values()}
    if reading and not any(member.parameter in normed for member in reading):
        return reading
    made = [member for member in group.members if member.role == "produces"]
    layers = (member.parameter.rpartition(".")[0].removesuffix(".parametrizations.weight") for member in made)
    beside = {f"{layer}.bias" for layer in layers}
    return made + [member for member in group.members if member.parameter in beside]
