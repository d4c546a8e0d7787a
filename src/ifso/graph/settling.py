"""Finding the Python numbers that follow the channels, and freezing channels whose numbers cannot be found.

Each round rehearses the removal of some units of every group. A function that gives a wrong shape points at a number:
an int attribute of the running module (or of one around it) with the old value is set to the new one. If no attribute
helps, the channels concerned are frozen, with the place as the reason.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ifso.graph.balancing import balance_vector
from ifso.graph.channel_graph import STAYS, ChannelGraph, SizeAttribute
from ifso.graph.labels import Labels
from ifso.graph.layouts import compact, compact_shape
from ifso.graph.rehearsal import Diverged, Problem, Rehearsal
from ifso.graph.running import call_model, named_tensors, preserved, quiet_torch
from ifso.graph.slim_attention import slim_attention
from ifso.graph.slots import read_attribute, set_attribute, set_tensors
from ifso.graph.tape import Ref, map_tensors, refs_in, tensors_in
from ifso.graph.units import Units, build, partition

ROUNDS = 20
SEARCH_ROUNDS = 8
TRIES_PER_MODULE = 4
HINTS = ("head", "dim", "channel", "chs", "width", "feature", "group", "planes", "embed", "hidden", "size")


@dataclass
class Settled:
    """Units that can really be removed, and the attributes to set when they are."""

    units: Units
    attributes: tuple[SizeAttribute, ...]
    notes: tuple[str, ...]


Candidate = tuple[str, str, int | None, Tensor]
"""(module, attribute, position, ids [rows, n] that it counts)."""


@dataclass
class _Search:
    """What has been tried for the functions of one module, and how many problems it had before the last try."""

    tried: set[frozenset[tuple[str, str, int | None]]] = field(default_factory=set)
    last: tuple[Candidate, ...] = ()
    before: int = 0


def settle(model: nn.Module, inputs: Any, labels: Labels, on_real_tensors: bool) -> Settled:
    """Rehearse until every remaining group can go; twice where axes are cut, since sizes can agree by chance."""
    frozen: list[tuple[Tensor, str]] = []
    found: list[Candidate] = []
    searches: dict[str, _Search] = {}
    clean = 0
    for number in range(ROUNDS):
        units = build(partition(labels, frozen))
        attributes = _attributes(model, labels, units, found)
        if not units.groups:
            break
        kept = _trial(units, seed=number, everywhere=clean == 0)
        problems, diverged = _rehearse(model, inputs, labels, units, attributes, kept, on_real_tensors)
        if not problems and diverged is None:
            clean += 1
            if clean == 2 or not (labels.splits or found):
                break
            continue
        clean = 0
        _react(model, labels, units, kept, problems, diverged, found, searches, frozen, number < SEARCH_ROUNDS)
    else:
        units = build(partition(labels, [*frozen, (torch.arange(labels.size), "its removal could not be rehearsed")]))
        attributes = ()
    return Settled(units, attributes, tuple(dict.fromkeys(labels.notes)))


def _attributes(
    model: nn.Module, labels: Labels, units: Units, found: list[Candidate]
) -> tuple[SizeAttribute, ...]:
    """Attributes known from the rules and found by rehearsing, as far as units that can go change them."""
    modules = dict(model.named_modules())
    result: dict[tuple[str, str, int | None], SizeAttribute] = {}
    for size in labels.sizes:
        module = modules.get(size.module)
        for name in size.names:
            if module is not None and read_attribute(module, name, size.position) == size.ids.numel():
                result[size.module, name, size.position] = SizeAttribute(
                    size.module, name, size.position, units.of[size.ids].view(1, -1)
                )
    for module_name, name, position, ids in found:
        result[module_name, name, position] = SizeAttribute(module_name, name, position, units.of[ids])
    return tuple(item for item in result.values() if bool((item.labels != STAYS).any()))


def _trial(units: Units, seed: int, everywhere: bool) -> Tensor:
    """Some units of every group go, or of most groups, with different shares: sizes must not agree by chance."""
    random = torch.Generator().manual_seed(1234 + seed)
    total = sum(group.size for group in units.groups)
    kept = torch.ones(total + 1, dtype=torch.bool)
    for group in units.groups:
        share = 0.2 + 0.4 * float(torch.rand(1, generator=random))
        count = min(max(1, round(group.size * share)), group.size - 1)
        if count > 0 and (everywhere or float(torch.rand(1, generator=random)) < 0.7):
            gone = torch.randperm(group.size, generator=random)[:count]
            kept[group.first + gone] = False
    _refill(units, kept)
    return balance_vector(kept, units.balances, torch.rand(total, generator=random))


def _refill(units: Units, kept: Tensor) -> None:
    """No axis may lose everything."""
    for layout in units.layouts.values():
        for layer in layout.layers:
            if not bool(kept[layer].any()):
                kept[layer.flatten()[0]] = True


def _rehearse(
    model: nn.Module, inputs: Any, labels: Labels, units: Units, attributes: tuple[SizeAttribute, ...], kept: Tensor, real: bool
) -> tuple[list[Problem], str | None]:
    """Run the model with smaller parameters. Returns the problems, and the module where it took another way."""
    if real:
        return [], _rehearse_real(model, inputs, units, attributes, kept)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    shapes = {name: compact_shape(layout, kept, name) for name, layout in units.layouts.items()}
    with preserved(model), quiet_torch():
        _apply_attributes(model, attributes, kept)
        tensors = named_tensors(model)
        with mode:
            set_tensors(model, {name: tensors[name].new_empty(shape) for name, shape in shapes.items()})
        rehearsal = Rehearsal(model, labels, units.of, kept, set(slim_attention(model)))
        try:
            with mode:
                fakes = map_tensors(inputs, mode.from_tensor)
                with rehearsal:
                    call_model(model, fakes)
        except Diverged as error:
            return rehearsal.problems, error.module
        except Exception:  # noqa: BLE001 - the user's own checks may raise anything
            return rehearsal.problems, rehearsal.module
        return rehearsal.problems, None


def rehearse_keep(model: nn.Module, graph: ChannelGraph, kept: Tensor) -> str | None:
    """Rehearse the removal that ``kept`` asks for; returns what went wrong, in words."""
    labels, units = graph.recording
    problems, stuck = _rehearse(model, graph.inputs, labels, units, graph.attributes, kept, graph.on_real_tensors)
    if problems:
        return f"{problems[0].call.name} in {problems[0].module or 'the model'} {problems[0].why}"
    if stuck is None:
        return None
    return None if _runs(model, graph, kept, units) else f"the forward pass fails in {stuck or 'the model'}"


def _runs(model: nn.Module, graph: ChannelGraph, kept: Tensor, units: Units) -> bool:
    """Does the smaller model run in its present mode, whatever way it takes, to outputs of the same shapes?"""
    if graph.on_real_tensors:
        return False
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    shapes = {name: compact_shape(layout, kept, name) for name, layout in units.layouts.items()}
    with preserved(model), quiet_torch():
        _apply_attributes(model, graph.attributes, kept)
        tensors = named_tensors(model)
        try:
            with mode:
                set_tensors(model, {name: tensors[name].new_empty(shape) for name, shape in shapes.items()})
                slim_attention(model)
                output = call_model(model, map_tensors(graph.inputs, mode.from_tensor))
        except Exception:  # noqa: BLE001 - the answer is no, whatever the reason
            return False
    return tuple(tuple(tensor.shape) for tensor in tensors_in(output)) == graph.output_shapes


def _rehearse_real(
    model: nn.Module, inputs: Any, units: Units, attributes: tuple[SizeAttribute, ...], kept: Tensor
) -> str | None:
    from ifso.graph.tape import ModuleStack

    with preserved(model, values=True), quiet_torch():
        tensors = named_tensors(model)
        set_tensors(model, {n: compact(tensors[n].detach(), layout, kept, n) for n, layout in units.layouts.items()})
        _apply_attributes(model, attributes, kept)
        slim_attention(model)
        stack = ModuleStack(model)
        last = [""]
        stack.on_enter = lambda name: last.__setitem__(0, name)
        try:
            with stack:
                call_model(model, map_tensors(inputs, lambda tensor: tensor.detach().clone()))
        except Exception:  # noqa: BLE001 - any failure of the user's model is a finding
            return last[0]
    return None


def _apply_attributes(model: nn.Module, attributes: tuple[SizeAttribute, ...], kept: Tensor) -> None:
    """Set the Python numbers for what is kept."""
    modules = dict(model.named_modules())
    for item in attributes:
        set_attribute(modules[item.module], item.name, item.position, item.value(kept))


# ---- reacting to problems -----------------------------------------------------------------------------------------


def _react(
    model: nn.Module, labels: Labels, units: Units, kept: Tensor, problems: list[Problem], diverged: str | None,
    found: list[Candidate], searches: dict[str, _Search], frozen: list[tuple[Tensor, str]], may_search: bool,
) -> None:  # fmt: skip
    by_module: dict[str, list[Problem]] = {}
    for problem in problems:
        by_module.setdefault(problem.module, []).append(problem)
    acted = False
    for module, here in by_module.items():
        search = searches.setdefault(module, _Search())
        if search.last and len(here) >= search.before:
            _forget(found, _keys(search.last))
        search.last = ()
        proposal = next(_proposals(model, labels, units, kept, here, search), None)
        if proposal is not None and may_search and len(search.tried) < TRIES_PER_MODULE:
            search.tried.add(_keys(proposal))
            search.last, search.before = proposal, len(here)
            found += proposal
            acted = True
        else:
            _forget(found, {key for tried in search.tried for key in tried})
            for problem in here:
                acted |= _freeze_for(problem, labels, units, kept, frozen)
    if diverged is not None and not acted:
        reason = f"Python code in {diverged or 'the model'} does not run with fewer of them"
        if not _freeze_module(diverged, labels, units, kept, frozen, reason):
            frozen.append((torch.arange(labels.size), reason))


def _forget(found: list[Candidate], keys: Collection[tuple[str, str, int | None]]) -> None:
    found[:] = [item for item in found if item[:3] not in keys]


def _keys(proposal: tuple[Candidate, ...]) -> frozenset[tuple[str, str, int | None]]:
    return frozenset(item[:3] for item in proposal)


def _proposals(
    model: nn.Module, labels: Labels, units: Units, kept: Tensor, problems: list[Problem], search: _Search
) -> Iterator[tuple[Candidate, ...]]:
    """Sets of attributes to try: all likely ones of the running module together, then one at a time, then outwards."""
    candidates = list(_candidates(model, labels, units, kept, problems))
    for module in _around(problems[0].module):
        here = [item for item in candidates if item[0] == module]
        likely = tuple(item for item in here if _is_likely(item[1]))
        for proposal in (likely, *((item,) for item in likely), tuple(here)):
            if proposal and _keys(proposal) not in search.tried:
                yield proposal


def _candidates(
    model: nn.Module, labels: Labels, units: Units, kept: Tensor, problems: list[Problem]
) -> Iterator[Candidate]:
    """Int attributes of the running module, or of those around it, that hold an old size whose new one differs."""
    modules = dict(model.named_modules())
    lines = [ids for problem in problems for ids in _lines(problem, labels, units, kept)]
    for module_name in _around(problems[0].module):
        module = modules.get(module_name)
        for name, position, value in _numbers(module) if module is not None else ():
            ids = next((ids for ids in lines if ids.shape[-1] == value), None)
            if ids is not None:
                yield module_name, name, position, ids


def _is_likely(name: str) -> bool:
    return any(hint in name.lower() for hint in HINTS)


def _around(module: str) -> Iterator[str]:
    yield module
    for _ in range(2):
        if not module:
            return
        module = module.rpartition(".")[0]
        yield module


def _numbers(module: nn.Module) -> list[tuple[str, int | None, int]]:
    numbers: list[tuple[str, int | None, int]] = []
    for name, attribute in vars(module).items():
        if name.startswith("_") or isinstance(attribute, bool):
            continue
        if isinstance(attribute, int):
            numbers.append((name, None, attribute))
        elif isinstance(attribute, (tuple, list)) and len(attribute) <= 8:
            numbers += [(name, i, item) for i, item in enumerate(attribute) if isinstance(item, int) and not isinstance(item, bool)]
    return sorted(numbers, key=lambda item: not _is_likely(item[0]))


def _lines(problem: Problem, labels: Labels, units: Units, kept: Tensor) -> Iterator[Tensor]:
    """Ids along each axis of the call's results and arguments that loses something."""
    for ref in dict.fromkeys([*refs_in(problem.call.result), *refs_in((problem.call.args, problem.call.kwargs))]):
        for layer in labels[ref]:
            for dim in layer.dims:
                ids = layer.ids.movedim(dim, -1).reshape(-1, layer.ids.shape[dim])
                alive = kept[units.of[ids]]
                if int(alive.sum(-1).max()) < ids.shape[-1]:
                    yield ids
    for size in labels.sizes:
        if size.module == problem.module and not bool(kept[units.of[size.ids]].all()):
            yield size.ids.view(1, -1)


def _freeze_for(
    problem: Problem, labels: Labels, units: Units, kept: Tensor, frozen: list[tuple[Tensor, str]]
) -> bool:
    where = problem.module or "the model"
    reason = f"{problem.call.name} in {where} uses a size that is fixed in Python code"
    made_here = [size.ids for size in labels.sizes if size.module == problem.module and size.names in (("front",), ("back",))]
    refs = list(refs_in((problem.call.args, problem.call.kwargs, problem.call.result)))
    lots = [made_here, [layer.ids for ref in refs for layer in labels[ref]]]
    for lot in lots:
        going = [ids for ids in lot if not bool(kept[units.of[ids]].all())]
        if going:
            frozen += [(ids.flatten(), reason) for ids in going]
            return True
    return _freeze_module(problem.module, labels, units, kept, frozen, reason)


def _freeze_module(
    module: str, labels: Labels, units: Units, kept: Tensor, frozen: list[tuple[Tensor, str]], reason: str
) -> bool:
    """Freeze what went in the tensors of a module, or of the one around it."""
    while True:
        refs: set[Ref] = set()
        for call in labels.tape.calls:
            if call.module == module or call.module.startswith(module + "."):
                refs.update(call.inputs)
                refs.update(ref for ref in call.outputs if ref is not None)
        going = [layer.ids for ref in refs for layer in labels[ref] if not bool(kept[units.of[layer.ids]].all())]
        if going:
            frozen += [(ids.flatten(), reason) for ids in going]
            return True
        if not module:
            return False
        module = module.rpartition(".")[0]
