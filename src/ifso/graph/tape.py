"""Recording: one run of a model as a flat list of ATen calls, with parameters recognised by identity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as module_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from ifso.common.tensors import LEAVING, map_tensors, tensors_in, written_by

FunctionKey = tuple[str, int, int]
"""(module name, visit, n): the n-th torch function called while that module ran for the visit-th time in a run."""


@dataclass(frozen=True)
class Ref:
    """A tensor of the recorded run; ``index`` points into :attr:`Tape.values`."""

    index: int


@dataclass(frozen=True)
class Value:
    """What is known of a recorded tensor. ``kind``: parameter, buffer, input, constant (met from outside) or result."""

    shape: tuple[int, ...]
    kind: str
    name: str
    dtype: torch.dtype
    device: torch.device
    content: Any = None
    """The numbers in a small constant, if it was met on a run without values."""


@dataclass(frozen=True)
class Call:
    """One ATen call; tensors in ``args`` and ``kwargs`` are replaced by :class:`Ref`."""

    func: Any
    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Ref | None, ...]
    module: str
    function: FunctionKey | None

    @property
    def inputs(self) -> Iterator[Ref]:
        """All tensors the call reads, in order."""
        return refs_in((self.args, self.kwargs))

    @property
    def result(self) -> Ref:
        """The first output, which there must be."""
        assert self.outputs[0] is not None
        return self.outputs[0]

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """A positional-or-keyword argument."""
        if len(self.args) > position:
            return self.args[position]
        return self.kwargs.get(name, default)


@dataclass(frozen=True)
class FunctionCall:
    """A torch-level function call (``torch.nn.functional.layer_norm``, ``Tensor.view`` …) around ATen calls."""

    key: FunctionKey
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    @property
    def refs(self) -> list[Ref]:
        """The tensors that it gives and takes, each once."""
        return list(dict.fromkeys(refs_in((self.result, self.args, self.kwargs))))


@dataclass
class Tape:
    """A recorded run."""

    values: list[Value] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    functions: list[FunctionCall] = field(default_factory=list)
    module_ends: dict[int, int] = field(default_factory=dict)
    outputs: tuple[Ref, ...] = ()
    written: set[str] = field(default_factory=set)
    """Names of parameters and buffers that the run wrote into or replaced."""
    _by_function: dict[FunctionKey, list[Call]] | None = field(default=None, repr=False)

    def shape(self, ref: Ref) -> tuple[int, ...]:
        """Shape of a recorded tensor."""
        return self.values[ref.index].shape

    def calls_of(self, function: FunctionKey) -> list[Call]:
        """The ATen calls that a torch function made, and those before it that belong to none."""
        if self._by_function is None:
            self._by_function, before = {}, []
            for call in self.calls:
                before.append(call)
                if call.function is not None:
                    self._by_function.setdefault(call.function, []).extend(before)
                    before = []
        return self._by_function.get(function, [])


def refs_in(tree: Any) -> Iterator[Ref]:
    """Every :class:`Ref` in nested tuples, lists and dicts."""
    if isinstance(tree, Ref):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from refs_in(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from refs_in(item)


OUTSIDE = "<outside the model>"


@dataclass
class _Frame:
    name: str
    entry: int
    visit: int = 1
    functions: int = 0


class ModuleFunctions(TorchFunctionMode):
    """A mode that sees torch functions and knows, through PyTorch's global forward hooks, which module calls them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {id(module): name for name, module in model.named_modules()}
        self._running = [_Frame(OUTSIDE, 0)]
        self._entries = 0
        self._visits: Counter[str] = Counter()
        self._handles: list[Any] = []
        self._thread = 0

    @property
    def caller(self) -> str:
        """Name of the innermost module of the model that runs in this thread."""
        return self._running[-1].name.removeprefix(OUTSIDE)

    def runs_within(self, names: Collection[str]) -> bool:
        """Return whether one of these modules is running."""
        return any(frame.name in names for frame in self._running)

    def next_function(self, func: Any) -> FunctionKey:
        """Key of the torch function that is about to be called.

        Reads of properties do not count: how many there are depends on whether gradients and fused kernels are on.
        """
        frame = self._running[-1]
        if getattr(func, "__name__", "") == "__get__":
            return (frame.name, frame.visit, 0)
        frame.functions += 1
        return (frame.name, frame.visit, frame.functions)

    def left(self, name: str, entry: int) -> None:
        """A module has run, the ``entry``-th to be entered; for subclasses."""

    def _enter(self, module: nn.Module, _inputs: Any) -> None:
        if get_ident() != self._thread:
            return
        self._entries += 1
        if len(self._running) == 1:
            self._visits.clear()
        name = self._names.get(id(module), self.caller)
        self._visits[name] += 1
        self._running.append(_Frame(name, self._entries, self._visits[name]))

    def _leave(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        if get_ident() == self._thread:
            frame = self._running.pop()
            self.left(frame.name, frame.entry)

    def __enter__(self) -> Self:
        self._thread = get_ident()
        self._handles = [
            module_hooks.register_module_forward_pre_hook(self._enter),
            module_hooks.register_module_forward_hook(self._leave, always_call=True),
        ]
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        for handle in self._handles:
            handle.remove()


class _FunctionLog(ModuleFunctions):
    """Notes torch-level calls, so that ATen calls know which function they belong to: ``function``, if any."""

    def __init__(self, model: nn.Module, recorder: Recorder) -> None:
        super().__init__(model)
        self._recorder = recorder
        self.function: FunctionKey | None = None

    def left(self, name: str, entry: int) -> None:  # noqa: ARG002 (one protocol)
        tape = self._recorder.tape
        tape.module_ends[entry] = len(tape.functions)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.function is not None:
            return func(*args, **kwargs)
        key = self.function = self.next_function(func)
        try:
            result = func(*args, **kwargs)
        finally:
            self.function = None
        self._recorder.note_function(key, func, args, kwargs, result)
        return result


class Recorder(TorchDispatchMode):
    """Writes a :class:`Tape` while active. ``named`` maps names to the model's parameters and buffers."""

    def __init__(self, model: nn.Module, named: dict[str, Tensor]) -> None:
        super().__init__()
        self.tape = Tape()
        self._log = _FunctionLog(model, self)
        self._refs: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._owners: WeakIdKeyDictionary = WeakIdKeyDictionary()
        for name, tensor in named.items():
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            self._register(tensor, kind, name)
            self._owners[tensor] = name

    def add_inputs(self, inputs: Any) -> None:
        """Mark the tensors in ``inputs`` as what the model is given."""
        for tensor in tensors_in(inputs):
            if tensor not in self._refs:
                self._register(tensor, "input")

    def finish(self, output: Any) -> Tape:
        """The tape, with the model's outputs marked."""
        self.tape.outputs = tuple(self.ref(tensor) for tensor in tensors_in(output))
        return self.tape

    def ref(self, tensor: Tensor) -> Ref:
        """The reference of a tensor; one never seen before is a constant from outside."""
        known = self._refs.get(tensor)
        return known if known is not None else self._register(tensor, "constant", content=content_of(tensor))

    def _register(self, tensor: Tensor, kind: str, name: str = "", content: Any = None) -> Ref:
        ref = Ref(len(self.tape.values))
        self.tape.values.append(Value(tuple(tensor.shape), kind, name, tensor.dtype, tensor.device, content))
        self._refs[tensor] = ref
        return ref

    def note_function(self, key: FunctionKey, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Write down a torch-level call."""
        name = getattr(func, "__name__", str(func))
        known = lambda tree: map_tensors(tree, self._refs.get)  # noqa: E731
        if name == "__set__" and isinstance(ref := known(args[0]), Ref) and self.tape.values[ref.index].name:
            self.tape.written.add(self.tape.values[ref.index].name)
        if name in LEAVING and args and args[0] in self._owners:
            self.tape.written.add(self._owners[args[0]])
        self.tape.functions.append(FunctionCall(key, name, known(tuple(args)), known(kwargs), known(result)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._record(func, args, kwargs or {})

    def _record(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func.namespace == "prim" or (func.namespace == "prims" and "device" in func.__name__):
            return func(*args, **kwargs)
        owners = (self._owners.get(tensor) for tensor in written_by(func, args, kwargs))
        self.tape.written.update(name for name in owners if name is not None)
        recorded_args = map_tensors(tuple(args), self.ref)
        recorded_kwargs = map_tensors(kwargs, self.ref)
        result = func(*args, **kwargs)
        outputs: list[Ref | None] = []
        items = result if isinstance(result, (tuple, list)) else (result,)
        for item in items:
            if not isinstance(item, Tensor):
                outputs.append(None)
                continue
            known = self._refs.get(item)
            if known is None:
                self.note_new(item)
            if known is None or self.tape.shape(known) != tuple(item.shape):
                known = self._register(item, "result")
                self._note_view(func, args, item)
            outputs.append(known)
        op = str(func.overloadpacket)
        call = Call(func, op, recorded_args, recorded_kwargs, tuple(outputs), self._log.caller, self._log.function)
        self.tape.calls.append(call)
        return result

    def _note_view(self, func: Any, args: Any, result: Tensor) -> None:
        """What is written into a view of a parameter is written into the parameter."""
        if args and isinstance(args[0], Tensor) and args[0] in self._owners and func.is_view:
            self._owners[result] = self._owners[args[0]]

    def note_new(self, tensor: Tensor) -> None:
        """A tensor that did not exist before; subclasses watch memory here."""

    def __enter__(self) -> Recorder:
        self._log.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._log.__exit__(*exc)


MOST_ELEMENTS = 4096
"""Constants with more elements are not compared."""


def content_of(item: Any) -> Any:
    """The numbers in a small tensor that has values, as shape and list; None for others."""
    if not isinstance(item, Tensor) or isinstance(item, FakeTensor) or item.numel() > MOST_ELEMENTS:
        return None
    with _disable_current_modes():
        try:
            return tuple(item.shape), item.detach().cpu().tolist()
        except (RuntimeError, NotImplementedError):
            return None
