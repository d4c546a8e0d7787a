"""Moves: always legal, as small as can be, the lowest first, all of them; against brute force on small structures."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from cases import CASES, Case, every_case
from torch import Tensor

import ifso
from ifso.errors import BudgetError, KeepError, ScoreError
from ifso.graph.balancing import check_keep
from ifso.graph.channel_graph import STAYS, Balance, ChannelGraph, Group, Layout, Member
from ifso.graph.layouts import compact_shape
from ifso.pruning.constraints import families_of, minimal_solutions
from ifso.pruning.moves import Move, Moves


def graph_of(*sizes: int, balances: tuple[Balance, ...] = (), stays: int = 0) -> ChannelGraph:
    """Groups g0, g1, … of these sizes, each made by one weight; ``stays`` more slices of the first one stay."""
    groups, layouts, first = [], {}, 0
    for number, size in enumerate(sizes):
        extra = stays if number == 0 else 0
        owner = torch.cat([torch.arange(size), torch.full((extra,), STAYS)])
        member = Member(f"w{number}", 0, "produces", owner, size)
        groups.append(Group(f"g{number}", first, size, (member,)))
        layer = torch.where(owner >= 0, owner + first, STAYS)[:, None]
        layouts[f"w{number}"] = Layout((size + extra, 3), (layer,))
        first += size
    return ChannelGraph(tuple(groups), (), balances, layouts, (), (), None, ())


def of(*blocks: list[int]) -> Balance:
    return Balance(torch.tensor(blocks), "test")


def random_scores(graph: ChannelGraph, seed: int) -> Tensor:
    return torch.rand(graph.num_units, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def taken(moves: Moves, scores: Tensor, kept: Tensor | None = None) -> list[Move]:
    """All moves, one after the other."""
    queue, made = moves.ordered(scores, kept), []
    while (move := queue.next()) is not None:
        queue.take(move)
        made.append(move)
    return made


def is_legal(graph: ChannelGraph, kept: Tensor) -> bool:
    try:
        check_keep(graph, kept)
    except KeepError:
        return False
    return True


def fewest_on_an_axis(graph: ChannelGraph, kept: Tensor, units: tuple[int, ...]) -> int:
    """Units and slices that stay, on the axis of these units that has the fewest."""
    fewest = graph.num_units
    for layout in graph.layouts.values():
        for layer in layout.layers:
            if torch.isin(layer, torch.tensor(units)).any():
                left = layer[kept[layer]]
                fewest = min(fewest, len(set(left[left != STAYS].tolist())) + int((left == STAYS).sum()))
    return fewest


def produced_sizes(graph: ChannelGraph, kept: Tensor, units: tuple[int, ...]) -> list[int]:
    """Channels of the axes these units are produced on, by the shapes that compaction makes."""
    found = []
    for group in graph.groups:
        if any(group.first <= unit < group.first + group.size for unit in units):
            for member in group.members:
                if member.role == "produces":
                    layout = graph.layouts[member.parameter]
                    groups = channel_groups(layout, kept, member.dim)
                    found.append(compact_shape(layout, kept, member.parameter)[member.dim] * groups)
    return found


def channel_groups(layout: Layout, kept: Tensor, dim: int) -> int:
    """How many groups of output channels share the places of this axis: those of a transposed convolution do."""
    shared = [layer for layer in layout.layers if dim == 1 and layer.shape[0] > 1 and layer.shape[1] > 1]
    return len({tuple(row.flatten().tolist()) for layer in shared for row in layer}) or 1


@pytest.mark.parametrize("settings", [{}, {"min_units": 3}, {"round_to": 2}, {"round_to": 3, "min_units": 2}], ids=str)
@every_case()
def test_every_state_on_the_way_is_legal(case: Case, settings: dict[str, int]):
    graph = case.graph()
    moves, scores, kept = Moves(graph, **settings), random_scores(graph, 0), graph.kept(None)
    for move in taken(moves, scores):
        assert kept[list(move.units)].all(), "a unit went twice"
        kept[list(move.units)] = False
        check_keep(graph, kept)
        assert move.score == pytest.approx(float(scores[list(move.units)].mean()))
        assert fewest_on_an_axis(graph, kept, move.units) >= settings.get("min_units", 1)
        assert all(size % settings.get("round_to", 1) == 0 for size in produced_sizes(graph, kept, move.units))
    if case.prunable and not settings:
        assert not kept.all()


@every_case()
def test_what_is_stuck_never_goes_and_all_else_can(case: Case):
    graph = case.graph()
    for round_to in (None, 2, 4):
        moves = Moves(graph, round_to=round_to)
        gone = {unit for seed in range(3) for move in taken(moves, random_scores(graph, seed)) for unit in move.units}
        for group in graph.groups:
            assert (group.name in moves.stuck) == gone.isdisjoint(range(group.first, group.first + group.size))
        assert all(reason and "\n" not in reason for reason in moves.stuck.values())


@every_case()
def test_in_the_end_nothing_more_can_go(case: Case):
    graph = case.graph()
    moves = Moves(graph)
    kept = moves.exhausted()
    check_keep(graph, kept)
    for unit in moves.free:
        if kept[unit]:
            without = kept.clone()
            without[unit] = False
            assert not is_legal(graph, without)


def test_single_units_go_by_score_then_by_number():
    graph = graph_of(3, 3)
    made = taken(Moves(graph), torch.tensor([2.0, 1.0, 3.0, 1.0, 5.0, 1.0]))
    assert [move.units for move in made] == [(1,), (3,), (5,), (0,)]
    assert [move.score for move in made] == [1.0, 1.0, 1.0, 2.0]


def test_a_layer_keeps_min_units_and_slices_that_stay_count():
    assert len(taken(Moves(graph_of(5), min_units=2), torch.zeros(5))) == 3
    assert len(taken(Moves(graph_of(5, stays=1), min_units=2), torch.zeros(5))) == 4
    assert len(taken(Moves(graph_of(5, stays=1)), torch.zeros(5))) == 5
    moves = Moves(graph_of(2, 5), min_units=2)
    assert "min_units=2" in moves.stuck["g0"]
    assert list(moves.stuck) == ["g0"]


def test_rows_lose_their_lowest_units_together():
    graph = graph_of(6, balances=(of([0, 1, 2], [3, 4, 5]),))
    made = taken(Moves(graph), torch.tensor([5.0, 1.0, 2.0, 4.0, 6.0, 3.0]))
    assert made == [Move((1, 5), 2.0), Move((2, 3), 3.0)]


def test_units_that_own_more_slices_go_less_often():
    graph = graph_of(8, 4, balances=(of([0, 1, 2, 3, 4, 5, 6, 7], [8, 8, 9, 9, 10, 10, 11, 11]),))
    made = taken(Moves(graph), torch.arange(12.0))
    assert [move.units for move in made] == [(0, 1, 8), (2, 3, 9), (4, 5, 10)]


def test_units_common_to_all_blocks_go_alone():
    graph = graph_of(5, balances=(of([0, 1, 4], [2, 3, 4]),))
    made = taken(Moves(graph), torch.tensor([5.0, 5.0, 5.0, 5.0, 0.0]))
    assert [move.units for move in made] == [(4,), (0, 2)]


def test_a_block_that_stays_holds_the_others_back():
    graph = graph_of(4, balances=(of([0, 1, 2, 3], [-1, -1, -1, -1]),))
    moves = Moves(graph)
    assert taken(moves, torch.zeros(4)) == []
    assert moves.stuck == {"g0": "test needs equal counts that no smaller choice has"}


STRUCTURES = {
    "two rows": (of([0, 1, 2], [3, 4, 5]),),
    "fixed": (of([-1, -1, 0, 1], [2, 3, 4, 5]),),
    "doubled": (of([0, 0, 1, 1], [2, 3, 4, 5]),),
    "nested": (of([0, 1], [2, 3], [4, 5], [6, 7]), of([0, 1, 2, 3], [4, 5, 6, 7])),
    "crossing": (of([0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]), of([0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11])),
    "open": (of([0, 1, 2], [3, 4, 5]), of([0, 1, 6], [3, 7, 8])),
    "uneven": (of([0, 0, 1, 2], [3, 4, 5, 6]),),
    "one direction": (of([0, 1, 2], [3, 4, 5]), of([0, 1, 2], [6, 7, 8])),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_no_legal_choice_lies_within_a_first_move(name):
    balances = STRUCTURES[name]
    units = max(int(one.blocks.max()) for one in balances) + 1
    graph = graph_of(units, balances=balances)
    choices = torch.tensor(list(product([False, True], repeat=units)))
    kept = torch.cat([choices, torch.ones(len(choices), 1, dtype=torch.bool)], 1)
    legal = torch.ones(len(kept), dtype=torch.bool)
    for one in balances:
        counts = kept[:, one.blocks].sum(2)
        legal &= (counts == counts[:, :1]).all(1)
    found = {frozenset((~row).nonzero().flatten().tolist()) for row in choices[legal]} - {frozenset()}
    minimal = {gone for gone in found if not any(other < gone for other in found)}
    free, tied = families_of(graph)
    by_pattern = {frozenset([unit]) for unit in free}
    for family in tied:
        for pattern in family.patterns:
            by_pattern |= set(every_choice(family.cells, pattern))
    assert by_pattern == minimal


def every_choice(cells: tuple[tuple[int, ...], ...], pattern: tuple[int, ...]) -> list[frozenset[int]]:
    from itertools import combinations

    parts = [combinations(cell, take) for cell, take in zip(cells, pattern, strict=True)]
    return [frozenset(unit for part in choice for unit in part) for choice in product(*parts)]


@pytest.mark.parametrize("seed", range(8))
def test_minimal_solutions_against_brute_force(seed):
    random = torch.Generator().manual_seed(seed)
    vectors = torch.randint(-2, 3, (5, 2), generator=random).tolist()
    most = torch.randint(1, 5, (5,), generator=random).tolist()
    found = [
        numbers
        for numbers in product(*(range(one + 1) for one in most))
        if any(numbers) and not any(sum(n * v[k] for n, v in zip(numbers, vectors, strict=True)) for k in range(2))
    ]
    minimal = {n for n in found if not any(o != n and all(a >= b for a, b in zip(n, o, strict=True)) for o in found)}
    assert set(minimal_solutions(vectors, most)) == minimal


def test_round_to_takes_as_many_as_it_needs():
    made = taken(Moves(graph_of(16), round_to=8), torch.arange(16.0))
    assert [move.units for move in made] == [tuple(range(8))]
    made = taken(Moves(graph_of(19), round_to=8), torch.arange(19.0))
    assert [len(move.units) for move in made] == [3, 8]
    moves = Moves(graph_of(8, 12), round_to=8)
    assert list(moves.stuck) == ["g0"]
    assert "round_to=8" in moves.stuck["g0"]


def test_round_to_counts_the_channels_of_a_shared_axis():
    graph = graph_of(2, 7)
    owner = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, *[STAYS] * 7])
    other = torch.tensor([*[STAYS] * 8, *range(7)])
    layer = torch.where(owner >= 0, owner, other + 2)[:, None]
    first = replace(graph.groups[0], members=(Member("w", 0, "produces", owner, 2),))
    second = replace(graph.groups[1], members=(Member("w", 0, "produces", other, 7),))
    graph = ChannelGraph((first, second), (), (), {"w": Layout((15, 3), (layer,))}, (), (), None, ())
    made = taken(Moves(graph, round_to=4), torch.arange(9.0))
    assert [move.units for move in made] == [(2, 3, 4), (0,), (1,)]


def test_round_to_on_a_balanced_family():
    graph = graph_of(24, balances=(of(list(range(12)), list(range(12, 24))),))
    made = taken(Moves(graph, round_to=8), torch.arange(24.0))
    assert [len(move.units) for move in made] == [8, 8]


def test_going_on_from_a_state_is_the_same_as_going_through():
    graph = CASES["shufflenet-v2-deep"].graph()
    moves, scores = Moves(graph), random_scores(graph, 5)
    made = taken(moves, scores)
    assert len(made) > 6
    kept = graph.kept(None)
    for move in made[:4]:
        kept[list(move.units)] = False
    assert taken(moves, scores, kept) == made[4:]


def test_skipped_moves_are_passed_over_and_the_rest_comes_in_order():
    graph = graph_of(4, 6, balances=(of([4, 5, 6], [7, 8, 9]),))
    queue = Moves(graph).ordered(torch.tensor([1.0, 2.0, 3.0, 4.0, 1.5, 9.0, 9.0, 1.5, 9.0, 9.0]))
    seen = []
    for skip in (True, False, True, False, False):
        seen.append(queue.next())
        (queue.skip if skip else queue.take)(seen[-1])
    assert [move.units for move in seen] == [(0,), (4, 7), (1,), (2,), (3,)]
    assert queue.next() == Move((5, 8), 9.0)


@pytest.mark.parametrize("value", [0, -1, True, False, 1.0, 8.0, "8"], ids=repr)
@pytest.mark.parametrize("name", ["round_to", "min_units"])
def test_settings_that_are_no_counts_are_refused(name, value):
    with pytest.raises(BudgetError, match=f"^{name} must be a whole number of channels from 1 up, got {value!r}$"):
        Moves(graph_of(4), **{name: value})


def test_min_units_none_is_refused():
    with pytest.raises(BudgetError, match=r"min_units must be .* got None"):
        Moves(graph_of(4), min_units=None)


def test_scores_that_are_no_numbers_are_refused():
    moves = Moves(graph_of(4, 4))
    scores = torch.zeros(8)
    scores[5] = float("nan")
    with pytest.raises(ScoreError, match=r"1 of 8 scores are not numbers \(first: unit 1 of g1 has nan"):
        moves.ordered(scores)
    kept = torch.ones(9, dtype=torch.bool)
    kept[5] = False
    assert moves.ordered(scores, kept).next() == Move((0,), 0.0)
    with pytest.raises(ScoreError, match=r"scores have shape \(7,\); the network has 8 units"):
        moves.ordered(torch.zeros(7))


def test_round_to_eight_on_a_real_network():
    model = ifso.create_model("ifso:resnet20")
    graph = ifso.trace(model, torch.zeros(1, 3, 32, 32))
    kept = Moves(graph, round_to=8).exhausted()
    ifso.compact_(model, graph, {group.name: kept[group.units] for group in graph.groups})
    widths = {module.out_channels for module in model.modules() if isinstance(module, torch.nn.Conv2d)}
    assert widths == {8}
