"""Running a model only to look at it: on fake tensors or real ones, leaving no trace in it.

A model may keep what it computes outside itself: in ``functools.lru_cache``, in a module's globals, in an object that a
hook writes to. A fake tensor there would be taken for a real one by every later run in the process: those that outlive
their run are found, taken out of where they were kept, or refused.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ifso.common.devices import devices_apart, let_go_of
from ifso.common.module_state import named_tensors
from ifso.common.snapshot import Image
from ifso.common.tensors import WatchedCalls, WatchedLeavings, Writes, map_tensors
from ifso.common.torch_state import ALONE, forget_caches, preserved, quiet_torch, uncollected
from ifso.errors import TraceError, TraceMemoryError, users_line
from ifso.graph.tape import Recorder, Tape

T = TypeVar("T")

_REAL = (Tensor, nn.Parameter)

ROUNDS = 6
"""Holders of holders that are looked for: a tensor in a tuple in a dict in an object …"""


def call_model(model: nn.Module, inputs: Any) -> Any:
    """``model(x)``, ``model(*tuple)`` or ``model(**dict)``."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, tuple):
        return model(*inputs)
    return model(inputs)


def trainable() -> contextlib.AbstractContextManager[Any]:
    """As outside of ``torch.inference_mode``: what is made can be trained, and its functions are seen one by one."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


def on_fake_tensors(model: nn.Module, run: Callable[[FakeStage], T], prepare: Callable[[], Any] | None = None) -> T:
    """What ``run`` returns, which must hold no tensor; it runs the model on tensors without values or memory.

    ``prepare`` changes the model beforehand, with values. Nothing takes memory that garbage collection would find.
    """
    stage = None
    try:
        with ALONE, uncollected(), preserved(model) as image, quiet_torch():
            if prepare is not None:
                prepare()
            with written_back(model, image) as writes:
                stage = FakeStage(writes)
                with stage:
                    return run(stage)
    except BaseException as error:
        let_go_of(error, wholly=True)
        raise
    finally:
        if stage is not None:
            stage.clear()


def on_real_tensors(model: nn.Module, run: Callable[[], T]) -> T:
    """What ``run`` returns; it runs the model on values, and whatever is written into old tensors is taken back."""
    with quiet_torch(), unmarked(model):
        return run()


@contextlib.contextmanager
def unmarked(model: nn.Module) -> Iterator[None]:
    """Whatever a run of the model changes within is put back: in Python, and in tensors that were there before."""
    with preserved(model) as image, written_back(model, image) as writes, WatchedLeavings(writes), WatchedCalls(writes):
        yield


@contextlib.contextmanager
def written_back(model: nn.Module, image: Image) -> Iterator[Writes]:
    """What the writes are told of is put back at the end."""
    writes = Writes([*named_tensors(model).values(), *image.tensors])
    try:
        yield writes
    finally:
        writes.undo()


def run_fake(model: nn.Module, inputs: Any, recorder: Recorder) -> Tape:
    """The tape of a run on fake tensors: shapes only, no memory."""

    def run(stage: FakeStage) -> Tape:
        with WatchedLeavings(stage.writes):
            return _recorded(model, map_tensors(inputs, stage.from_tensor), recorder)

    return on_fake_tensors(model, run)


def run_real(model: nn.Module, inputs: Any, recorder: Recorder) -> Tape:
    """The tape of a run on copies of the real tensors."""
    copies = map_tensors(inputs, lambda tensor: tensor.detach().clone())
    return on_real_tensors(model, lambda: _recorded(model, copies, recorder))


def _recorded(model: nn.Module, inputs: Any, recorder: Recorder) -> Tape:
    forget_caches(model)
    recorder.add_inputs(inputs)
    with recorder:
        output = call_model(model, inputs)
    return recorder.finish(output)


class GuardedRecorder(Recorder):
    """A recorder for real tensors that stops before memory runs out."""

    def __init__(self, model: nn.Module, named: dict[str, Tensor], limit: int | None) -> None:
        super().__init__(model, named)
        self._limit = limit
        self._live = 0

    def note_new(self, tensor: Tensor) -> None:
        """Count the bytes of living results."""
        size = tensor.numel() * tensor.element_size()
        self._live += size
        weakref.finalize(tensor, self._release, size)
        if self._limit is not None and self._live > self._limit:
            raise TraceMemoryError(
                f"tracing this model needs real tensors and more than {self._limit / 2**30:.1f} GiB of memory; "
                "give smaller example inputs (size or batch), or a larger memory_limit"
            )

    def _release(self, size: int) -> None:
        self._live -= size


def explain(error: Exception, model: nn.Module, inputs: Any) -> TraceError:
    """A model that does not run on its example inputs, as one line."""
    if isinstance(error, TraceError):
        return error
    text = " ".join(str(error).split())[:300] or type(error).__name__
    hint = devices_apart(model, inputs) or (
        "check that model(example_inputs) works (a tensor; a tuple of positional, or a dict of keyword arguments)"
    )
    what = f"{type(error).__name__}: {text}{users_line(error)}"
    return TraceError(f"{type(model).__name__} does not run on the example inputs: {what}; {hint}")


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
            result = self._run(func, types, args, kwargs)
        else:
            self.listen = None
            try:
                with torch._C.DisableTorchFunction():
                    listen(func, args, kwargs)
                    result = self._run(func, types, args, kwargs)
            finally:
                self.listen = listen
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, FakeTensor):
                self._made.append(weakref.ref(item))
        return result

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """The call on fake tensors alone, whose result PyTorch remembers from call to call."""
        if self._mixed(func, args):
            args = map_tensors(args, self._made_fake)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _mixed(self, func: Any, args: Any) -> bool:
        """Whether there are fake tensors and weights among the arguments of a call that changes no shape in place."""
        kinds = {type(item) for item in args}
        return (
            FakeTensor in kinds
            and not kinds.isdisjoint(_REAL)
            and func not in self.lift_fns
            and torch.Tag.inplace_view not in func.tags
        )

    def _made_fake(self, tensor: Tensor) -> Tensor:
        return self.fake_tensor_converter.from_real_tensor(self, tensor) if type(tensor) in _REAL else tensor

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
    if isinstance(holder, (tuple, frozenset, types.CellType, type)):
        return False
    if isinstance(holder, dict):
        return _remove_from_dict(holder, lot)
    if isinstance(holder, (list, deque, set)):
        return _remove_from_container(holder, lot)
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


def _remove_from_container(holder: list[Any] | deque[Any] | set[Any], lot: dict[int, Any]) -> bool:
    left = [item for item in holder if id(item) not in lot]
    if len(left) == len(holder):
        return False
    holder.clear()
    (holder.update if isinstance(holder, set) else holder.extend)(left)
    return True


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
