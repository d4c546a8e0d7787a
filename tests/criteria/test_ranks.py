"""Two processes that score together give what one would, and fail together."""

from __future__ import annotations

import json

import pytest
import rank as worker
import torch
from processes import ranks_of

import ifso
from ifso.criteria.scorer import score


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each of two ranks has found, by scenario."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks_of(worker.main, worker.WORLD, folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(worker.WORLD)]


@pytest.fixture(scope="module")
def alone():
    """The mean over all batches in this process."""
    model = worker.network()
    graph = ifso.trace(model, torch.zeros(1, 3, 8, 8))
    return score(model, graph, worker.loss_fn, worker.all_batches(), "taylor")


@pytest.mark.parametrize("scenario", ["uneven", "none on one rank"])
def test_the_mean_over_the_batches_of_all_ranks(results, alone, scenario):
    first, second = (result[scenario] for result in results)
    assert first == second
    assert list(first) == list(alone)
    for name, values in alone.items():
        torch.testing.assert_close(torch.tensor(first[name], dtype=torch.float64), values, rtol=1e-6, atol=1e-9)


def test_a_rank_that_fails_fails_all(results):
    good, bad = (result["bad on one rank"] for result in results)
    assert bad.startswith("the loss on batch 1 is not finite (nan)")
    assert good == "no score, because rank 1 failed on its batches; see its own message"


def test_a_mistake_on_one_rank_fails_all(results):
    good, bad = (result["unknown"] for result in results)
    assert bad.startswith("no criterion 'tailor'")
    assert good.startswith("no score, because rank 1 failed")


def test_no_batch_on_any_rank(results):
    for result in results:
        assert result["no batches"].startswith("batches ran out before the first one")


def test_random_is_the_same_on_every_rank(results):
    first, second = (result["random"] for result in results)
    assert first == second
    model = worker.network()
    here = score(model, ifso.trace(model, torch.zeros(1, 3, 8, 8)), None, None, "random")
    assert first == {name: values.tolist() for name, values in here.items()}


def test_graphs_of_different_sizes(results):
    for result in results:
        assert result["other graphs"].startswith("ranks score graphs of different sizes ([3, 4] units)")
