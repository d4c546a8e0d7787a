"""Commands under ``torchrun``: every rank holds the same, it is what one process finds, and only the first one writes.

The quick tests start two ranks once for all of them, the slow ones four.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_record import record
from refused import LONE, RANKED, all_words
from safetensors.torch import load_file
from world import HERE, TASK, Ended, torchrun

from ifso.cli.main import main
from ifso.surgery.recipe import digest_of

TWO_AND_FOUR = [2, pytest.param(4, marks=pytest.mark.slow)]
ALIKE = ("scores", "steps", "shared", "finetune", "uncounted", "digits", "spare")
DONE = (*ALIKE, "staged", "eval")
ROUNDING = 2e-6
"""Largest difference of weights and scores from those of one process, over their largest."""


def commands(folder: Path, ranks: int) -> list[tuple[str, list[str]]]:
    """By name, the arguments of ``ifso``. Each rank scores its part of four batches."""
    prune = ["prune", "--model", f"{TASK}:plain", "--macs", "0.6"]
    steps = ["--criterion", "magnitude", "--batches-per-score", "1", "--accumulate", "2", "--lr", "0.05"]
    digits = ["prune", "--model", f"{TASK}:for_digits", "--macs", "0.8", "--data", "digits", "--batch", "100"]
    tune = ["finetune", f"{folder}/steps", "--epochs", "2", "--batch", "8", "--lr", "0.05"]
    train = ["train", "--model", f"{TASK}:for_digits", "--epochs", "1", "--batch", "100", "--lr", "0.05"]
    spare = ["train", "--model", f"{TASK}:Spare", "--epochs", "1", "--batch", "8", "--lr", "0.05"]
    scores = ["--schedule", "one-shot", "--accumulate", "1", "--batches-per-score", str(4 // ranks)]
    return [
        ("scores", [*prune, "--data", f"{TASK}:dealt", *scores, "--out", f"{folder}/scores"]),
        ("steps", [*prune, "--data", f"{TASK}:joint", *steps, "--out", f"{folder}/steps"]),
        ("shared", [*digits, *steps, "--out", f"{folder}/shared"]),
        ("staged", [*prune, "--data", f"{TASK}:joint", "--out", f"{folder}/staged"]),
        ("finetune", [*tune, "--out", f"{folder}/finetune"]),
        ("uncounted", [*tune, "--data", f"{TASK}:uncounted", "--out", f"{folder}/uncounted"]),
        ("digits", [*train, "--data", "digits", "--out", f"{folder}/digits"]),
        ("spare", [*spare, "--data", f"{TASK}:joint", "--out", f"{folder}/spare"]),
        ("eval", ["eval", f"{folder}/steps", "--only", "pruned", "--repeats", "1", "--threads", "1", "--json"]),
        ("uneven", [*tune, "--data", f"{TASK}:uneven", "--out", f"{folder}/uneven"]),
        ("uneven uncounted", [*tune, "--data", f"{TASK}:uneven_uncounted", "--out", f"{folder}/uneven_uncounted"]),
        ("empty share", [*prune, "--data", f"{TASK}:empty_share", "--out", f"{folder}/empty"]),
    ]


@dataclass(frozen=True)
class World:
    """Ranks that have done everything, and one process that has done it alone. The last command lost rank 1."""

    folder: Path
    alone: Path
    results: list[dict[str, Any]]
    ended: Ended
    since_fault: float

    @property
    def ranks(self) -> int:
        return len(self.results)


@pytest.fixture(scope="module", params=TWO_AND_FOUR)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    ranks, folder = request.param, tmp_path_factory.mktemp("ranks")
    runs, alone = folder / "runs", folder / "alone"
    runs.mkdir()
    alone.mkdir()
    listed = commands(runs, ranks)
    last = [*dict(listed)["steps"][:-1], str(runs / "lost")]
    faults = {"FAULT": "kill:1:9", "FAULT_AT": str(folder / "fault"), "PAUSE": "0.05"}
    jobs = {"commands": listed, "last": last, "faults": faults}
    (folder / "jobs.json").write_text(json.dumps(jobs))
    ended = torchrun(ranks, [HERE / "commands_rank.py", folder])
    now = time.time()
    missing = [rank for rank in range(ranks) if not (folder / f"{rank}.json").exists()]
    assert not missing, "\n".join(line for line in ended.err.splitlines() if "[rank" in line)[-3000:]
    for name, arguments in commands(alone, 1):
        assert name not in ALIKE or main(arguments) == 0, name
    results = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    return World(runs, alone, results, ended, now - float((folder / "fault").read_text()))


@pytest.mark.parametrize("name", DONE)
def test_every_rank_holds_the_same(world: World, name: str) -> None:
    found = [result[name] for result in world.results]
    assert [one["status"] for one in found] == [0] * world.ranks, found[0]["errors"]
    if name != "eval":
        assert len({one["weights"] for one in found}) == 1
    if name in ("scores", "steps", "shared", "staged"):
        assert all(one["keep"] == found[0]["keep"] for one in found)
        assert any(0 in kept for kept in found[0]["keep"].values())


@pytest.mark.parametrize(("name", "file"), [("scores", "scores"), *((name, "model") for name in ALIKE)])
def test_it_is_what_one_process_finds(world: World, name: str, file: str) -> None:
    """Uneven last batches among them: 1437 digits in batches of 100."""
    ours, alone = (load_file(place / name / f"{file}.safetensors") for place in (world.folder, world.alone))
    assert ours.keys() == alone.keys()
    worst = max(_difference(ours[key], alone[key]) for key in ours)
    assert worst < ROUNDING
    if file == "model":
        recipes = [json.loads((place / name / "recipe.json").read_text()) for place in (world.folder, world.alone)]
        assert recipes[0]["rounds"] == recipes[1]["rounds"]
    record(f"{name}: {file}", world.ranks, "difference", worst)


def _difference(ours: torch.Tensor, alone: torch.Tensor) -> float:
    ours, alone = ours.double(), alone.double()
    return float((ours - alone).abs().max() / alone.abs().max().clamp(min=1e-30))


def test_only_the_first_rank_writes_and_speaks(world: World) -> None:
    first, *others = world.results
    for name in DONE:
        assert bool(first[name]["written"]) == (name != "eval")
        assert first[name]["printed"]
        for other in others:
            assert (other[name]["written"], other[name]["printed"]) == ([], "")


def test_a_part_of_the_images_each(world: World) -> None:
    """Also where there are fewer batches than ranks."""
    measured = json.loads(world.results[0]["eval"]["printed"])
    assert measured["ranks"] == world.ranks
    assert measured["networks"]["pruned"]["samples"] == 24


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("uneven", "training batches; give each equally many"),
        ("uneven uncounted", "and others have more; give each equally many"),
    ],
)
def test_ranks_with_fewer_batches_are_refused(world: World, name: str, words: str) -> None:
    for result in world.results:
        assert result[name]["status"] == 2
        assert len(result[name]["errors"]) == 1
        assert words in result[name]["errors"][0]


def test_a_rank_with_nothing_to_train_on(world: World) -> None:
    *others, last = (result["empty share"] for result in world.results)
    assert "train_batches is empty" in last["errors"][0]
    for other in others:
        assert other["errors"][0].startswith(f"ifso: error: stopped, because rank {world.ranks - 1} failed")
    assert not (world.folder / "empty").exists()


WORDS = {
    "DDP": "model is wrapped in DistributedDataParallel; give its .module",
    "DDP inside": "0 of the model is wrapped in DistributedDataParallel; give its .module",
    "FSDP": "model is wrapped in FullyShardedDataParallel; give it before it is sharded",
    "FSDP2": "0.weight is sharded over ranks (DTensor); trace the whole model before sharding it",
    "DataParallel": "model is wrapped in DataParallel; give its .module",
    "compiled": "model is compiled; give the module it was made from",
    "compiled inside": "0 of the model is compiled; give the module it was made from",
    "compiled in place": "model is compiled in place; trace and prune it first",
}


@pytest.mark.parametrize("name", RANKED)
def test_networks_wrapped_for_ranks_are_refused_by_name(world: World, name: str) -> None:
    for result in world.results:
        assert [line.startswith(f"TraceError: {WORDS[name]}") for line in result["refused"][name]] == [True] * 3


@pytest.mark.parametrize("name", LONE)
def test_other_wrappings_work_or_are_refused_by_name(name: str) -> None:
    said = all_words(LONE[name])
    expected = f"TraceError: {WORDS[name]}" if name in WORDS else ""
    assert all(line.startswith(expected) and bool(line) == bool(expected) for line in said), said


def test_a_rank_that_is_killed_is_named_soon_and_nothing_is_lost(world: World, capsys: pytest.CaptureFixture) -> None:
    assert world.ended.status != 0
    assert world.since_fault < 30
    stopped = sorted(line for line in world.ended.errors if "stopped, because rank 1 is gone without a word" in line)
    survivors = [rank for rank in range(world.ranks) if rank != 1]
    assert [line.split()[3] for line in stopped] == [str(rank) for rank in survivors]
    assert all("--resume goes on with a run" in line for line in stopped)
    assert (world.folder / "lost" / "checkpoints").is_dir()
    assert main(["prune", "--resume", "--out", str(world.folder / "lost")]) == 0
    assert "resumed after removal" in capsys.readouterr().out
    lost, alone = (load_file(place / "model.safetensors") for place in (world.folder / "lost", world.alone / "steps"))
    assert max(_difference(lost[key], alone[key]) for key in alone) < ROUNDING
    record("prune: kill", world.ranks, "seconds", world.since_fault)


def test_the_digest_tells_networks_apart() -> None:
    """What the ranks are compared by."""
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    assert digest_of(first) == digest_of(first) != digest_of(second)
