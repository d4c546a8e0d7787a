"""One pipeline of scores: what a criterion says of itself is enough for its clients, which do not ask for its class."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES
from torch import Tensor

import ifso
from ifso.common.loss_fn import WatchedLoss
from ifso.criteria.base import Criterion, Task
from ifso.criteria.ifso import Ifso
from ifso.criteria.registry import create
from ifso.criteria.scorer import Scorer
from ifso.errors import ScoreError
from ifso.pruning.scoring_loop import ScoringLoop
from ifso.pruning.settings import sgd
from ifso.pruning.shrinking_network import ShrinkingNetwork

CASE = CASES["residual"]


def squares(model: torch.nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def images(number: int) -> Tensor:
    return torch.randn(number, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def scorer_of(criterion: Criterion, *, shrinks: bool = False) -> Scorer:
    graph = CASE.graph()
    return Scorer(criterion, CASE.model().eval(), graph, WatchedLoss(squares), graph.kept(None), shrinks=shrinks)


@dataclass(frozen=True)
class Sizes(Criterion):
    """Scores every unit by the size of the batch it sees, times what is left of the first weight."""

    name = "sizes"
    needs = "gradients"

    by_itself: bool = False
    size: int | None = None

    def units(self, task: Task, batch: Any) -> Tensor:
        left = task.memo("left", dict).get("stem.conv.weight", torch.ones(1))
        count = len(batch) if self.size is None else self.size
        return torch.full((task.graph.num_units,), float(count)) * left.double().mean()

    def survivors(self, task: Task) -> Mapping[str, Tensor]:
        name = "stem.conv.weight"
        return task.memo("left", lambda: {name: torch.ones_like(task.weight(name))})

    def micro_batched(self, size: int) -> Criterion | None:
        return replace(self, size=size) if self.by_itself else None


@pytest.mark.parametrize(("by_itself", "first"), [(False, (2 * 4 + 1) / 5), (True, 2.0)])
def test_a_batch_is_cut_by_the_scorer_or_by_the_criterion_itself(by_itself, first):
    scorer = scorer_of(Sizes(by_itself))
    assert float(scorer.units(images(5))[0]) == 5
    scorer.cut_batches(2)
    assert float(scorer.units(images(5))[0]) == pytest.approx(first)


def test_what_units_leave_is_narrowed_in_place_in_a_task_that_shrinks():
    scorer = scorer_of(Sizes(), shrinks=True)
    kept = CASE.graph().kept({"stem.conv": torch.arange(8) >= 2})
    before, weight = scorer.task.kept, CASE.model().get_parameter("stem.conv.weight")
    alive = torch.ones_like(weight)
    alive[:2] = 0
    scorer.narrow_(kept, {"stem.conv.weight": alive, "another": alive})
    assert scorer.task.kept is before
    assert torch.equal(before, kept)
    assert float(scorer.units(images(4))[0]) == pytest.approx(4 * 6 / 8)


def test_a_task_that_does_not_shrink_asks_for_no_survivors():
    class Unasked(Sizes):
        def survivors(self, task: Task) -> Mapping[str, Tensor]:
            raise AssertionError("asked")

    assert float(scorer_of(Unasked()).units(images(3))[0]) == 3
    with pytest.raises(AssertionError, match="asked"):
        scorer_of(Unasked(), shrinks=True)


def test_a_run_narrows_the_survivors_of_any_criterion():
    """The loop of a run with a criterion that it has never heard of."""
    loop = ScoringLoop(
        ShrinkingNetwork(CASE.model().eval(), CASE.graph()), Sizes(), squares, lambda weights: sgd(weights, 0.05)
    )
    loop.remove_([0, 1])
    loop.round([images(4)], train=False)
    assert float(loop.collect()[0][5]) == pytest.approx(4 * 6 / 8)


@pytest.mark.parametrize("criterion", ["ifso", "taylor", "group-fisher", "hrank", "magnitude", "fpgm"])
def test_units_are_those_of_ifso_score(criterion):
    scores = ifso.score(CASE.model().eval(), CASE.graph(), squares, [images(4)], criterion)
    units = scorer_of(create(criterion)).units(images(4))
    for group in CASE.graph().groups:
        assert torch.equal(units[group.units], scores[group.name])


def test_scores_of_another_shape_are_refused():
    @dataclass(frozen=True)
    class Three(Sizes):
        def units(self, task: Task, batch: Any) -> Tensor:
            return torch.zeros(3)

    with pytest.raises(ScoreError, match="one for each unit"):
        scorer_of(Three()).units(images(2))


def test_ifso_cuts_batches_itself_and_exactly():
    whole, cut = (scorer_of(create("ifso")) for _ in range(2))
    cut.cut_batches(2)
    assert cut.criterion == Ifso(micro_batch=2)
    torch.testing.assert_close(cut.units(images(6)), whole.units(images(6)), rtol=1e-10, atol=1e-14)


def test_nobody_asks_for_the_class_of_a_criterion():
    asked = []
    for path in Path(ifso.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "type"):
                names = {one.id for part in node.args[1:] for one in ast.walk(part) if isinstance(one, ast.Name)}
                asked += [path.name] if "Ifso" in names else []
    assert asked == []
