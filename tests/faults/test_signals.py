"""SIGTERM, SIGINT and SIGKILL to real processes: one word at the end, nothing provisional, and they go on."""

from __future__ import annotations

import signal
from pathlib import Path

import every_fault
import failing_files
import pytest
import signalled
import trials
from failing_files import SIGNALS

from ifso.exporting.export import RUNNERS


@pytest.mark.parametrize("kind", SIGNALS)
@pytest.mark.parametrize(
    ("name", "points"), [("train", (5, 40)), ("prune", (60,)), ("prune staged", (30,)), ("finetune", (30,))]
)
def test_stopped_before_a_file_operation(name: str, points: tuple[int, ...], kind: str, tmp_path: Path) -> None:
    for at in points:
        trials.trial(name, kind, at, tmp_path / str(at))


def test_a_terminated_export_leaves_nothing_provisional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RUNNERS, "torch", (lambda *_: signal.raise_signal(signal.SIGTERM), "nobody"))
    trials._pruned(tmp_path / "work")
    run = tmp_path / "work" / "run"
    with failing_files.hearing():
        assert trials.command("export", run, "--to", "torch") == 143
    assert failing_files.provisional_files(run) == []
    assert not (run / "model.pt2").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "begun"),
    [
        ("train", "SIGTERM", "metrics.jsonl"),
        ("prune", "SIGINT", "checkpoints"),
        ("export torch", "SIGTERM", ".model.pt2.new"),
    ],
)
def test_stopped_at_work(name: str, kind: str, begun: str, tmp_path: Path) -> None:
    run = trials._finished_run() / "work" / "run"
    work = signalled.works(run, tmp_path / "a")[name]
    signalled.prepared(work, run, tmp_path / "a")
    status, words = signalled.signalled(work, kind, 0.01, wait_for=work.folder / begun)
    assert signalled.check_stopped(work, kind, status, words)
    if "export" not in name:
        signalled.goes_on(work, status)
        assert (work.folder / "summary.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", every_fault.SIGNALLED)
def test_stopped_at_any_time(name: str) -> None:
    assert every_fault.failures_of_signals(name)["failures"] == []
