"""A capture that fails gives back what it took; without a GPU, torch's own functions are only watched."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ifso.common import cuda_graphs as module
from ifso.common.cuda_graphs import NotCaptured, capturing
from ifso.errors import ScoreError

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
POOL = (0, 7)


class Watched:
    """Stands for torch's captures: what is called is written down, and each end as told.

    ``gives_back``: a torch that gives the memory of a spoilt capture back itself.
    """

    def __init__(self, ends: bool, gives_back: bool) -> None:
        self.ends, self.gives_back = ends, gives_back
        self.said: list[Any] = []

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

    def reset(self) -> None:
        self.said.append(("reset",))

    def end(self, *given: Any) -> None:
        if self.gives_back:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.said.append(("end", *given))

    def note(self, name: str) -> Callable[..., None]:
        return lambda *given: self.said.append((name, *given))

    def freed(self, pool: tuple[int, int] = POOL) -> list[Any]:
        """What is to be said when a capture has failed."""
        by_hand = [] if self.gives_back else [("end", 0, pool), ("release", 0, pool)]
        spoilt = [] if self.ends else [("reset",), *by_hand]
        return [("stream", "outside"), *spoilt, ("generator", 4)]


@pytest.fixture(params=[(True, True), (False, False), (False, True)], ids=["ended", "spoilt", "spoilt and given back"])
def watched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Watched:
    found = Watched(*request.param)
    cuda = SimpleNamespace(
        graph=found.graph,
        graph_pool_handle=lambda: POOL,
        current_stream=lambda: "outside",
        current_device=lambda: 0,
        synchronize=lambda: None,
        set_stream=found.note("stream"),
        default_generators=[SimpleNamespace(get_offset=lambda: 4)],
    )
    inner = SimpleNamespace(_cuda_endAllocateToPool=found.end, _cuda_releasePool=found.note("release"))
    monkeypatch.setattr(module, "torch", SimpleNamespace(cuda=cuda, _C=inner))
    monkeypatch.setattr(module, "_free_generator", lambda _, offset: found.note("generator")(offset))
    return found


def fail_without_garbage() -> None:
    assert not gc.isenabled()
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_what_a_failed_capture_gives_back(watched: Watched) -> None:
    with pytest.raises(NotCaptured, match="OutOfMemoryError: CUDA out of memory") as found, capturing(watched):
        fail_without_garbage()
    assert gc.isenabled()
    assert isinstance(found.value.__cause__, torch.OutOfMemoryError)
    assert watched.said == [("begin", POOL), *watched.freed()]


def test_what_failed_is_let_go_of(watched: Watched) -> None:
    class Large:
        pass

    def fail() -> None:
        held = Large()
        kept.append(weakref.ref(held))
        raise RuntimeError("too much")

    kept: list[Any] = []
    with pytest.raises(NotCaptured, match="RuntimeError: too much") as found, capturing(watched):
        fail()
    assert kept[0]() is None
    assert found.value.__cause__ is not None


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
    assert watched.said == [("begin", (0, 3)), *([] if watched.ends else watched.freed((0, 3)))]


class Generator:
    """Stands for the GPU's; ``waits`` for the end of a capture."""

    device = torch.device("cpu")

    def __init__(self, waits: bool) -> None:
        self.waits, self.offset, self.states = waits, 16, 0

    def initial_seed(self) -> int:
        return 3

    def graphsafe_set_state(self, _: Any) -> None:
        self.waits, self.states, self.offset = False, self.states + 1, 0

    def set_offset(self, offset: int) -> None:
        assert not self.waits
        self.offset = offset


@pytest.mark.parametrize("waits", [True, False])
def test_the_generator_goes_on_where_it_was(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = Generator(waits)

    class Drawn:
        def uniform_(self) -> None:
            if generator.waits:
                raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
            generator.offset += 4

    class Fresh:
        def manual_seed(self, seed: int) -> Fresh:
            assert seed == 3
            return self

        def graphsafe_get_state(self) -> Fresh:
            return self

    stands = SimpleNamespace(empty=lambda *_, **__: Drawn(), Generator=lambda _: Fresh())
    monkeypatch.setattr(module, "torch", stands)
    module._free_generator(generator, 12)
    assert (generator.waits, generator.offset, generator.states) == (False, 12, int(waits))


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


@gpu
def test_random_numbers_go_on_after_a_failed_capture_on_a_gpu() -> None:
    torch.cuda.manual_seed(5)
    torch.rand(3, device="cuda")
    wanted = torch.rand(3, device="cuda")
    torch.cuda.manual_seed(5)
    torch.rand(3, device="cuda")
    with pytest.raises(NotCaptured), capturing(torch.cuda.CUDAGraph()):
        work_and(spoil)
    assert torch.equal(torch.rand(3, device="cuda"), wanted)
