"""Running a model only to look at it: on fake tensors or real ones, leaving no trace in it."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ifso.errors import TraceError, TraceMemoryError, users_line
from ifso.graph.image import Image
from ifso.graph.slots import named_tensors
from ifso.graph.stage import Stage, forget_frames
from ifso.graph.tape import Recorder, Tape, map_tensors
from ifso.graph.writes import WatchedCalls, WatchedLeavings, Writes

T = TypeVar("T")


def call_model(model: nn.Module, inputs: Any) -> Any:
    """``model(x)``, ``model(*tuple)`` or ``model(**dict)``."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, tuple):
        return model(*inputs)
    return model(inputs)


ALONE = threading.RLock()
"""Held by whoever changes a model for a moment, or a setting of the whole process."""


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[Image]:
    """Put back afterwards every attribute of every module, what hangs on them, and what the buffers hold."""
    with ALONE:
        image = Image(model)
        contents = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        try:
            yield image
        finally:
            image.restore()
            with torch.no_grad():
                for buffer, content in contents:
                    buffer.copy_(content)


def on_fake_tensors(model: nn.Module, run: Callable[[Stage], T], prepare: Callable[[], Any] | None = None) -> T:
    """What ``run`` returns, which must hold no tensor; it runs the model on tensors without values or memory.

    ``prepare`` changes the model beforehand, with values.
    """
    stage = None
    try:
        with ALONE, _uncollected(), preserved(model) as image, quiet_torch():
            if prepare is not None:
                prepare()
            with _written_back(model, image) as writes:
                stage = Stage(writes)
                with stage:
                    return run(stage)
    except BaseException as error:
        forget_frames(error)
        raise
    finally:
        if stage is not None:
            stage.clear()


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without garbage collection, which looks at every object of the process while nothing here takes memory."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def on_real_tensors(model: nn.Module, run: Callable[[], T]) -> T:
    """What ``run`` returns; it runs the model on values, and whatever is written into old tensors is taken back."""
    with (
        preserved(model) as image,
        quiet_torch(),
        _written_back(model, image) as writes,
        WatchedLeavings(writes),
        WatchedCalls(writes),
    ):
        return run()


@contextlib.contextmanager
def _written_back(model: nn.Module, image: Image) -> Iterator[Writes]:
    writes = Writes([*named_tensors(model).values(), *image.tensors])
    try:
        yield writes
    finally:
        writes.undo()


def forget_caches(model: nn.Module) -> None:
    """Empty the dicts in which modules keep tensors computed from their parameters (``…cache…``), and autocast's."""
    forget_caches_of(model.modules())


def forget_caches_of(modules: Iterable[nn.Module]) -> None:
    """The same for modules that are known: to find all of a model takes long."""
    torch.clear_autocast_cache()
    for module in modules:
        for name, value in vars(module).items():
            if "cache" in name and isinstance(value, dict) and any(isinstance(item, Tensor) for item in value.values()):
                value.clear()


@contextlib.contextmanager
def quiet_torch() -> Iterator[None]:
    """No gradients, no fused attention kernels, no log lines about shapes we try; random state put back.

    Weights that ``torch.autocast`` has cast are not kept: the cache would mix those of this run with others.
    """
    with ALONE:
        fused, caching = torch.backends.mha.get_fastpath_enabled(), torch.is_autocast_cache_enabled()
        log = logging.getLogger("torch._subclasses.fake_tensor")
        level = log.level
        try:
            torch.backends.mha.set_fastpath_enabled(False)
            torch.clear_autocast_cache()
            torch.set_autocast_cache_enabled(False)
            log.setLevel(logging.CRITICAL + 1)
            with torch.no_grad(), torch.random.fork_rng():
                yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)
            torch.set_autocast_cache_enabled(caching)
            log.setLevel(level)


def run_fake(model: nn.Module, inputs: Any, recorder: Recorder) -> Tape:
    """The tape of a run on fake tensors: shapes only, no memory."""

    def run(stage: Stage) -> Tape:
        forget_caches(model)
        fakes = map_tensors(inputs, stage.from_tensor)
        recorder.add_inputs(fakes)
        with WatchedLeavings(stage.writes), recorder:
            output = call_model(model, fakes)
        return recorder.finish(output)

    return on_fake_tensors(model, run)


def run_real(model: nn.Module, inputs: Any, recorder: Recorder) -> Tape:
    """The tape of a run on the real tensors."""

    def run() -> Tape:
        forget_caches(model)
        copies = map_tensors(inputs, lambda tensor: tensor.detach().clone())
        recorder.add_inputs(copies)
        with recorder:
            output = call_model(model, copies)
        return recorder.finish(output)

    return on_real_tensors(model, run)


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
    what = f"{type(error).__name__}: {text}{users_line(error)}"
    return TraceError(f"{type(model).__name__} does not run on the example inputs: {what}; {hint}")
