"""Two processes that prune together remove the same units, hold the same weights, and stop together."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import prune_rank
import pytest
import torch
from processes import ranks_of
from small_runs import SmallResNet, contents, listed, prune

import ifso
from ifso.surgery.recipe import digest_of

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks have been."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks_of(prune_rank.main, prune_rank.WORLD, folder)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    """What each of them has found, by scenario."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(prune_rank.WORLD)]


@pytest.mark.parametrize("scenario", ["one-shot", "incremental", "interrupted", "finished", "latency"])
def test_ranks_hold_the_same(results: Results, scenario: str) -> None:
    first, second = (result[scenario] for result in results)
    assert {**first, "folder": None} == {**second, "folder": None}
    if scenario not in {"finished", "latency"}:
        assert first["folder"] is not None
        assert second["folder"] is None


def test_like_one_process_with_all_batches(results: Results) -> None:
    alone = prune("one-shot", train_batches=listed()[:4], batches_per_score=4)
    found = results[0]["one-shot"]
    assert found["keep"] == {name: kept.tolist() for name, kept in alone.keep.items()}
    for name, values in alone.scores.items():
        torch.testing.assert_close(
            torch.tensor(found["scores"][name], dtype=torch.float64), values, rtol=1e-5, atol=1e-9
        )


def test_resumed_like_uninterrupted(results: Results, folder: Path) -> None:
    assert results[0]["interrupted"]["weights"] == results[0]["incremental"]["weights"]
    assert contents(folder / "interrupted") == contents(folder / "whole")
    assert results[0]["incremental"]["weights"] != digest_of(prune("shuffled").model)
    assert results[1]["finished"]["weights"] == results[1]["incremental"]["weights"]
    ifso.load(folder / "whole", SmallResNet())


@pytest.mark.parametrize(
    ("scenario", "first", "second"),
    [
        ("folder exists", "RunError: .*already holds a run", "RankError: stopped, because rank 0 failed"),
        ("no batches", "RankError: stopped, because rank 1 failed", "DataError: train_batches is empty"),
        ("runs out", "RankError: stopped, because rank 1 failed", "DataError: train_batches ran out"),
        ("bad batch", "DataError: .*hold NaN or infinity .1 of them", "DataError: .*hold NaN or infinity .1 of them"),
        ("other seed", "RankError: stopped, because rank 1", "RunError: other .* first rank: seed is 1 and was 0"),
        ("other weights", "RankError: stopped, because rank 1", "RunError: other .* rank: the weights are other ones"),
        ("bad loss", "RankError: stopped, because rank 1 failed", "ScoreError: loss_fn failed: ValueError: no more"),
    ],
)  # fmt: skip
def test_ranks_stop_together(results: Results, scenario: str, first: str, second: str) -> None:
    for result, pattern in zip(results, (first, second), strict=True):
        message = result[scenario]
        assert isinstance(message, str)
        assert "\n" not in message
        assert re.match(pattern, message), message


def test_a_rank_that_dies(results: Results) -> None:
    assert "dead" not in results[1]
    assert results[0]["dead"].startswith("RankError: rank 0 stopped, because another rank cannot be reached any more")
