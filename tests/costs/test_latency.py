"""Latency: how time is taken and dealt out. No test asks how fast a machine is."""

from __future__ import annotations

import copy
import itertools
import json
import queue
import time
from collections.abc import Callable

import pytest
import torch
from cases import CASES, Case, every_case, random_keep
from torch import Tensor, nn

import ifso
from ifso.costs import latency
from ifso.costs.latency import Latency, LatencyModel, measure_latency
from ifso.errors import IfsoError, RunError, StaleGraphError, TraceError
from ifso.graph.channel_graph import ChannelGraph


class Clocked(nn.Module):
    """conv → batch norm → dropout → relu → linear, which remembers how it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 4)
        self.modes: list[bool] = []
        self.grads: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(self.training)
        self.grads.append(torch.is_grad_enabled())
        return self.head(self.drop(self.norm(self.conv(x))).relu().mean((2, 3)))


class Ticks:
    """A clock that moves only when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def delay(self, module: nn.Module, seconds: float | Callable[[], float], afterwards: float = 0.0) -> None:
        """Let the module's forward pass last so long before, and after, what it does."""
        forward = module.forward

        def slow(*arguments: object, **options: object) -> object:
            self.now += seconds() if callable(seconds) else seconds
            result = forward(*arguments, **options)
            self.now += afterwards
            return result

        module.forward = slow


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    clock = Ticks()
    monkeypatch.setattr("ifso.common.timing.time", clock)
    return clock


def clocked(ticks: Ticks) -> tuple[nn.Module, ChannelGraph]:
    """A traced network: conv 4 s, norm 1 s, head 2 s, the network itself 0.5 s."""
    model = Clocked()
    for module, seconds in ((model.conv, 4.0), (model.norm, 1.0), (model.head, 2.0), (model, 0.5)):
        ticks.delay(module, seconds)
    return model, ifso.trace(model, torch.randn(2, 3, 5, 5))


def by_term(model: LatencyModel, graph: ChannelGraph) -> dict[tuple[str, str], float]:
    """Seconds of every term of the whole network, and of the constant."""
    kept = graph.kept(None)
    found: dict[tuple[str, str], float] = {("constant", ""): model.constant}
    for term, weight in zip(graph.terms, model.weights(graph).tolist(), strict=False):
        found[term.kind, term.where] = found.get((term.kind, term.where), 0.0) + weight * term.count(kept)
    return found


# -------------------------------------------------------------------------------------------------- measure_latency


def test_median_and_spread(ticks: Ticks):
    model = nn.Linear(2, 2)
    seconds = iter([99.0, 99.0, 3.0, 1.0, 2.0, 5.0, 50.0])
    ticks.delay(model, lambda: next(seconds))
    found = measure_latency(model, torch.zeros(1, 2), repeats=5, warm_up=2)
    assert found.samples == (3.0, 1.0, 2.0, 5.0, 50.0)
    assert found.median == 3.0
    assert found.spread == 27.5 - 1.5
    assert str(Latency(0.002, 0.001, (0.002,) * 3)) == "2.000 ms ± 0.500 (3 runs)"


def test_one_repeat(ticks: Ticks):
    model = nn.Linear(2, 2)
    ticks.delay(model, 2.0)
    assert measure_latency(model, torch.zeros(1, 2), repeats=1, warm_up=0) == Latency(2.0, 0.0, (2.0,))


def test_real_time_passes():
    class Sleeper(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            time.sleep(0.01)
            return x

    found = measure_latency(Sleeper(), torch.zeros(1), repeats=3, warm_up=0)
    assert min(found.samples) >= 0.0099


@pytest.mark.parametrize("how", ["measure_latency", "LatencyModel"])
def test_nothing_is_left_behind(how: str):
    model = Clocked().train()
    model.norm.eval()
    inputs = torch.randn(2, 3, 5, 5)
    graph = ifso.trace(model, inputs)
    model.modes.clear()
    model.grads.clear()
    seen = (model.modes, model.grads)
    record: queue.SimpleQueue[tuple[bool, bool]] = queue.SimpleQueue()
    handle = model.register_forward_pre_hook(lambda *_: record.put((model.training, torch.is_grad_enabled())))
    tensors, given = copy.deepcopy(model.state_dict()), inputs.clone()
    attributes = {name: list(vars(module)) for name, module in model.named_modules()}
    random = torch.get_rng_state()
    measure_latency(model, inputs) if how == "measure_latency" else LatencyModel.measure(model, graph)
    assert {record.get() for _ in range(record.qsize())} == {(False, False)}
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(inputs, given)
    assert all(torch.equal(tensors[name], value) for name, value in model.state_dict().items())
    assert {name: list(vars(module)) for name, module in model.named_modules()} == attributes
    assert [module.training for module in model.modules()] == [True, True, False, True, True]
    assert seen == ([], [])
    assert torch.is_grad_enabled()
    handle.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_that_writes_into_its_inputs_and_draws_numbers():
    class Rude(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x.add_(torch.randn(()))

    model, inputs, random = Rude(), torch.zeros(3), torch.get_rng_state()
    measure_latency(model, (inputs,))
    assert model.calls == 0
    assert torch.equal(inputs, torch.zeros(3))
    assert torch.equal(torch.get_rng_state(), random)


def test_bad_input():
    model = nn.Linear(2, 2)
    with pytest.raises(IfsoError, match="0 repeats"):
        measure_latency(model, torch.zeros(1, 2), repeats=0)
    with pytest.raises(IfsoError, match="-1 to warm up"):
        measure_latency(model, torch.zeros(1, 2), warm_up=-1)
    with pytest.raises(IfsoError, match="the model is on meta"):
        measure_latency(nn.Linear(2, 2, device="meta"), torch.zeros(1, 2))
    with pytest.raises(TraceError, match="Linear does not run on the example inputs") as caught:
        measure_latency(model, torch.zeros(1, 3))
    assert "\n" not in str(caught.value)


# ----------------------------------------------------------------------------------------------------- LatencyModel


def test_seconds_go_to_the_terms_that_take_them(ticks: Ticks):
    model, graph = clocked(ticks)
    found = LatencyModel.measure(model, graph, repeats=3)
    assert found.total == pytest.approx(7.5)
    parts = by_term(found, graph)
    assert parts["conv", "conv"] == pytest.approx(4.0)
    assert parts["linear", "head"] == pytest.approx(2.0)
    conv, head = 2 * 8 * 25, 2 * 4
    assert parts["activation", "conv"] == pytest.approx(1.5 * conv / (conv + head))
    assert parts["activation", "head"] == pytest.approx(1.5 * head / (conv + head))
    assert parts["constant", ""] == 0
    assert sum(parts.values()) == pytest.approx(7.5)
    assert all(seconds == 0 for (kind, _), seconds in parts.items() if kind == "parameter")


def test_watching_is_not_counted(ticks: Ticks):
    """Each hook takes 0.1 s; the parts still sum up to the time without hooks."""
    model, graph = clocked(ticks)
    plain = LatencyModel.measure(model, graph, repeats=1)
    real = ticks.perf_counter
    reads = itertools.count(1)

    def slow_clock() -> float:
        ticks.now += 0.1 if next(reads) > 2 * (1 + latency.WARM_UP) else 0.0
        return real()

    ticks.perf_counter = slow_clock
    watched = LatencyModel.measure(model, graph, repeats=1)
    assert next(reads) > 20
    assert watched.total == plain.total == pytest.approx(7.5)
    assert watched.seconds(graph) == pytest.approx(7.5)


def test_the_median_of_the_runs_counts(ticks: Ticks):
    model = Clocked()
    graph = ifso.trace(model, torch.randn(2, 3, 5, 5))
    outliers = iter(range(1000))
    ticks.delay(model.conv, lambda: 50.0 if next(outliers) % 4 == 0 else 4.0)
    ticks.delay(model.head, 4.0)
    found = LatencyModel.measure(model, graph, repeats=5)
    parts = by_term(found, graph)
    assert parts["conv", "conv"] == pytest.approx(parts["linear", "head"]) == pytest.approx(4.0)


def test_several_products_in_one_module_share_by_their_macs(ticks: Ticks):
    case = CASES["multihead"]
    model, graph = case.model(), case.graph()
    ticks.delay(model.attn, 6.0)
    found = LatencyModel.measure(model, graph, repeats=1)
    terms = [
        (term, weight) for term, weight in zip(graph.terms, found.per_element, strict=True) if term.where == "attn"
    ]
    products = [weight for term, weight in terms if term.kind in {"linear", "matmul"}]
    assert len(products) == 4
    assert products == pytest.approx([products[0]] * 4)
    kept = graph.kept(None)
    spent = sum(weight * term.count(kept) for term, weight in terms if term.kind in {"linear", "matmul"})
    assert spent == pytest.approx(6.0)


def test_a_module_does_not_pay_for_its_children(ticks: Ticks):
    case = CASES["attention"]
    model, graph = case.model(), case.graph()
    children = dict(model.attn.named_children())
    for child in children.values():
        ticks.delay(child, 1.0)
    ticks.delay(model.attn, 2.0, afterwards=3.0)
    parts = by_term(LatencyModel.measure(model, graph, repeats=1), graph)
    assert parts["matmul", "attn"] == pytest.approx(5.0)
    for name in children:
        assert parts["linear", f"attn.{name}"] == pytest.approx(1.0)


@every_case()
def test_every_network(case: Case):
    """Weights are not negative, sum up to the total, and less is never slower."""
    model, graph = case.model(), case.graph()
    found = LatencyModel.measure(model, graph, repeats=1, warm_up=0)
    weights = found.weights(graph)
    assert weights.dtype == torch.float64
    assert weights.shape == (len(graph.terms) + 1,)
    assert bool((weights >= 0).all())
    assert found.total > 0
    assert found.seconds(graph) == pytest.approx(found.total)
    keep = graph.keep_all()
    if graph.groups:
        keep = random_keep(graph, seed=1, share=0.3)
        less = {name: choice & random_keep(graph, seed=2)[name] for name, choice in keep.items()}
        assert found.seconds(graph, less) <= found.seconds(graph, keep) * (1 + 1e-12)
    assert 0 <= found.seconds(graph, keep) <= found.total * (1 + 1e-12)
    assert LatencyModel.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_removal_saves_its_part(ticks: Ticks):
    """conv 4 s halves, head reads half: 2 s halves, activations 1.5 s: those of conv halve."""
    model, graph = clocked(ticks)
    found = LatencyModel.measure(model, graph, repeats=1)
    keep = {graph.groups[0].name: torch.arange(8) < 4}
    conv, head = 2 * 8 * 25, 2 * 4
    assert found.seconds(graph, keep) == pytest.approx(2 + 1 + 1.5 * (conv / 2 + head) / (conv + head))


def test_the_model_holds_after_a_compaction(ticks: Ticks):
    model, graph = clocked(ticks)
    found = LatencyModel.measure(model, graph, repeats=1)
    keep = {graph.groups[0].name: torch.arange(8) < 5}
    predicted = found.seconds(graph, keep)
    fresh = Clocked()
    graph = ifso.trace(fresh, torch.randn(2, 3, 5, 5))
    ifso.compact_(fresh, graph, keep)
    assert found.seconds(ifso.trace(fresh, torch.randn(2, 3, 5, 5))) == pytest.approx(predicted)


def test_another_network_is_refused(ticks: Ticks):
    model, graph = clocked(ticks)
    found = LatencyModel.measure(model, graph, repeats=1)
    other = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with pytest.raises(StaleGraphError, match="measured on another network"):
        found.weights(ifso.trace(other, torch.zeros(1, 3)))
    with pytest.raises(StaleGraphError):
        LatencyModel.measure(other, graph)


def test_a_network_without_products_is_constant(ticks: Ticks):
    model = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU())
    graph = ifso.trace(model, torch.randn(2, 3, 4, 4))
    ticks.delay(model[0], 2.0)
    found = LatencyModel.measure(model, graph, repeats=1)
    assert found.constant == found.total == 2.0
    assert found.seconds(graph) == 2.0


# ------------------------------------------------------------------------------------------------------ calibration


@pytest.mark.parametrize(("modelled", "measured"), [(0.5, 0.75), (0.5, 0.5), (0.6, 0.5), (0.9, 0.99), (0.3, 0.9)])
def test_calibration_gives_what_was_measured(modelled: float, measured: float):
    model = LatencyModel((("conv", "a"), ("parameter", "a.weight")), (0.02, 0.0), 0.0, 2.0)
    found = model.calibrated(modelled, measured)
    weight, _ = found.per_element
    assert weight * 100 + found.constant == pytest.approx(2.0)
    assert (weight * 100 * modelled + found.constant) / 2.0 == pytest.approx(measured)
    assert found.total == model.total


def test_calibration_twice_is_calibration_of_the_calibrated():
    model = LatencyModel((("conv", "a"),), (0.02,), 0.0, 2.0).calibrated(0.5, 0.75)
    share = (model.per_element[0] * 40 + model.constant) / 2.0
    again = model.calibrated(share, 0.8)
    assert (again.per_element[0] * 40 + again.constant) / 2.0 == pytest.approx(0.8)
    assert again.per_element[0] * 100 + again.constant == pytest.approx(2.0)


@pytest.mark.parametrize(("measured", "slope"), [(1.5, 0.05), (1.0, 0.05), (0.1, 1.5), (-1.0, 1.5)])
def test_calibration_is_clipped(measured: float, slope: float):
    found = LatencyModel((("conv", "a"),), (0.01,), 0.0, 1.0).calibrated(0.5, measured)
    assert found.per_element[0] == pytest.approx(0.01 * slope)
    assert found.constant == pytest.approx(1 - slope)


def test_calibration_without_a_removal():
    model = LatencyModel((("conv", "a"),), (0.01,), 0.0, 1.0)
    assert model.calibrated(1.0, 0.9) == model
    with pytest.raises(IfsoError, match="must be numbers, not nan"):
        model.calibrated(float("nan"), 0.9)


# ------------------------------------------------------------------------------------------------------------- JSON


def test_json_comes_back_bit_for_bit():
    model = LatencyModel((("conv", "a"), ("activation", "")), (0.1 + 0.2, 1e-17), -1 / 3, 2.0)
    assert LatencyModel.from_json(json.loads(json.dumps(model.to_json()))) == model


@pytest.mark.parametrize(
    "damage",
    [
        {"terms": None}, {"terms": [["conv", "a"]]}, {"terms": [[1, "a", 0.1]]}, {"terms": [["conv", "a", "0.1"]]},
        {"terms": [["conv", "a", -0.1]]}, {"constant": None}, {"constant": float("nan")}, {"total": 0}, {"total": True},
    ],
    ids=str,
)  # fmt: skip
def test_damaged_json(damage: dict):
    document = LatencyModel((("conv", "a"),), (0.1,), 0.0, 2.0).to_json()
    LatencyModel.from_json(document)
    with pytest.raises(
        RunError, match=r"latencies stored with the run are (damaged|not positive); start the run again"
    ):
        LatencyModel.from_json({**document, **damage})
    with pytest.raises(RunError):
        LatencyModel.from_json([1])
    with pytest.raises(RunError):
        LatencyModel.from_json({name: value for name, value in document.items() if name not in damage})


# -------------------------------------------------------------------------------------------------------------- GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu():
    model = CASES["vit"].model().cuda()
    graph = ifso.trace(model, CASES["vit"].inputs().cuda())
    random = torch.cuda.get_rng_state()
    found = LatencyModel.measure(model, graph)
    assert found.total > 0
    assert bool((found.weights(graph) >= 0).all())
    assert found.seconds(graph) == pytest.approx(found.total)
    assert torch.equal(torch.cuda.get_rng_state(), random)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_is_waited_for():
    """A large product takes longer than its launch: with n times the work the time grows."""
    small, large = nn.Linear(256, 256).cuda(), nn.Linear(8192, 8192).cuda()
    few = measure_latency(small, torch.randn(256, 256, device="cuda")).median
    many = measure_latency(large, torch.randn(8192, 8192)).median
    assert many > 5 * few
