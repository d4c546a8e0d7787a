"""The network of a run: its layers in order, what is coupled, what is frozen, and what is left of each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ifso.costs.cost import MAC_KINDS, count
from ifso.graph import channel_graph
from ifso.runs.values import listing, mapping, objects, text, whole, wholes
from ifso.surgery.recipe import Recipe, Round

MOST_UNITS = 2**20
"""A group of more units than this is not one of a network."""

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class MemberRecord:
    """An axis of a parameter that loses slices; ``positions`` of them belong to the group."""

    parameter: str
    dim: int
    role: str
    positions: int

    @property
    def layer(self) -> str:
        """The module it belongs to."""
        return layer_of(self.parameter)


@dataclass(frozen=True)
class GroupRecord:
    """Units that go together; ``gone`` are the removed ones by their place, with the number of the removal if known."""

    name: str
    size: int
    flags: tuple[str, ...]
    members: tuple[MemberRecord, ...]
    gone: Mapping[int, int | None]

    @property
    def kept(self) -> int:
        """Units that are left."""
        return self.size - len(self.gone)


@dataclass(frozen=True)
class LayerRecord:
    """Output channels of a layer before and after, and the groups (by number) that they belong to.

    ``params`` are its parameters before and after, ``macs`` its multiply-adds, if the folder has them.
    """

    name: str
    channels: int
    kept: int
    groups: tuple[int, ...]
    params: tuple[int, int] = (0, 0)
    macs: tuple[int, int] | None = None


@dataclass(frozen=True)
class ReasonRecord:
    """Why something cannot be pruned: how many channels (slices along axes) of which parameters."""

    reason: str
    slices: int
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Structure:
    """All that is known of the network."""

    groups: tuple[GroupRecord, ...] = ()
    layers: tuple[LayerRecord, ...] = ()
    frozen: tuple[ReasonRecord, ...] = ()

    @property
    def coupled(self) -> dict[int, int]:
        """Groups that more than one layer writes into, numbered from 1 in order."""
        writers = Counter(number for layer in self.layers for number in layer.groups)
        several = [number for number in range(len(self.groups)) if writers[number] > 1]
        return {number: place for place, number in enumerate(several, 1)}


def layer_of(parameter: str) -> str:
    """The module that a parameter belongs to.

    >>> layer_of("layer1.0.conv2.weight"), layer_of("cls_token")
    ('layer1.0.conv2', 'cls_token')
    """
    return parameter.rpartition(".")[0] or parameter


def from_document(
    document: Mapping[str, Any], gone: Mapping[str, Mapping[int, int | None]], recipe: Recipe | None = None
) -> Structure:
    """From ``structure.json``; ``gone`` are removed units by group, with the number of the removal if known.

    A recipe says what is left of each parameter; without it that follows from the units.
    """
    shapes = {name: wholes(shape) for name, shape in mapping(document.get("shapes")).items()}
    groups = [found for each in objects(document.get("groups")) if (found := _group(each, gone)) is not None]
    frozen = [each for each in objects(document.get("frozen")) if text(each.get("parameter"))]
    fixed = {each["parameter"] for each in frozen if not whole(each.get("dim"))}
    macs = {name: each for name, each in mapping(document.get("macs")).items() if whole(each) is not None}
    return Structure(tuple(groups), tuple(_layers(groups, shapes, fixed, recipe, macs)), tuple(_reasons(frozen)))


def document_of(recipe: Recipe) -> dict[str, Any]:
    """What ``structure.json`` would say, as far as a recipe knows; the first axis of a weight is taken for its output.

    MACs are not told, nor costs.
    """
    shapes = {name: list(change.before) for name, change in recipe.shapes.items()}
    last = recipe.rounds[-1] if recipe.rounds else Round()
    groups = []
    for group in last.groups:
        members = [{"parameter": name, "dim": dim, "role": _role(shapes, name, dim)} for name, dim in group.members]
        groups.append({"name": group.name, "size": group.size, "flags": list(group.flags), "members": members})
    frozen = [
        {"parameter": each.parameter, "dim": each.dim, "reason": each.reason,
         "slices": _size(shapes, each.parameter, each.dim)}
        for each in last.frozen
    ]  # fmt: skip
    return {"groups": groups, "frozen": frozen, "shapes": shapes}


def _role(shapes: Shapes, parameter: str, dim: int) -> str:
    if len(shapes.get(parameter, ())) < 2:
        return "follows"
    return "produces" if dim == 0 else "consumes"


def _size(shapes: Shapes, parameter: str, dim: int) -> int:
    shape = shapes.get(parameter, ())
    return shape[dim] if dim < len(shape) else 0


def _group(document: Mapping[str, Any], gone: Mapping[str, Mapping[int, int | None]]) -> GroupRecord | None:
    name, size = text(document.get("name")), whole(document.get("size"))
    if name is None or not size or size > MOST_UNITS:
        return None
    flags = tuple(flag for flag in listing(document.get("flags")) if isinstance(flag, str))
    members = tuple(
        MemberRecord(
            parameter, whole(each.get("dim")) or 0, text(each.get("role")) or "follows",
            whole(each.get("positions")) or size,
        )
        for each in objects(document.get("members")) if (parameter := text(each.get("parameter"))) is not None
    )  # fmt: skip
    lost = {place: when for place, when in gone.get(name, {}).items() if place < size}
    return GroupRecord(name, size, flags, members, lost)


def _layers(
    groups: Sequence[GroupRecord],
    shapes: Shapes,
    frozen: Collection[str],
    recipe: Recipe | None,
    macs: Mapping[str, int],
) -> Iterator[LayerRecord]:
    """Every weight of two axes or more that writes channels, in the order of the network.

    Those called in ``frozen`` write some that cannot be pruned.
    """
    writers: dict[str, dict[int, MemberRecord]] = {}
    for number, group in enumerate(groups):
        for member in group.members:
            if len(shapes.get(member.parameter, ())) >= 2 and _writes(member):
                writers.setdefault(member.parameter, {})[number] = member
    after = _shapes_after(groups, shapes, recipe)
    for parameter, shape in shapes.items():
        parts = writers.get(parameter, {})
        dim = next((member.dim for member in parts.values()), 0)
        size = _size(shapes, parameter, dim)
        if size and (parts or (parameter in frozen and len(shape) >= 2)):
            before, left = math.prod(shape), math.prod(after[parameter])
            bias = f"{parameter.removesuffix('weight')}bias"
            params = (before + math.prod(shapes[bias]), left + math.prod(after[bias])) if bias in shapes else None
            work = (macs[parameter], macs[parameter] * left // before) if parameter in macs and before else None
            yield LayerRecord(
                layer_of(parameter), size, after[parameter][dim], tuple(parts), params or (before, left), work
            )


def _shapes_after(groups: Sequence[GroupRecord], shapes: Shapes, recipe: Recipe | None) -> dict[str, list[int]]:
    """Shapes of what is left: those of the recipe, else what follows from the units that went."""
    lost: dict[tuple[str, int], float] = {}
    for group in groups:
        for member in group.members:
            key = member.parameter, member.dim
            lost[key] = lost.get(key, 0.0) + member.positions * len(group.gone) / max(group.size, 1)
    changed = {} if recipe is None else {name: change.after for name, change in recipe.shapes.items()}
    return {
        name: [
            max(changed[name][dim] if dim < len(changed.get(name, ())) else size - round(lost.get((name, dim), 0)), 0)
            for dim, size in enumerate(shape)
        ]
        for name, shape in shapes.items()
    }


def _writes(member: MemberRecord) -> bool:
    return member.role == "produces" or (member.role == "follows" and member.dim == 0)


def _reasons(frozen: Sequence[Mapping[str, Any]]) -> list[ReasonRecord]:
    """By reason, the most channels first."""
    slices: Counter[str] = Counter()
    parameters: dict[str, dict[str, None]] = {}
    for axis in frozen:
        reason = text(axis.get("reason")) or "not told"
        slices[reason] += whole(axis.get("slices")) or 0
        parameters.setdefault(reason, {})[axis["parameter"]] = None
    return [ReasonRecord(reason, count, tuple(parameters[reason])) for reason, count in slices.most_common()]


def structure_of(graph: channel_graph.ChannelGraph) -> dict[str, Any]:
    """Groups with their members, what is frozen and why, shapes and costs of the network before the run.

    ``positions`` of a member are how many slices along its axis belong to the group; ``macs`` are the multiply-adds of
    the layers that make so many with each number of their weight.
    """
    frozen = [
        {"parameter": axis.parameter, "dim": axis.dim, "reason": axis.reason, "slices": len(axis.index)}
        for axis in graph.frozen
    ]
    shapes = {name: list(layout.shape) for name, layout in graph.layouts.items()}
    parameters = {term.where: list(term.shape) for term in graph.terms if term.kind == "parameter"}
    shapes = in_place(shapes, parameters)
    return {
        "groups": [_described(group) for group in graph.groups],
        "frozen": frozen,
        "shapes": shapes,
        "macs": _macs_of_weights(graph, shapes),
        "cost": count(graph, graph.kept(None)).as_dict(),
    }


def in_place(known: Mapping[str, Any], every: Mapping[str, Any]) -> dict[str, Any]:
    """All that is ``known``, and what else ``every`` has before that which comes after it there.

    >>> in_place({"b": 1, "b.mean": 2, "d": 3}, {"a": 4, "b": 5, "c": 6, "d": 7, "e": 8})
    {'a': 4, 'b': 1, 'b.mean': 2, 'c': 6, 'd': 3, 'e': 8}
    """
    before: dict[str | None, list[str]] = {}
    missing: list[str] = []
    for name in every:
        if name in known:
            before[name], missing = missing, []
        else:
            missing.append(name)
    found: dict[str, Any] = {}
    for name in known:
        found |= {other: every[other] for other in before.get(name, ())} if name in every else {}
        found[name] = known[name]
    return found | {name: every[name] for name in missing}


def _macs_of_weights(graph: channel_graph.ChannelGraph, shapes: Shapes) -> dict[str, int]:
    """Multiply-adds by the name of the weight, of layers that multiply with nothing else."""
    terms = [term for term in graph.terms if term.kind in MAC_KINDS]
    mixed = {term.where for term in terms if term.kind == "matmul"}
    macs: dict[str, int] = {}
    for term in terms:
        name = f"{term.where}.weight" if term.where else "weight"
        if term.where not in mixed and name in shapes:
            macs[name] = macs.get(name, 0) + math.prod(term.shape)
    return {name: number for name, number in macs.items() if number % math.prod(shapes[name]) == 0}


def _described(group: channel_graph.Group) -> dict[str, Any]:
    members = [
        {
            "parameter": member.parameter,
            "dim": member.dim,
            "role": member.role,
            "positions": int((member.owner >= 0).reshape(-1, member.owner.shape[-1]).any(0).sum()),
        }
        for member in group.members
    ]
    return {"name": group.name, "size": group.size, "flags": sorted(group.flags), "members": members}
