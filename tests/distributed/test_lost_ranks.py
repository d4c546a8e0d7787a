"""A rank that fails, is killed or hangs, anywhere: the others stop soon and say which it was; the run goes on later.

The quick tests are of the roll call itself and of what is told apart; every command is in the slow ones, and a killed
rank among the quick ones of test_ranks_together.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks_record import record
from safetensors.torch import load_file
from world import TASK, Ended, ifso_on

from ifso.cli import distributed as ranks
from ifso.cli import distributed as roll_call
from ifso.cli.distributed import RollCall
from ifso.cli.main import main
from ifso.common.distributed import of_another_rank
from ifso.errors import DataError, RankError, TrainingError

SOON = 30.0
ROUNDING = 2e-6
PRUNE = [
    *("prune", "--model", f"{TASK}:plain", "--data", f"{TASK}:joint", "--macs", "0.6", "--criterion", "magnitude"),
    *("--batches-per-score", "1", "--accumulate", "2", "--lr", "0.05"),
]
STAGED = ["prune", "--model", f"{TASK}:plain", "--data", f"{TASK}:joint", "--macs", "0.4", "--recover", "5"]
TUNE = ["--epochs", "4", "--batch", "8", "--lr", "0.05"]


@pytest.fixture
def store() -> torch.distributed.HashStore:
    return torch.distributed.HashStore()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call, "PERIOD", 0.02)
    monkeypatch.setattr(roll_call, "SILENT", 0.3)
    monkeypatch.setattr(roll_call, "PATIENCE", 1.0)


@pytest.mark.usefixtures("hasty")
def test_the_roll_call_names_the_one_that_no_longer_answers(store: torch.distributed.HashStore) -> None:
    first, second, _ = calls = [RollCall(rank, 3, store) for rank in range(3)]
    for call in calls[:2]:
        call.start()
    assert str(first.blame()).startswith("rank 2 is gone without a word")
    assert second.blame() == first.blame()
    for call in calls[:2]:
        call.leave()


@pytest.mark.usefixtures("hasty")
def test_the_first_word_counts(store: torch.distributed.HashStore) -> None:
    first, second, third = (RollCall(rank, 3, store) for rank in range(3))
    second.fail("no such file")
    third.fail("another one")
    assert first.blame() == "rank 1 failed: no such file"


@pytest.mark.usefixtures("hasty")
def test_nobody_is_to_blame_where_all_left(store: torch.distributed.HashStore) -> None:
    first, second = (RollCall(rank, 2, store) for rank in range(2))
    second.leave()
    assert first.blame() is None


@pytest.mark.usefixtures("hasty")
def test_who_waits_in_vain_is_ended(store: torch.distributed.HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr(roll_call, "GRACE", 0.1)
    monkeypatch.setattr(roll_call, "HUNG", 0.2)
    monkeypatch.setattr(roll_call, "_leave_at_once", ended.append)
    first, _ = (RollCall(rank, 2, store) for rank in range(2))
    first.start()
    deadline = time.monotonic() + 5
    while not ended and time.monotonic() < deadline:
        time.sleep(0.02)
    first.leave()
    assert ended[0].startswith("rank 0 stopped, because rank 1 has not answered for 0 seconds; start all ranks again")


def test_a_line_is_written_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks share standard error; a line break that comes by itself may end the line of another rank."""
    pieces: list[str] = []
    monkeypatch.setattr("sys.stderr", SimpleNamespace(write=pieces.append, flush=lambda: None))
    assert main(["eval", "nowhere"]) == 2
    assert len(pieces) == 1
    assert pieces[0].startswith("ifso: error: nowhere")
    assert pieces[0].endswith("\n")


def test_whose_error_it_is() -> None:
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:545] Read error [127.0.0.1]:52137: Connection reset by peer")
    wrapped = TrainingError("a batch cannot be learned from")
    wrapped.__cause__ = lost
    assert all(map(of_another_rank, (lost, wrapped, RankError("rank 1 failed"))))
    assert not any(map(of_another_rank, (RuntimeError("shapes differ"), DataError("gloo/ is empty"), OSError())))


@pytest.fixture
def sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ranks._interrupt_when_terminated()
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("sigterm")
def test_sigterm_does_not_disturb_a_rank_that_stops_anyway() -> None:
    """It comes from ``torchrun`` while the last good state is written."""
    try:
        raise RankError("rank 1 failed")
    except RankError:
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.usefixtures("sigterm")
def test_sigterm_is_an_interruption_once() -> None:
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)


# ------------------------------------------------------------------------------------------------- slow: real ranks


def faulty(ranks: int, tmp_path: Path, fault: str, *arguments: object, **variables: str) -> tuple[Ended, float]:
    """How it ended, and after how many seconds from the fault."""
    at = tmp_path / "fault"
    ended = ifso_on(ranks, *arguments, FAULT=fault, FAULT_AT=str(at), PAUSE="0.02", **variables)
    now = time.time()
    assert at.exists(), ended.err[-2000:]
    return ended, now - float(at.read_text())


def same_network(one: Path, other: Path) -> None:
    found, expected = (load_file(place / "model.safetensors") for place in (one, other))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=ROUNDING, atol=ROUNDING * float(tensor.abs().max()))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process does without interruption."""
    folder = tmp_path_factory.mktemp("alone")
    assert main([*PRUNE, "--out", str(folder / "run")]) == 0
    assert main(["finetune", str(folder / "run"), *TUNE, "--out", str(folder / "tuned")]) == 0
    return folder


def resumed(ranks: int, arguments: list[str]) -> None:
    if ranks == 1:
        assert main(arguments) == 0
        return
    ended = ifso_on(ranks, *arguments)
    assert ended.status == 0, ended.errors


ENDS = {
    "kill": "rank {rank} is gone without a word",
    "raise": "rank {rank} failed: {task}:joint: train_batches failed after",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "ranks", "rank", "then"),
    [("kill", 4, 0, 2), ("kill", 2, 1, 1), ("raise", 2, 0, 4), ("raise", 4, 3, 1), ("kill", 4, 2, 4)],
)
def test_a_pruning_that_loses_a_rank(fault: str, ranks: int, rank: int, then: int, alone: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ended, seconds = faulty(ranks, tmp_path, f"{fault}:{rank}:8", *PRUNE, "--out", out)
    assert ended.status != 0
    assert seconds < SOON
    told = ENDS[fault].format(rank=rank, task=TASK)
    stopped = [line for line in ended.errors if f"stopped, because {told}" in line]
    assert len(stopped) == ranks - 1, ended.errors
    assert "Traceback" not in ended.err.partition("elastic")[0]
    resumed(then, ["prune", "--resume", "--out", str(out)])
    same_network(out, alone / "run")
    record(f"prune: {fault} rank {rank}, resume on {then}", ranks, "seconds", seconds)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "rank", "lines"), [(2, 0, 1), (2, 1, 4), (4, 0, 8), (4, 3, 2)])
def test_a_staged_pruning_that_loses_a_rank(ranks: int, rank: int, lines: int, tmp_path: Path) -> None:
    """Between its stages, and resumed on as many ranks: the same bits as a run that lost none."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    resumed(ranks, [*STAGED, "--out", str(whole)])
    watched = {"LINES": str(parts / "metrics.jsonl")}
    ended, seconds = faulty(ranks, tmp_path, f"lines:{rank}:{lines}", *STAGED, "--out", parts, **watched)
    assert ended.status != 0
    assert seconds < SOON
    stopped = [line for line in ended.errors if f"stopped, because {ENDS['kill'].format(rank=rank)}" in line]
    assert len(stopped) == ranks - 1, ended.errors
    assert not (parts / "summary.json").exists()
    resumed(ranks, ["prune", "--resume", "--out", str(parts)])
    for name in ("model.safetensors", "recipe.json", "scores.safetensors"):
        assert (parts / name).read_bytes() == (whole / name).read_bytes(), name
    record(f"prune staged: kill rank {rank} after {lines} removals, the same bits", ranks, "seconds", seconds)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "ranks", "rank", "then"), [("kill", 2, 0, 4), ("kill", 4, 1, 1), ("raise", 4, 2, 2)])
def test_a_fine_tuning_that_loses_a_rank(
    fault: str, ranks: int, rank: int, then: int, alone: Path, tmp_path: Path
) -> None:
    tune = ["finetune", str(alone / "run"), *TUNE, "--out", str(tmp_path / "tuned")]
    ended, seconds = faulty(ranks, tmp_path, f"{fault}:{rank}:30", *tune)
    assert ended.status != 0
    assert seconds < SOON
    told = ENDS[fault].format(rank=rank, task=TASK)
    stopped = [line for line in ended.errors if f"stopped, because {told}" in line]
    assert len(stopped) == ranks - 1, ended.errors
    resumed(then, ["finetune", str(alone / "run"), "--resume", "--out", str(tmp_path / "tuned")])
    same_network(tmp_path / "tuned", alone / "tuned")
    record(f"finetune: {fault} rank {rank}, resume on {then}", ranks, "seconds", seconds)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_pruning_with_nan_on_one_rank(ranks: int, tmp_path: Path) -> None:
    ended, seconds = faulty(ranks, tmp_path, f"nan:{ranks - 1}:8", *PRUNE, "--out", tmp_path / "run")
    assert seconds < SOON
    assert ended.status != 0
    assert len(ended.errors) == ranks
    assert all(f"hold NaN or infinity (1 of them, on rank {ranks - 1})" in line for line in ended.errors)
    assert (tmp_path / "run" / "model.safetensors").is_file()
    record("prune: nan", ranks, "seconds", seconds)


@pytest.mark.slow
def test_a_fine_tuning_with_nan_on_one_rank(alone: Path, tmp_path: Path) -> None:
    tune = ["finetune", str(alone / "run"), *TUNE, "--out", str(tmp_path / "tuned")]
    ended, seconds = faulty(2, tmp_path, "nan:1:30", *tune)
    assert seconds < SOON
    assert ended.status != 0
    assert len(ended.errors) == 2
    assert all("nan" in line.lower() for line in ended.errors)
    record("finetune: nan", 2, "seconds", seconds)


@pytest.mark.slow
def test_a_rank_that_fails_before_the_others_wait(tmp_path: Path) -> None:
    """Its data is there for the first rank alone."""
    file = tmp_path / "half.py"
    file.write_text(
        "from shared_task import joint\n"
        "def half(rank=0, ranks=1):\n"
        "    if rank: raise OSError('no such disk')\n"
        "    return joint(rank, ranks)\n"
    )
    ended = ifso_on(2, *PRUNE, "--data", f"{file}:half", "--out", tmp_path / "run")
    assert ended.status != 0
    assert any("rank 0 stopped, because rank 1 failed" in line and "no such disk" in line for line in ended.errors)
    record("prune: no data on one rank", 2, "seconds with the start", ended.seconds)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "then", "number"), [(4, 2, signal.SIGINT), (2, 4, signal.SIGTERM), (1, 2, None)])
def test_an_interruption_and_another_number_of_ranks(
    ranks: int, then: int, number: signal.Signals | None, alone: Path, tmp_path: Path
) -> None:
    """Nobody is to blame for it; one process that is resumed by two is stopped by SIGINT as well."""
    out = tmp_path / "run"

    def interrupt(process: subprocess.Popen[str]) -> None:
        lines, deadline = out / "metrics.jsonl", time.monotonic() + 60
        while not (lines.exists() and lines.read_bytes().count(b"\n") >= 1) and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(process.pid, number or signal.SIGINT)

    ended = ifso_on(ranks, *PRUNE, "--out", out, meanwhile=interrupt, PAUSE="0.2")
    assert ended.status != 0
    assert ended.after < SOON
    assert not ended.errors
    assert "to go on: ifso prune --resume" in ended.err
    resumed(then, ["prune", "--resume", "--out", str(out)])
    same_network(out, alone / "run")
    record(f"prune: {(number or signal.SIGINT).name}, resume on {then}", ranks, "seconds", ended.after)


@pytest.mark.slow
def test_a_resume_with_the_same_number_of_ranks_is_exact(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    resumed(2, [*PRUNE, "--out", str(whole)])
    faulty(2, tmp_path, "kill:1:8", *PRUNE, "--out", parts)
    resumed(2, ["prune", "--resume", "--out", str(parts)])
    found, expected = (load_file(place / "model.safetensors") for place in (parts, whole))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    record("prune: resume on as many is exact", 2, "difference", 0.0)
