"""Real ``ifso`` processes that are sent signals while they work, and how they go on."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from failing_files import hearing, provisional_files
from trials import PRUNE, STAGED, TASK, command, ended

import ifso

EPOCHS = 60
LONG_TRAIN = ("train", *TASK, "--epochs", str(EPOCHS))
LONG_PRUNE = (*PRUNE[:-1], "2", "--accumulate", "30", "--batches-per-score", "2")
LONG_STAGED = (*STAGED[:-3], "60", *STAGED[-2:])
QUIET = ("ifso: interrupted", "ifso: terminated")
SIGNALS = {
    "SIGINT": (signal.SIGINT, (130, -signal.SIGINT)),
    "SIGTERM": (signal.SIGTERM, (143,)),
    "SIGKILL": (signal.SIGKILL, (-signal.SIGKILL,)),
}
"""With the statuses that a process may have then; Python turns 130 into -2 if the signal came within ``exec``."""


@dataclass(frozen=True)
class Work:
    """A command, the folder that it works in, how it goes on, and the folder that is there once it has begun."""

    arguments: tuple[object, ...]
    folder: Path
    again: tuple[object, ...]
    begun: Path


def works(run: Path, place: Path) -> dict[str, Work]:
    """Each of the commands, below ``place``; ``run`` is a finished pruning, which is copied there if need be."""
    copy, folder = place / "copy", place / "run"
    tuned = copy / "finetune"
    return {
        "train": Work((*LONG_TRAIN, "--out", folder), folder, ("train", "--resume", "--out", folder), folder),
        "prune": Work((*LONG_PRUNE, "--out", folder), folder, ("prune", "--resume", "--out", folder), folder),
        "prune staged": Work((*LONG_STAGED, "--out", folder), folder, ("prune", "--resume", "--out", folder), folder),
        "finetune": Work(
            ("finetune", copy, "--epochs", EPOCHS), tuned, ("finetune", "--resume", copy), tuned
        ),
        "export torch": Work(("export", copy, "--to", "torch"), copy, ("export", copy, "--to", "torch"), copy),
        "export onnx": Work(("export", copy, "--to", "onnx"), copy, ("export", copy, "--to", "onnx"), copy),
    }  # fmt: skip


def prepared(work: Work, run: Path, place: Path) -> None:
    """The folder that the command finds."""
    place.mkdir(parents=True, exist_ok=True)
    if (place / "copy") in (work.folder, work.folder.parent):
        shutil.copytree(run, place / "copy")


def started(arguments: tuple[object, ...]) -> subprocess.Popen[str]:
    """The command as a process of its own."""
    source = str(Path(ifso.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "ifso.cli", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def signalled(work: Work, name: str, seconds: float, *, wait_for: Path | None = None) -> tuple[int, str]:
    """Exit status and words of a process that gets a signal after ``seconds``, from when ``wait_for`` is there."""
    with hearing():
        process, deadline = started(work.arguments), time.monotonic() + 120
    while wait_for is not None and not wait_for.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    if process.poll() is None:
        process.send_signal(SIGNALS[name][0])
    try:
        _, words = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, words


def check_stopped(work: Work, name: str, status: int, words: str) -> bool:
    """One clear end, nothing provisional; False if the command was through before the signal came."""
    if name == "SIGKILL" or status == 0:
        assert status in (0, -signal.SIGKILL), words
        return status != 0
    if "ifso:" not in words and (not work.begun.exists() or (work.folder / "summary.json").exists()):
        assert provisional_files(work.folder) == []
        return False  # Python had not begun with the command, or was through with it
    assert status in SIGNALS[name][1], (status, words)
    assert "Traceback" not in words, words
    last = [line for line in words.splitlines() if line.startswith(("ifso:", "to go on:"))]
    assert last[-1] in QUIET, words
    if (work.folder / "config.json").exists() and "export" not in work.arguments:
        assert last[0] == f"to go on: ifso {' '.join(map(str, work.again))}", words
    if work.folder.exists():
        assert [left for left in provisional_files(work.folder) if left != ".recipe.json.new"] == []
    return True


def goes_on(work: Work, status: int) -> None:
    """The same command, or its ``--resume``, comes to an end in this process."""
    resumable = "export" in work.arguments or (work.folder / "config.json").exists()
    assert status == 0 or command(*(work.again if resumable else work.arguments)) == 0
    assert provisional_files(work.folder) == []


def result(work: Work) -> object:
    """What must not depend on signals."""
    if "export" in work.arguments:
        return sorted((path.name, path.stat().st_size) for path in work.folder.glob("model.[op]*"))
    return ended(work.folder)


def moments(number: int, longest: float, seed: int = 0) -> list[float]:
    """Seconds at which signals are sent, spread at random."""
    chance = random.Random(seed)
    return [chance.uniform(0, longest) for _ in range(number)]
