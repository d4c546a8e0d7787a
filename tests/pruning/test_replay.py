"""Rounds captured as CUDA graphs against the same rounds run one operation after another."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ifso
from ifso.criteria.registry import create
from ifso.curvature import capturing
from ifso.pruning.network import ShrinkingNetwork
from ifso.pruning.replay import Replay, can_capture, side_by_side
from ifso.pruning.worker import Worker

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=1e-4)


def batches(number: int) -> list[list[tuple[Tensor, Tensor]]]:
    random = torch.Generator().manual_seed(0)
    return [
        [
            (torch.randn(16, 3, 32, 32, generator=random).double(), torch.randint(0, 10, (16,), generator=random))
            for _ in range(2)
        ]
        for _ in range(number)
    ]


def history(worker: Worker) -> list[Tensor]:
    """Scores and weights after rounds, a removal, and rounds again."""
    found = []
    for number, lot in enumerate(batches(12)):
        worker.round(lot, train=True)
        if number % 4 == 3:
            scores, loss = worker.collect()
            assert loss > 0
            found.append(scores)
            worker.remove_([int(scores.masked_fill(scores == 0, torch.inf).argmin())])
    weights = torch.cat(
        [parameter.detach().flatten().cpu().double() for parameter in worker.network.model.parameters()]
    )
    return [*found, weights]


@gpu
@pytest.mark.parametrize("criterion", ["ifso", "authors", "group-fisher", "taylor", "magnitude"])
def test_captured_rounds_on_a_gpu_equal_plain_ones(criterion):
    model = ifso.create_model("ifso:resnet20").cuda().double().train()
    graph = ifso.trace(model, torch.zeros(1, 3, 32, 32, device="cuda", dtype=torch.float64))
    said: list[str] = []
    workers = []
    for _ in range(2):
        network = ShrinkingNetwork(copy.deepcopy(model), graph)
        workers.append(Worker(network, create(criterion), cross_entropy, sgd))
        workers[-1].tell = said.append
    workers[0]._capture = False
    plain, captured = (history(worker) for worker in workers)
    assert not said
    assert workers[1]._replays
    assert not workers[0]._replays
    for one, other in zip(plain, captured, strict=True):
        assert float((one - other).norm() / one.norm()) < 1e-6


@gpu
def test_a_batch_of_another_shape_on_a_gpu_is_no_batch_for_a_replay():
    total = torch.zeros((), device="cuda")
    made = Replay.make(lambda held: total.add_(held[0].sum()), [torch.ones(3, device="cuda")])
    assert isinstance(made, Replay)
    assert float(total) == 0
    made([torch.full((3,), 2.0, device="cuda")])
    assert float(total) == 6
    assert not made.takes([torch.ones(4, device="cuda")])
    assert not made.takes([torch.ones(3, device="cuda"), torch.ones(3, device="cuda")])


@gpu
def test_what_waits_for_the_gpu_is_refused_with_a_reason():
    made = Replay.make(lambda held: held[0].sum().item(), [torch.ones(3, device="cuda")])
    assert isinstance(made, str)
    assert float(torch.rand(2, device="cuda").sum()) > 0  # random numbers too can be drawn again


def waiting(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    loss = cross_entropy(model, batch)
    return loss * (2.0 if loss.item() > 100 else 1.0)


@gpu
@pytest.mark.parametrize("criterion", ["ifso", "group-fisher"])
def test_a_loss_that_waits_for_the_gpu_is_not_captured_and_gives_the_same(criterion):
    model = ifso.create_model("ifso:resnet20").cuda().double().train()
    graph = ifso.trace(model, torch.zeros(1, 3, 32, 32, device="cuda", dtype=torch.float64))
    said: list[str] = []
    found = []
    for loss in (cross_entropy, waiting):
        worker = Worker(ShrinkingNetwork(copy.deepcopy(model), graph), create(criterion), loss, sgd)
        worker.tell = said.append
        found.append(history(worker))
    assert len(said) == 1
    assert said[0].startswith("rounds run without a CUDA graph: ")
    for one, other in zip(*found, strict=True):
        assert float((one - other).norm() / one.norm()) < 1e-6


class Refusing:
    """Stands for a GPU on which a loss that waits, or for which memory is short, cannot be captured."""

    capturing = False

    def __init__(self, cause: Exception) -> None:
        self.cause = cause

    @contextlib.contextmanager
    def graph(self, *_: object, **__: object) -> Iterator[None]:
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if self.capturing:
            raise self.cause
        return cross_entropy(model, batch)


@pytest.mark.parametrize(
    "cause", [RuntimeError("operation not permitted"), torch.OutOfMemoryError("CUDA out of memory"), ValueError("odd")]
)
@pytest.mark.parametrize("criterion", ["ifso", "group-fisher"])
def test_a_loss_that_fails_only_within_a_capture_costs_no_more_than_the_capture(cause, criterion, monkeypatch):
    model = ifso.create_model("ifso:resnet20").double().train()
    graph = ifso.trace(model, torch.zeros(1, 3, 32, 32, dtype=torch.float64))
    refusing, said, found = Refusing(cause), [], []
    monkeypatch.setattr(capturing, "torch", SimpleNamespace(cuda=_no_gpu(refusing.graph)))
    monkeypatch.setattr(capturing, "_free_generator", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(pool=tuple))
    for loss in (cross_entropy, refusing.loss):
        worker = Worker(ShrinkingNetwork(copy.deepcopy(model), graph), create(criterion), loss, sgd)
        worker._capture, worker.tell = loss is not cross_entropy, said.append
        for lot in batches(4):
            worker.round(lot, train=True)
        found.append(worker.collect())
    assert said == [f"rounds run without a CUDA graph: {type(cause).__name__}: {cause}"]
    assert found[0][1] == found[1][1]
    assert torch.equal(found[0][0], found[1][0])


def _no_gpu(graph: Callable[..., Any]) -> SimpleNamespace:
    """What a capture asks of torch.cuda."""
    return SimpleNamespace(
        graph=graph, graph_pool_handle=tuple, current_stream=str, synchronize=int, set_stream=str, current_device=int
    )


def test_nothing_is_captured_on_the_cpu():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    assert not can_capture(ShrinkingNetwork(model, ifso.trace(model, torch.zeros(1, 3, 8, 8))))


def test_jobs_give_their_results_in_order():
    assert side_by_side([lambda: 1, lambda: 2, lambda: 3]) == [1, 2, 3]
