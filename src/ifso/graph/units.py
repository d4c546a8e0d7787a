"""From ids and relations to units: connected components, minus what must stay, in groups with names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ifso.common.tensors import placed
from ifso.graph.channel_graph import STAYS, Balance, Frozen, Group, Layout, Member
from ifso.graph.channel_ids import PRODUCES, Axis, Labels

UNUSED = "is not used when the model runs on the example inputs"
COMPLEX = "holds complex numbers, which are not followed"
UNPRODUCED = "no layer of the model produces it as channels"


def components(size: int, edges: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """For each of ``size`` ids the smallest id it is connected to.

    >>> components(5, [(torch.tensor([0, 3]), torch.tensor([2, 4]))])
    tensor([0, 1, 0, 3, 3])
    """
    parent = torch.arange(size, device="cpu")
    pairs = list(edges)
    if not pairs:
        return parent
    left, right = torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs])
    while True:
        a, b = parent[left], parent[right]
        apart = a != b
        if not apart.any():
            return parent
        left, right, a, b = left[apart], right[apart], a[apart], b[apart]
        parent.scatter_reduce_(0, torch.maximum(a, b), torch.minimum(a, b), "amin")
        while not torch.equal(parent, parent[parent]):
            parent = parent[parent]


@dataclass
class Partition:
    """Which class each id is in, and what is known of each class (indexed by its smallest id)."""

    labels: Labels
    classes: Tensor
    reasons: dict[int, str]
    produced: Tensor
    balances: list[tuple[Tensor, str]]
    interleave: dict[tuple[str, int], int]

    def prunable(self) -> Tensor:
        """For each id: is its class produced by some layer and free to go?"""
        free = self.produced.clone()
        if self.reasons:
            free[torch.tensor(list(self.reasons), device="cpu")] = False
        return free[self.classes]


def partition(
    labels: Labels, more_frozen: Iterable[tuple[Tensor, str]] = (), more_balances: Iterable[tuple[Tensor, str]] = ()
) -> Partition:
    """Solve the relations noted in ``labels``, and what was learned since."""
    edges = list(labels.edges)
    classes = components(labels.size, edges)
    produced_ids = _ids_with_role(labels, PRODUCES)
    locks, interleave = _locks(labels, produced_ids)
    locked = [(rows, rows[:, :1].expand_as(rows)) for rows in locks if not _blocks_are_units(classes, rows.t())]
    if locked:
        edges += [(a.flatten(), b.flatten()) for a, b in locked]
        classes = components(labels.size, edges)
    balances = _real_balances(labels, classes, more_balances)
    produced = torch.zeros(labels.size, dtype=torch.bool, device="cpu")
    produced[classes[produced_ids]] = True
    result = Partition(labels, classes, {}, produced, balances, interleave)
    for ids, reason in [*labels.frozen, *more_frozen]:
        _freeze(result, ids, reason)
    _freeze_whole_axes(result)
    while _freeze_together(result) or _freeze_stuck_balances(result):
        pass
    return result


def _ids_with_role(labels: Labels, role: str) -> Tensor:
    found = [ids for ids, own in labels.roles if own == role]
    return torch.cat(found).unique() if found else torch.zeros(0, dtype=torch.long, device="cpu")


def _freeze(result: Partition, ids: Tensor, reason: str) -> None:
    for name in result.classes[ids].unique().tolist():
        result.reasons.setdefault(name, reason)


def _blocks_are_units(classes: Tensor, blocks: Tensor) -> bool:
    found = classes[blocks]
    return bool((found == found[:, :1]).all())


def _locks(labels: Labels, produced_ids: Tensor) -> tuple[list[Tensor], dict[tuple[str, int], int]]:
    """Shuffled axes whose order is fixed by something, and those whose order parameters can follow."""
    locks = list(labels.locks)
    seen: dict[Axis, list[tuple[int, Tensor]]] = {}
    for axis, period, ids in labels.attached:
        seen.setdefault(axis, []).append((period, ids))
    produced = torch.zeros(labels.size, dtype=torch.bool, device="cpu")
    produced[produced_ids] = True
    interleave = {}
    for axis, uses in seen.items():
        periods = {period for period, _ in uses}
        if periods == {0}:
            continue
        if len(periods) > 1 or bool(produced[axis.first]):
            locks += [ids.view(-1, period) for period, ids in uses if period]
        else:
            interleave[axis.name, axis.dim] = periods.pop()
    return locks, interleave


def _real_balances(labels: Labels, classes: Tensor, more: Iterable[tuple[Tensor, str]]) -> list[tuple[Tensor, str]]:
    """Balances that ask for something: not those of whole units, nor of blocks that hold the same classes."""
    real: list[tuple[Tensor, str]] = []
    seen: set[tuple[int, ...]] = set()
    splits = [(blocks, where) for blocks, where in labels.splits if not _blocks_are_units(classes, blocks)]
    for blocks, where in [*labels.balances, *splits, *more]:
        found = classes[blocks].sort(1).values
        if blocks.shape[0] < 2 or bool((found == found[:1]).all()):
            continue
        key = (*found.shape, *found.flatten().tolist())
        if key not in seen:
            seen.add(key)
            real.append((blocks, where))
    return real


def _freeze_whole_axes(result: Partition) -> None:
    """A unit that is all there is along some axis can never go."""
    for axis in result.labels.axes:
        found = result.classes[axis.first : axis.first + axis.size]
        name = int(found[0])
        if bool(result.produced[name]) and bool((found == name).all()):
            result.reasons.setdefault(name, f"all of {axis.name} (dim {axis.dim}) is coupled into one unit")


def _freeze_together(result: Partition) -> bool:
    """Where one part of an axis must stay, all must. Did that freeze anything?"""
    for ids in result.labels.together:
        names = result.classes[ids].unique().tolist()
        reason = next((result.reasons[name] for name in names if name in result.reasons), None)
        if reason is not None and any(name not in result.reasons for name in names):
            _freeze(result, ids, reason)
            return True
    return False


def _freeze_stuck_balances(result: Partition) -> bool:
    """Blocks must lose equally many: if one can lose none, none can. Did that freeze anything?"""
    free = result.prunable()
    for blocks, where in result.balances:
        can = free[blocks].any(1)
        if bool(can.any()) and not bool(can.all()):
            _freeze(
                result, blocks[can].flatten(), f"must keep as many as channels that stay (in {where or 'the model'})"
            )
            return True
    return False


@dataclass
class Units:
    """Units numbered group by group; ``of`` gives the unit number of each id, or STAYS."""

    groups: tuple[Group, ...]
    frozen: tuple[Frozen, ...]
    balances: tuple[Balance, ...]
    layouts: dict[str, Layout]
    of: Tensor


def build(result: Partition) -> Units:
    """Number the free classes, name the groups, and say what is frozen."""
    labels, classes = result.labels, result.classes
    spots = _spots(labels)
    names = classes[result.prunable()].unique()
    names = names[_first_producer(labels, classes)[names].argsort(stable=True)]
    alike: dict[int, list[int]] = {}
    for name, sign in zip(names.tolist(), _signatures(labels, classes, spots)[names].tolist(), strict=True):
        alike.setdefault(sign, []).append(name)
    unit_of_class = torch.full((labels.size,), STAYS, device="cpu")
    numbered = [name for found in alike.values() for name in found]
    unit_of_class[torch.tensor(numbered, dtype=torch.long, device="cpu")] = torch.arange(len(numbered), device="cpu")
    of = unit_of_class[classes]
    balances = tuple(Balance(of[blocks], where) for blocks, where in result.balances if bool((of[blocks] >= 0).any()))
    groups = _groups([len(found) for found in alike.values()], of, spots, labels)
    return Units(groups, _frozen(result, of, spots), balances, _layouts(labels, of, result.interleave), of)


def _groups(sizes: list[int], of: Tensor, spots: list[_Spot], labels: Labels) -> tuple[Group, ...]:
    group_of_unit = torch.repeat_interleave(
        torch.arange(len(sizes), device="cpu"), torch.tensor(sizes, dtype=torch.long, device="cpu")
    )
    firsts = [sum(sizes[:number]) for number in range(len(sizes))]
    roles = _roles(labels)
    members: list[list[Member]] = [[] for _ in sizes]
    for spot in spots:
        units = of[spot.ids]
        present = group_of_unit[units[units >= 0]].unique().tolist()
        role = _role(spot, spots, roles)
        for number in present:
            mine = (units >= firsts[number]) & (units < firsts[number] + sizes[number])
            owner = torch.where(mine, units - firsts[number], -1)
            members[number].append(Member(spot.name, spot.dim, role, owner, sizes[number]))
    flags: list[set[str]] = [set() for _ in sizes]
    for ids, flag, _ in labels.flags_for(of):
        units = of[ids]
        for number in group_of_unit[units[units >= 0]].unique().tolist():
            flags[number].add(flag)
    taken: set[str] = set()
    return tuple(
        Group(_name(members[number], taken), firsts[number], size, tuple(members[number]), frozenset(flags[number]))
        for number, size in enumerate(sizes)
    )


@dataclass(frozen=True)
class _Spot:
    """A place where classes live: an axis, or the ragged input axis of a grouped convolution."""

    name: str
    dim: int
    ids: Tensor


def _spots(labels: Labels) -> list[_Spot]:
    spots = []
    for axis in labels.axes:
        if axis.name in labels.ragged and axis.dim == 1:
            continue
        spots.append(_Spot(axis.name, axis.dim, torch.arange(axis.first, axis.first + axis.size, device="cpu")))
    spots += [_Spot(name, 1, table.reshape(table.shape[0], -1)) for name, table in labels.ragged.items()]
    return spots


def _signatures(labels: Labels, classes: Tensor, spots: list[_Spot]) -> Tensor:
    """A hash, per class, of the set of places it lives in."""
    random = torch.Generator().manual_seed(0)
    hashes = torch.randint(-(2**62), 2**62, (len(spots),), generator=random, device="cpu")
    signature = torch.zeros(labels.size, dtype=torch.long, device="cpu")
    for spot, number in zip(spots, hashes, strict=True):
        signature[classes[spot.ids].unique()] += number
    return signature


def _first_producer(labels: Labels, classes: Tensor) -> Tensor:
    order = torch.full((labels.size,), labels.size, device="cpu")
    ids = _ids_with_role(labels, PRODUCES)
    return order.scatter_reduce(0, classes[ids], ids, "amin")


def _roles(labels: Labels) -> dict[int, str]:
    """Role of each axis by its first id."""
    roles: dict[int, str] = {}
    for ids, role in labels.roles:
        if ids.numel():
            first = int(ids[0])
            if roles.get(first) != PRODUCES:
                roles[first] = role
    return roles


def _role(spot: _Spot, spots: list[_Spot], roles: dict[int, str]) -> str:
    """What an axis does.

    The second axis of a grouped convolution, which has a row for each position of the first, does the opposite of the
    first: that is the output or, if the convolution is transposed, the input.
    """
    if spot.ids.dim() == 1:
        return roles.get(int(spot.ids[0]), "follows")
    lines = [other for other in spots if other.name == spot.name and other.dim == 0 and other.ids.dim() == 1]
    return "produces" if lines and _role(lines[0], spots, roles) == "consumes" else "consumes"


def _name(members: list[Member], taken: set[str]) -> str:
    producer = next((member for member in members if member.role == PRODUCES), members[0])
    base = producer.parameter.rpartition(".")[0] or producer.parameter
    name, number = base, 2
    while name in taken:
        name, number = f"{base}#{number}", number + 1
    taken.add(name)
    return name


def _frozen(result: Partition, of: Tensor, spots: list[_Spot]) -> tuple[Frozen, ...]:
    labels = result.labels
    touched = torch.zeros(labels.size, dtype=torch.bool, device="cpu")
    for ids in [*(ids for pair in labels.edges for ids in pair), *(ids for ids, _ in [*labels.frozen, *labels.roles])]:
        touched[ids] = True
    reasons = list(dict.fromkeys([UNPRODUCED, *result.reasons.values()]))
    number = {reason: place for place, reason in enumerate(reasons)}
    reason_of = torch.zeros(labels.size, dtype=torch.long, device="cpu")
    for name, reason in result.reasons.items():
        reason_of[name] = number[reason]
    found = []
    for spot in spots:
        ids = spot.ids if spot.ids.dim() == 1 else spot.ids[0]
        stays = ((of[ids] == STAYS) & touched[ids]).nonzero().flatten()
        why = reason_of[result.classes[ids[stays]]]
        for place in why.unique().tolist():
            index = tuple(stays[why == place].tolist())
            found.append(Frozen(spot.name, spot.dim, reasons[place], index))
    return (*found, *_unused(labels))


def _unused(labels: Labels) -> list[Frozen]:
    seen = {axis.name for axis in labels.axes}
    unseen = (value for value in labels.tape.values if value.kind == "parameter" and value.name not in seen)
    return [
        Frozen(v.name, 0, COMPLEX if v.dtype.is_complex else UNUSED, tuple(range(v.shape[0])))
        for v in unseen
        if max(v.shape, default=1) > 1
    ]


def _layouts(labels: Labels, of: Tensor, interleave: dict[tuple[str, int], int]) -> dict[str, Layout]:
    shapes = {value.name: value.shape for value in labels.tape.values if value.name}
    layers: dict[str, list[Tensor]] = {}
    for axis in labels.axes:
        if axis.name in labels.ragged and axis.dim == 1:
            continue
        units = of[axis.first : axis.first + axis.size]
        if bool((units != STAYS).any()):
            layers.setdefault(axis.name, []).append(placed(units, axis.dim, len(shapes[axis.name])))
    for name, table in labels.ragged.items():
        if bool((of[table] != STAYS).any()):
            layers.setdefault(name, []).append(of[table])
    shuffled: dict[str, dict[int, int]] = {}
    for (name, dim), period in [*interleave.items(), *(((n, 1), p) for n, p in labels.ragged_period.items())]:
        shuffled.setdefault(name, {})[dim] = period
    return {name: Layout(shapes[name], tuple(found), shuffled.get(name, {})) for name, found in layers.items()}
