"""Rehearsing a removal: the model runs with smaller parameters on fake tensors, beside its own recording.

Sizes kept as Python numbers (``num_heads``, ``C // heads``, widths in slices) are invisible to the tape. Here they
show: every torch function must give the shapes that the ids predict. Where one does not, the expected shape is put in
its place and the run goes on, so that one run finds every such place.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ifso.errors import StaleGraphError
from ifso.graph.channel_graph import STAYS, SizeAttribute
from ifso.graph.labels import Labels
from ifso.graph.layouts import compact, compact_shape
from ifso.graph.numbers import new_numbers
from ifso.graph.running import call_model, forget_caches, on_fake_tensors, on_real_tensors
from ifso.graph.slim_attention import slim_attention
from ifso.graph.slots import named_tensors, read_attribute, set_attribute, set_tensors
from ifso.graph.stage import Stage
from ifso.graph.tape import LEAVING, FunctionCall, ModuleStack, Ref, Tape, map_tensors, refs_in, tensors_in
from ifso.graph.units import Units
from ifso.graph.values import Values, content_of, place_of, values_of
from ifso.graph.wiring import modes_of
from ifso.graph.writes import WatchedLeavings


def expected_shape(shape: tuple[int, ...], layers: list[Tensor], kept: Tensor, blocks: list[Tensor]) -> tuple[int, ...]:
    """Shape after removal of a tensor whose elements belong to the units in ``layers``.

    ``blocks`` are axes that were cut into rows [rows, n]: these keep their number of rows.
    """
    result = list(shape)
    for layer in layers:
        if bool((layer == STAYS).all()):
            continue
        dims = [dim for dim, size in enumerate(layer.shape) if size > 1]
        for dim, size in zip(dims, _block(layer.squeeze(), kept, blocks), strict=True):
            result[dim] = size
    return tuple(result)


def _block(units: Tensor, kept: Tensor, blocks: list[Tensor]) -> list[int]:
    """Sizes of the block that the survivors form: a sub-block, or rows of equal length."""
    alive = kept[units]
    total = int(alive.sum())
    filled = [int(_any_other(alive, dim).sum()) for dim in range(alive.dim())]
    product = math.prod(filled)
    if product == total:
        return filled
    for dim in _position_dims(units, blocks):
        rest = product // max(filled[dim], 1)
        counts = alive.sum(dim)
        if int((counts > 0).sum()) == rest and len(set(counts[counts > 0].tolist())) == 1:
            return [total // rest if d == dim else size for d, size in enumerate(filled)]
    return filled


def _position_dims(units: Tensor, blocks: list[Tensor]) -> list[int]:
    """Dims along which rows may keep different positions, likeliest first."""
    if units.dim() == 2 and any(units.t().equal(rows) for rows in blocks):
        return [0]
    return list(range(units.dim() - 1, -1, -1))


def _any_other(alive: Tensor, dim: int) -> Tensor:
    return alive.movedim(dim, 0).flatten(1).any(1) if alive.dim() > 1 else alive


@dataclass(frozen=True)
class Problem:
    """A function that did not give the expected shapes, or (``by_value``) computes with a number that has changed.

    ``numbers`` are the (old, new) ints among its arguments that the model's code has changed by itself, ``line`` is
    where that code calls the function.
    """

    module: str
    call: FunctionCall
    why: str
    by_value: bool = False
    numbers: frozenset[tuple[int, int]] = frozenset()
    line: str = ""


class Diverged(Exception):
    """The model took another way than in its recording."""

    def __init__(self, module: str) -> None:
        super().__init__(module)
        self.module = module


@dataclass(frozen=True)
class Removal:
    """What is to be removed from a traced model, and all that a rehearsal of it needs."""

    units: Units
    attributes: tuple[SizeAttribute, ...]
    kept: Tensor
    labels: Labels
    inputs: Any
    on_real_tensors: bool

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """New shapes of the parameters and buffers that lose something."""
        return {name: compact_shape(layout, self.kept, name) for name, layout in self.units.layouts.items()}

    def expected_results(self) -> dict[Ref, tuple[int, ...]]:
        """The shape that each result of a torch function should have."""
        return self._expected(ref for call in self.labels.tape.functions for ref in refs_in(call.result))

    def expected_arguments(self) -> dict[Ref, tuple[int, ...]]:
        """The shape that each argument of a torch function should have."""
        return self._expected(ref for call in self.labels.tape.functions for ref in refs_in((call.args, call.kwargs)))

    def _expected(self, refs: Iterable[Ref]) -> dict[Ref, tuple[int, ...]]:
        tape, of = self.labels.tape, self.units.of
        blocks = [of[rows] for rows, _ in self.labels.splits]
        expected = {}
        for ref in dict.fromkeys(refs):
            value = tape.values[ref.index]
            if value.name:
                expected[ref] = self.shapes.get(value.name, value.shape)
            else:
                layers = [of[layer.ids] for layer in self.labels[ref]]
                expected[ref] = expected_shape(value.shape, layers, self.kept, blocks)
        return expected

    def set_numbers(self, model: nn.Module) -> list[str]:
        """Set the Python numbers; returns the names of attention layers whose class was exchanged."""
        forget_caches(model)
        modules, shapes = dict(model.named_modules()), self.shapes
        for (module, name, position), value in new_numbers(model, self.attributes, self.kept, shapes).items():
            if read_attribute(modules[module], name, position) is not None:
                set_attribute(modules[module], name, position, value)
        return slim_attention(model, shapes)


def rehearse(model: nn.Module, removal: Removal) -> tuple[list[Problem], str | None]:
    """Run the smaller model. Returns the problems, and the module where it could not go on or took another way."""
    if removal.on_real_tensors:
        return _rehearse_real(model, removal)
    expected = removal.expected_results()
    problems: list[Problem] = []
    exchanged: set[str] = set()

    def run(stage: Stage) -> str | None:
        rehearsal = Rehearsal(model, removal.labels.tape, expected, exchanged, problems, stage)
        try:
            _run_smaller(model, removal, stage, rehearsal)
        except Diverged as error:
            return error.module
        except Exception:
            return rehearsal.module
        return None

    return problems, on_fake_tensors(model, run, lambda: exchanged.update(removal.set_numbers(model)))


def _run_smaller(
    model: nn.Module, removal: Removal, stage: Stage, watch: contextlib.AbstractContextManager[Any]
) -> list[tuple[int, ...]]:
    """Shapes of the smaller model's outputs."""
    tensors = named_tensors(model)
    set_tensors(model, {name: tensors[name].new_empty(shape) for name, shape in removal.shapes.items()})
    fakes = map_tensors(removal.inputs, stage.from_tensor)
    with watch, _BelowFunctions():
        output = call_model(model, fakes)
    return [tuple(tensor.shape) for tensor in tensors_in(output)]


def _rehearse_real(model: nn.Module, removal: Removal) -> tuple[list[Problem], str | None]:
    """The same with values, for models whose course depends on them."""

    def run() -> tuple[list[Problem], str | None]:
        tensors, layouts = named_tensors(model), removal.units.layouts
        set_tensors(
            model, {name: compact(tensors[name].detach(), layouts[name], removal.kept, name) for name in layouts}
        )
        rehearsal = LooseRehearsal(model, removal, set(removal.set_numbers(model)))
        try:
            with rehearsal:
                call_model(model, map_tensors(removal.inputs, lambda tensor: tensor.detach().clone()))
        except Exception:
            return rehearsal.problems, rehearsal.module
        return rehearsal.problems, None

    return on_real_tensors(model, run)


def check_removal(
    model: nn.Module, removal: Removal, output_shapes: tuple[tuple[int, ...], ...], modes: tuple[bool, ...]
) -> str | None:
    """What is wrong with a removal, in words; None if the smaller model runs to the same output shapes.

    ``modes`` are those of the recording. A model in others (it is in train mode now, say) that takes another way is
    only asked for its outputs; in the same modes it must take the same way, or the recording is of another model.
    """
    problems, stuck = rehearse(model, removal)
    if stuck is not None and not removal.on_real_tensors and modes_of(model) == modes:
        _, whole = rehearse(model, replace(removal, kept=torch.ones_like(removal.kept)))
        if whole is not None:
            raise StaleGraphError(
                f"the graph was traced from another model: {whole or 'it'} runs other functions now; "
                "call ifso.trace again"
            )
    if problems:
        return f"{problems[0].call.name} in {problems[0].module or 'the model'} {problems[0].why}"
    if stuck is None:
        return None
    failure = f"the forward pass fails in {stuck or 'the model'}"
    if removal.on_real_tensors:
        return failure

    def run(stage: Stage) -> list[tuple[int, ...]]:
        return _run_smaller(model, removal, stage, WatchedLeavings(stage.writes))

    try:
        shapes = on_fake_tensors(model, run, lambda: removal.set_numbers(model))
    except Exception:
        return failure
    return None if tuple(shapes) == output_shapes else "its outputs have other shapes"


class _BelowFunctions(TorchDispatchMode):
    """What fake tensors do inside a call is no torch function of the model, also where scripted code makes the call."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return func(*args, **(kwargs or {}))


class Rehearsal(TorchFunctionMode):
    """Compares each torch function with the recording and notes the ``problems``.

    Numbers that functions compute with are compared where there is a ``stage`` to hear of them.
    """

    def __init__(
        self,
        model: nn.Module,
        tape: Tape,
        expected: dict[Ref, tuple[int, ...]],
        exchanged: set[str],
        problems: list[Problem],
        stage: Stage | None,
    ) -> None:
        super().__init__()
        self.problems = problems
        self._tape = tape
        self._expected = expected
        self._stack = ModuleStack(model, self._resume)
        self._last = ""
        self._place = 0
        self._inside = False
        self._exchanged = exchanged
        self._stage = stage
        self._computed = _Computed(model)

    @property
    def module(self) -> str:
        """The innermost module that ran last."""
        return self._last

    def _resume(self, name: str, entry: int) -> None:
        if name in self._exchanged:
            self._place = self._tape.module_ends.get(entry, self._place)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        if any(name in self._exchanged for name in self._stack.running):
            try:
                return func(*args, **kwargs)
            finally:
                self._computed.calls.clear()
        self._last = self._stack.module
        name = getattr(func, "__name__", str(func))
        if self._stage is not None and name in LEAVING and args and isinstance(args[0], Tensor):
            self._stage.writes.protect(args[0])
        if self._place >= len(self._tape.functions) or self._tape.functions[self._place].name != name:
            raise Diverged(self._stack.module)
        call = self._tape.functions[self._place]
        self._place += 1
        self._inside = True
        try:
            return self._compare(call, func, args, kwargs)
        finally:
            self._inside = False

    def _compare(self, call: FunctionCall, func: Any, args: Any, kwargs: Any) -> Any:
        changed = frozenset(_changed_numbers((call.args, call.kwargs), (args, kwargs)))
        before = len(self._computed.calls)
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            self._computed.calls.clear()
            self._note(call, f"{type(error).__name__}: {error}", numbers=changed)
            return self._stand_in(call.result)
        recorded = _recorded(call, self._tape) if self._stage is not None else []
        if (recorded or len(self._computed.calls) > before) and not self._computes_the_same(call, recorded, kwargs):
            self._note(call, "computes with a number that depends on how many channels there are", by_value=True)
        refs = list(refs_in(call.result))
        tensors = tensors_in(result)
        if not refs:
            return result
        if not self._fits(tensors, refs):
            wanted = [self._expected[ref] for ref in refs]
            self._note(call, f"gave {[tuple(t.shape) for t in tensors]}, expected {wanted}", numbers=changed)
            return self._stand_in(call.result)
        return result

    def _fits(self, tensors: list[Tensor], refs: list[Ref]) -> bool:
        return [tuple(tensor.shape) for tensor in tensors] == [self._expected[ref] for ref in refs]

    def _computes_the_same(self, call: FunctionCall, recorded: list[Computed], kwargs: Mapping[str, Any]) -> bool:
        now = self._computed.calls[:]
        self._computed.calls.clear()
        if call.name in OWN_SCALES:
            return bool(kwargs.get("scale") == call.kwargs.get("scale"))
        return _same_numbers(recorded, now)

    def _note(
        self, call: FunctionCall, why: str, by_value: bool = False, numbers: frozenset[tuple[int, int]] = frozenset()
    ) -> None:
        line = _line_outside(sys._getframe())
        self.problems.append(Problem(self._stack.module, call, " ".join(why.split())[:200], by_value, numbers, line))

    def _stand_in(self, tree: Any) -> Any:
        if isinstance(tree, Ref):
            value = self._tape.values[tree.index]
            return torch.zeros(self._expected[tree], dtype=value.dtype, device=value.device)
        if isinstance(tree, (tuple, list)):
            return type(tree)(self._stand_in(item) for item in tree) if type(tree) in (tuple, list) else tree
        return tree

    def __enter__(self) -> Rehearsal:
        self._stack.__enter__()
        if self._stage is not None:
            self._stage.listen = self._computed.note
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        if self._stage is not None:
            self._stage.listen = None
        self._stack.__exit__(*exc)


class LooseRehearsal(Rehearsal):
    """The same for models whose course depends on values, which differ from those of the recording.

    A call is only judged if it is the one that was recorded at this place and its arguments have the expected shapes,
    and only by the axes that lose something: boxes chosen by their scores may be more or fewer for other reasons.
    """

    def __init__(self, model: nn.Module, removal: Removal, exchanged: set[str]) -> None:
        tape = removal.labels.tape
        super().__init__(model, tape, removal.expected_arguments() | removal.expected_results(), exchanged, [], None)
        self._by_key = {call.key: call for call in tape.functions if call.key[2]}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside or any(name in self._exchanged for name in self._stack.running):
            return func(*args, **kwargs)
        self._last = self._stack.module
        call = self._by_key.get(self._stack.next_function(func))
        self._inside = True
        try:
            if call is None or not self._is_judged(call, getattr(func, "__name__", str(func)), (args, kwargs)):
                return func(*args, **kwargs)
            return self._compare(call, func, args, kwargs)
        finally:
            self._inside = False

    def _is_judged(self, call: FunctionCall, name: str, arguments: Any) -> bool:
        refs = list(refs_in((call.args, call.kwargs)))
        loses = any(self._expected[ref] != self._tape.shape(ref) for ref in (*refs, *refs_in(call.result)))
        return (
            loses
            and call.name == name
            and [tuple(tensor.shape) for tensor in tensors_in(arguments)] == [self._expected[ref] for ref in refs]
        )

    def _fits(self, tensors: list[Tensor], refs: list[Ref]) -> bool:
        return len(tensors) == len(refs) and all(map(self._loses_as_expected, tensors, refs))

    def _loses_as_expected(self, tensor: Tensor, ref: Ref) -> bool:
        old, new = self._tape.shape(ref), self._expected[ref]
        return tensor.dim() == len(new) and all(
            size == after for size, before, after in zip(tensor.shape, old, new, strict=True) if before != after
        )


class _Computed:
    """Notes what the ATen calls of one torch function compute with."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[Computed] = []
        self._known = {id(tensor) for tensor in named_tensors(model).values()}

    def note(self, func: Any, args: Any, kwargs: Any) -> None:
        """An ATen call is about to be made."""
        self.calls.append(_computed(func, args, kwargs, self._content, lambda tensor: tuple(tensor.shape)))

    def _content(self, item: Any) -> Any:
        return None if id(item) in self._known else content_of(item)


def _line_outside(frame: FrameType | None) -> str:
    """The innermost line of code that is neither PyTorch's nor ours, as ``file.py:12``; empty if there is none."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("torch", "ifso"):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _changed_numbers(before: Any, now: Any) -> Iterator[tuple[int, int]]:
    """(old, new) where arguments of a recorded call hold another int at the same place now.

    >>> list(_changed_numbers((2, [1, 16]), (2, [1, 13])))
    [(16, 13)]
    """
    if type(before) is int and type(now) is int:
        if before != now:
            yield before, now
    elif isinstance(before, (tuple, list)) and isinstance(now, (tuple, list)):
        for old, new in zip(before, now, strict=False):
            yield from _changed_numbers(old, new)
    elif isinstance(before, dict) and isinstance(now, dict):
        yield from _changed_numbers([before[key] for key in before], [now.get(key) for key in before])


Computed = tuple[str, Values, "tuple[int, ...] | None"]
"""An ATen call: its operator, the numbers it computes with, and the place along an axis that it picks."""


def _computed(func: Any, args: Any, kwargs: Any, content: Callable[[Any], Any], size: Callable[[Any], Any]) -> Computed:
    return str(func.overloadpacket), values_of(func, args, kwargs, content), place_of(func, args, size)


def _recorded(call: FunctionCall, tape: Tape) -> list[Computed]:
    def content(item: Any) -> Any:
        return tape.values[item.index].content if isinstance(item, Ref) else None

    return [_computed(one.func, one.args, one.kwargs, content, tape.shape) for one in tape.calls_of(call.key)]


def _same_numbers(before: list[Computed], now: list[Computed]) -> bool:
    """Do two runs of a function compute with the same numbers? A place may move with the size of its axis.

    Where PyTorch itself takes other operators for other sizes, as in an einsum, their dims and places tell nothing.
    """
    if [op for op, _, _ in before] != [op for op, _, _ in now]:
        return _fractions(before) == _fractions(now)
    if [values for _, values, _ in before] != [values for _, values, _ in now]:
        return False
    places = [[place for _, _, place in calls if place is not None] for calls in (before, now)]
    return all(one == other or one[0] != other[0] for one, other in zip(*places, strict=True))


def _fractions(calls: list[Computed]) -> list[Any]:
    return [value for _, values, _ in calls for _, whole, value in values if not whole]


OWN_SCALES = ("scaled_dot_product_attention", "multi_head_attention_forward")
"""Functions that divide by the root of a head's size, which masks account for."""
