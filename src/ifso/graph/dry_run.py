"""Rehearsing a removal: the model runs with smaller parameters on fake tensors, beside its own recording.

Sizes kept as Python numbers (``num_heads``, ``C // heads``, widths in slices) are invisible to the tape. Here they
show: every torch function must give the shapes that the ids predict. Where one does not, the expected shape is put in
its place and the run goes on, so that one run finds every such place.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ifso.common.module_state import named_tensors, set_tensors
from ifso.common.tensors import LEAVING, WatchedLeavings, map_tensors, tensors_in
from ifso.errors import StaleGraphError
from ifso.graph.execution import FakeStage, call_model, on_fake_tensors, on_real_tensors
from ifso.graph.layouts import compact
from ifso.graph.naming import modes_of
from ifso.graph.removal import UnitRemoval
from ifso.graph.scalar_arguments import (
    OWN_SCALES,
    ComputedNumbers,
    changed_numbers,
    recorded_numbers,
    same_numbers,
)
from ifso.graph.tape import FunctionCall, ModuleFunctions, Ref, Tape, refs_in


@dataclass(frozen=True)
class Problem:
    """A function that did not give the expected shapes, or (``by_value``) computes with a number that has changed.

    ``numbers`` are the (old, new) ints among its arguments that the model's code has changed by itself, ``line`` is
    where that code calls the function, ``computed`` what it computes with now.
    """

    module: str
    call: FunctionCall
    why: str
    by_value: bool = False
    numbers: frozenset[tuple[int, int]] = frozenset()
    line: str = ""
    computed: Any = None


class Diverged(Exception):
    """The model took another way than in its recording."""

    def __init__(self, module: str) -> None:
        super().__init__(module)
        self.module = module


def rehearse(model: nn.Module, removal: UnitRemoval) -> tuple[list[Problem], str | None]:
    """Run the smaller model. Returns the problems, and the module where it could not go on or took another way."""
    if removal.on_real_tensors:
        return _rehearse_real(model, removal)
    expected = removal.expected()
    exchanged: set[str] = set()

    def run(stage: FakeStage) -> tuple[list[Problem], str | None]:
        rehearsal = Rehearsal(model, removal.labels.tape, expected, exchanged, stage)
        try:
            _run_smaller(model, removal, stage, rehearsal)
        except Diverged as error:
            return rehearsal.problems, error.module
        except Exception:
            return rehearsal.problems, rehearsal.module
        return rehearsal.problems, None

    return on_fake_tensors(model, run, lambda: exchanged.update(removal.set_numbers(model)))


def _run_smaller(
    model: nn.Module, removal: UnitRemoval, stage: FakeStage, watch: contextlib.AbstractContextManager[Any]
) -> list[tuple[int, ...]]:
    """Shapes of the smaller model's outputs."""
    tensors = named_tensors(model)
    set_tensors(model, {name: _empty_like(tensors[name], shape) for name, shape in removal.shapes.items()})
    fakes = map_tensors(removal.inputs, stage.from_tensor)
    with watch, _BelowFunctions():
        output = call_model(model, fakes)
    return [tuple(tensor.shape) for tensor in tensors_in(output)]


def _empty_like(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=tensor.dtype, layout=tensor.layout, device=tensor.device)


def _rehearse_real(model: nn.Module, removal: UnitRemoval) -> tuple[list[Problem], str | None]:
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
    model: nn.Module, removal: UnitRemoval, output_shapes: tuple[tuple[int, ...], ...], modes: tuple[bool, ...]
) -> str | None:
    """What is wrong with a removal, in words; None if the smaller model runs to the same output shapes.

    ``modes`` are those of the recording. A model in others (it is in train mode now, say) that takes another way is
    only asked for its outputs; in the same modes it must take the same way, or the recording is of another model.
    """
    problems, stuck = rehearse(model, removal)
    must_go_on = stuck is not None and not removal.on_real_tensors and modes_of(model) == modes
    if must_go_on or any(problem.by_value for problem in problems):
        of_whole, whole = rehearse(model, replace(removal, kept=torch.ones_like(removal.kept)))
        problems = [problem for problem in problems if not _as_whole(problem, of_whole)]
        if must_go_on and whole is not None:
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

    def run(stage: FakeStage) -> list[tuple[int, ...]]:
        return _run_smaller(model, removal, stage, WatchedLeavings(stage.writes))

    try:
        shapes = on_fake_tensors(model, run, lambda: removal.set_numbers(model))
    except Exception:
        return failure
    return None if tuple(shapes) == output_shapes else "its outputs have other shapes"


def _as_whole(problem: Problem, whole: list[Problem]) -> bool:
    """Whether the whole model computes with the same number at this place: then it is not for want of channels.

    Who gives batch norms another momentum, or dropout another share, has changed the model since its recording.
    """
    same = (other for other in whole if other.by_value and other.call is problem.call)
    return problem.by_value and any(other.computed == problem.computed for other in same)


class _BelowFunctions(TorchDispatchMode):
    """What fake tensors do inside a call is no torch function of the model, also where scripted code makes the call."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return func(*args, **(kwargs or {}))


class Rehearsal(ModuleFunctions):
    """Compares each torch function with the recording and notes ``problems``.

    Numbers that functions compute with are compared where there is a ``stage`` to hear of them.
    """

    def __init__(
        self,
        model: nn.Module,
        tape: Tape,
        expected: dict[Ref, tuple[int, ...]],
        exchanged: set[str],
        stage: FakeStage | None,
    ) -> None:
        super().__init__(model)
        self.problems: list[Problem] = []
        self.module = ""
        """The innermost module that ran last."""
        self._tape, self._expected, self._exchanged, self._stage = tape, expected, exchanged, stage
        self._place, self._inside = 0, False
        self._computed = ComputedNumbers(model)

    def left(self, name: str, entry: int) -> None:
        """Behind a module whose class was exchanged the recording goes on."""
        if name in self._exchanged:
            self._place = self._tape.module_ends.get(entry, self._place)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        if self.runs_within(self._exchanged):
            try:
                return func(*args, **kwargs)
            finally:
                self._computed.calls.clear()
        self.module = self.caller
        name = getattr(func, "__name__", str(func))
        if self._stage is not None and name in LEAVING and args and isinstance(args[0], Tensor):
            self._stage.writes.protect(args[0])
        if self._place >= len(self._tape.functions) or self._tape.functions[self._place].name != name:
            raise Diverged(self.caller)
        call = self._tape.functions[self._place]
        self._place += 1
        self._inside = True
        try:
            return self._compare(call, func, args, kwargs)
        finally:
            self._inside = False

    def _compare(self, call: FunctionCall, func: Any, args: Any, kwargs: Any) -> Any:
        changed = frozenset(changed_numbers((call.args, call.kwargs), (args, kwargs)))
        before = len(self._computed.calls)
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            self._computed.calls.clear()
            self._note(call, f"{type(error).__name__}: {error}", numbers=changed)
            return self._stand_in(call.result)
        recorded = recorded_numbers(call, self._tape) if self._stage is not None else []
        if recorded or len(self._computed.calls) > before:
            now = self._computed.calls[:]
            self._computed.calls.clear()
            scales = kwargs.get("scale"), call.kwargs.get("scale")
            if not (scales[0] == scales[1] if call.name in OWN_SCALES else same_numbers(recorded, now)):
                why = "computes with a number that depends on how many channels there are"
                self._note(call, why, by_value=True, computed=(now, scales[0]))
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

    def _note(self, call: FunctionCall, why: str, **facts: Any) -> None:
        line = _line_outside(sys._getframe())
        self.problems.append(Problem(self.caller, call, " ".join(why.split())[:200], line=line, **facts))

    def _stand_in(self, tree: Any) -> Any:
        if isinstance(tree, Ref):
            value = self._tape.values[tree.index]
            return torch.zeros(self._expected[tree], dtype=value.dtype, device=value.device)
        if isinstance(tree, (tuple, list)):
            return type(tree)(self._stand_in(item) for item in tree) if type(tree) in (tuple, list) else tree
        return tree

    def __enter__(self) -> Self:
        if self._stage is not None:
            self._stage.listen = self._computed.note
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        if self._stage is not None:
            self._stage.listen = None


class LooseRehearsal(Rehearsal):
    """The same for models whose course depends on values, which differ from those of the recording.

    A call is only judged if it is the one that was recorded at this place and its arguments have the expected shapes,
    and only by the axes that lose something: boxes chosen by their scores may be more or fewer for other reasons.
    """

    def __init__(self, model: nn.Module, removal: UnitRemoval, exchanged: set[str]) -> None:
        tape = removal.labels.tape
        super().__init__(model, tape, removal.expected(arguments=True), exchanged, None)
        self._by_key = {call.key: call for call in tape.functions if call.key[2]}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside or self.runs_within(self._exchanged):
            return func(*args, **kwargs)
        self.module = self.caller
        call = self._by_key.get(self.next_function(func))
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


def _line_outside(frame: FrameType | None) -> str:
    """The innermost line of code that is neither PyTorch's nor ours, as ``file.py:12``; empty if there is none."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("torch", "ifso"):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
