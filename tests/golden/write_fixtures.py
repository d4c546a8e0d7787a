"""Writes ``fixtures/*.zip``: folders as ifso 0.1.0 wrote them, which every later version must open.

Run once, by that version: ``PYTHONPATH=src python tests/golden/write_fixtures.py``. They are not renewed with the
golden files: a folder that the code under test has written itself proves nothing. A new format gets new fixtures.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from golden_runs import TASK, WEIGHTS, command, write_weights

from ifso.pruning.events import Removal, Silent
from ifso.runs.folder import RunFolder

HERE = Path(__file__).parent
FIXTURES = HERE / "fixtures"
SMALL = ("--model", "small_net.py:small", "--data", "digits")
PAPER = (
    *TASK, "--preset", "paper", "--macs", "0.04", "--accumulate", "1", "--units-per-step", "8", "--batch", "128",
    "--lr", "0.02", "--seed", "4",
)  # fmt: skip
STAGED = (*SMALL, "--weights", "trained/model.safetensors", "--macs", "0.35", "--calibration", "96", "--seed", "5")
TRAIN = (*SMALL, "--epochs", "4", "--batch", "256", "--lr", "0.05", "--seed", "6")
TUNE = ("--epochs", "4", "--batch", "256", "--lr", "0.05")


class Stop(Silent):
    """Ctrl-C at a removal."""

    def __init__(self, at: int) -> None:
        self.at = at

    def removed(self, removal: Removal) -> None:
        """That one is lost, those before it are not."""
        if removal.removal == self.at:
            raise KeyboardInterrupt


def written() -> None:
    """All folders, below the one that this is run in."""
    shutil.copy(HERE / "small_net.py", "small_net.py")
    write_weights(Path(WEIGHTS))
    do("train", *TRAIN, "--out", "trained")
    do("prune", *PAPER, "--out", "pruned")
    interrupted(140, *PAPER, "--out", "pruned-interrupted")
    do("prune", *STAGED, "--out", "staged")
    interrupted(9, *STAGED, "--out", "staged-interrupted")
    shutil.copytree("pruned", "tuned-interrupted")
    do("finetune", "pruned", *TUNE)
    tuning_interrupted("finetune", "tuned-interrupted", *TUNE)


def do(*arguments: str, status: int = 0) -> None:
    """A command that ends so."""
    done = command(*arguments)
    assert done.status == status, (arguments, done)


def interrupted(at: int, *arguments: str) -> None:
    """A pruning that is stopped; only the newest checkpoint is kept."""
    with mock.patch("ifso.cli.prune.progress", return_value=contextlib.nullcontext(Stop(at))):
        do("prune", *arguments, status=130)
    *older, _ = sorted(Path(arguments[-1], "checkpoints").iterdir())
    for path in older:
        path.unlink()


def tuning_interrupted(*arguments: str) -> None:
    """A fine-tuning that is stopped in its third epoch, with a checkpoint after each."""
    append = RunFolder.append

    def ended(folder: RunFolder, line: Mapping[str, Any]) -> None:
        if line["epoch"] == 3:
            raise KeyboardInterrupt
        append(folder, line)

    with mock.patch("ifso.training.runs.SAVE_EVERY", 0.0), mock.patch.object(RunFolder, "append", ended):
        do(*arguments, status=130)


def pack(name: str) -> None:
    """Without what can be made again: checkpoints of what is finished, pages, locks."""
    finished = Path(name, "summary.json").exists()
    with zipfile.ZipFile(FIXTURES / f"{name}.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as file:
        for path in sorted(Path(name).rglob("*")):
            spare = finished and path.parent.name == "checkpoints"
            if path.is_file() and not spare and path.name not in (".lock", "first_scores.safetensors"):
                file.write(path)


def main() -> None:
    """Write them."""
    torch.set_num_threads(1)
    FIXTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        written()
        for path in sorted(Path().iterdir()):
            if path.is_dir() and path.name != "__pycache__":
                pack(path.name)


if __name__ == "__main__":
    main()
