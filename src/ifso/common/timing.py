"""Seconds and peak memory of a function, on the CPU or a GPU."""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ifso.common.cuda_graphs import NotCaptured, capturing

WARM_UP = 3


@dataclass(frozen=True)
class Ready:
    """A function ready to be timed. ``captured``: it is replayed as a CUDA graph, so kernels are timed, not Python.

    ``function`` is what was captured: tensors that it holds must live as long as the graph.
    """

    function: Callable[[], Any]
    call: Callable[[], Any]
    device: torch.device
    captured: bool

    def seconds(self) -> float:
        """Time of one call."""
        start = now(self.device)
        self.call()
        end = now(self.device)
        wait(self.device)
        return between(start, end)


def now(device: torch.device) -> Any:
    """A moment of the work on a device: the time, or an event on a GPU."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(start: Any, end: Any) -> float:
    """Seconds from one moment to another; a GPU must have come so far."""
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1000


def wait(device: torch.device) -> None:
    """Wait until a GPU is through."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_ready(function: Callable[[], Any], device: torch.device) -> Ready:
    """Warm the function up and, on a GPU, capture it if it can be."""
    if device.type != "cuda":
        function()
        return Ready(function, function, device, captured=False)
    replay = _captured(function)
    ready = Ready(function, replay or function, device, captured=replay is not None)
    for _ in range(WARM_UP):
        ready.call()
    return ready


def in_turns(functions: Mapping[str, Ready], rounds: int) -> dict[str, list[float]]:
    """Seconds of every function in every round: what disturbs the machine disturbs them all."""
    found: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, ready in functions.items():
            found[name].append(ready.seconds())
    return found


def middle(values: Sequence[float]) -> tuple[float, float]:
    """Median, and width of the middle half.

    >>> middle([1.0, 2.0, 3.0, 4.0, 100.0])
    (3.0, 50.5)
    """
    if len(values) == 1:
        return values[0], 0.0
    low, median, high = statistics.quantiles(values, n=4)
    return median, high - low


def machine(device: torch.device) -> dict[str, Any]:
    """The device that is timed, the version of torch and its threads."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"torch": torch.__version__, "device_name": name, "threads": torch.get_num_threads()}


def _captured(function: Callable[[], Any]) -> Callable[[], None] | None:
    """The function as a CUDA graph to replay, or None if it cannot be captured (it waits for the GPU)."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with capturing(graph):
            function()
    except NotCaptured:
        return None
    return graph.replay


def peak_bytes(function: Callable[[], Any], device: torch.device) -> int:
    """Most memory that tensors made by the function held at one time."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with LiveBytes() as live:
        function()
    return live.peak


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are alive among those made while it is on.

    >>> with LiveBytes() as live:
    ...     kept = torch.zeros(10)
    ...     del kept
    ...     _ = torch.zeros(20) + 1
    >>> live.peak
    160
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._now = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operation: count the storages of its results that were not there before."""
        known = {storage.data_ptr() for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            place = storage.data_ptr()
            if place and place not in known and place not in self._seen:
                self._note(storage, place)
        return result

    def _note(self, storage: torch.UntypedStorage, place: int) -> None:
        self._seen.add(place)
        self._now += storage.nbytes()
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._release, place, storage.nbytes())

    def _release(self, place: int, size: int) -> None:
        self._seen.discard(place)
        self._now -= size


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    """Those of tensors that hold something: fake ones have no bytes."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor) and not leaf._is_zerotensor():
            yield leaf.untyped_storage()
