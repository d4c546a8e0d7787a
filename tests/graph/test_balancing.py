"""The nearest legal choice: against brute force over all choices, for small structures."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch
from cases import CASES, random_keep
from torch import Tensor

import ifso
from ifso.errors import KeepError
from ifso.graph.balancing import balance_vector
from ifso.graph.channel_graph import STAYS, Balance


def of(*blocks: list[int]) -> Balance:
    """Blocks of unit numbers that must keep equally many."""
    return Balance(torch.tensor(blocks), "test")


def units_of(balances: list[Balance]) -> int:
    return max(int(one.blocks.max()) for one in balances) + 1


def vector(bits: tuple[bool, ...]) -> Tensor:
    """A choice with the last entry that stands for what stays."""
    return torch.tensor([*bits, True])


def is_legal(kept: Tensor, balances: list[Balance]) -> bool:
    """Equal counts in every balance, and nothing emptied."""
    counts = [one.counts(kept) for one in balances]
    return all(bool((count == count[0]).all()) and int(count[0]) > 0 for count in counts)


def by_number(units: int) -> Tensor:
    """Lower numbers are more important, as by default."""
    return -torch.arange(units, dtype=torch.float64)


@cache
def legal_choices(*rows: tuple[tuple[int, ...], ...]) -> Tensor:
    """All legal choices [n, units] for balances given as nested tuples."""
    balances = [of(*map(list, blocks)) for blocks in rows]
    found = [bits for bits in product([False, True], repeat=units_of(balances)) if is_legal(vector(bits), balances)]
    return torch.tensor(found)


def nearest_distance(kept: Tensor, choices: Tensor) -> int:
    return int((choices != kept[:-1]).sum(1).min())


def rows_of(balances: list[Balance]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    return tuple(tuple(tuple(block) for block in one.blocks.tolist()) for one in balances)


SINGLE = {
    "two-by-two": [of([0, 1], [2, 3])],
    "two-by-four": [of([0, 1, 2, 3], [4, 5, 6, 7])],
    "three-by-three": [of([0, 1, 2], [3, 4, 5], [6, 7, 8])],
    "four-by-two": [of([0, 1], [2, 3], [4, 5], [6, 7])],
    "mixed-up": [of([0, 3, 5], [4, 1, 2])],
}
"""One balance over units that stand in one block each."""

UNEVEN = {
    "with-what-stays": [of([STAYS, 0, 1], [2, 3, 4])],
    "mostly-what-stays": [of([STAYS, STAYS, 0, 1], [2, 3, 4, 5])],
    "shared-unit": [of([0, 1, 2], [0, 3, 4])],
    "double-units": [of([0, 0, 1, 1], [2, 3, 4, 5])],
}
"""One balance with slices that stay, units in both blocks, units that count twice."""

SEVERAL = {
    "nested": [of([0, 1], [2, 3], [4, 5], [6, 7]), of([0, 1, 2, 3], [4, 5, 6, 7])],
    "nested-other-way": [of([0, 1, 2, 3], [4, 5, 6, 7]), of([0, 1], [2, 3], [4, 5], [6, 7])],
    "overlapping": [of([0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]), of([0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11])],
    "crossing": [of([0, 1, 2, 3], [4, 5, 6, 7]), of([0, 1, 4, 5], [2, 3, 6, 7])],
    "chained": [of([0, 1], [2, 3]), of([2, 3], [4, 5]), of([4, 5], [6, 7])],
    "apart": [of([0, 1], [2, 3]), of([4, 5, 6], [7, 8, 9])],
    "one-block-in-two": [of([0, 1, 2], [3, 4, 5]), of([0, 1, 2], [6, 7, 8])],
}

ALL = {**SINGLE, **UNEVEN, **SEVERAL}


def all_requests(units: int) -> list[Tensor]:
    """Every choice for small structures, many random ones for larger."""
    if units <= 8:
        return [vector(bits) for bits in product([False, True], repeat=units)]
    random = torch.Generator().manual_seed(0)
    return [
        vector(tuple((torch.rand(units, generator=random) < share).tolist()))
        for share in (0.2, 0.5, 0.8)
        for _ in range(60)
    ]


def requests(balances: list[Balance]) -> list[Tensor]:
    """Choices that leave something in every balance: a layer emptied on purpose is refused elsewhere."""
    return [
        kept for kept in all_requests(units_of(balances)) if all(int(one.counts(kept).max()) > 0 for one in balances)
    ]


@pytest.mark.parametrize("name", [*SINGLE, *UNEVEN])
def test_nearest_legal_choice_for_a_single_balance(name):
    balances = ALL[name]
    choices = legal_choices(*rows_of(balances))
    for kept in requests(balances):
        found = balance_vector(kept, balances, by_number(units_of(balances)))
        assert is_legal(found, balances), kept.tolist()
        assert int((found != kept).sum()) == nearest_distance(kept, choices), kept.tolist()


@pytest.mark.parametrize("name", SINGLE)
def test_at_a_tie_more_units_stay(name):
    balances = SINGLE[name]
    choices = legal_choices(*rows_of(balances))
    for kept in requests(balances):
        found = balance_vector(kept, balances, by_number(units_of(balances)))
        distances = (choices != kept[:-1]).sum(1)
        assert int(found[:-1].sum()) == int(choices[distances == distances.min()].sum(1).max()), kept.tolist()


@pytest.mark.parametrize("name", ALL)
def test_result_is_legal_and_legal_choices_do_not_change(name):
    balances = ALL[name]
    ranking = torch.rand(units_of(balances), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for kept in requests(balances):
        asked = kept.clone()
        found = balance_vector(kept, balances, ranking)
        assert torch.equal(kept, asked), "the request itself was changed"
        assert bool(found[-1])
        assert is_legal(found, balances)
        assert torch.equal(balance_vector(found, balances, ranking), found)
        if is_legal(kept, balances):
            assert torch.equal(found, kept)


@pytest.mark.parametrize("name", SEVERAL)
def test_several_balances_leave_room(name):
    """Something smaller than the whole is found when much less is asked for."""
    balances = SEVERAL[name]
    units = units_of(balances)
    firsts = {int(one.blocks[0, 0]) for one in balances}
    kept = vector(tuple(unit in firsts for unit in range(units)))
    found = balance_vector(kept, balances, by_number(units))
    assert is_legal(found, balances)
    assert int(found[:-1].sum()) < units


def test_balances_that_share_nothing_do_not_disturb_each_other():
    balances = SEVERAL["apart"]
    kept = vector((True, False, True, True, *[True, False, False, False, True, False]))
    found = balance_vector(kept, balances, by_number(10))
    assert torch.equal(found[4:10], kept[4:10])
    assert found[:4].tolist() == [True, True, True, True]


def test_scores_decide_who_comes_back_and_who_goes():
    blocks = [of([0, 1, 2, 3], [4, 5, 6, 7])]
    scores = torch.tensor([1.0, 2.0, 3.0, 4.0, 1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    full_and_one = vector((True, True, True, True, True, False, False, True))
    found = balance_vector(full_and_one, blocks, scores)
    assert found[:8].tolist() == [True, True, True, True, True, True, True, True]
    three_and_one = vector((True, True, True, False, False, True, False, False))
    found = balance_vector(three_and_one, blocks, scores)
    assert found[:8].tolist() == [True, True, True, False, False, True, True, True]
    four_blocks = [of([0, 1], [2, 3], [4, 5], [6, 7])]
    one_too_many = vector((True, True, False, True, True, False, False, True))
    found = balance_vector(one_too_many, four_blocks, torch.tensor([1.0, 2, 1, 2, 1, 2, 1, 2], dtype=torch.float64))
    assert found[:8].tolist() == [False, True, False, True, True, False, False, True]


@pytest.mark.parametrize(
    "name", ["grouped", "shuffle", "shufflenet-v2", "group-norm", "grouped-chain", "res2net", "fpn"]
)
def test_public_balance_makes_any_choice_legal(name):
    case = CASES[name]
    graph, model = case.graph(), case.model()
    for seed in range(10):
        keep = random_keep(graph, seed)
        assert set(keep) == {group.name for group in graph.groups}
        assert all(
            choice.dtype == torch.bool and len(choice) == graph.group(name).size for name, choice in keep.items()
        )
        with ifso.masked(model, graph, keep):
            pass
        again = ifso.balance(graph, keep)
        assert all(torch.equal(again[name], choice) for name, choice in keep.items())


def test_public_balance_follows_scores_and_leaves_the_request_alone():
    graph = CASES["grouped"].graph()
    keep = {"gconv.conv": torch.tensor([True, True, True, True, False, False, True, False, False, True, False, False])}
    asked = keep["gconv.conv"].clone()
    scores = {"gconv.conv": torch.tensor([1.0, 5.0, 2.0] * 4)}
    found = ifso.balance(graph, keep, scores=scores)
    assert torch.equal(keep["gconv.conv"], asked)
    assert found["gconv.conv"].tolist() == [
        False,
        True,
        False,
        True,
        False,
        False,
        True,
        False,
        False,
        True,
        False,
        False,
    ]
    assert found["stem.conv"].all()
    assert found["body.conv"].all()


def test_groups_left_out_stay_whole():
    graph = CASES["plain"].graph()
    found = ifso.balance(graph, {"stem.conv": torch.arange(8) < 2})
    assert found["body.conv"].all()
    assert found["stem.conv"].tolist() == [True, True, *[False] * 6]


def test_scores_of_another_size_are_refused():
    graph = CASES["grouped"].graph()
    with pytest.raises(KeepError, match=r"scores\['gconv.conv'\].*12 units"):
        ifso.balance(graph, graph.keep_all(), scores={"gconv.conv": torch.ones(3)})
    with pytest.raises(KeepError, match="no group named 'x'"):
        ifso.balance(graph, graph.keep_all(), scores={"x": torch.ones(3)})
