"""Running costs against costs counted anew, after every removal."""

from __future__ import annotations

import pytest
import torch
from cases import CASES, FEW, every_case
from torch import Tensor

import ifso
from ifso.graph.channel_graph import ChannelGraph
from ifso.pruning.cost_tracker import Ledger

STANDARD = ("macs", "conv_macs", "params", "activations")


def by_group(graph: ChannelGraph, kept: Tensor) -> dict[str, Tensor]:
    return {group.name: kept[group.units] for group in graph.groups}


def removals(graph: ChannelGraph, seed: int) -> list[list[int]]:
    """All units in random order, in lots of one to three."""
    random = torch.Generator().manual_seed(seed)
    order, lots = torch.randperm(graph.num_units, generator=random).tolist(), []
    while order:
        size = int(torch.randint(1, 4, (), generator=random))
        lots.append(order[:size])
        order = order[size:]
    return lots


def weights(graph: ChannelGraph) -> Tensor:
    random = torch.Generator().manual_seed(7)
    values = torch.rand(len(graph.terms) + 1, generator=random, dtype=torch.float64)
    values[torch.arange(len(values)) % 3 == 1] = 0
    return values


@every_case(few=FEW)
def test_costs_and_savings_after_every_removal(case):
    graph, model = case.graph(), case.model()
    extra = weights(graph)
    ledger = Ledger(graph, extra={"latency": extra})
    whole = ifso.cost(model, graph).as_dict()
    whole_latency = latency(graph, graph.kept(None), extra)
    for lot in removals(graph, 0):
        expected = ledger.shares_without(lot)
        ledger.remove(lot)
        keep = by_group(graph, ledger.kept)
        counted = ifso.cost(model, graph, keep).as_dict()
        costs = ledger.costs()
        assert {name: costs[name] for name in STANDARD} == {name: counted[name] for name in STANDARD}
        assert all(isinstance(costs[name], int) for name in STANDARD)
        assert costs["latency"] == pytest.approx(latency(graph, ledger.kept, extra), rel=1e-12)
        assert ledger.shares() == expected
        shares = {name: counted[name] / whole[name] if whole[name] else 1.0 for name in STANDARD}
        assert {name: expected[name] for name in STANDARD} == shares
        assert expected["latency"] == pytest.approx(costs["latency"] / whole_latency, rel=1e-12)
        check_savings(graph, ledger, extra)
    assert not ledger.kept[:-1].any()
    assert bool(ledger.kept[-1])


def latency(graph: ChannelGraph, kept: Tensor, extra: Tensor) -> float:
    counts = [*(term.count(kept) for term in graph.terms), 1]
    return float((torch.tensor(counts, dtype=torch.float64) * extra).sum())


def check_savings(graph: ChannelGraph, ledger: Ledger, extra: Tensor) -> None:
    alone = ifso.unit_costs(graph, by_group(graph, ledger.kept))
    for name in STANDARD:
        wanted = torch.cat([getattr(alone[group.name], name) for group in graph.groups] or [torch.zeros(0)])
        assert ledger.savings(name).tolist() == wanted.tolist()
    expected = sum(float(w) * term.savings(ledger.kept).double() for w, term in zip(extra, graph.terms, strict=False))
    torch.testing.assert_close(ledger.savings("latency"), expected)


def test_savings_are_what_shares_without_says():
    graph = CASES["grouped-chain"].graph()
    ledger = Ledger(graph)
    ledger.remove([0, 9, 33])
    costs = ledger.costs()
    whole = {name: costs[name] / share for name, share in ledger.shares().items()}
    for name in STANDARD:
        for unit, saved in enumerate(ledger.savings(name).tolist()):
            left = ledger.shares_without([unit])[name] * whole[name]
            assert costs[name] - left == pytest.approx(saved, abs=1e-6)


def test_starting_from_a_state_is_the_same_as_going_there():
    graph = CASES["shufflenet-v1"].graph()
    extra = {"latency": weights(graph)}
    gone, there = Ledger(graph, extra=extra), [0, 7, 13, 20]
    for unit in there:
        gone.remove([unit])
    started = Ledger(graph, gone.kept, extra)
    assert started.costs() == gone.costs()
    assert started.shares() == gone.shares()
    assert all(torch.equal(started.savings(name), gone.savings(name)) for name in [*STANDARD, "latency"])


def test_a_ledger_owns_its_state():
    graph = CASES["plain"].graph()
    kept = graph.kept(None)
    ledger = Ledger(graph, kept)
    kept[0] = False
    assert bool(ledger.kept[0])
    other = ledger.copy()
    ledger.savings("macs")
    other.remove([3])
    assert ledger.shares() == Ledger(graph).shares()
    assert ledger.savings("macs").equal(Ledger(graph).savings("macs"))
    assert other.costs() != ledger.costs()


def test_units_that_are_gone_or_named_twice_count_once():
    graph = CASES["residual"].graph()
    once, twice = Ledger(graph), Ledger(graph)
    once.remove([0, 9])
    twice.remove([0, 0, 9])
    twice.remove([9])
    assert once.costs() == twice.costs()
    assert once.shares_without([0, 1]) == twice.shares_without([1, 1])


def test_nothing_of_a_cost_is_a_whole_share():
    assert Ledger(CASES["mlp-batch-norm"].graph()).shares()["conv_macs"] == 1.0


def test_what_does_not_fit_is_refused():
    graph = CASES["plain"].graph()
    with pytest.raises(ValueError, match="no unit 14; units are 0 to 13"):
        Ledger(graph).remove([14])
    with pytest.raises(ValueError, match="no unit -1"):
        Ledger(graph).shares_without([-1])
    with pytest.raises(ValueError, match="no cost named 'flops'"):
        Ledger(graph).savings("flops")
    with pytest.raises(ValueError, match="finite weights and a constant"):
        Ledger(graph, extra={"latency": torch.ones(2)})


def test_ten_thousand_removals_one_by_one_add_up():
    model = ifso.create_model("torchvision:resnet50")
    graph = ifso.trace(model, torch.zeros(1, 3, 64, 64))
    ledger, kept = Ledger(graph), graph.kept(None)
    for unit in range(10_000):
        ledger.remove([unit])
    kept[:10_000] = False
    counted = ifso.cost(model, graph, by_group(graph, kept)).as_dict()
    assert {name: ledger.costs()[name] for name in STANDARD} == {name: counted[name] for name in STANDARD}
