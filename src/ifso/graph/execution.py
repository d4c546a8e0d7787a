"""Running a model only to look at it: on fake tensors or real ones, leaving no trace in it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ifso.common.devices import devices_apart, let_go_of
from ifso.common.fake_tensors import FakeStage
from ifso.common.module_state import named_tensors
from ifso.common.snapshot import Image
from ifso.common.tensors import WatchedCalls, WatchedLeavings, Writes, map_tensors
from ifso.common.torch_state import ALONE, forget_caches, preserved, quiet_torch, uncollected
from ifso.errors import TraceError, TraceMemoryError, users_line
from ifso.graph.tape import Recorder, Tape

T = TypeVar("T")


def call_model(model: nn.Module, inputs: Any) -> Any:
    """``model(x)``, ``model(*tuple)`` or ``model(**dict)``."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, tuple):
        return model(*inputs)
    return model(inputs)


@contextlib.contextmanager
def trainable() -> Iterator[None]:
    """As outside of ``torch.inference_mode``: what is made can be trained, and its functions are seen one by one."""
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext():
        yield


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
