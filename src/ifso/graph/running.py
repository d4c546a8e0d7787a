"""Running a model only to look at it: on fake tensors or real ones, leaving no trace in it."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from ifso.errors import TraceError, TraceMemoryError
from ifso.graph.tape import Recorder, map_tensors


def call_model(model: nn.Module, inputs: Any) -> Any:
    """``model(x)``, ``model(*tuple)`` or ``model(**dict)``."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, tuple):
        return model(*inputs)
    return model(inputs)


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Put every attribute of every module, and what the buffers hold, back afterwards."""
    modules = list(model.modules())
    classes = [type(module) for module in modules]
    before = [{key: _copied(value) for key, value in vars(module).items()} for module in modules]
    contents = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for module, kind, attributes in zip(modules, classes, before, strict=True):
            module.__class__ = kind
            module.__dict__.clear()
            module.__dict__.update({key: _restored(original, copy) for key, (original, copy) in attributes.items()})
        with torch.no_grad():
            for buffer, content in contents:
                buffer.copy_(content)


def forget_caches(model: nn.Module) -> None:
    """Empty the dicts in which modules keep tensors they computed from their parameters (``…cache…``)."""
    forget_caches_of(model.modules())


def forget_caches_of(modules: Iterable[nn.Module]) -> None:
    """The same for modules that are known: to find all of a model takes long."""
    for module in modules:
        for name, value in vars(module).items():
            if "cache" in name and isinstance(value, dict) and any(isinstance(item, Tensor) for item in value.values()):
                value.clear()


def _copied(value: Any) -> tuple[Any, Any]:
    return (value, value.copy()) if isinstance(value, (dict, list, set)) else (value, None)


def _restored(original: Any, copy: Any) -> Any:
    """The container with its former content; one that still has it is left alone: it may refuse to be written."""
    if copy is None or _items(original) == _items(copy):
        return original
    if isinstance(original, list):
        original[:] = copy
    elif isinstance(original, (dict, set)):
        original.clear()
        original.update(copy)
    return original


def _items(container: dict[Any, Any] | list[Any] | set[Any]) -> list[Any]:
    """What tells whether a container holds the same objects in the same order."""
    if isinstance(container, dict):
        return [(key, id(value)) for key, value in container.items()]
    return [id(item) for item in container]


@contextlib.contextmanager
def quiet_torch() -> Iterator[None]:
    """No gradients, no fused attention kernels, no log lines about shapes we try; random state put back."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        with torch.no_grad(), torch.random.fork_rng():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        log.setLevel(level)


def run_fake(model: nn.Module, inputs: Any, recorder: Recorder, mode: FakeTensorMode) -> Any:
    """Record a run on fake tensors: shapes only, no memory."""
    forget_caches(model)
    with quiet_torch(), mode:
        fakes = map_tensors(inputs, mode.from_tensor)
        recorder.add_inputs(fakes)
        with recorder:
            return call_model(model, fakes)


def run_real(model: nn.Module, inputs: Any, recorder: Recorder) -> Any:
    """Record a run on the real tensors."""
    forget_caches(model)
    with quiet_torch():
        copies = map_tensors(inputs, lambda tensor: tensor.detach().clone())
        recorder.add_inputs(copies)
        with recorder:
            return call_model(model, copies)


def available_memory() -> int | None:
    """Bytes of main memory free for use, where the system tells."""
    try:
        with Path("/proc/meminfo").open() as lines:
            found = next(line for line in lines if line.startswith("MemAvailable"))
        return int(found.split()[1]) * 1024
    except (OSError, StopIteration):
        return None


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


def devices_apart(model: nn.Module, inputs: Any) -> str:
    """Where a model and what it is called with are, and what to do, if they are not on one device; else empty.

    >>> devices_apart(nn.Linear(2, 2), (torch.zeros(2), torch.zeros(2, device="meta")))
    'the model is on cpu, what it is given on cpu and meta; move one to the device of the other'
    """
    mine = {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())}
    theirs = {str(leaf.device) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)}
    if not mine or not theirs or mine == theirs:
        return ""
    here, there = (" and ".join(sorted(places)) for places in (mine, theirs))
    return f"the model is on {here}, what it is given on {there}; move one to the device of the other"


def explain(error: Exception, model: nn.Module, inputs: Any) -> TraceError:
    """A model that does not run on its example inputs, as one line."""
    if isinstance(error, TraceError):
        return error
    text = " ".join(str(error).split())[:300] or type(error).__name__
    hint = devices_apart(model, inputs) or (
        "check that model(example_inputs) works (a tensor; a tuple of positional, or a dict of keyword arguments)"
    )
    return TraceError(
        f"{type(model).__name__} does not run on the example inputs: {type(error).__name__}: {text}; {hint}"
    )
