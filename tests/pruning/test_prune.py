"""ifso.prune against Algorithm 2 written out with public functions, option by option, and what it gives back."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import CASES
from torch import Tensor, nn

import ifso
from ifso.costs.latency import Latency, LatencyModel
from ifso.criteria.registry import create
from ifso.errors import UnreachableBudget
from ifso.pruning import finalize as finishing
from ifso.pruning import preflight, selection
from ifso.pruning.budget import NORMALIZERS
from ifso.pruning.cost_tracker import Ledger
from ifso.pruning.moves import Moves
from ifso.pruning.selection import normalized
from ifso.pruning.settings import Settings
from ifso.pruning.shrinking_network import ShrinkingNetwork

EXAMPLE = torch.zeros(1, 3, 8, 8, dtype=torch.float64)
Places = list[tuple[str, int]]


class Tiny(nn.Module):
    """Two convolutions around a residual stream, one behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn0 = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv1, self.bn1 = nn.Conv2d(6, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv3, self.bn3 = nn.Conv2d(6, 7, 3, stride=2, bias=False), nn.BatchNorm2d(7)
        self.fc = nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn0(self.stem(x)))
        x = F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
        return self.fc(F.relu(self.bn3(self.conv3(x))).mean((2, 3)))


def tiny() -> nn.Module:
    torch.manual_seed(7)
    model = Tiny().double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.2, 0.2)
    return model.eval()


def data(count: int = 5, size: int = 6) -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(11)
    return [
        (torch.randn(size, 3, 8, 8, generator=made, dtype=torch.float64), torch.randint(0, 4, (size,), generator=made))
        for _ in range(count)
    ]


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def prune(model: nn.Module, budget: ifso.Budget | None = None, **options: Any) -> ifso.PruneResult:
    chosen = {"accumulate": 2, "batches_per_score": 2, "recalibrate": 0, **options}
    return ifso.prune(model, data(), loss_fn, budget=budget or ifso.Budget(macs=0.6), example_inputs=EXAMPLE, **chosen)


@pytest.fixture
def plainly(monkeypatch):
    """Without the search for a landing near the target, which has tests of its own: always the lowest."""
    assert finishing.TOLERANCE == selection.TOLERANCE == 0.005
    monkeypatch.setattr(selection, "TOLERANCE", 1.0)


class ByHand:
    """Algorithm 2, as slowly as it is written in the paper."""

    def __init__(self, criterion: str, k: int, b: int, normalize: str = "sqrt-memory") -> None:
        self.criterion, self.k, self.b, self.normalize = criterion, k, b, normalize
        self.model = tiny()
        self.graph = ifso.trace(self.model, EXAMPLE)
        self.model.train()
        self.keep = self.graph.keep_all()
        self.batches = itertools.cycle(data())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
        self.removed: Places = []
        self.scores: list[float] = []
        self.losses: list[float] = []

    def share(self) -> float:
        return ifso.cost(self.model, self.graph, self.keep).macs / ifso.cost(self.model, self.graph).macs

    def collect(self, train: bool) -> tuple[dict[str, Tensor], float]:
        """Scores over what a removal saves, summed over k rounds."""
        total, losses = {name: torch.zeros(len(kept)).double() for name, kept in self.keep.items()}, []
        for _ in range(self.k):
            chosen = [next(self.batches) for _ in range(self.b)]
            found = ifso.score(self.model, self.graph, loss_fn, chosen, self.criterion, keep=self.keep)
            for name, scores in found.items():
                total[name] += scores / self.divisor(name)
            losses.append(self.step(chosen[0]) if train else self.loss(chosen[0]))
        return total, sum(losses) / self.k

    def divisor(self, name: str) -> Tensor:
        costs = ifso.unit_costs(self.graph, self.keep)[name]
        return {
            "sqrt-memory": costs.activations.double().sqrt(),
            "memory": costs.activations.double(),
            "macs": costs.macs.double(),
            "none": torch.ones(len(costs.macs)).double(),
        }[self.normalize]

    def step(self, batch: tuple[Tensor, Tensor]) -> float:
        with ifso.masked(self.model, self.graph, self.keep):
            self.optimizer.zero_grad()
            loss = loss_fn(self.model, batch)
            loss.backward()
            self.optimizer.step()
        return float(loss.detach())

    @torch.no_grad()
    def loss(self, batch: tuple[Tensor, Tensor]) -> float:
        with ifso.masked(copy.deepcopy(self.model), self.graph, self.keep) as model:
            return float(loss_fn(model, batch))

    def remove(self, total: Mapping[str, Tensor], loss: float) -> None:
        """The lowest of all units that are not the last of their layer."""
        candidates = [
            (float(total[name][place]), name, place)
            for name, kept in self.keep.items()
            if int(kept.sum()) > 1
            for place in kept.nonzero().flatten().tolist()
        ]
        score, name, place = min(candidates, key=lambda one: one[0])
        self.keep[name][place] = False
        self.removed.append((name, place))
        self.scores.append(score / self.k)
        self.losses.append(loss)

    def run(self, target: float, train: bool = True) -> ByHand:
        while self.share() > target:
            found = self.collect(train)
            self.remove(*found)
            while not train and self.share() > target:
                self.remove(*found)
        return self


def removed(result: ifso.PruneResult) -> Places:
    """The units of each line of metrics, in order."""
    return [(name, place) for line in result.metrics for name, places in line["units"].items() for place in places]


def check_same(hand: ByHand, result: ifso.PruneResult) -> None:
    assert len(hand.removed) > 3
    assert removed(result) == hand.removed
    assert [line["score"] for line in result.metrics] == pytest.approx(hand.scores, rel=1e-9)
    assert [line["loss"] for line in result.metrics] == pytest.approx(hand.losses, rel=1e-9)
    assert [line["removal"] for line in result.metrics] == list(range(1, len(hand.removed) + 1))
    assert result.metrics[-1]["shares"]["macs"] == hand.share()
    ifso.compact_(hand.model.eval(), hand.graph, hand.keep)
    found, wanted = result.model.state_dict(), hand.model.state_dict()
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert torch.allclose(found[name].double(), tensor.double(), rtol=1e-9, atol=1e-12), name


@pytest.mark.usefixtures("plainly")
@pytest.mark.parametrize("criterion", ["ifso", "taylor", "magnitude", "group-fisher"])
def test_incremental_is_algorithm_2(criterion):
    hand = ByHand(criterion, k=2, b=2).run(0.6)
    check_same(hand, prune(tiny(), criterion=criterion, schedule="incremental"))


@pytest.mark.usefixtures("plainly")
@pytest.mark.parametrize("multiple", [1, 2])
def test_incremental_with_compaction_on_the_way(monkeypatch, multiple):
    """Taken out of memory whenever that saves anything: the same units, the same weights."""
    monkeypatch.setattr("ifso.pruning.run.SHRINK_AT", {"cpu": 1e-9})
    monkeypatch.setattr("ifso.pruning.run.WORTH_IT", {"cpu": 0.0})
    monkeypatch.setattr("ifso.pruning.run.MULTIPLE", {"cpu": multiple})
    compact_, sizes = ShrinkingNetwork.compact_, []

    def counted(network: ShrinkingNetwork, *options: Any) -> None:
        compact_(network, *options)
        sizes.append(network.graph.num_units)

    monkeypatch.setattr(ShrinkingNetwork, "compact_", counted)
    hand = ByHand("ifso", k=1, b=1).run(0.5)
    result = prune(tiny(), ifso.Budget(macs=0.5), accumulate=1, batches_per_score=1)
    assert len(set(sizes)) > (3 if multiple == 1 else 1)
    check_same(hand, result)


def test_far_from_the_target_the_search_changes_nothing():
    hand = ByHand("ifso", k=1, b=1)
    for _ in range(3):
        hand.remove(*hand.collect(train=True))
    result = prune(tiny(), ifso.Budget(macs=0.2), accumulate=1, batches_per_score=1)
    assert removed(result)[:3] == hand.removed


@pytest.mark.usefixtures("plainly")
@pytest.mark.parametrize("normalize", ["sqrt-memory", "memory", "macs", "none"])
def test_one_shot_takes_the_lowest(normalize):
    """Normalised once, by what units save of the whole network; no step is taken: weights are slices of the old."""
    hand = ByHand("ifso", k=2, b=2, normalize=normalize).run(0.6, train=False)
    result = prune(tiny(), schedule="one-shot", normalize=normalize)
    check_same(hand, result)
    assert {line["step"] for line in result.metrics} == {1}


@pytest.mark.usefixtures("plainly")
def test_mixed_goes_half_the_way_step_by_step():
    hand = ByHand("ifso", k=2, b=2).run(0.8)
    gradual = len(hand.removed)
    hand.run(0.6, train=False)
    result = prune(tiny(), schedule=ifso.Mixed(0.5))
    check_same(hand, result)
    assert [line["step"] for line in result.metrics] == [*range(1, gradual + 1), *[gradual + 1] * (
        len(hand.removed) - gradual
    )]  # fmt: skip


@pytest.mark.usefixtures("plainly")
def test_units_per_step():
    result = prune(tiny(), units_per_step=3)
    steps = [line["step"] for line in result.metrics]
    assert all(steps.count(step) == 3 for step in set(steps) - {steps[-1]})
    hand = ByHand("ifso", k=2, b=2)
    found = hand.collect(train=True)
    for _ in range(3):
        hand.remove(*found)
    assert removed(result)[:3] == hand.removed


@pytest.mark.parametrize("name", [name for name in NORMALIZERS if name != "latency"])
def test_normalizers_are_what_unit_costs_say(name):
    graph = ifso.trace(tiny(), EXAMPLE)
    ledger = Ledger(graph)
    ledger.remove([0, 7, 15])
    keep = {group.name: ledger.kept[group.units] for group in graph.groups}
    costs = ifso.unit_costs(graph, keep)
    powers = {
        "sqrt-memory": ("activations", 0.5),
        "memory": ("activations", 1),
        "macs": ("macs", 1),
        "params": ("params", 1),
    }
    kind, power = powers.get(name, ("macs", 0))
    wanted = torch.cat([getattr(costs[group.name], kind).double() ** power for group in graph.groups])
    scores = torch.arange(1.0, graph.num_units + 1, dtype=torch.float64)
    kept = ledger.kept[:-1]
    assert torch.allclose(normalized(scores, ledger, name)[kept], (scores / wanted)[kept], rtol=1e-12)


def fixed_latency(graph: ifso.ChannelGraph) -> LatencyModel:
    """Only conv3 takes time."""
    terms = tuple((term.kind, term.where) for term in graph.terms)
    seconds = tuple(1e-6 if where == "conv3" and kind == "conv" else 0.0 for kind, where in terms)
    total = sum(part * term.count(graph.kept(None)) for part, term in zip(seconds, graph.terms, strict=True))
    return LatencyModel(terms, seconds, 0.0, total)


@pytest.mark.usefixtures("plainly")
def test_latency_as_normalizer(monkeypatch):
    """Units that save no latency count as the one that saves least; the others by what they save."""
    graph = ifso.trace(tiny(), EXAMPLE)
    known = {"before": 1.0, "model": fixed_latency(graph).to_json()}
    monkeypatch.setattr("ifso.pruning.preflight.latency_model", lambda *_: dict(known))
    result = prune(tiny(), criterion="magnitude", schedule="one-shot", normalize="latency")
    scores = ifso.score(tiny(), graph, None, None, "magnitude")
    saved = Ledger(graph, extra={"latency": fixed_latency(graph).weights(graph)}).savings("latency")
    least = float(saved[saved > 0].min())
    first_name, first_place = removed(result)[0]
    ranked = torch.cat([scores[group.name] for group in graph.groups]) / saved.clamp(min=least)
    group = graph.group(first_name)
    assert int(ranked.argmin()) == group.first + first_place
    assert result.metrics[0]["score"] == pytest.approx(float(ranked.min()), rel=1e-12)
    assert result.latency is not None
    assert "latency (measured)" in str(result)


def timed_as(monkeypatch: pytest.MonkeyPatch, graph: ifso.ChannelGraph, *seconds: float) -> None:
    """A network that took 1 s and in which MACs are what takes time; later measurements give ``seconds``."""
    macs = [1.0 if term.kind in ("conv", "linear") else 0.0 for term in graph.terms]
    whole = sum(part * term.count(graph.kept(None)) for part, term in zip(macs, graph.terms, strict=True))
    terms = tuple((term.kind, term.where) for term in graph.terms)
    model = LatencyModel(terms, tuple(part / whole for part in macs), 0.0, 1.0)
    later = iter(seconds)
    monkeypatch.setattr(finishing, "TIMES", 1)
    monkeypatch.setattr(preflight, "latency_model", lambda *_: {"before": 1.0, "model": model.to_json()})
    monkeypatch.setattr(
        finishing, "measure_latency", lambda *_: Latency(median=next(later), spread=0.0, samples=(1.0,))
    )


def test_a_latency_that_was_modelled_too_low(monkeypatch):
    """Measured 0.65 at a modelled 0.6: 0.875 of it shrinks, so that MACs must go to 1 − 0.4/0.875 = 0.543."""
    timed_as(monkeypatch, ifso.trace(tiny(), EXAMPLE), 0.65, 0.6)
    result = prune(tiny(), ifso.Budget(latency=0.6), criterion="random", schedule="one-shot")
    first = prune(tiny(), ifso.Budget(macs=0.6), criterion="random", schedule="one-shot")
    assert result.removed_units > first.removed_units
    slope = 0.35 / (1 - first.shares["macs"])
    assert result.shares["macs"] <= 1 - 0.4 / slope
    assert result.shares["latency"] == pytest.approx(1 - slope * (1 - result.shares["macs"]), rel=1e-9)
    assert dict(result.latency) == {"before": 1.0, "after": 0.6, "share": 0.6, "spread": 0.0}
    assert [note for note in result.notes if note.startswith("latency: measured 65.0%, modelled")]


def test_a_latency_that_does_not_fall_is_said(monkeypatch):
    timed_as(monkeypatch, ifso.trace(tiny(), EXAMPLE), 0.83, 0.82, 0.81, 0.805)
    result = prune(tiny(), ifso.Budget(latency=0.8), criterion="random", schedule="one-shot")
    assert result.latency["share"] == 0.805
    assert not [note for note in result.notes if "ends here" in note]
    timed_as(monkeypatch, ifso.trace(tiny(), EXAMPLE), 0.83, 0.825, 0.82, 0.815)
    result = prune(tiny(), ifso.Budget(latency=0.8), criterion="random", schedule="one-shot")
    assert result.latency["share"] == 0.815
    assert [note for note in result.notes if "81.5%" in note and "3 corrections were made" in note]


def test_a_latency_that_cannot_fall_ends_the_run(monkeypatch):
    """Measured 0.99 where 0.6 was modelled: next to nothing shrinks. What was reached is kept, and that is said."""
    timed_as(monkeypatch, ifso.trace(tiny(), EXAMPLE), 0.99)
    result = prune(tiny(), ifso.Budget(latency=0.6), criterion="random", schedule="one-shot")
    assert result.latency["share"] == 0.99
    assert result.shares["latency"] <= 0.6
    assert [note for note in result.notes if "measured 99.0%" in note and "no smaller network is below" in note]


def test_a_latency_that_does_not_shrink_is_found_out_before_any_work(monkeypatch):
    """A smaller copy that takes as long as the whole: exit status 3, and the model is as it was."""
    same = Latency(median=1.0, spread=0.0, samples=(1.0,))
    monkeypatch.setattr(preflight, "measure_latency", lambda *_, **__: same)
    model, before = tiny(), tiny().state_dict()
    with pytest.raises(UnreachableBudget, match=r"latency=0.6 is asked and 0\.9\d+ the smallest"):
        prune(model, ifso.Budget(latency=0.6))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_refusal_is_timed_again(monkeypatch):
    """A busy machine: at first the smaller copy seems to take as long as the whole, later it takes half as long."""
    whole, smaller = tiny(), []

    def measure(model: nn.Module, *_: Any, **__: Any) -> Latency:
        cut = model is not whole
        smaller.extend([model] if cut else [])
        return Latency(median=0.5 if cut and len(smaller) > preflight.PAIRS else 1.0, spread=0.0, samples=(1.0,))

    monkeypatch.setattr(preflight, "measure_latency", measure)
    graph = ifso.trace(whole, EXAMPLE)
    settings = Settings(ifso.Budget(latency=0.6), create("magnitude"))
    found = preflight.latency_model(whole, graph, Moves(graph, round_to=None, min_units=1), settings)
    assert len(smaller) == preflight.PAIRS + preflight.BEFORE_REFUSAL
    assert found["before"] == 1.0


def test_units_that_cannot_be_told_apart_end_a_latency_run(monkeypatch):
    """What is left has other units than the original, so no more can go: that is said, and the result is sound."""
    case = CASES["grouped-chain"]
    timed_as(monkeypatch, case.graph(), 0.66, 0.6)
    result = ifso.prune(
        case.model(), [case.inputs()], lambda model, batch: model(batch).square().mean(),
        budget=ifso.Budget(latency=0.6), example_inputs=case.inputs(), criterion="magnitude", schedule="one-shot",
        accumulate=1, batches_per_score=1,
    )  # fmt: skip
    assert [note for note in result.notes if "can no longer be told apart" in note]
    assert all(check.passed for check in result.checks)


class Recorder:
    """Which batches the loss was asked for, by their number; ``grad`` or not."""

    def __init__(self) -> None:
        self.batches, self.calls = data(), []

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        number = next(n for n, one in enumerate(self.batches) if torch.equal(one[0], batch[0]))
        self.calls.append((number, model.training))
        return loss_fn(model, batch)


def test_batches_come_as_documented():
    """k=2 rounds of b=3 scores and a step on the first batch, before each removal; round and round through the data."""
    record = Recorder()
    result = ifso.prune(
        tiny(), record.batches, record, budget=ifso.Budget(macs=0.8), example_inputs=EXAMPLE, criterion="taylor",
        accumulate=2, batches_per_score=3, recalibrate=0, evaluate=lambda _: 0.0,
    )  # fmt: skip
    asked = [number for number, training in record.calls if training]
    stream, wanted = itertools.cycle(range(5)), []
    for _ in range(2 * result.removals):
        chosen = [next(stream) for _ in range(3)]
        wanted += [*chosen, chosen[0]]
    assert asked == wanted


def test_train_mode_false_leaves_modes():
    record = Recorder()
    ifso.prune(
        tiny(), record.batches, record, budget=ifso.Budget(macs=0.8), example_inputs=EXAMPLE, train_mode=False,
        accumulate=1, batches_per_score=1, recalibrate=0,
    )  # fmt: skip
    assert not any(training for _, training in record.calls)


def test_modes_are_put_back_and_random_states_untouched():
    model = tiny().train()
    model.bn1.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    random.seed(3)
    np.random.seed(4)  # noqa: NPY002 (what users use)
    torch.manual_seed(5)
    states = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]  # noqa: NPY002
    result = ifso.prune(
        model, data(), loss_fn, budget=ifso.Budget(macs=0.6), example_inputs=torch.zeros(2, 3, 8, 8).double(),
        accumulate=1, batches_per_score=1, recalibrate=2, weight_update=1,
    )  # fmt: skip
    assert {name: module.training for name, module in result.model.named_modules()} == modes
    now = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]  # noqa: NPY002
    assert now == states


def statistics(model: nn.Module, batches: list[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Mean over the batches of each norm's mean and (unbiased) variance of its inputs, seen in train mode."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    seen: dict[nn.Module, list[Tensor]] = {norm: [] for norm in norms}
    hooks = [norm.register_forward_pre_hook(lambda norm, args: seen[norm].append(args[0])) for norm in norms]
    twin = model.train()
    with torch.no_grad():
        for batch in batches:
            twin(batch[0])
    for hook in hooks:
        hook.remove()
    for norm in norms:
        yield (
            torch.stack([x.mean((0, 2, 3)) for x in seen[norm]]).mean(0),
            torch.stack([x.var((0, 2, 3)) for x in seen[norm]]).mean(0),
        )


def test_recalibration_gives_the_mean_over_the_batches():
    model = tiny()
    result = prune(model, recalibrate=5)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    found = [(norm.running_mean.clone(), norm.running_var.clone()) for norm in norms]
    assert all(norm.momentum == 0.1 for norm in norms)
    wanted = list(statistics(model, data()))
    assert len(found) == len(wanted) == 4
    for (mean, variance), (wanted_mean, wanted_variance) in zip(found, wanted, strict=True):
        assert torch.allclose(mean, wanted_mean, rtol=1e-10, atol=1e-12)
        assert torch.allclose(variance, wanted_variance, rtol=1e-10)
    assert [measure.stage for measure in result.measures] == ["unpruned", "pruned", "batch norms recalibrated"]


def test_evaluate_is_asked_at_every_stage():
    sizes = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        sizes.append(sum(parameter.numel() for parameter in model.parameters()))
        return {"size": sizes[-1], "asked": len(sizes)}

    result = prune(tiny(), recalibrate=1, weight_update=2, evaluate=evaluate)
    stages = ["unpruned", "pruned", "batch norms recalibrated", "weights updated by ΔW"]
    assert [measure.stage for measure in result.measures] == stages
    assert [measure.values["size"] for measure in result.measures] == sizes
    assert [measure.values["asked"] for measure in result.measures] == [1, 2, 3, 4]
    assert sizes[0] == result.before.params
    assert set(sizes[1:]) == {result.after.params}


def test_the_loss_is_measured_where_nothing_else_is_asked_for():
    model = tiny()
    result = prune(model)
    with torch.no_grad():
        wanted = sum(float(loss_fn(tiny(), batch)) for batch in data()[:4]) / 4
        after = sum(float(loss_fn(result.model, batch)) for batch in data()[:4]) / 4
    assert result.measures[0].values["loss"] == pytest.approx(wanted, rel=1e-12)
    assert result.measures[-1].values["loss"] == pytest.approx(after, rel=1e-12)


def test_min_units_ignore_and_round_to():
    budget = ifso.Budget(macs=0.5)
    least = prune(tiny(), budget, criterion="random", schedule="one-shot", min_units=3)
    assert min(int(kept.sum()) for kept in least.keep.values()) >= 3
    left_alone = prune(tiny(), ifso.Budget(macs=0.2), criterion="random", schedule="one-shot", ignore=("fc",))
    assert left_alone.model.conv3.out_channels == left_alone.model.fc.in_features == 7
    assert left_alone.model.conv3.in_channels < 6
    assert left_alone.model.conv1.out_channels < 8
    rounded = prune(tiny(), budget, criterion="random", schedule="one-shot", round_to=2)
    convolutions = [module for module in rounded.model.modules() if isinstance(module, nn.Conv2d)]
    changed = [module.out_channels for module in convolutions if module.out_channels not in (6, 8, 7)]
    assert changed
    assert all(channels % 2 == 0 for channels in changed)


def test_the_result_speaks_the_truth():
    model, before = tiny(), ifso.cost(tiny(), ifso.trace(tiny(), EXAMPLE))
    result = prune(model, ifso.Budget(macs=0.6, params=0.7))
    after = ifso.cost(model, ifso.trace(model, EXAMPLE))
    assert result.model is model
    assert result.before == before
    assert result.after == after
    for kind in ("macs", "conv_macs", "params", "activations"):
        assert result.shares[kind] == after.as_dict()[kind] / before.as_dict()[kind]
    assert result.targets == {"macs": 0.6, "params": 0.7}
    gaps = [0.6 - result.shares["macs"], 0.7 - result.shares["params"]]
    assert result.below_target == min(gaps) >= 0
    assert (
        result.removals
        == len(result.metrics)
        == result.removed_units
        == 21 - sum(int(kept.sum()) for kept in result.keep.values())
    )
    assert [check.passed for check in result.checks] == [True] * 3
    assert set(result.scores) == set(result.keep)
    summary = json.loads(json.dumps(result.summary()))
    assert summary["removed_units"] == result.removed_units
    assert summary["after"] == after.as_dict()
    assert summary["kept"] == {name: [int(kept.sum()), len(kept)] for name, kept in result.keep.items()}
    assert summary["shares"] == dict(result.shares)
    assert result.config["settings"]["budget"] == {"macs": 0.6, "params": 0.7}


def test_save_and_load(tmp_path):
    result = prune(tiny(), recalibrate=1)
    folder = result.save(tmp_path / "run")
    loaded = ifso.load(folder, tiny())
    x = data()[0][0]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(x), result.model.eval()(x))
    assert json.loads((folder / "summary.json").read_text())["removals"] == result.removals
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == result.removals
    again = prune(loaded, ifso.Budget(macs=0.8))
    assert len(again.recipe.rounds) == 2
    twice = ifso.load(again.save(tmp_path / "twice"), tiny())
    with torch.no_grad():
        assert torch.equal(twice.eval()(x), again.model.eval()(x))


GOLDEN = """\
Tiny: 4 of 21 units removed in 1.2 s, 0.02% below the target

                      before   after    kept  asked for
MACs                  69,094  41,446  59.98%     60.00%
MACs of convolutions  69,066  41,418  59.97%
parameters             1,490   1,050  70.47%
activations            1,347   1,091  80.99%

stage                     value
unpruned                    0.5
pruned                      0.5
batch norms recalibrated    0.5

ok     compacted equals masked: largest relative error 1.0e-16 on a batch
ok     cost recounted: 41,446 MACs, 1,050 parameters
ok     budget met: 59.98% of macs kept, 60.00% asked
note: a note
to train it further make the optimizer anew: the one before holds parameters of the larger network"""


def test_a_result_as_text():
    result = prune(tiny(), criterion="magnitude", schedule="one-shot", recalibrate=1, evaluate=lambda _: 0.5)
    equal, *others = result.checks
    assert equal.passed
    assert equal.error < 1e-12
    equal = dataclasses.replace(equal, detail="largest relative error 1.0e-16 on a batch")
    shown = dataclasses.replace(result, seconds=1.23, notes=("a note",), checks=(equal, *others))
    assert str(shown) == GOLDEN
