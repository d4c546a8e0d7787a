"""Rounds captured as CUDA graphs against the same rounds run one operation after another."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ifso
from ifso.common import cuda_graphs as capturing
from ifso.common.cuda_graphs import captures_go_to
from ifso.criteria.registry import create
from ifso.pruning.scoring_loop import EAGER_ROUNDS, MOST_MISSES, CapturedRound, ScoringLoop, can_capture, side_by_side
from ifso.pruning.shrinking_network import ShrinkingNetwork

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=1e-4)


def batches(number: int) -> list[list[tuple[Tensor, Tensor]]]:
    made = torch.Generator().manual_seed(0)
    return [
        [
            (torch.randn(16, 3, 32, 32, generator=made).double(), torch.randint(0, 10, (16,), generator=made))
            for _ in range(2)
        ]
        for _ in range(number)
    ]


def history(worker: ScoringLoop) -> list[Tensor]:
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
        workers.append(ScoringLoop(network, create(criterion), cross_entropy, sgd))
        workers[-1].tell = said.append
    workers[0]._capture = False
    plain, captured = (history(worker) for worker in workers)
    assert not said
    assert workers[1]._captured
    assert not workers[0]._captured
    for one, other in zip(plain, captured, strict=True):
        assert float((one - other).norm() / one.norm()) < 1e-6


@gpu
def test_a_batch_of_another_shape_on_a_gpu_is_no_batch_for_a_replay():
    total = torch.zeros((), device="cuda")
    made = CapturedRound.make(lambda held: total.add_(held[0].sum()), [torch.ones(3, device="cuda")])
    assert isinstance(made, CapturedRound)
    assert float(total) == 0
    made([torch.full((3,), 2.0, device="cuda")])
    assert float(total) == 6
    assert not made.takes([torch.ones(4, device="cuda")])
    assert not made.takes([torch.ones(3, device="cuda"), torch.ones(3, device="cuda")])


@gpu
def test_what_waits_for_the_gpu_is_refused_with_a_reason():
    made = CapturedRound.make(lambda held: held[0].sum().item(), [torch.ones(3, device="cuda")])
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
        worker = ScoringLoop(ShrinkingNetwork(copy.deepcopy(model), graph), create(criterion), loss, sgd)
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
    refusing, model, found = Refusing(cause), Net(), []
    stand_in = SimpleNamespace(cuda=_no_gpu(refusing.graph), get_rng_state=torch.get_rng_state, equal=torch.equal)
    monkeypatch.setattr(capturing, "torch", stand_in)
    monkeypatch.setattr(capturing, "_free_generator", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(pool=tuple))
    for loss in (cross_entropy, refusing.loss):
        worker, said = worker_of(copy.deepcopy(model), criterion=criterion, loss=loss)
        worker._capture = loss is not cross_entropy
        for number in range(4):
            worker.round([small(number)], train=True)
        found.append(worker.collect())
    assert said == [f"rounds run without a CUDA graph: {type(cause).__name__}: {cause}"]
    assert found[0][1] == found[1][1]
    assert torch.equal(found[0][0], found[1][0])
    assert float(found[0][0].max()) > 0


class Recording:
    """Stands for a GPU on which everything can be captured: a round runs when it is captured, and not when replayed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.captured = 0
        monkeypatch.setattr("ifso.pruning.scoring_loop.capturing", self.graph)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))

    @contextlib.contextmanager
    def graph(self, _: object) -> Iterator[None]:
        self.captured += 1
        yield


def worker_of(
    model: nn.Module, optimizer: Any = sgd, criterion: str = "taylor", loss: Any = cross_entropy
) -> tuple[ScoringLoop, list[str]]:
    graph = ifso.trace(model, torch.zeros(2, 3, 8, 8))
    worker, said = ScoringLoop(ShrinkingNetwork(model, graph), create(criterion), loss, optimizer), []
    worker._capture, worker.tell = True, said.append
    return worker, said


class Net(nn.Module):
    """A small network that does something ``beside`` its work."""

    def __init__(self, beside: Callable[[nn.Module, Tensor], Tensor] = lambda _, x: x) -> None:
        super().__init__()
        self.first, self.last, self.beside = nn.Conv2d(3, 6, 3), nn.Linear(6, 4), beside
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.beside(self, self.first(x).relu().mean((2, 3))))


def small(number: int = 0, samples: int = 4) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(number)
    return torch.randn(samples, 3, 8, 8, generator=made), torch.randint(0, 4, (samples,), generator=made)


def functional_dropout(net: nn.Module, x: Tensor) -> Tensor:
    return F.dropout(x, 0.5, net.training)


def chosen_by_python(_: nn.Module, x: Tensor) -> Tensor:
    random.random()
    return x


@pytest.mark.parametrize("beside", [functional_dropout, chosen_by_python])
@pytest.mark.parametrize("train", [True, False])
def test_a_network_that_draws_random_numbers_is_not_captured(beside, train, monkeypatch):
    recording, (worker, said) = Recording(monkeypatch), worker_of(Net(beside).train())
    for number in range(4):
        worker.round([small(number)], train=train)
    assert recording.captured == 0
    assert said == ["rounds run without a CUDA graph: the model or its loss draws random numbers"]


def test_a_criterion_that_takes_another_direction_for_each_batch_is_not_captured(monkeypatch):
    recording, (worker, said) = Recording(monkeypatch), worker_of(Net(), criterion="true-loss")
    worker.prepare([small(number) for number in range(4)])
    for number in range(4):
        worker.round([small(number)], train=True)
    assert recording.captured == 0
    assert said == ["rounds run without a CUDA graph: criterion 'true-loss' does not score every batch in the same way"]


@pytest.mark.parametrize("beside", [functional_dropout, lambda _, x: x])
def test_one_that_draws_none_is_captured(beside, monkeypatch):
    recording, (worker, said) = Recording(monkeypatch), worker_of(Net(beside).eval())
    for number in range(4):
        worker.round([small(number)], train=True)
    assert (recording.captured, said) == (1, [])


@pytest.mark.parametrize(
    ("make", "captured"),
    [
        (sgd, 1),
        (lambda weights: torch.optim.Adam(weights, lr=1e-3, capturable=True), 1),
        (lambda weights: torch.optim.Adam(weights, lr=1e-3), 0),
        (lambda weights: torch.optim.Adagrad(weights, lr=1e-3, lr_decay=0.1), 0),
    ],
)
def test_an_optimizer_that_counts_its_steps_on_the_host_is_not_captured(make, captured, monkeypatch):
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)  # Adam asks for a GPU otherwise
    recording, (worker, said) = Recording(monkeypatch), worker_of(Net(), make)
    for number in range(4):
        worker.round([small(number)], train=True)
    assert recording.captured == captured
    assert [line.split("(")[0] for line in said] == [
        f"rounds run without a CUDA graph: {type(worker.optimizer).__name__} counts its steps on the host "
    ] * (1 - captured)


def test_without_training_the_optimizer_does_not_matter(monkeypatch):
    recording, (worker, said) = Recording(monkeypatch), worker_of(Net(), torch.optim.Adam)
    for number in range(4):
        worker.round([small(number)], train=False)
    assert (recording.captured, said) == (1, [])


@pytest.mark.parametrize("odd", [numpy.arange(4), {"a", "b"}], ids=["array", "set"])
def test_a_batch_with_something_odd_in_it_is_not_captured(odd, monkeypatch):
    recording, (worker, said) = Recording(monkeypatch), worker_of(Net())
    for number in range(5):
        worker.round([(*small(number), odd)], train=True)
    assert recording.captured == 0
    assert said == [f"rounds run without a CUDA graph: a batch holds a {type(odd).__name__}"]


def test_batches_that_are_never_alike_end_the_capture(monkeypatch):
    recording, (worker, said) = Recording(monkeypatch), worker_of(Net())
    for number in range(EAGER_ROUNDS + MOST_MISSES):
        worker.round([(*small(number), f"file {number}")], train=True)
    assert (recording.captured, said, len(worker._captured)) == (1, [], 1)
    for number in range(2):
        worker.round([(*small(number), f"other {number}")], train=True)
    assert (recording.captured, len(worker._captured)) == (1, 0)
    assert said == ["rounds run without a CUDA graph: 10 batches in a row differ in shapes, or in what is no tensor"]


def test_a_smaller_batch_now_and_then_does_not(monkeypatch):
    recording, (worker, said) = Recording(monkeypatch), worker_of(Net())
    for number in range(4 * MOST_MISSES):
        worker.round([small(number, 2 if number % 2 else 4)], train=True)
    assert (recording.captured, said, len(worker._captured)) == (1, [], 1)


def counting(net: nn.Module, x: Tensor) -> Tensor:
    net.count += 1
    return x


@pytest.mark.parametrize(("beside", "wanted"), [(counting, False), (lambda _, x: x, True)])
def test_jobs_stay_together_where_a_pass_changes_buffers(beside, wanted, monkeypatch):
    found: list[bool] = []

    def one_by_one(jobs: list[Callable[[], Any]], apart: bool) -> list[Any]:
        found.append(apart)
        return [job() for job in jobs]

    Recording(monkeypatch)
    monkeypatch.setattr("ifso.pruning.scoring_loop.side_by_side", one_by_one)
    worker, _ = worker_of(Net(beside).train())
    for number in range(3):
        worker.round([small(number)], train=True)
    assert found[-1] is wanted


def test_captures_go_to_the_current_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    devices = ["cpu", "cuda", "cuda:0", "cuda:1"]
    assert [captures_go_to(torch.device(name)) for name in devices] == [False, True, False, True]


def _no_gpu(graph: Callable[..., Any]) -> SimpleNamespace:
    """What a capture asks of torch.cuda."""
    return SimpleNamespace(
        graph=graph, graph_pool_handle=tuple, current_stream=str, synchronize=int, set_stream=str, current_device=int,
        default_generators=[SimpleNamespace(get_offset=int)], is_available=bool,
    )  # fmt: skip


def test_nothing_is_captured_on_the_cpu():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    assert not can_capture(ShrinkingNetwork(model, ifso.trace(model, torch.zeros(1, 3, 8, 8))))


def test_jobs_give_their_results_in_order():
    assert side_by_side([lambda: 1, lambda: 2, lambda: 3]) == [1, 2, 3]
