"""What counts of the k scores before a removal: their sum or the last, against scores and steps by hand in float64."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from small_runs import SIZE, SmallResNet, contents, samples
from small_runs import prune as prune_small
from torch import Tensor, nn

import ifso
from ifso.errors import BudgetError, RunError
from ifso.pruning.settings import sgd

ROUNDS, RATE = 3, 0.05


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batches() -> list[tuple[Tensor, Tensor]]:
    images, labels = samples()
    return list(zip(images.double().split(8), labels.split(8), strict=True))


def by_hand() -> list[Tensor]:
    """The scores of all units before each of the steps."""
    model, found = SmallResNet().double().train(), []
    graph = ifso.trace(model, torch.zeros(1, 2, SIZE, SIZE, dtype=torch.float64))
    optimizer = sgd(list(model.parameters()), RATE)
    for batch in batches()[:ROUNDS]:
        scores = ifso.score(model, graph, loss_fn, [batch])
        found.append(torch.cat([scores[group.name] for group in graph.groups]))
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
    return found


def pruned(accumulation: str, **changes: object) -> ifso.PruneResult:
    """All removals at once, after one collection of scores."""
    options = {
        "budget": ifso.Budget(macs=0.5), "example_inputs": torch.zeros(1, 2, SIZE, SIZE, dtype=torch.float64),
        "accumulate": ROUNDS, "batches_per_score": 1, "units_per_step": 1000, "recalibrate": 0,
        "optimizer": lambda parameters: sgd(parameters, RATE), "accumulation": accumulation, **changes,
    }  # fmt: skip
    return ifso.prune(SmallResNet().double(), batches(), loss_fn, **options)


def scores_of(result: ifso.PruneResult) -> Tensor:
    return torch.cat([result.scores[group.name] for group in result.graph.groups])


@pytest.fixture(scope="module")
def truth() -> list[Tensor]:
    return by_hand()


def test_the_last_of_k_scores_is_the_kth_alone(truth):
    found = scores_of(pruned("last"))
    torch.testing.assert_close(found, truth[-1], rtol=1e-9, atol=1e-14)
    assert not torch.allclose(found, truth[-2], rtol=1e-2)


def test_the_sum_counts_every_score_alike(truth):
    found = scores_of(pruned("sum"))
    torch.testing.assert_close(found, torch.stack(truth).mean(0), rtol=1e-9, atol=1e-14)


def test_with_one_score_both_are_the_same():
    one, other = (pruned(accumulation, accumulate=1) for accumulation in ("sum", "last"))
    assert torch.equal(scores_of(one), scores_of(other))
    assert all(torch.equal(one.keep[name], other.keep[name]) for name in one.keep)


def test_losses_are_those_of_all_rounds():
    one, other = (pruned(accumulation) for accumulation in ("sum", "last"))
    assert one.metrics[0]["loss"] == pytest.approx(other.metrics[0]["loss"], rel=1e-12)


def test_it_is_kept_in_the_run_and_cannot_change(tmp_path):
    prune_small("plain", tmp_path / "last", accumulation="last", accumulate=2)
    assert json.loads((tmp_path / "last" / "config.json").read_text())["settings"]["accumulation"] == "last"
    with pytest.raises(RunError, match="accumulation is not set and was 'last'"):
        prune_small("plain", tmp_path / "last", accumulate=2)


def test_a_run_from_before_there_was_a_choice_goes_on(tmp_path):
    prune_small("plain", tmp_path)
    assert "accumulation" not in json.loads((tmp_path / "config.json").read_text())["settings"]
    before = contents(tmp_path)
    prune_small("plain", tmp_path, accumulation="sum")
    assert contents(tmp_path) == before


def test_another_word_is_refused():
    with pytest.raises(BudgetError) as caught:
        pruned("mean")
    assert str(caught.value) == "accumulation='mean' is unknown; choose 'sum' or 'last'"
