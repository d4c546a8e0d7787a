"""The network of a run: soft removal, compaction in between and the numbers of units, on every network there is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import CASES, FEW, Case, difference, prunable_cases
from cases import outputs as outputs_of
from torch import Tensor, nn

import ifso
from ifso.common.module_state import named_tensors
from ifso.criteria.base import Task
from ifso.criteria.weights import Magnitude
from ifso.errors import IfsoError
from ifso.graph.balancing import check_keep
from ifso.graph.channel_graph import STAYS
from ifso.pruning.moves import Moves
from ifso.pruning.shrinking_network import ShrinkingNetwork

EXACT = 1e-10

NOT_TOLD_APART = {
    "grouped": "one channel is left in each group: the convolution is depthwise now, its inputs and outputs one unit",
    "grouped-chain": "as grouped",
    "transposed-grouped": "as grouped",
    "grouped-with-input": "units must keep as many as the image's channels that share their convolution",
    "padded": "one channel is left on the shortcut, so that it looks added to all others",
    "padded-one-number": "as padded",
    "real-padded": "as padded",
    "cross-attention": "attention has units of its own once the width of its inputs differs from that of its heads",
}
"""Cases in which, after the first portion, units of the smaller network are not those of the original; and why."""


WIDE = ("plain", "residual", "concat", "grouped", "unet", "shufflenet-v2", "attention", "vit", "convnext", "padded")
"""Cases for what need not be tried on every network."""


def portion(network: ShrinkingNetwork, moves: Moves, seed: int, share: float = 0.3) -> list[int]:
    """About so much of what can still go, at random; at least one move."""
    random = torch.Generator().manual_seed(seed)
    scores = torch.rand(network.original.num_units, generator=random, dtype=torch.float64)
    queue = moves.ordered(scores, network.kept)
    most = share * int(network.kept[:STAYS].sum())
    units: list[int] = []
    while (move := queue.next()) is not None and (not units or len(units) + len(move.units) <= most):
        queue.take(move)
        units += move.units
    assert units
    return units


def movable(network: ShrinkingNetwork, moves: Moves) -> set[int]:
    """Units that can go next."""
    queue = moves.ordered(torch.zeros(network.original.num_units, dtype=torch.float64), network.kept)
    found: set[int] = set()
    while (move := queue.next()) is not None:
        found.update(move.units)
        queue.skip(move)
    return found


def start(case: Case) -> tuple[ShrinkingNetwork, Moves]:
    return ShrinkingNetwork(case.model(), case.graph()), Moves(case.graph())


def outputs(network: ShrinkingNetwork, inputs: Any) -> list[Tensor]:
    with network.running():
        return outputs_of(network.model, inputs)


def masked_outputs(case: Case, keep: dict[str, Tensor]) -> list[Tensor]:
    """Of a new model with these units gone, by a public function."""
    model = case.model()
    with ifso.masked(model, case.graph(), keep):
        return outputs_of(model, case.inputs())


def magnitudes(network: ShrinkingNetwork) -> Tensor:
    """Scores by original number; a removed unit has 0."""
    task = Task(network.model, network.graph, lambda *_: torch.zeros(()), network.kept_here)
    return network.in_original(Magnitude().units(task, None))


def check_mapping(network: ShrinkingNetwork, moves: Moves, scores: Tensor) -> None:
    """Every unit that can go is there under its own number, with the score it had."""
    present = torch.zeros(network.original.num_units, dtype=torch.bool)
    present[network.numbers] = True
    assert network.numbers.unique().numel() == network.graph.num_units
    assert movable(network, moves) <= set(present.nonzero().flatten().tolist())
    assert torch.allclose(magnitudes(network)[present], scores[present], rtol=1e-12, atol=0)


@prunable_cases(few={*FEW, *NOT_TOLD_APART, *WIDE})
def test_the_whole_way(case, tmp_path):
    """Soft as masked; compacted as soft, unit by unit; again; all of it as one compaction of the original."""
    network, moves = start(case)
    network.remove_(portion(network, moves, seed=1))
    check_keep(case.graph(), network.kept)
    wanted, scores = outputs(network, case.inputs()), magnitudes(network)
    assert difference(masked_outputs(case, network.keep), wanted) < EXACT
    told_apart = network.rehearse()
    assert told_apart == (case.name not in NOT_TOLD_APART)
    assert difference(wanted, outputs(network, case.inputs())) == 0, "a rehearsal must change nothing"
    network.compact_()
    assert difference(wanted, outputs(network, case.inputs())) < EXACT
    if told_apart:
        check_mapping(network, moves, scores)
        network.remove_(portion(network, moves, seed=2, share=0.15))
        wanted = masked_outputs(case, network.keep)
        assert difference(wanted, outputs(network, case.inputs())) < EXACT
        network.compact_()
    assert not torch.equal(network.kept, case.graph().kept(None))

    at_once = case.model()
    ifso.compact_(at_once, case.graph(), network.keep)
    found, expected = named_tensors(network.model), named_tensors(at_once)
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        tolerance = 1e-14 if name in case.graph().gains else 0  # multiplied in each round by what was left of a length
        torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=0, msg=name)
    assert difference(wanted, outputs_of(network.model, case.inputs())) < EXACT

    recipe = network.recipe()
    assert len(recipe.rounds) == 1
    assert {one.name: one.kept for one in recipe.rounds[0].groups} == {
        name: tuple(kept.nonzero().flatten().tolist()) for name, kept in network.keep.items()
    }
    if case.name not in WIDE:
        return
    ifso.save(network.model, tmp_path / "run")
    loaded = ifso.load(tmp_path / "run", case.build().double().eval())
    assert difference(wanted, outputs_of(loaded, case.inputs())) < EXACT


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("multiple", [2, 8])
def test_a_multiple_keeps_zeros_among_the_units(name, multiple):
    case = CASES[name]
    network, moves = start(case)
    network.remove_(portion(network, moves, seed=3))
    wanted, scores, saving = outputs(network, case.inputs()), magnitudes(network), network.saving(multiple)
    if not network.rehearse(multiple):
        assert case.name in NOT_TOLD_APART
        return
    before, full = ifso.cost(network.model, network.graph).macs, network.saving()
    balanced = {unit for one in network.graph.balances for unit in one.blocks.flatten().tolist()}
    network.compact_(multiple=multiple)
    assert difference(wanted, outputs(network, case.inputs())) < EXACT
    assert 1 - ifso.cost(network.model, network.graph).macs / before == pytest.approx(saving, abs=1e-12)
    assert saving <= full
    check_mapping(network, moves, scores)
    for group in case.graph().groups:
        left = int(torch.isin(torch.arange(group.first, group.first + group.size), network.numbers).sum())
        if not balanced & set(range(group.first, group.first + group.size)):
            assert left % multiple == 0 or left in (0, group.size)
    network.remove_(portion(network, moves, seed=4, share=0.1))
    assert difference(masked_outputs(case, network.keep), outputs(network, case.inputs())) < EXACT
    network.compact_()
    assert difference(masked_outputs(case, network.keep), outputs_of(network.model, case.inputs())) < EXACT


def test_the_numbers_of_a_known_network():
    """stem 4 units, conv 6, conv2 4: what stays keeps its number through two compactions."""
    network, _ = start(CASES["plain"])
    network.remove_([0, 5, 6, 12])
    network.compact_()
    assert network.numbers.tolist() == [1, 2, 3, 4, 7, 8, 9, 10, 11, 13]
    network.remove_([2, 8])
    assert network.kept_here.tolist() == [number not in (2, 8) for number in network.numbers.tolist()] + [True]
    network.compact_()
    assert network.numbers.tolist() == [1, 3, 4, 7, 9, 10, 11, 13]
    assert network.in_original(torch.arange(8) + 1.0).nonzero().flatten().tolist() == network.numbers.tolist()


def test_nothing_to_do_is_not_done():
    network, _ = start(CASES["plain"])
    graph = network.graph
    network.compact_()
    assert network.graph is graph
    assert network.saving() == 0


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), torch.optim.Adam])
def test_the_optimizer_goes_along(make):
    """Momenta of removed units are zero; those of the others stay with them through a compaction."""
    case = CASES["residual"]
    network, moves = start(case)
    optimizer = make(list(network.model.parameters()))
    sum(out.square().sum() for out in [network.model(case.inputs())]).backward()
    optimizer.step()
    network.remove_(portion(network, moves, seed=5), optimizer)
    momenta = {
        name: [value.clone() for value in optimizer.state[tensor].values() if value.shape == tensor.shape]
        for name, tensor in network.model.named_parameters()
    }
    assert sum(len(parts) for parts in momenta.values()) >= len(momenta)
    network.compact_(optimizer)
    for name, tensor in network.model.named_parameters():
        own = [value for value in optimizer.state[tensor].values() if value.dim()]
        for before, after in zip(momenta[name], own, strict=True):
            assert after.shape == tensor.shape
            assert torch.equal(before[before != 0].sort().values, after[after != 0].sort().values)


def test_a_smaller_network_that_cannot_be_traced_is_not_made(monkeypatch):
    network, moves = start(CASES["plain"])
    network.remove_(portion(network, moves, seed=1))

    def fails(*_: Any, **__: Any) -> None:
        raise IfsoError("no")

    monkeypatch.setattr("ifso.pruning.shrinking_network.trace", fails)
    assert not network.rehearse()
    assert not network.can_shrink


def test_surgery_is_done_in_the_modes_of_the_trace():
    """Batch norm in train mode refuses one value per channel, which the example inputs of a trace may well have."""
    model = nn.Sequential(nn.Conv2d(3, 6, 8), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6, 4)).eval()
    network = ShrinkingNetwork(model, ifso.trace(model, torch.zeros(1, 3, 8, 8)))
    model.train()
    model[1].eval()
    modes = [module.training for module in model.modules()]
    network.remove_([1, 4])
    assert network.rehearse()
    network.compact_()
    assert model[0].out_channels == 4
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize("found_before", [True, False])
def test_a_rehearsed_compaction_is_the_same(found_before):
    network, _ = start(CASES["residual"])
    network.remove_([0, 9])
    if found_before:
        network.rehearse()
        network.remove_([1])
        network.rehearse()
    else:
        network.remove_([1])
    network.compact_()
    graph = ifso.trace(network.model, CASES["residual"].inputs())
    assert [(one.name, one.size) for one in network.graph.groups] == [(one.name, one.size) for one in graph.groups]
    assert ifso.cost(network.model, network.graph) == ifso.cost(network.model, graph)
