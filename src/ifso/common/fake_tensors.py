"""Fake tensors that outlive the run they were made for: found, taken out of where they were kept, or refused.

A model may keep what it computes outside itself: in ``functools.lru_cache``, in a module's globals, in an object that a
hook writes to. A fake tensor there would be taken for a real one by every later run in the process.
"""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ifso.common.tensors import Writes
from ifso.errors import TraceError

T = TypeVar("T")

ROUNDS = 6
"""Holders of holders that are looked for: a tensor in a tuple in a dict in an object …"""


class FakeStage(FakeTensorMode):
    """Fake tensors for one run, none of which may be alive after it; ``writes`` are told of every call.

    ``listen`` is told of the calls that the model makes, not of those that are made for them.
    """

    def __init__(self, writes: Writes) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.writes = writes
        self.listen: Callable[[Any, Any, Any], None] | None = None
        self._made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, listen = kwargs or {}, self.listen
        if func.namespace == "prim":
            return super().__torch_dispatch__(func, types, args, kwargs)
        self.writes.before(func, args, kwargs)
        if listen is None:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        else:
            self.listen = None
            try:
                with torch._C.DisableTorchFunction():
                    listen(func, args, kwargs)
                    result = super().__torch_dispatch__(func, types, args, kwargs)
            finally:
                self.listen = listen
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, FakeTensor):
                self._made.append(weakref.ref(item))
        return result

    def alive(self) -> list[Tensor]:
        """Fake tensors that somebody still holds."""
        found = (made() for made in self._made)
        return [tensor for tensor in found if tensor is not None]

    def clear(self) -> None:
        """Take what is left of the run out of caches and containers; TraceError where that is not possible."""
        collected = False
        for _ in range(ROUNDS):
            held = self.alive()
            if not held:
                return
            removed = _release(held)
            del held
            if not removed:
                if collected:
                    break
                gc.collect()
                collected = True
        if self.alive():
            raise TraceError(
                f"the model keeps tensors of a trial run in {_describe(self.alive())}, from where they cannot be taken "
                "out; they are useless: start a new process, and keep tensors in attributes of the model or in a dict"
            )


def _release(held: list[Any]) -> bool:
    """Take these objects, or tuples around them, out of what holds them; was there anything to take out?"""
    lot = {id(item): item for item in held}
    ours = {id(held), id(lot)}
    for _ in range(ROUNDS):
        holders = [one for one in gc.get_referrers(*lot.values()) if id(one) not in ours and not _passing(one, lot)]
        removed = [_remove(one, lot) for one in holders]
        if any(removed):
            return True
        lot = {id(one): one for one in holders if isinstance(one, (tuple, frozenset))}
        ours |= {id(lot), id(holders)}
        if not lot:
            return False
    return False


def _passing(holder: Any, lot: dict[int, Any]) -> bool:
    """Frames that run, lists of this search and the tensors themselves hold nothing for long."""
    return isinstance(holder, types.FrameType) or id(holder) in lot or isinstance(holder, weakref.ref)


def _remove(holder: Any, lot: dict[int, Any]) -> bool:
    """Take objects out of one holder, if it is of a kind from which they can be taken."""
    if isinstance(holder, functools._lru_cache_wrapper):
        holder.cache_clear()
        return True
    for kind, remove in _REMOVERS:
        if isinstance(holder, kind):
            return remove(holder, lot)
    attributes = getattr(holder, "__dict__", None)
    return (isinstance(attributes, dict) and _remove_from_dict(attributes, lot)) or _remove_from_slots(holder, lot)


def _remove_from_slots(holder: Any, lot: dict[int, Any]) -> bool:
    slots = {name for kind in type(holder).__mro__ for name in vars(kind).get("__slots__", ())}
    found = [name for name in slots if id(getattr(holder, name, None)) in lot]
    for name in found:
        delattr(holder, name)
    return bool(found)


def _remove_from_dict(holder: dict[Any, Any], lot: dict[int, Any]) -> bool:
    keys = [key for key, value in holder.items() if id(value) in lot or id(key) in lot]
    owner = next((one for one in gc.get_referrers(holder) if isinstance(one, type)), None) if keys else None
    for key in keys:
        if owner is not None and isinstance(key, str) and key in vars(owner):
            delattr(owner, key)
        else:
            del holder[key]
    return bool(keys)


def _remove_from_sequence(holder: Any, lot: dict[int, Any]) -> bool:
    left = [item for item in holder if id(item) not in lot]
    if len(left) == len(holder):
        return False
    holder.clear()
    holder.extend(left)
    return True


def _remove_from_set(holder: set[Any], lot: dict[int, Any]) -> bool:
    gone = [item for item in holder if id(item) in lot]
    holder.difference_update(gone)
    return bool(gone)


_REMOVERS: tuple[tuple[Any, Callable[[Any, dict[int, Any]], bool]], ...] = (
    (dict, _remove_from_dict),
    ((list, deque), _remove_from_sequence),
    (set, _remove_from_set),
    ((tuple, frozenset, types.CellType, type), lambda _holder, _lot: False),
)


def _describe(held: list[Any]) -> str:
    """What holds the first of these objects, in words."""
    lot: list[Any] = held[:1]
    for _ in range(ROUNDS):
        holders = [one for one in gc.get_referrers(*lot) if one is not held and one is not lot]
        holders = [one for one in holders if not isinstance(one, types.FrameType)]
        kinds = sorted({type(one).__name__ for one in holders if not isinstance(one, tuple)})
        if kinds:
            return f"an object of type {', '.join(kinds)}"
        lot = holders
    return "a place that Python does not show"
