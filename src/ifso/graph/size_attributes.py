"""Finding the Python numbers that follow the channels, and freezing channels whose numbers cannot be found.

Each round rehearses the removal of some units of every group. A function that gives a wrong shape points at a number:
int attributes of the running module (or of one around it) with the old value are set to the new one. If no attribute
helps, the channels concerned are frozen, with the place as the reason.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ifso.common.module_state import read_attribute
from ifso.graph.channel_graph import STAYS, SizeAttribute
from ifso.graph.channel_ids import PADDED_BACK, PADDED_FRONT, Labels
from ifso.graph.dry_run import Problem, rehearse
from ifso.graph.naming import is_under
from ifso.graph.removal import Place, UnitRemoval, leave_one_whole, trial
from ifso.graph.tape import Ref, refs_in
from ifso.graph.units import Units, build, partition

ROUNDS = 20
SEARCH_ROUNDS = 8
TRIES_PER_MODULE = 4
MORE_FOR_WHOLE = 3
LIKELY = ("head", "dim", "channel", "chs", "width", "feature", "group", "planes", "embed", "hidden")
NEVER = (
    "kernel", "stride", "pad", "dilation", "shift", "window", "patch", "img", "image", "grid", "resolution",
    "depth", "layer", "level", "block", "stage", "seq", "token", "vocab", "class",
)  # fmt: skip

Candidate = tuple[Place, Tensor]
"""An attribute and the ids [rows, n] that it may count."""


@dataclass
class _Search:
    """What has been tried for the functions of one module, and how many problems it had before the last try."""

    tried: set[frozenset[Place]] = field(default_factory=set)
    last: frozenset[Place] = frozenset()
    before: int = 0
    tied: bool = False


def settle(
    model: nn.Module, inputs: Any, labels: Labels, on_real_tensors: bool
) -> tuple[Units, tuple[SizeAttribute, ...]]:
    """Units that can really be removed, and the attributes to set when they are."""
    settler = _Settler(model, inputs, labels, on_real_tensors)
    clean = 0
    whole: set[int] = set()
    for number in range(ROUNDS):
        units = settler.units()
        if not units.groups:
            break
        kept = trial(units, seed=number, everywhere=clean == 0 or bool(labels.together), halve=whole)
        if clean:
            kept = leave_one_whole(kept, units, labels.together, clean)
        problems, stuck = settler.rehearse(kept)
        if problems or stuck is not None:
            clean, whole = 0, set()
            settler.react(kept, problems, stuck, may_search=number < SEARCH_ROUNDS)
            continue
        unharmed = {place for place, group in enumerate(units.groups) if bool(kept[group.units].all())}
        whole = whole & unharmed if clean else unharmed
        clean += 1
        beyond = clean - (3 if labels.together else 2 if labels.splits or settler.found else 1)
        if beyond >= (0 if not whole or number == ROUNDS - 1 else MORE_FOR_WHOLE):
            break
    else:
        settler.frozen.append((torch.arange(labels.size, device="cpu"), "its removal could not be rehearsed"))
    settler.drop_needless()
    return settler.units(), settler.attributes()


class _Settler:
    """What is known so far: attributes found, channels frozen."""

    def __init__(self, model: nn.Module, inputs: Any, labels: Labels, on_real_tensors: bool) -> None:
        self.found: dict[Place, Tensor] = {}
        self.frozen: list[tuple[Tensor, str]] = []
        self.ties: list[tuple[Tensor, str]] = []
        self._model, self._modules = model, dict(model.named_modules())
        self._inputs, self._labels, self._on_real_tensors = inputs, labels, on_real_tensors
        self._searches: defaultdict[str, _Search] = defaultdict(_Search)
        self._built: tuple[tuple[int, ...], Units] | None = None
        self._rehearsed = self.units()

    def units(self) -> Units:
        """Units of what is not frozen."""
        state = (len(self.frozen), *(id(tie) for tie in self.ties))
        if self._built is None or self._built[0] != state:
            self._built = (state, build(partition(self._labels, self.frozen, self.ties)))
        return self._built[1]

    def attributes(self, without: Collection[Place] = ()) -> tuple[SizeAttribute, ...]:
        """Attributes known from the rules and found by rehearsing, as far as units that can go change them."""
        of = self.units().of
        places = {}
        for size in self._labels.sizes:
            for name in size.names:
                module = self._modules.get(size.module)
                if module is not None and read_attribute(module, name, size.position) == size.ids.numel():
                    places[size.module, name, size.position] = of[size.ids].view(1, -1)
        places |= {place: of[ids] for place, ids in self.found.items() if place not in without}
        return tuple(SizeAttribute(*place, units) for place, units in places.items() if bool((units != STAYS).any()))

    def rehearse(self, kept: Tensor, without: Collection[Place] = ()) -> tuple[list[Problem], str | None]:
        """The problems of a removal, and the module where it could not go on."""
        units, attributes = self.units(), self.attributes(without)
        return rehearse(
            self._model, UnitRemoval(units, attributes, kept, self._labels, self._inputs, self._on_real_tensors)
        )

    def drop_needless(self) -> None:
        """Forget attributes that the model runs without: they were taken along by chance, and may mean something else.

        One attribute of each module at a time is left as it is; a module that then has no problem does not need it.
        """
        by_module: dict[str, list[Place]] = {}
        for place in self.found:
            by_module.setdefault(place[0], []).append(place)
        units = self.units()
        for number in range(max(map(len, by_module.values()), default=0)):
            dropped = {module: places[number] for module, places in by_module.items() if number < len(places)}
            kept = trial(units, seed=100 + number, everywhere=True)
            problems, stuck = self.rehearse(kept, without=set(dropped.values()))
            if stuck is None:
                needed = {name for problem in problems for name in _around(problem.module)}
                changing = {(item.module, item.name, item.position) for item in self.attributes() if item.changes(kept)}
                for module, place in dropped.items():
                    if module not in needed and place in changing:
                        self.found.pop(place)

    def react(self, kept: Tensor, problems: list[Problem], stuck: str | None, may_search: bool) -> None:
        """Try attributes for each module that has problems; where none is left to try, freeze."""
        self._rehearsed = self.units()
        by_module: dict[str, list[Problem]] = {}
        for problem in problems:
            by_module.setdefault(problem.module, []).append(problem)
        acted = False
        for module, here in by_module.items():
            if may_search and any(
                found(module, here, kept) for found in (self._try_equal, self._try_attributes, self._try_tie)
            ):
                acted = True
                continue
            self.ties = [tie for tie in self.ties if tie[1] != module]
            self._forget({place for tried in self._searches[module].tried for place in tried})
            for problem in here:
                acted |= self._freeze_for(problem, kept)
        if stuck is not None and not acted:
            if may_search and self._try_attributes_alike(stuck, kept):
                return
            reason = f"Python code in {stuck or 'the model'} does not run with fewer of them"
            if not self._freeze_module(stuck, kept, reason):
                self.frozen.append((torch.arange(self._labels.size, device="cpu"), reason))

    # ---- attributes -----------------------------------------------------------------------------------------------

    def _forget(self, places: Collection[Place]) -> None:
        for place in places:
            self.found.pop(place, None)

    def _try_attributes(self, module: str, problems: list[Problem], kept: Tensor) -> bool:
        lines = [ids for problem in problems for ids in self._lines(problem, kept)]
        return self._try_proposal(module, lines, len(problems))

    def _try_attributes_alike(self, stuck: str, kept: Tensor) -> bool:
        """The same for a module whose code does not run on, and for all of its kind: what one insists on, all do."""
        kind = type(self._modules.get(stuck))
        alike = [name for name, module in self._modules.items() if type(module) is kind and name != stuck]
        if not self._try_proposal(stuck, self._lines_under(stuck, kept), 1):
            return False
        for name in alike:
            self._try_proposal(name, self._lines_under(name, kept), 1)
        return True

    def _lines_under(self, module: str, kept: Tensor) -> list[Tensor]:
        return [ids.view(1, -1) for ids in self._module_lines(module, kept)]

    def _try_proposal(self, module: str, lines: list[Tensor], problems: int) -> bool:
        search = self._searches[module]
        if problems >= search.before:
            self._forget(search.last)
        search.last = frozenset()
        proposal = next(self._proposals(module, lines), None)
        if proposal is None or len(search.tried) >= TRIES_PER_MODULE:
            return False
        search.last, search.before = frozenset(proposal), problems
        search.tried.add(search.last)
        self.found |= proposal
        return True

    def _proposals(self, module: str, lines: list[Tensor], again: bool = False) -> Iterator[dict[Place, Tensor]]:
        """Sets of attributes to try: all likely ones of the running module, then one at a time, then further out."""
        for name in _around(module):
            here = dict(self._candidates(name, lines))
            likely = {place: ids for place, ids in here.items() if any(word in place[1].lower() for word in LIKELY)}
            for proposal in (likely, *({place: ids} for place, ids in likely.items()), here):
                if proposal and (again or frozenset(proposal) not in self._searches[module].tried):
                    yield proposal

    def _candidates(self, name: str, lines: list[Tensor]) -> Iterator[Candidate]:
        """Int attributes of a module that hold an old size whose new one differs.

        Equal entries of one tuple or list stand for different axes, in turn.
        """
        module = self._modules.get(name)
        seen: Counter[tuple[str, int]] = Counter()
        for attribute, position, value in _numbers(module) if module is not None else ():
            fitting = [ids for ids in lines if ids.shape[-1] == value]
            different = [
                ids for place, ids in enumerate(fitting) if not any(ids.equal(other) for other in fitting[:place])
            ]
            if different:
                yield (name, attribute, position), different[min(seen[attribute, value], len(different) - 1)]
            seen[attribute, value] += 1

    def _lines(self, problem: Problem, kept: Tensor) -> Iterator[Tensor]:
        """Ids along each axis of the call's results and arguments that loses something."""
        of = self._rehearsed.of
        for ref in problem.call.refs:
            for layer in self._labels[ref]:
                for dim in layer.dims:
                    ids = layer.ids.movedim(dim, -1).reshape(-1, layer.ids.shape[dim])
                    if int(kept[of[ids]].sum(-1).max()) < ids.shape[-1]:
                        yield ids
        for size in self._labels.sizes:
            if size.module == problem.module and self._goes(size.ids, kept):
                yield size.ids.view(1, -1)

    def _try_tie(self, module: str, problems: list[Problem], kept: Tensor) -> bool:
        """Let two axes of the same size lose equally many: attention that takes its width from its input.

        Code such as ``x.reshape(B, N, num_heads, C // num_heads)`` runs if what is left of the heads is as wide as what
        is left of the input.
        """
        search = self._searches[module]
        if search.tied:
            return False
        search.tied = True
        tie = next(self._possible_ties(module, problems, kept), None)
        if tie is None:
            return False
        self.ties.append((tie, module))
        lines = [ids for problem in problems for ids in self._lines(problem, kept)]
        self.found |= next(self._proposals(module, lines, again=True), {})
        search.tried.add(frozenset(self.found))
        return True

    def _possible_ties(self, module: str, problems: list[Problem], kept: Tensor) -> Iterator[Tensor]:
        """Rows of ids: parts of an axis that one number cuts, then a width and the channels of heads."""
        yield from (parts for problem in problems for parts in self._equal_parts(problem))
        widths = list(self._module_lines(module, kept))
        for problem in problems:
            for heads in self._passing(problem):
                width = next((ids for ids in widths if self._can_tie(ids, heads)), None)
                if width is not None:
                    yield torch.stack([width, heads.flatten()[: width.numel()]])

    def _equal_parts(self, problem: Problem) -> Iterator[Tensor]:
        """Results of equal size, each with channels of its own, as of ``x.split((self.c, self.c), 1)``."""
        refs = list(refs_in(problem.call.result))
        parts = [layer.ids.flatten() for ref in refs for layer in self._labels[ref] if len(layer.dims) == 1]
        if len(parts) > 1 and len(parts) == len(refs) and len({part.numel() for part in parts}) == 1:
            units = self._rehearsed.of[torch.stack(parts)]
            if units.unique().numel() == units.numel():
                yield torch.stack(parts)

    def _try_equal(self, module: str, problems: list[Problem], kept: Tensor) -> bool:
        """Let an axis lose as many as the one whose new size the code took for it: values viewed as wide as keys."""
        of, acted = self._rehearsed.of, False
        for problem in problems:
            for old, new in problem.numbers:
                other = [ids for ids in self._module_lines(module, kept) if ids.numel() == old]
                taken = next((ids for ids in other if int(kept[of[ids]].sum()) == new), None)
                if taken is None:
                    continue
                for ids in self._passing(problem):
                    if ids.shape == taken.shape and self._are_apart(ids, taken):
                        self.ties.append((torch.stack([taken, ids]), module))
                        acted = True
        return acted

    def _are_apart(self, ids: Tensor, others: Tensor) -> bool:
        """Return whether no unit stands on both sides, and no such tie is known."""
        of = self._rehearsed.of
        pair = of[torch.stack([others, ids])]
        known = any(of[tie].equal(pair) for tie, _ in self.ties if tie.shape == pair.shape)
        return not known and not set(of[ids].tolist()) & set(of[others].tolist()) - {STAYS}

    def _can_tie(self, width: Tensor, heads: Tensor) -> bool:
        of, n = self._rehearsed.of, width.numel()
        if heads.numel() % n or heads.shape[-1] == n or heads.dim() < 2:
            return False
        return not set(of[width].tolist()) & set(of[heads].flatten().tolist())

    def _module_lines(self, module: str, kept: Tensor) -> Iterator[Tensor]:
        """Ids of plain channel axes that lose something inside a module."""
        for ref in self._refs_under(module):
            for layer in self._labels[ref]:
                if len(layer.dims) == 1 and self._goes(layer.ids, kept):
                    yield layer.ids.flatten()

    def _passing(self, problem: Problem) -> Iterator[Tensor]:
        for ref in problem.call.refs:
            for layer in self._labels[ref]:
                yield layer.ids.squeeze()

    # ---- freezing -------------------------------------------------------------------------------------------------

    def _goes(self, ids: Tensor, kept: Tensor) -> bool:
        return not bool(kept[self._rehearsed.of[ids]].all())

    def _freeze(self, lot: list[Tensor], kept: Tensor, reason: str) -> bool:
        going = [ids for ids in lot if self._goes(ids, kept)]
        self.frozen += [(ids.flatten(), reason) for ids in going]
        return bool(going)

    def _freeze_for(self, problem: Problem, kept: Tensor) -> bool:
        """Freeze padding of fixed width, else what goes through the function, else what goes through the module."""
        what = "computes with how many there are" if problem.by_value else "uses a size that is fixed in Python code"
        where = f" ({problem.line})" if problem.line else ""
        reason = f"{problem.call.name} in {problem.module or 'the model'} {what}{where}"
        here = (size for size in self._labels.sizes if size.module == problem.module)
        padding = [size.ids for size in here if size.names in (PADDED_FRONT, PADDED_BACK)]
        passing = list(self._passing(problem))
        return (
            self._freeze(padding, kept, reason)
            or self._freeze(passing, kept, reason)
            or self._freeze_module(problem.module, kept, reason)
        )

    def _freeze_module(self, module: str, kept: Tensor, reason: str) -> bool:
        """Freeze what went in the tensors of a module, or of the nearest one around it that lost anything."""
        for name in _outwards(module):
            if self._freeze([layer.ids for ref in self._refs_under(name) for layer in self._labels[ref]], kept, reason):
                return True
        return False

    def _refs_under(self, module: str) -> list[Ref]:
        """All tensors read or made while a module runs."""
        calls = (call for call in self._labels.tape.calls if not module or is_under(call.module, [module]))
        refs = (ref for call in calls for ref in (*call.inputs, *call.outputs) if ref is not None)
        return list(dict.fromkeys(refs))


def _outwards(module: str) -> Iterator[str]:
    """The module, the one around it, …, the model ("").

    >>> list(_outwards("blocks.0.attn"))
    ['blocks.0.attn', 'blocks.0', 'blocks', '']
    """
    yield module
    while module:
        module = module.rpartition(".")[0]
        yield module


def _around(module: str) -> list[str]:
    return list(_outwards(module))[:3]


def _numbers(module: nn.Module) -> Iterator[tuple[str, int | None, int]]:
    """(attribute, position, value) of the public ints of a module, also in short tuples and lists."""
    for name, attribute in vars(module).items():
        if name.startswith("_") or any(word in name.lower() for word in NEVER):
            continue
        if type(attribute) is int:
            yield name, None, attribute
        elif isinstance(attribute, (tuple, list)) and len(attribute) <= 8:
            yield from ((name, place, item) for place, item in enumerate(attribute) if type(item) is int)
