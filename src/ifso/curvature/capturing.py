"""Work as a CUDA graph. A capture that fails leaves nothing behind: no memory, no stream, no waiting generator."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch

from ifso.curvature.losses import one_line


class NotCaptured(RuntimeError):
    """Work that failed while it was captured; its own error is the cause. Without a capture it may well run."""


@contextlib.contextmanager
def capturing(
    graph: torch.cuda.CUDAGraph,
    *,
    pool: Any = None,
    stream: torch.cuda.Stream | None = None,
    mode: str = "global",
) -> Iterator[None]:
    """What is put on the GPU within it becomes ``graph``, which does not run yet.

    Another graph that is destroyed meanwhile would spoil it, so garbage is collected before and not within.
    If the work fails, this raises :class:`NotCaptured` with the work's own reason, not that of the capture which then
    cannot be ended.
    """
    cause: BaseException | None = None
    outside, pool = torch.cuda.current_stream(), torch.cuda.graph_pool_handle() if pool is None else pool
    torch.cuda.synchronize()
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode):
            try:
                yield
            except BaseException as error:
                cause = error
                raise
    except BaseException as error:
        torch.cuda.set_stream(outside)
        torch.cuda.synchronize()
        _free_generator()
        _free_pool(graph, pool)
        cause = cause or error
        if not isinstance(cause, Exception):
            raise cause from None
        raise NotCaptured(one_line(_first(cause))) from cause
    finally:
        if enabled:
            gc.enable()


def _first(error: Exception) -> Exception:
    """The error that others tell of, which may have wrapped it on the way."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


def _free_generator() -> None:
    """It waits for the end of the capture: give it a new state of the same seed."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    fresh = torch.Generator(generator.device).manual_seed(generator.initial_seed())
    generator.graphsafe_set_state(fresh.graphsafe_get_state())


def _free_pool(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """Torch holds the memory of a capture that could not be ended for good, and frees no other as if it went on."""
    with contextlib.suppress(RuntimeError):
        graph.pool()
        return  # it was ended, and gives its memory back itself
    for give_back in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
        with contextlib.suppress(RuntimeError):
            give_back(torch.cuda.current_device(), pool)
