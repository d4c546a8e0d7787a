"""Commands that are stopped by a failing disk at a chosen file operation, and what must hold then and afterwards."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import tiny
import torch
from failing_files import SIGNALS, STOPS, Crash, Disk, copied, hearing, provisional_files

import ifso
from ifso.cli.main import main
from ifso.pruning import prune as pruning
from ifso.runs.folder import RunFolder
from ifso.surgery.store import read_recipe
from ifso.training import runs

TINY = Path(tiny.__file__)
TASK = ("--model", f"{TINY}:network", "--data", f"{TINY}:data")
PRUNE = ("prune", *TASK, "--macs", "0.5", "--accumulate", "1", "--batches-per-score", "1", "--seed", "1")
STAGED = ("prune", *TASK, "--macs", "0.7", "--recover", "2", "--seed", "1")
TRAIN = ("train", *TASK, "--epochs", "3")
CLOCKS = {"seconds", "prune_seconds", "timings"}


@dataclass(frozen=True)
class Scenario:
    """``run(folder)`` is what is stopped, ``again(folder)`` what a user then does; both give an exit status.

    ``before(folder)`` makes what is there beforehand, ``result(folder)`` is what must not depend on interruptions, and
    ``whole(folder, before)`` fails unless all that was there before can still be used.
    """

    run: Callable[[Path], int]
    again: Callable[[Path], int]
    result: Callable[[Path], Any]
    before: Callable[[Path], None] = lambda folder: folder.mkdir()
    whole: Callable[[Path], None] = lambda folder: None


@dataclass(frozen=True)
class Outcome:
    """What happened: operations that were counted, whether one failed, the exit status (None after a crash), words."""

    operations: list[str]
    failed: bool
    status: int | None
    words: str


def command(*arguments: object) -> int:
    """An ``ifso`` command in this process."""
    return main([str(argument) for argument in arguments])


def stopped(scenario: Scenario, folder: Path, kind: str, at: int | None) -> Outcome:
    """The run on a disk that fails at an operation."""
    words, status = io.StringIO(), None
    quiet, signals = redirect_stdout(io.StringIO()), hearing() if kind in SIGNALS else nullcontext()
    with quiet, redirect_stderr(words), often(), signals, Disk(folder, kind, at) as disk:
        try:
            status = scenario.run(folder)
        except Crash:
            assert disk.dead
        else:
            assert not disk.dead, "a crash was taken for something to go on after"
    return Outcome(disk.done, disk.failed, status, words.getvalue())


@contextmanager
def often() -> Iterator[None]:
    """Checkpoints are written whenever they can be."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(runs, "SAVE_EVERY", 0.0))
        stack.enter_context(mock.patch.dict(pruning.prune.__kwdefaults__, {"checkpoint_every": 0.0}))
        yield


@cache
def reference(name: str) -> tuple[list[str], Any]:
    """The file operations of a run that nobody disturbs, and its result."""
    scenario = SCENARIOS[name]
    with TemporaryDirectory() as place:
        folder = Path(place) / "work"
        scenario.before(folder)
        outcome = stopped(scenario, folder, "refused", None)
        assert outcome.status == 0, outcome.words
        return outcome.operations, scenario.result(folder)


def trial(name: str, kind: str, at: int, place: Path) -> Outcome:
    """Stop a scenario at an operation, check what is there, let it go on, and compare its end."""
    scenario, folder = SCENARIOS[name], place / "work"
    place.mkdir(exist_ok=True)
    scenario.before(folder)
    outcome = stopped(scenario, folder, kind, at)
    assert outcome.failed
    if kind in SIGNALS:
        told_how_to_go_on(outcome, kind)
    elif kind not in STOPS:
        refused_in_one_line(outcome)
    if kind in ("full", "refused", *SIGNALS):
        left = provisional_files(folder)
        assert len(left) <= (outcome.operations[at - 1] == "unlink") + (".recipe.json.new" in map(_name, left)), left
    scenario.whole(folder)
    if kind in STOPS:
        scenario.whole(copied(folder, place / "copy"))
    words = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(words), often():
        status = scenario.again(folder)
    assert status == 0, f"{outcome.words}\nthen: {words.getvalue()}"
    assert scenario.result(folder) == reference(name)[1]
    assert provisional_files(folder) == []
    return outcome


def _name(path: str) -> str:
    return Path(path).name


def refused_in_one_line(outcome: Outcome) -> None:
    """Either it did not matter, or one line says what is wrong, where, and what to do."""
    lines = [line for line in outcome.words.splitlines() if line.startswith("ifso: error: ")]
    assert "Traceback" not in outcome.words
    if outcome.status == 0:
        assert lines == []
    else:
        assert len(lines) == 1, outcome.words
        assert outcome.words.endswith(lines[0] + "\n")
        assert "; " in lines[0], lines[0]


def told_how_to_go_on(outcome: Outcome, kind: str) -> None:
    """The last words after a signal, and the status."""
    assert outcome.status == SIGNALS[kind], outcome
    words = {"SIGINT": "ifso: interrupted", "SIGTERM": "ifso: terminated"}
    assert outcome.words.splitlines()[-1] == words[kind], outcome.words
    assert outcome.words.count("to go on: ifso ") <= 1


# ------------------------------------------------------------------------------------------------------ the scenarios


def resumed(folder: Path, fresh: Sequence[object], again: Sequence[object]) -> int:
    """As a user would who finds a run there, or not."""
    return command(*again) if (folder / "config.json").exists() else command(*fresh)


def ended(folder: Path) -> dict[str, Any]:
    """Everything in a folder of a run that must not depend on interruptions, bit for bit."""
    places = [folder / "model.safetensors", folder / "recipe.json", *folder.glob("*scores.safetensors")]
    files = {place.name: place.read_bytes() for place in places}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    told = [{name: value for name, value in line.items() if name not in CLOCKS} for line in lines]
    return {**files, "stages": stages(folder), "lines": told, "names": {path.name for path in folder.iterdir()}}


def stages(folder: Path) -> list[dict[str, Any]]:
    """What the summary tells of the stages of a staged run."""
    told = json.loads((folder / "summary.json").read_text())
    return [{name: value for name, value in stage.items() if name not in CLOCKS} for stage in told.get("stages", ())]


def readable(folder: Path) -> None:
    """Checkpoints and networks that are there can be read."""
    if not (folder / "config.json").exists():
        return
    with RunFolder.resume(folder, json.loads((folder / "config.json").read_text()), reading=True) as run:
        newest = run.newest_checkpoint()
        assert newest is not None or not list(folder.glob("checkpoints/0*"))
        assert run.notes == []
    if (folder / "model.safetensors").exists():
        read_recipe(folder)
        ifso.load(folder, tiny.network())


def _pruned(folder: Path) -> None:
    """A finished run, made once."""
    copied(_finished_run() / "work", folder)


@cache
def _finished_run() -> Path:
    place = Path(_KEPT.name)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), often():
        (place / "work").mkdir()
        assert command(*PRUNE, "--out", place / "work" / "run") == 0
    return place


_KEPT = TemporaryDirectory()


def _run_is_as_it_was(folder: Path) -> None:
    first = _finished_run() / "work" / "run"
    for path in first.rglob("*"):
        if path.is_file():
            assert (folder / "run" / path.relative_to(first)).read_bytes() == path.read_bytes()


def _tuning_is_whole(folder: Path) -> None:
    _run_is_as_it_was(folder)
    if (folder / "run" / "finetune" / "model.safetensors").exists():
        read_recipe(folder / "run" / "finetune")


def _tuned(folder: Path) -> int:
    again = ("--resume",) if (folder / "run" / "finetune" / "config.json").exists() else ("--epochs", "3")
    return command("finetune", folder / "run", *again)


def _report(folder: Path) -> int:
    return command("report", folder / "run")


def _saved_before(folder: Path) -> None:
    folder.mkdir()
    ifso.save(_other(), folder / "model")


def _other() -> torch.nn.Module:
    model = tiny.network()
    with torch.no_grad():
        model[0].weight.zero_()
    return model


def _save(folder: Path) -> int:
    try:
        ifso.save(tiny.network(), folder / "model")
    except ifso.errors.IfsoError as error:
        import sys

        sys.stderr.write(f"ifso: error: {error}\n")
        return 2
    return 0


def _one_of_both(folder: Path) -> None:
    found = ifso.load(folder / "model", tiny.network())[0].weight
    assert any(torch.equal(found, each[0].weight) for each in (tiny.network(), _other()))


def _export(to: str) -> Callable[[Path], int]:
    return lambda folder: command("export", folder / "run", "--to", to)


def _exported_before(name: str) -> Callable[[Path], None]:
    def before(folder: Path) -> None:
        _pruned(folder)
        (folder / "run" / name).write_bytes(b"an earlier file")

    return before


def _earlier_or_new(name: str) -> Callable[[Path], None]:
    def whole(folder: Path) -> None:
        _run_is_as_it_was(folder)
        found = (folder / "run" / name).read_bytes()
        assert found == b"an earlier file" or len(found) == reference(f"export {SUFFIX_OF[name]}")[1]

    return whole


SUFFIX_OF = {"model.onnx": "onnx", "model.pt2": "torch"}


def _export_of(name: str) -> Scenario:
    run = _export(SUFFIX_OF[name])
    return Scenario(
        run, run, lambda folder: (folder / "run" / name).stat().st_size, _exported_before(name), _earlier_or_new(name)
    )


SCENARIOS = {
    "prune": Scenario(
        lambda folder: command(*PRUNE, "--out", folder / "run"),
        lambda folder: resumed(
            folder / "run", (*PRUNE, "--out", folder / "run"), ("prune", "--resume", "--out", folder / "run")
        ),
        lambda folder: ended(folder / "run"),
        whole=lambda folder: readable(folder / "run"),
    ),
    "prune staged": Scenario(
        lambda folder: command(*STAGED, "--out", folder / "run"),
        lambda folder: resumed(
            folder / "run", (*STAGED, "--out", folder / "run"), ("prune", "--resume", "--out", folder / "run")
        ),
        lambda folder: ended(folder / "run"),
        whole=lambda folder: readable(folder / "run"),
    ),
    "train": Scenario(
        lambda folder: command(*TRAIN, "--out", folder / "run"),
        lambda folder: resumed(
            folder / "run", (*TRAIN, "--out", folder / "run"), ("train", "--resume", "--out", folder / "run")
        ),
        lambda folder: ended(folder / "run"),
        whole=lambda folder: readable(folder / "run"),
    ),
    "finetune": Scenario(
        lambda folder: command("finetune", folder / "run", "--epochs", "3"),
        _tuned,
        lambda folder: ended(folder / "run" / "finetune"),
        _pruned,
        _tuning_is_whole,
    ),
    "report": Scenario(
        _report,
        _report,
        lambda folder: len((folder / "run" / "report.html").read_text().replace(str(folder), "")),
        _pruned,
        _run_is_as_it_was,
    ),
    "save": Scenario(
        _save,
        _save,
        lambda folder: {path.name: path.read_bytes() for path in (folder / "model").iterdir()},
        _saved_before,
        _one_of_both,
    ),
    "export onnx": _export_of("model.onnx"),
    "export torch": _export_of("model.pt2"),
}
