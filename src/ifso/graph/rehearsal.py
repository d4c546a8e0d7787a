"""Rehearsing a removal: the model runs with smaller parameters on fake tensors, beside its own recording.

Sizes kept as Python numbers (``num_heads``, ``C // heads``, widths in slices) are invisible to the tape. Here they
show: every torch function must give the shapes that the ids predict. Where one does not, the expected shape is put in
its place and the run goes on, so that one run finds every such place.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from ifso.graph.channel_graph import STAYS, SizeAttribute
from ifso.graph.labels import Labels
from ifso.graph.layouts import compact, compact_shape
from ifso.graph.numbers import new_numbers
from ifso.graph.running import call_model, forget_caches, preserved, quiet_torch
from ifso.graph.slim_attention import slim_attention
from ifso.graph.slots import named_tensors, read_attribute, set_attribute, set_tensors
from ifso.graph.tape import FunctionCall, ModuleStack, Ref, Tape, map_tensors, refs_in, tensors_in
from ifso.graph.units import Units


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
    """A function that did not give the expected shapes, or (``by_value``) computes with a number that has changed."""

    module: str
    call: FunctionCall
    why: str
    by_value: bool = False


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
    with preserved(model), quiet_torch():
        exchanged = removal.set_numbers(model)
        rehearsal = Rehearsal(model, removal.labels.tape, expected, set(exchanged))
        try:
            _run_smaller(model, removal, rehearsal)
        except Diverged as error:
            return rehearsal.problems, error.module
        except Exception:
            return rehearsal.problems, rehearsal.module
        return rehearsal.problems, None


def _run_smaller(model: nn.Module, removal: Removal, watch: contextlib.AbstractContextManager[Any]) -> Any:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tensors, shapes = named_tensors(model), removal.shapes
    with mode:
        set_tensors(model, {name: tensors[name].new_empty(shape) for name, shape in shapes.items()})
        fakes = map_tensors(removal.inputs, mode.from_tensor)
        with watch:
            return call_model(model, fakes)


def _rehearse_real(model: nn.Module, removal: Removal) -> tuple[list[Problem], str | None]:
    """The same with values, for models whose course depends on them."""
    tensors = named_tensors(model)
    with preserved(model), quiet_torch():
        layouts = removal.units.layouts
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


def check_removal(model: nn.Module, removal: Removal, output_shapes: tuple[tuple[int, ...], ...]) -> str | None:
    """What is wrong with a removal, in words; None if the smaller model runs to the same output shapes.

    A model that takes another way than in its recording (it is in train mode now, say) is only asked for its outputs.
    """
    problems, stuck = rehearse(model, removal)
    if problems:
        return f"{problems[0].call.name} in {problems[0].module or 'the model'} {problems[0].why}"
    if stuck is None:
        return None
    failure = f"the forward pass fails in {stuck or 'the model'}"
    if removal.on_real_tensors:
        return failure
    with preserved(model), quiet_torch():
        removal.set_numbers(model)
        try:
            output = _run_smaller(model, removal, contextlib.nullcontext())
        except Exception:
            return failure
    same = tuple(tuple(tensor.shape) for tensor in tensors_in(output)) == output_shapes
    return None if same else "its outputs have other shapes"


class Rehearsal(TorchFunctionMode):
    """Compares each torch function with the recording and notes the problems."""

    def __init__(self, model: nn.Module, tape: Tape, expected: dict[Ref, tuple[int, ...]], exchanged: set[str]) -> None:
        super().__init__()
        self.problems: list[Problem] = []
        self._tape = tape
        self._expected = expected
        self._stack = ModuleStack(model, self._resume)
        self._last = ""
        self._place = 0
        self._inside = False
        self._exchanged = exchanged

    @property
    def module(self) -> str:
        """The innermost module that ran last."""
        return self._last

    def _resume(self, name: str, entry: int) -> None:
        if name in self._exchanged:
            self._place = self._tape.module_ends.get(entry, self._place)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside or any(name in self._exchanged for name in self._stack.running):
            return func(*args, **kwargs)
        self._last = self._stack.module
        name = getattr(func, "__name__", str(func))
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
        if _factors(call.name, args, kwargs) != _factors(call.name, call.args, call.kwargs):
            self._note(call, "computes with a number that depends on how many channels there are", by_value=True)
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            self._note(call, f"{type(error).__name__}: {error}")
            return self._stand_in(call.result)
        refs = list(refs_in(call.result))
        tensors = tensors_in(result)
        if not refs:
            return result
        if not self._fits(tensors, refs):
            wanted = [self._expected[ref] for ref in refs]
            self._note(call, f"gave {[tuple(t.shape) for t in tensors]}, expected {wanted}")
            return self._stand_in(call.result)
        return result

    def _fits(self, tensors: list[Tensor], refs: list[Ref]) -> bool:
        return [tuple(tensor.shape) for tensor in tensors] == [self._expected[ref] for ref in refs]

    def _note(self, call: FunctionCall, why: str, by_value: bool = False) -> None:
        self.problems.append(Problem(self._stack.module, call, " ".join(why.split())[:200], by_value))

    def _stand_in(self, tree: Any) -> Any:
        if isinstance(tree, Ref):
            value = self._tape.values[tree.index]
            return torch.zeros(self._expected[tree], dtype=value.dtype, device=value.device)
        if isinstance(tree, (tuple, list)):
            return type(tree)(self._stand_in(item) for item in tree) if type(tree) in (tuple, list) else tree
        return tree

    def __enter__(self) -> Rehearsal:
        self._stack.__enter__()
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._stack.__exit__(*exc)


class LooseRehearsal(Rehearsal):
    """The same for models whose course depends on values, which differ from those of the recording.

    A call is only judged if it is the one that was recorded at this place and its arguments have the expected shapes,
    and only by the axes that lose something: boxes chosen by their scores may be more or fewer for other reasons.
    """

    def __init__(self, model: nn.Module, removal: Removal, exchanged: set[str]) -> None:
        tape = removal.labels.tape
        super().__init__(model, tape, removal.expected_arguments() | removal.expected_results(), exchanged)
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


ARITHMETIC = frozenset(
    ("add", "sub", "rsub", "mul", "div", "rdiv", "truediv", "rtruediv", "true_divide", "pow", "rpow")
)


def _factors(name: str, args: Any, kwargs: Mapping[str, Any]) -> list[float]:
    """Numbers that a function computes with: masking cannot change them, so removal must not."""
    if name == "scaled_dot_product_attention":
        scale = kwargs.get("scale")
        return [] if scale is None else [scale]
    if name.strip("_").removeprefix("i") not in ARITHMETIC and name.strip("_") not in ARITHMETIC:
        return []
    return [item for item in args if isinstance(item, (int, float)) and not isinstance(item, bool)]
