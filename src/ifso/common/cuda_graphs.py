"""Work captured as a CUDA graph and replayed, and the random numbers that stand in the way."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ifso.common.devices import let_go_of
from ifso.common.text import describe_error
from ifso.common.torch_state import uncollected

CONSTANTS = (type(None), bool, int, float, str)
"""What may go into captured work beside tensors; the graph keeps it."""


class NotCaptured(RuntimeError):
    """Work that failed while it was captured; its own error is the cause. Without a capture it may well run."""


@contextlib.contextmanager
def capturing(
    graph: torch.cuda.CUDAGraph, *, pool: Any = None, stream: torch.cuda.Stream | None = None
) -> Iterator[None]:
    """What is put on the GPU within it becomes ``graph``, which does not run yet.

    Other threads, which may be loading images, go on with their own work meanwhile.
    Another graph that is destroyed meanwhile would spoil it, so garbage is collected before and not within.
    If the work fails, this raises :class:`NotCaptured` with the work's own reason, not that of the capture which then
    cannot be ended.
    """
    cause: BaseException | None = None
    outside, pool = torch.cuda.current_stream(), torch.cuda.graph_pool_handle() if pool is None else pool
    torch.cuda.synchronize()
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    offset = generator.get_offset()
    gc.collect()
    with uncollected():
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                try:
                    yield
                except BaseException as error:
                    cause = error
                    raise
        except BaseException as error:
            torch.cuda.set_stream(outside)
            torch.cuda.synchronize()
            _free_pool(graph, pool)
            _free_generator(generator, offset)
            cause = cause or error
            if not isinstance(cause, Exception):
                raise cause from None
            reason = describe_error(_first(cause))
            let_go_of(error)
            raise NotCaptured(reason) from cause


def _first(error: Exception) -> Exception:
    """The error that others tell of, which may have wrapped it on the way."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


def captures_go_to(device: torch.device) -> bool:
    """Return whether it is the current GPU. Work on another one would run at once and not be in the graph."""
    return device.type == "cuda" and (device.index is None or device.index == torch.cuda.current_device())


def _free_generator(generator: torch.Generator, offset: int) -> None:
    """With older torch it waits for the end of the capture: it gets a new state then. It goes on where it was."""
    try:
        torch.empty(1, device=generator.device).uniform_()
    except RuntimeError:
        fresh = torch.Generator(generator.device).manual_seed(generator.initial_seed())
        generator.graphsafe_set_state(fresh.graphsafe_get_state())
    with contextlib.suppress(RuntimeError):  # what failed is told in its own words, whatever becomes of this
        generator.set_offset(offset)


def _free_pool(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """Older torch keeps the memory of a capture that could not be ended, and frees no other as if it went on."""
    with contextlib.suppress(RuntimeError):
        graph.pool()
        return  # it was ended, and gives its memory back itself
    graph.reset()
    device = torch.cuda.current_device()
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:
        return  # torch has ended it, and given the memory back
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_releasePool(device, pool)


Pair = tuple[Tensor | None, Tensor | None]
"""A number and its tangent."""

Work = Callable[[], list[Pair]]

Recorded = tuple[list[Pair], Callable[[], None]]
"""What the work gave, in tensors that stay, and what fills them anew. They hold nothing before that was called."""

Record = Callable[[Work, Any], Recorded]
"""Records work; of two with the same pool, which is any object, neither needs its memory while the other runs."""


class GraphRecord:
    """Records work as CUDA graphs."""

    def __init__(self) -> None:
        self._pools: dict[Any, Any] = {}

    def __call__(self, work: Work, pool: Any) -> Recorded:
        """The work as a CUDA graph."""
        if pool not in self._pools:
            self._pools[pool] = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with capturing(graph, pool=self._pools[pool]):
                found = work()
        except NotCaptured:
            del self._pools[pool]
            raise
        return found, graph.replay


def draws(*, gpu: bool = True) -> Callable[[], bool]:
    """Ask the result later: have random numbers been drawn since, by torch or by Python? ``gpu=False``: on the host.

    >>> drawn = draws()
    >>> drawn()
    False
    >>> state = torch.get_rng_state()
    >>> _ = torch.rand(1)
    >>> drawn()
    True
    >>> torch.set_rng_state(state)
    """
    on_gpu = gpu and torch.cuda.is_available()
    python, host = random.getstate(), torch.get_rng_state()
    device = torch.cuda.get_rng_state() if on_gpu else None

    def drawn() -> bool:
        here = random.getstate() != python or not torch.equal(torch.get_rng_state(), host)
        return here or (device is not None and not torch.equal(torch.cuda.get_rng_state(), device))

    return drawn
