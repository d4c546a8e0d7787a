"""A capture that fails gives back what it took; without a GPU, torch's own functions are only watched."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ifso.curvature import capturing as module
from ifso.curvature.capturing import NotCaptured, capturing
from ifso.errors import ScoreError

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
POOL = (0, 7)


class Watched:
    """Stands for torch's captures: what is called is written down, and each end as told."""

    def __init__(self, ends: bool) -> None:
        self.ends, self.said = ends, []

    @contextlib.contextmanager
    def graph(self, _: Any, **options: Any) -> Iterator[None]:
        self.said.append(("begin", options["pool"]))
        try:
            yield
        finally:
            if not self.ends:
                raise RuntimeError("operation would result in a merge of separate capture sequences")

    def pool(self) -> tuple[int, int]:
        if not self.ends:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return POOL

    def note(self, name: str) -> Callable[..., None]:
        return lambda *given: self.said.append((name, *given))


@pytest.fixture(params=[True, False], ids=["ended", "spoilt"])
def watched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Watched:
    found = Watched(request.param)
    cuda = SimpleNamespace(
        graph=found.graph,
        graph_pool_handle=lambda: POOL,
        current_stream=lambda: "outside",
        current_device=lambda: 0,
        synchronize=lambda: None,
        set_stream=found.note("stream"),
    )
    inner = SimpleNamespace(_cuda_endAllocateToPool=found.note("end"), _cuda_releasePool=found.note("release"))
    monkeypatch.setattr(module, "torch", SimpleNamespace(cuda=cuda, _C=inner))
    monkeypatch.setattr(module, "_free_generator", found.note("generator"))
    return found


def fail_without_garbage() -> None:
    assert not gc.isenabled()
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_what_a_failed_capture_gives_back(watched: Watched) -> None:
    with pytest.raises(NotCaptured, match="OutOfMemoryError: CUDA out of memory") as found, capturing(watched):
        fail_without_garbage()
    assert gc.isenabled()
    assert isinstance(found.value.__cause__, torch.OutOfMemoryError)
    spoilt = [] if watched.ends else [("end", 0, POOL), ("release", 0, POOL)]
    assert watched.said == [("begin", POOL), ("stream", "outside"), ("generator",), *spoilt]


def test_the_reason_is_the_first_error_of_those_that_tell_of_each_other(watched: Watched) -> None:
    def fail() -> None:
        try:
            raise RuntimeError("operation not permitted when stream is capturing")
        except RuntimeError as error:
            raise ScoreError("loss_fn failed; check that loss_fn(model, batch) works") from error

    with pytest.raises(NotCaptured, match="RuntimeError: operation not permitted") as found, capturing(watched):
        fail()
    assert isinstance(found.value.__cause__, ScoreError)


def test_an_interrupt_stays_one(watched: Watched) -> None:
    with pytest.raises(KeyboardInterrupt), capturing(watched):
        raise KeyboardInterrupt


def test_a_capture_that_its_work_does_not_spoil(watched: Watched) -> None:
    outcome = contextlib.nullcontext() if watched.ends else pytest.raises(RuntimeError, match="separate capture")
    with outcome, capturing(watched, pool=(0, 3)):
        pass
    spoilt = [("stream", "outside"), ("generator",), ("end", 0, (0, 3)), ("release", 0, (0, 3))]
    assert watched.said == [("begin", (0, 3)), *([] if watched.ends else spoilt)]


def spoil() -> None:
    """It waits for the GPU."""
    torch.zeros((), device="cuda").item()


def fork() -> None:
    """It leaves work on another stream, as memory that runs out in the middle of a round does."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.zeros(8, device="cuda")
        raise torch.OutOfMemoryError("CUDA out of memory")


def stop() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def work_and(fail: Callable[[], None]) -> None:
    torch.zeros(2**28, dtype=torch.uint8, device="cuda")
    fail()


@gpu
@pytest.mark.parametrize("fail", [spoil, fork, stop])
def test_memory_comes_back_on_a_gpu(fail: Callable[[], None]) -> None:
    torch.cuda.empty_cache()
    before, stream = torch.cuda.memory_reserved(), torch.cuda.current_stream()
    with pytest.raises(NotCaptured), capturing(torch.cuda.CUDAGraph()):
        work_and(fail)
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + 2**22
    assert torch.cuda.current_stream() == stream
    graph, number = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    with capturing(graph):
        number += torch.rand(1, device="cuda") + 1
    graph.replay()
    assert float(number) >= 1
