"""A picture of everything in Python that a run of a model may change, taken before the run and put back after it.

Modules and their attributes are followed into containers, plain objects, classes, hooks, closures and the global names
that their code mentions.
"""

from __future__ import annotations

import functools
import random
import sys
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ifso.common.module_state import named_tensors
from ifso.common.tensors import storage_of

DEPTH = 5
"""How many containers and objects deep an attribute of a module is followed."""
MOST = 20_000
"""Objects that are looked at beside the modules and where they keep their parameters, of which there may be more."""
LONGEST = 2_000
"""Entries of a container that are looked into; all of them are put back."""

_FOREIGN = frozenset(sys.stdlib_module_names | {"torch", "numpy"}) - {"__main__"}
_PLAIN_OBJECTS = ("types", "collections", "argparse", "dataclasses", "functools")
_IMMUTABLE = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, types.ModuleType)

Undo = Callable[[], None]


class Image:
    """What a model's run may change, as it is now."""

    def __init__(self, model: nn.Module) -> None:
        self._undo: list[Undo] = [_random_state()]
        self._seen: set[int] = set()
        self._alive: list[Any] = []
        self._empty: list[dict[Any, Any]] = []
        self.tensors: list[Tensor] = []
        self._todo: deque[tuple[Any, int]] = deque()
        for tensor in named_tensors(model).values():
            self._undo.append(_tensor(tensor))
        for module in model.modules():
            self._look(module, DEPTH)
            for store in (module._parameters, module._buffers, module._modules):
                self._look(store, DEPTH - 1)
        most = len(self._seen) + MOST
        while self._todo and len(self._seen) < most:
            self._look(*self._todo.popleft())
        self._undo.reverse()

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back."""
        for undo in self._undo:
            undo()
        for items in self._empty:
            if items:
                items.clear()

    def _look(self, item: Any, depth: int) -> None:
        if isinstance(item, _IMMUTABLE) or id(item) in self._seen:
            return
        self._seen.add(id(item))
        if isinstance(item, dict) and not item:
            self._empty.append(item)
            return
        self._alive.append(item)
        for kind, look in _LOOKS:
            if isinstance(item, kind):
                undo, inside = look(item)
                break
        else:
            undo, inside = _object(item)
        if undo is not None:
            self._undo.append(undo)
        if isinstance(item, Tensor):
            self.tensors.append(item)
        if depth or isinstance(item, nn.Module):
            self._todo.extend((one, depth - 1) for one in inside if not isinstance(one, _IMMUTABLE))


Look = tuple[Undo | None, "list[Any] | tuple[Any, ...]"]


def _module(module: nn.Module) -> Look:
    attributes, kind = _dict(vars(module)), type(module)
    stores = (module._parameters, module._buffers) if isinstance(module, torch.jit.ScriptModule) else ()
    slots: list[tuple[Any, dict[str, Any]]] = [(store, dict(store.items())) for store in stores]

    def undo() -> None:
        if type(module) is not kind:
            module.__class__ = kind
        attributes[0]()
        for store, before in slots:
            for key, tensor in before.items():
                if store[key] is not tensor:
                    store[key] = tensor

    return undo, [kind, *attributes[1]]


def _dict(items: dict[Any, Any]) -> tuple[Undo, list[Any]]:
    before = list(items.items())

    def undo() -> None:
        if not _same([part for item in before for part in item], [part for item in items.items() for part in item]):
            items.clear()
            items.update(before)

    return undo, [value for _, value in before[:LONGEST]]


def _collection(items: Any) -> Look:
    """A list, a deque or a set."""
    before, fill = list(items), items.update if isinstance(items, set) else items.extend

    def undo() -> None:
        if not _same(before, list(items)):
            items.clear()
            fill(before)

    return undo, before[:LONGEST]


def _same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(lambda a, b: a is b, one, other))


def _object(item: Any) -> Look:
    """A plain object with attributes; those of the standard library and of torch are let alone."""
    kind = type(item)
    if _package(kind) in _FOREIGN and kind.__module__.partition(".")[0] not in _PLAIN_OBJECTS:
        return None, ()
    attributes = getattr(item, "__dict__", None)
    if not isinstance(attributes, dict):
        return None, (kind,)
    undo, inside = _dict(attributes)
    return undo, [kind, *inside]


def _class(kind: type) -> Look:
    if _package(kind) in _FOREIGN:
        return None, ()

    def attributes() -> dict[str, Any]:
        return {name: value for name, value in vars(kind).items() if not (name[:2] == name[-2:] == "__")}

    before = attributes()

    def undo() -> None:
        now = attributes()
        for name in now.keys() - before.keys():
            delattr(kind, name)
        for name, value in before.items():
            if now.get(name) is not value:
                setattr(kind, name, value)

    return undo, [*before.values(), *kind.__bases__]


def _package(item: Any) -> str:
    return str(getattr(item, "__module__", "") or "").partition(".")[0]


def _function(function: types.FunctionType) -> Look:
    if _package(function) in _FOREIGN:
        return None, ()
    cells = [(cell, cell.cell_contents) for cell in function.__closure__ or () if not _is_empty(cell)]
    space = function.__globals__
    mentioned = [(name, space[name]) for name in _names(function.__code__) if name in space]
    undo_attributes, attributes = _dict(function.__dict__)

    def undo() -> None:
        undo_attributes()
        for cell, content in cells:
            if _is_empty(cell) or cell.cell_contents is not content:
                cell.cell_contents = content
        for name, value in mentioned:
            if space.get(name) is not value:
                space[name] = value

    inside = [*attributes, *(content for _, content in cells), *(value for _, value in mentioned)]
    return undo, [*inside, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _is_empty(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return True
    return False


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Global names that a function's code mentions, in functions within it too."""
    nested = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return tuple(dict.fromkeys([*code.co_names, *(name for inner in nested for name in _names(inner))]))


def _wrapped(item: Any) -> Look:
    inside = [getattr(item, name, None) for name in ("__func__", "__wrapped__", "fget")]
    if not isinstance(item, functools._lru_cache_wrapper):
        return None, inside
    undo, attributes = _dict(item.__dict__)
    return undo, [*inside, *attributes]


_LOOKS: tuple[tuple[Any, Callable[[Any], Look]], ...] = (
    (nn.Module, _module),
    (Tensor, lambda tensor: _dict(tensor.__dict__)),
    (dict, _dict),
    ((list, deque, set), _collection),
    ((tuple, frozenset), lambda items: (None, list(items)[:LONGEST])),
    (types.FunctionType, _function),
    (types.MethodType, lambda method: (None, (method.__self__, method.__func__))),
    (functools.partial, lambda call: (None, (call.func, *call.args, *call.keywords.values()))),
    (type, _class),
    ((staticmethod, classmethod, property, functools._lru_cache_wrapper), _wrapped),
    (torch.Generator, lambda random: (functools.partial(random.set_state, random.get_state()), ())),
)


def _tensor(tensor: Tensor) -> Undo:
    """A parameter or buffer: what it holds, whatever is put in the place of its data."""
    data, needs_grad = tensor.data, tensor.requires_grad
    grad = tensor.grad if tensor.is_leaf else None
    shape, storage = tensor.shape, storage_of(tensor)

    def undo() -> None:
        if tensor.shape != shape or storage_of(tensor) != storage or tensor.dtype != data.dtype:
            tensor.data = data
        if tensor.is_leaf and tensor.requires_grad != needs_grad:
            tensor.requires_grad_(needs_grad)
        if tensor.is_leaf and tensor.grad is not grad:
            tensor.grad = grad

    return undo


def _random_state() -> Undo:
    """Python's and numpy's; torch's has a context of its own."""
    state, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()

    def undo() -> None:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)

    return undo
