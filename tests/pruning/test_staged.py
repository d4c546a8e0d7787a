"""The default run: stages without training, in which weights are fitted anew."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from small_runs import SIZE, SmallResNet, listed, loss_fn, samples, shuffled
from torch import Tensor, nn

import ifso
from ifso.common.module_state import named_tensors
from ifso.criteria.base import Criterion, Task
from ifso.errors import BudgetError, IfsoError, ScoreError, UnreachableBudget
from ifso.pruning import run as running
from ifso.pruning.events import Silent, Stage
from ifso.pruning.judging import Aim
from ifso.pruning.recovery import recalibrate_
from ifso.pruning.result import PruneResult

EXAMPLE = torch.zeros(1, 2, SIZE, SIZE)


@cache
def trained(drop: float = 0.0) -> nn.Module:
    """A network that has learnt something."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = SmallResNet(width=9, inner=14, drop=drop)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for batch in listed() * 6:
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
        recalibrate_(model, loss_fn, listed())
    return model.eval()


def prune(model: nn.Module | None = None, batches: Any = None, **options: Any) -> PruneResult:
    """A staged run of a copy."""
    usual = {"budget": ifso.Budget(macs=0.7), "loss_fn": loss_fn, "example_inputs": EXAMPLE, "calibration": 24}
    chosen = {**usual, "progress": False, **options}
    return ifso.prune(copy.deepcopy(model or trained()), listed() if batches is None else batches, **chosen)


@cache
def usual_run() -> PruneResult:
    return prune()


def distance(model: nn.Module, other: nn.Module) -> float:
    """Between the outputs of two networks, on all samples."""
    with torch.no_grad():
        return float((model.eval()(samples()[0]) - other.eval()(samples()[0])).square().mean())


def assert_same_bits(one: nn.Module, other: nn.Module) -> None:
    found, wanted = named_tensors(one), named_tensors(other)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def with_keep(keep: Mapping[str, Tensor]) -> nn.Module:
    """The trained network without some units, otherwise as it was."""
    model = copy.deepcopy(trained())
    ifso.compact_(model, ifso.trace(model, EXAMPLE), dict(keep))
    return model


# ------------------------------------------------------------------------------------------------------- what it does


def test_no_step_is_taken_and_the_budget_is_met(monkeypatch):
    def step(*_: Any, **__: Any) -> None:
        raise AssertionError("a step of training")

    monkeypatch.setattr(torch.optim.SGD, "step", step)
    result = prune()
    assert 0.65 < result.shares["macs"] <= 0.7
    assert all(check.passed for check in result.checks)
    assert not result.model.training
    assert all(parameter.grad is None for parameter in result.model.parameters())


def test_stages_take_about_a_twentieth_each():
    stages = usual_run().stages
    assert [stage["stage"] for stage in stages] == list(range(1, 7))
    before = 1.0
    for stage in stages:
        share, wanted = stage["shares"]["macs"], 1 - 0.05 * stage["stage"]
        assert share <= wanted + 1e-9
        assert wanted - share < 0.04
        assert stage["units"] > 0
        assert share < before
        before = share


def test_weights_of_removed_units_are_gone():
    result = usual_run()
    kept = {name: int(choice.sum()) for name, choice in result.keep.items()}
    assert sum(kept.values()) < sum(choice.numel() for choice in result.keep.values())
    assert result.model.stem.weight.shape == (kept["stem"], 2, 3, 3)
    assert result.model.one.conv1.weight.shape == (kept["one.conv1"], kept["stem"], 3, 3)
    assert result.model.fc.weight.shape == (3, kept["stem"])


def test_without_an_update_what_is_kept_stays_as_it_was():
    result = prune(update=False, recalibrate=0)
    assert_same_bits(result.model, with_keep(result.keep))


def test_the_update_brings_the_outputs_nearer_to_those_of_the_unpruned_network():
    result = usual_run()
    plain = with_keep(result.keep)
    assert not torch.equal(plain.one.conv2.weight, result.model.one.conv2.weight)
    assert distance(result.model, trained()) < 0.5 * distance(plain, trained())


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_run_does_the_same_twice_whatever_the_random_state_is(shuffle):
    torch.manual_seed(1)
    first = prune(trained(0.3), shuffled() if shuffle else None)
    torch.manual_seed(2)
    assert_same_bits(first.model, prune(trained(0.3), shuffled() if shuffle else None).model)


# ------------------------------------------------------------------------------------------------------ several budgets


@dataclass
class Evaluated:
    """An evaluation that remembers when it was asked, and says what it is told to."""

    values: Iterator[float] | None = None
    name: str = "accuracy"
    asked: int = 0

    def __call__(self, model: nn.Module) -> dict[str, float]:
        self.asked += 1
        assert not model.training
        return {self.name: 90.0 if self.values is None else next(self.values)}


def test_a_path_leaves_a_network_for_each_budget(tmp_path):
    evaluate = Evaluated(iter([90.0, 89.0, 88.5, 88.0, 87.5, 87.0, 86.0, 85.0, 84.0]))
    path = ifso.Budget(macs=(0.9, 0.8, 0.7))
    result = prune(budget=path, out=tmp_path / "run", evaluate=evaluate)
    here = prune(budget=path, evaluate=Evaluated())
    assert [network.targets for network in result.networks] == [{"macs": 0.9}, {"macs": 0.8}, {"macs": 0.7}]
    assert [network.values["accuracy"] for network in result.networks] == [88.5, 87.5, 84.0]
    for network, other in zip(result.networks, here.networks, strict=True):
        assert network.shares["macs"] <= network.targets["macs"]
        loaded = ifso.load(network.folder, SmallResNet(width=9, inner=14))
        assert other.model is not None
        assert_same_bits(loaded, other.model)
        macs = ifso.cost(loaded, ifso.trace(loaded, EXAMPLE)).macs
        assert macs / result.before.macs == pytest.approx(network.shares["macs"])
    assert_same_bits(ifso.load(tmp_path / "run", SmallResNet(width=9, inner=14)), result.model)


def test_the_network_of_a_budget_is_that_of_a_run_to_it():
    both = prune(budget=ifso.Budget(macs=(0.9, 0.85)))
    assert both.networks[0].model is not None
    assert_same_bits(both.networks[0].model, prune(budget=ifso.Budget(macs=0.9)).model)


def test_stop_keeps_the_last_network_that_held(tmp_path):
    evaluate = Evaluated(iter([90.0, 89.0, 88.0, 60.0, 88.0, 88.0, 88.0]))
    result = prune(stop=5.0, evaluate=evaluate, out=tmp_path / "run")
    assert len(result.stages) == 2
    assert any("stage 3 was undone" in note for note in result.notes)
    assert_same_bits(result.model, prune(budget=ifso.Budget(macs=0.9), stop=5.0, evaluate=Evaluated()).model)
    assert_same_bits(ifso.load(tmp_path / "run", SmallResNet(width=9, inner=14)), result.model)


def test_a_loss_may_rise_by_stop():
    values = iter([1.0, 1.1, 1.6, 1.1, 1.1, 1.1])
    assert len(prune(stop=0.3, evaluate=Evaluated(values, "loss")).stages) == 1


def test_stopped_at_once_the_network_is_whole():
    result = prune(stop=1.0, evaluate=Evaluated(iter([90.0, 10.0, 90.0, 90.0])), recalibrate=0)
    assert result.removed_units == 0
    assert_same_bits(result.model, trained())


# ------------------------------------------------------------------------------------------------------------- recover


def test_distillation_brings_the_outputs_nearer(monkeypatch):
    monkeypatch.setattr(Aim, "better_calibrated", lambda aim: aim)
    near = lambda model: {"loss": distance(model, copy.deepcopy(trained()))}  # noqa: E731
    result = prune(budget=ifso.Budget(macs=0.5), recover=300, evaluate=near, calibration=40)
    *_, before, after = (measure.values["loss"] for measure in result.measures)
    assert after < before
    assert distance(result.model, trained()) == pytest.approx(after)


def test_distillation_that_does_harm_is_undone():
    worse = Evaluated(iter([90.0, 80.0, 80.0, 80.0, 80.0, 10.0]))
    result = prune(recover=5, evaluate=worse)
    assert any("distillation were undone" in note for note in result.notes)
    assert_same_bits(result.model, usual_run().model)


# -------------------------------------------------------------------------------------------------------------- floors


def test_attention_in_train_mode_with_dropout():
    """Whole it runs one function, smaller another one, of which fewer tensors are counted."""
    torch.manual_seed(0)
    model = nn.Transformer(16, 4, 1, 1, 24, batch_first=True).train()
    batches = [(torch.randn(3, 5, 16), torch.randn(3, 4, 16)) for _ in range(4)]
    result = ifso.prune(
        model, batches, lambda net, batch: net(*batch).square().mean(), budget=ifso.Budget(macs=0.6),
        example_inputs=batches[0], progress=False,
    )  # fmt: skip
    assert result.shares["macs"] <= 0.6


class WithPlaces(nn.Module):
    """Beside samples it takes places, which are the same for all of them, as Flux does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.places, self.last = nn.Linear(6, 16), nn.Linear(2, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        return self.last((self.first(x) + self.places(places).mean(0)).relu())


def test_batches_whose_tensors_hold_different_numbers_get_to_the_end():
    torch.manual_seed(0)
    batches = [(torch.randn(8, 6), torch.randn(5, 2)) for _ in range(4)]
    result = ifso.prune(
        WithPlaces(), batches, lambda net, batch: net(*batch).square().mean(), budget=ifso.Budget(macs=0.5),
        example_inputs=batches[0], progress=False,
    )  # fmt: skip
    assert result.shares["macs"] <= 0.5


@pytest.mark.parametrize("call", [2, 3, 5])
def test_a_loss_that_fails_later_is_one_line(call):
    calls = iter(range(1, 100))

    def failing(net: nn.Module, batch: Any) -> Tensor:
        if next(calls) == call:
            raise KeyError("mine")
        return net(*batch).square().mean()

    batches = [(torch.randn(8, 6), torch.randn(8, 2)) for _ in range(4)]
    with pytest.raises(ScoreError, match="loss_fn failed: KeyError: 'mine'"):
        ifso.prune(
            WithPlaces(), batches, failing, budget=ifso.Budget(macs=0.5), example_inputs=batches[0], progress=False
        )


class Products(nn.Module):
    """Layers written as products with matrices [inputs, outputs], as GPT-2 has them."""

    def __init__(self, twin: nn.Sequential) -> None:
        super().__init__()
        self.first = copy.deepcopy(twin[0])
        self.middle = nn.Parameter(twin[2].weight.detach().t().clone())
        self.bias = nn.Parameter(twin[2].bias.detach().clone())
        self.last = nn.Parameter(twin[4].weight.detach().t().clone())

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, self.first(x).relu(), self.middle).relu() @ self.last


def test_layers_written_as_products_are_pruned_as_linear_ones_are():
    torch.manual_seed(0)
    twin = nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3, bias=False)
    ).double()
    model = Products(twin)
    batches = [(torch.randn(32, 6).double(), torch.randint(3, (32,))) for _ in range(6)]

    def loss_fn(net: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(net(batch[0]), batch[1])

    for criterion in ("true-loss", "group-fisher"):
        scores = [ifso.score(net, ifso.trace(net, batches[0][0]), loss_fn, batches, criterion) for net in (twin, model)]
        for one, other in zip(*(found.values() for found in scores), strict=True):
            torch.testing.assert_close(one, other)
    for net in (twin, model):
        ifso.prune(net, batches, loss_fn, budget=ifso.Budget(macs=0.5), example_inputs=batches[0][0], progress=False)
    assert model.middle.shape == twin[2].weight.t().shape != (16, 12)
    torch.testing.assert_close(model(batches[0][0]), twin(batches[0][0]))


class ReadOtherwise(nn.Module):
    """Beside layers, a parameter that a product reads, and an MLP along places, which no sample has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.gate = nn.Parameter(torch.randn(8, 1))
        self.places = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).relu()).relu().mean((2, 3))
        return self.head(
            x * torch.einsum("nc,cd->nd", x, self.gate).sigmoid()
            + self.places(torch.linspace(0, 1, 10).view(5, 2)).mean(0)
        )


def test_units_that_the_score_cannot_see_being_read_are_left_alone_and_that_is_told():
    torch.manual_seed(0)
    model = ReadOtherwise()
    batches = [(torch.randn(4, 3, 8, 8), torch.randint(3, (4,))) for _ in range(3)]
    result = ifso.prune(
        model, batches, lambda net, batch: nn.functional.cross_entropy(net(batch[0]), batch[1]),
        budget=ifso.Budget(macs=0.7), example_inputs=batches[0][0], progress=False,
    )  # fmt: skip
    assert model.gate.shape == (8, 1)
    assert model.places[0].weight.shape == (6, 2)
    assert model.first.weight.shape[0] < 8
    told = [note for note in result.notes if "left alone" in note]
    assert ["gate" in told[0], "places.2.weight" in told[1]] == [True, True]


def test_a_share_of_every_layer_stays_and_that_is_told():
    result = prune(budget=ifso.Budget(macs=0.5), min_share=0.6)
    assert all(int(choice.sum()) >= 0.6 * choice.numel() for choice in result.keep.values())
    assert result.floors
    assert "reached their floor" in str(result)
    for name in result.floors:
        assert int(result.keep[name].sum()) - 1 < 0.6 * result.keep[name].numel()


def test_a_budget_below_the_floors_is_refused_in_one_line():
    model = copy.deepcopy(trained())
    with pytest.raises(UnreachableBudget, match=r"min_share=0\.9") as caught:
        ifso.prune(model, listed(), loss_fn, budget=ifso.Budget(macs=0.3), min_share=0.9, example_inputs=EXAMPLE)
    assert "\n" not in str(caught.value)
    assert_same_bits(model, trained())


# ------------------------------------------------------------------------------------------------------------- resumed


class StopAfter(Silent):
    """Ctrl-C when a stage is done."""

    def __init__(self, stage: int) -> None:
        self.stage = stage

    def staged(self, stage: Stage) -> None:
        if stage.number == self.stage:
            raise KeyboardInterrupt


RUNS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "path": lambda: {"budget": ifso.Budget(macs=(0.95, 0.85))},
    "shuffled": lambda: {"batches": shuffled(), "model": trained(0.3)},
    "stop": lambda: {"stop": 1.0},
    "shrunk": dict,
    "recover": lambda: {"recover": 4},
}


@pytest.mark.parametrize(
    ("name", "after"),
    [
        *((name, (1, 2, 3) if name == "path" else (2,)) for name in RUNS),
        *(pytest.param(name, (1, 3), marks=pytest.mark.slow) for name in ("plain", "shrunk")),
    ],
)
def test_interrupted_after_any_stage_it_ends_with_the_same_bits(name, after, tmp_path, monkeypatch):
    if name == "shrunk":
        monkeypatch.setitem(running.SHRINK_AT, "cpu", 0.01)
        monkeypatch.setitem(running.WORTH_IT, "cpu", 0.0)

    def again(**options: Any) -> PruneResult:
        return prune(**{"budget": ifso.Budget(macs=0.85), "checkpoint_every": 0.0, **RUNS[name](), **options})

    whole = again(out=tmp_path / "whole")
    for stage in after:
        folder = tmp_path / f"stopped after {stage}"
        with pytest.raises(KeyboardInterrupt):
            again(out=folder, listener=StopAfter(stage))
        resumed = again(resume=folder)
        assert_same_bits(resumed.model, whole.model)
        assert [stage["shares"] for stage in resumed.stages] == [stage["shares"] for stage in whole.stages]
        for pair in zip(resumed.networks, whole.networks, strict=True):
            assert_same_bits(*(ifso.load(network.folder, SmallResNet(width=9, inner=14)) for network in pair))


# ------------------------------------------------------------------------------------------------------- unusual inputs


def pieces(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    images, labels = samples()
    return list(zip(images[: sum(sizes)].split(sizes), labels[: sum(sizes)].split(sizes), strict=True))


ODD = {
    "one batch": (pieces(12), {}),
    "one class": ([(images, torch.zeros_like(labels)) for images, labels in pieces(8, 8)], {}),
    "calibration smaller than a batch": (pieces(20, 20), {"calibration": 3}),
    "sizes that differ": (pieces(3, 17, 8, 2), {}),
    "a generator": (iter(pieces(8, 8)), {}),
}


@pytest.mark.parametrize("name", ODD)
def test_whatever_the_batches_are(name):
    batches, options = ODD[name]
    result = prune(batches=batches, **options)
    assert result.shares["macs"] <= 0.7
    assert all(bool(tensor.isfinite().all()) for tensor in named_tensors(result.model).values())


def test_a_loss_of_another_model_is_refused_in_one_line():
    model, other = copy.deepcopy(trained()), copy.deepcopy(trained())
    with pytest.raises(IfsoError, match="model") as caught:
        ifso.prune(
            model,
            listed(),
            lambda _, batch: loss_fn(other, batch),
            budget=ifso.Budget(macs=0.6),
            example_inputs=EXAMPLE,
        )
    assert "\n" not in str(caught.value)
    assert_same_bits(model, trained())


@dataclass(frozen=True)
class Ones(Criterion):
    """All units alike."""

    name = "ones"
    needs = "weights"

    def units(self, task: Task, batch: Any) -> Tensor:
        return torch.ones(task.graph.num_units, dtype=torch.float64)


def test_scores_that_are_all_alike_still_meet_the_budget():
    assert prune(criterion=Ones()).shares["macs"] <= 0.7


@pytest.mark.parametrize("schedule", ["one-shot", ifso.Mixed(0.5)])
def test_several_shares_are_refused_where_no_run_passes_through_them(schedule):
    with pytest.raises(BudgetError, match=r"several shares need schedule='staged' or 'incremental'"):
        prune(budget=ifso.Budget(macs=(0.8, 0.6)), schedule=schedule)


def test_a_layer_that_reads_far_more_channels_than_there_are_samples_is_told():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 3))
    few, enough = ([(torch.randn(count, 4), torch.arange(count) % 3)] for count in (8, 32))
    options = {"budget": ifso.Budget(macs=0.9), "example_inputs": torch.zeros(1, 4)}
    told = "2.weight reads 64 channels, and the calibration has only 8 samples"
    assert any(note.startswith(told) for note in prune(model, few, **options).notes)
    assert not any("has only" in note for note in prune(model, enough, **options).notes)


def test_few_samples_are_told_once_and_not_layer_by_layer():
    torch.manual_seed(0)
    wide = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.ReLU())]
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), *wide, nn.Linear(64, 5))
    few = [(torch.randn(4, 8), torch.randint(5, (4,)))]
    options = {"budget": ifso.Budget(macs=0.5), "example_inputs": torch.zeros(1, 8)}
    notes = [note for note in prune(model, few, **options).notes if "has only" in note]
    assert len(notes) == 1
    assert "reads 64 channels" in notes[0]
    assert "other layers read too many, too), and the calibration has only 4 samples" in notes[0]
