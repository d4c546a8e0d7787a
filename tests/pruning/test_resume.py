"""A run that was interrupted, killed or ran out of disk goes on as if nothing had happened."""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import small_runs
import torch
from processes import APART
from safetensors.torch import load_file
from small_runs import CASES, SmallResNet, Stop, StopAt, contents, prune

import ifso
from ifso.cli.main import main
from ifso.common import files
from ifso.common.module_state import named_tensors
from ifso.common.serialization import read_tensor_file, write_tensor_file
from ifso.errors import DataError, RunError, VerificationError
from ifso.pruning import run as running
from ifso.pruning.events import Removal, Silent
from ifso.pruning.result import PruneResult
from ifso.pruning.shrinking_network import ShrinkingNetwork

SHRUNK = ("shuffled", "adam", "magnitude", "channels last")
"""Cases that are also compacted during the run."""


@pytest.fixture
def shrinking(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Units are taken out of memory whenever that saves anything; gives the sizes that networks were brought to."""
    sizes: list[int] = []
    compact_ = ShrinkingNetwork.compact_

    def counted(network: ShrinkingNetwork, *args: Any, **options: Any) -> None:
        compact_(network, *args, **options)
        sizes.append(int(network.present.sum()))

    monkeypatch.setattr(ShrinkingNetwork, "compact_", counted)
    monkeypatch.setitem(running.SHRINK_AT, "cpu", 0.12)
    monkeypatch.setitem(running.WORTH_IT, "cpu", 0.0)
    return sizes


def interrupted(case: str, folder: Path, *stops: StopAt, **options: Any) -> PruneResult:
    """Stopped by each of the listeners in turn, then to the end."""
    for stop in stops:
        with pytest.raises(Stop):
            prune(case, folder, listener=stop, **options)
    return prune(case, folder, **options)


@cache
def uninterrupted(case: str) -> dict[str, Any]:
    """What a run leaves that nobody disturbed."""
    with TemporaryDirectory() as folder:
        prune(case, Path(folder) / "run")
        return contents(Path(folder) / "run")


def files_in(folder: Path) -> dict[str, bytes]:
    """All of them, byte for byte."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ------------------------------------------------------------------------------------------------------ interrupted


@pytest.mark.parametrize("number", [1, 4, 7])
def test_stopped_at_any_removal(number: int, tmp_path: Path) -> None:
    result = interrupted("plain", tmp_path / "run", StopAt(number))
    assert contents(tmp_path / "run") == uninterrupted("plain")
    stored = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(tensor, stored[name]) for name, tensor in named_tensors(result.model).items())


@pytest.mark.parametrize("case", [case for case in CASES if case != "plain"])
def test_stopped_again_and_again(case: str, tmp_path: Path) -> None:
    steps = (3, 3) if case not in {"one-shot", "mixed"} else (2, 1)
    interrupted(case, tmp_path / "run", *map(StopAt, steps))
    assert contents(tmp_path / "run") == uninterrupted(case)


@pytest.mark.parametrize("case", [SHRUNK[0], *(pytest.param(case, marks=pytest.mark.slow) for case in SHRUNK[1:])])
def test_stopped_while_the_network_shrinks(case: str, tmp_path: Path, shrinking: list[int]) -> None:
    prune(case, tmp_path / "whole")
    at_once = list(shrinking)
    assert len(set(at_once)) >= 3
    interrupted(case, tmp_path / "run", StopAt(3), StopAt(3))
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")
    assert shrinking[-1] == at_once[-1]


@pytest.mark.parametrize(
    ("case", "words"), [("dropout", "unpruned"), ("shuffled", "pruned"), ("dropout", "batch norms")]
)
def test_stopped_before_and_after_the_removals(case: str, words: str, tmp_path: Path) -> None:
    interrupted(case, tmp_path / "run", StopAt(words=words), StopAt(words=words if words != "unpruned" else "pruned"))
    assert contents(tmp_path / "run") == uninterrupted(case)


def test_stopped_without_any_checkpoint_but_the_first(tmp_path: Path) -> None:
    interrupted("shuffled", tmp_path / "run", StopAt(2), StopAt(7), checkpoint_every=1e9)
    assert contents(tmp_path / "run") == uninterrupted("shuffled")


def test_control_c_loses_no_removal(tmp_path: Path) -> None:
    class Impatient(Silent):
        def removed(self, removal: Removal) -> None:
            if removal.removal == 4:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune("shuffled", tmp_path / "run", listener=Impatient(), checkpoint_every=1e9)
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    assert int(newest.stem) == 3
    prune("shuffled", tmp_path / "run")
    assert contents(tmp_path / "run") == uninterrupted("shuffled")


def test_damaged_newest_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(Stop):
        prune("shuffled", tmp_path / "run", listener=StopAt(4))
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    newest.write_bytes(newest.read_bytes()[:-7])
    result = prune("shuffled", tmp_path / "run")
    assert contents(tmp_path / "run") == uninterrupted("shuffled")
    assert any("an earlier state of the run is used" in note for note in result.notes)


# ------------------------------------------------------------------------------------------------------------ killed


def small_run(case: str, folder: Path, every: float) -> None:
    """A run as a process of its own."""
    torch.set_num_threads(1)
    prune(case, folder, checkpoint_every=every)


def command_line(*arguments: str) -> None:
    """``ifso`` as a process of its own."""
    sys.exit(main([*arguments]))


def killed(work: Callable[..., None], arguments: Sequence[Any], moment: Callable[[float], bool]) -> bool:
    """Run in a process that is killed with SIGKILL once ``moment(seconds since it began)``. False: it was too late."""
    process = APART.Process(target=work, args=tuple(arguments))
    began = time.monotonic()
    process.start()
    while process.exitcode is None and not moment(time.monotonic() - began):
        time.sleep(0.001)
    process.kill()
    process.join()
    assert process.exitcode in {0, -signal.SIGKILL}
    return process.exitcode != 0


def newest_number(folder: Path) -> int:
    """Of the checkpoints in a folder; -1 if there are none."""
    with suppress(OSError):
        return max((int(path.stem) for path in (folder / "checkpoints").glob("0*.safetensors")), default=-1)
    return -1


MOMENTS: dict[str, Callable[[Path], bool]] = {
    "the folder is there": lambda folder: folder.exists(),
    "a checkpoint is being written": lambda folder: any((folder / "checkpoints").glob(".*")),
    "two units are gone": lambda folder: newest_number(folder) >= 2,
    "the result is being written": lambda folder: any(folder.glob("scores.*")) or any(folder.glob(".model*")),
}


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("the folder is there", marks=pytest.mark.slow),
        pytest.param("two units are gone", marks=pytest.mark.slow),
        "a checkpoint is being written",
        "the result is being written",
    ],
)
def test_killed_and_resumed(moment: str, tmp_path: Path) -> None:
    folder, case = tmp_path / "run", "augmented"
    killed(small_run, (case, folder, 0.0), lambda _: MOMENTS[moment](folder))
    prune(case, folder)
    assert contents(folder) == uninterrupted(case)
    assert not [path for path in folder.rglob(".*") if path.name != ".lock"]


class Later:
    """A moment so many seconds after a folder was seen first."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.seconds, self.seen = folder, seconds, 0.0

    def __call__(self, now: float) -> bool:
        self.seen = self.seen or (now if self.folder.exists() else 0.0)
        return bool(self.seen) and now >= self.seen + self.seconds


@pytest.mark.slow
@pytest.mark.parametrize("every", [0.0, 0.5])
def test_killed_at_twenty_random_moments(every: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random_, case, deaths = random.Random(int(10 * every)), "augmented", []
    begun, ended = (Later(tmp_path / "whole" / name, 1e9) for name in ("", "summary.json"))
    assert not killed(small_run, (case, tmp_path / "whole", every), lambda now: begun(now) or ended(now))
    length = ended.seen - begun.seen
    for number in range(60):
        folder, seconds = tmp_path / f"run{number}", random_.uniform(0, length)
        arguments = (case, folder, every)
        killed(small_run, arguments, Later(folder, seconds))
        if (folder / "summary.json").exists():
            length *= 0.9
            continue
        deaths.append(lines_in(folder))
        killed(small_run, arguments, Later(folder, random_.uniform(begun.seen, begun.seen + length)))
        assert not killed(small_run, arguments, lambda _: False)
        assert contents(folder) == uninterrupted(case), f"killed after {seconds:.3f} s"
        if len(deaths) == 20:
            break
    with capsys.disabled():
        sys.stdout.write(f"\nlines of metrics at each death: {deaths}\n")
    assert len(deaths) == 20
    assert len(set(deaths)) >= 4


def lines_in(folder: Path) -> int:
    """How far a run is: lines of metrics; -1 if there is no such file yet."""
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else -1


NET = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
    )
"""


@pytest.mark.slow
@pytest.mark.parametrize("removals", [0, 1, 3, 6])
def test_killed_on_the_command_line(removals: int, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    begin = [
        "prune", "--model", f"{tmp_path / 'net.py'}:make", "--data", "digits", "--macs", "0.3",
        "--accumulate", "2", "--batch", "64", "--out",
    ]  # fmt: skip
    assert not killed(command_line, [*begin, str(tmp_path / "whole")], lambda _: False)
    folder = tmp_path / "run"
    lines = folder / "metrics.jsonl"
    enough = lambda _: lines.is_file() and lines.read_bytes().count(b"\n") >= removals  # noqa: E731
    assert killed(command_line, [*begin, str(folder)], enough)
    assert not killed(command_line, ["prune", "--resume", "--out", str(folder)], lambda _: False)
    assert contents(folder) == contents(tmp_path / "whole")


# ----------------------------------------------------------------------------------------------------------- refused


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(Stop):
        prune("plain", folder, listener=StopAt(3))
    return folder


@pytest.fixture
def begun(stopped: Path, tmp_path: Path) -> Path:
    """A run that was stopped after some removals."""
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def other_weights() -> SmallResNet:
    model = SmallResNet()
    with torch.no_grad():
        model.fc.bias += 1
    return model


def refused(folder: Path, kind: type[Exception] = RunError, **changes: Any) -> str:
    """One line, and not a byte on the disk is changed."""
    before = files_in(folder)
    with pytest.raises(kind) as caught:
        prune("plain", folder, **changes)
    assert files_in(folder) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"accumulate": 5}, "accumulate is 5 and was 1"),
        ({"budget": ifso.Budget(macs=0.4, params=0.5)}, "budget.macs is 0.4 and was 0.5; budget.params is 0.5"),
        ({"seed": 1}, "seed is 1 and was 0"),
        ({"criterion": "taylor"}, "criterion.name is 'taylor' and was 'ifso'"),
        ({"schedule": "one-shot"}, "schedule is 'one-shot' and was 'incremental'"),
        ({"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.5)}, "optimizer.groups"),
        ({"optimizer": torch.optim.Adam}, "optimizer.class is 'Adam' and was 'SGD'"),
        ({"model": other_weights()}, "the weights are other ones"),
        ({"model": SmallResNet(inner=9)}, "the weights are other ones"),
    ],
)  # fmt: skip
def test_other_settings_are_refused(changes: dict[str, Any], difference: str, begun: Path) -> None:
    assert difference in refused(begun, **changes)


def test_refused_and_then_resumed(begun: Path) -> None:
    refused(begun, accumulate=3, seed=4)
    prune("plain", begun)
    assert contents(begun) == uninterrupted("plain")


def test_two_at_once(begun: Path) -> None:
    class Second(StopAt):
        def started(self, plan: object) -> None:
            self.message = refused(begun)

    second = Second()
    prune("plain", begun, listener=second)
    assert "in use by another process" in second.message
    assert contents(begun) == uninterrupted("plain")


def test_a_checkpoint_of_another_version(begun: Path) -> None:
    for path in (begun / "checkpoints").iterdir():
        tensors, state = read_tensor_file(path)
        write_tensor_file(path, tensors, {**state, "progress": {**state["progress"], "mood": "good"}})
    assert "of another version of ifso" in refused(begun)


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no run to resume"):
        prune("plain", resume=tmp_path)
    with pytest.raises(ifso.IfsoError, match="a run goes on in its own folder"):
        prune("plain", resume=tmp_path, out=tmp_path / "other")


def test_a_damaged_recipe_of_a_finished_run(tmp_path: Path) -> None:
    prune("plain", tmp_path / "run")
    for name in ("recipe.json", "scores.safetensors", "summary.json"):
        path = tmp_path / "run" / name
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        refused(tmp_path / "run", ifso.IfsoError)
        path.write_bytes(whole)
    (tmp_path / "run" / "summary.json").unlink()
    prune("plain", tmp_path / "run")
    assert contents(tmp_path / "run") == uninterrupted("plain")


# ---------------------------------------------------------------------------------------------------------- finished


def test_a_finished_run_is_opened_again(tmp_path: Path) -> None:
    first = prune("dropout", tmp_path / "run")
    before = files_in(tmp_path / "run")
    again = prune("dropout", tmp_path / "run")
    assert files_in(tmp_path / "run") == before
    images = small_runs.samples()[0]
    assert torch.equal(first.model.eval()(images), again.model.eval()(images))
    for name in ("recipe", "before", "after", "targets", "shares", "removals", "checks", "measures", "below_target"):
        assert getattr(first, name) == getattr(again, name), name
    assert all(torch.equal(first.keep[name], again.keep[name]) for name in first.keep)
    assert all(torch.equal(first.scores[name], again.scores[name]) for name in first.scores)
    assert [dict(line) for line in again.metrics] == [dict(line) for line in first.metrics]
    summaries = [{**result.summary(), "notes": []} for result in (first, again)]
    assert summaries[0] == summaries[1]
    assert str(again).splitlines()[:8] == str(first).splitlines()[:8]


def test_a_failed_check_fails_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = running.compare
    monkeypatch.setattr(running, "compare", lambda *sides: dataclasses.replace(check(*sides), passed=False))
    with pytest.raises(VerificationError, match="compacted equals masked") as caught:
        prune("plain", tmp_path / "run")
    assert caught.value.exit_status == 4
    monkeypatch.undo()
    with pytest.raises(VerificationError, match="compacted equals masked"):
        prune("plain", tmp_path / "run")


# --------------------------------------------------------------------------------------------------------- disk full


@pytest.fixture
def full_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[str]]:
    """The disk is full at the n-th call that writes, and only then; gives what was called."""
    calls: list[str] = []
    limit = [0]

    def failing(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            calls.append(name)
            if len(calls) == limit[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(*args, **options)

        return counted

    for place, name in ((files.os, "write"), (files.os, "fsync"), (files, "save_file"), (Path, "replace")):
        monkeypatch.setattr(place, name, failing(name, getattr(place, name)))

    def at(number: int) -> list[str]:
        calls.clear()
        limit[0] = number
        return calls

    return at


@pytest.mark.parametrize("first", [1, pytest.param(9, marks=pytest.mark.slow)])
def test_a_full_disk(first: int, full_at: Callable[[int], list[str]], tmp_path: Path) -> None:
    calls = full_at(0)
    prune("one-shot", tmp_path / "whole")
    number_of_calls = len(calls)
    assert number_of_calls > 25
    for number in range(first, number_of_calls + 1, 16):
        folder = tmp_path / str(number)
        full_at(number)
        with pytest.raises(RunError, match="No space left on device; make room, then resume") as caught:
            prune("one-shot", folder)
        assert "\n" not in str(caught.value)
        full_at(0)
        prune("one-shot", folder)
        assert contents(folder) == contents(tmp_path / "whole"), number


# -------------------------------------------------------------------------------------------- when a network shrinks


@pytest.mark.parametrize("case", ["plain", "three at a time"])
def test_compaction_changes_nothing(case: str, shrinking: list[int]) -> None:
    def float64() -> Iterator[PruneResult]:
        for compact in (True, False):
            batches = [(images.double(), labels) for images, labels in small_runs.listed()]
            inputs = torch.zeros(1, 2, small_runs.SIZE, small_runs.SIZE, dtype=torch.float64)
            model = SmallResNet().double()
            yield prune(case, model=model, train_batches=batches, example_inputs=inputs, compact=compact)
            shrinking.append(0)

    small, large = float64()
    assert shrinking.index(0) >= 3
    assert len(shrinking) - shrinking.index(0) == 3
    assert all(torch.equal(small.keep[name], large.keep[name]) for name in small.keep)
    others = named_tensors(large.model)
    for name, tensor in named_tensors(small.model).items():
        torch.testing.assert_close(tensor, others[name], rtol=1e-9, atol=1e-9)
    assert small.recipe == large.recipe


# --------------------------------------------------------------------------------------------------- several budgets


PATH = ifso.Budget(macs=(0.8, 0.65, 0.5))


def test_algorithm_2_leaves_a_network_for_each_budget_on_its_way(tmp_path: Path) -> None:
    result = prune("plain", tmp_path / "run", budget=PATH)
    first = prune("plain", tmp_path / "first", budget=ifso.Budget(macs=0.8))
    assert [network.targets for network in result.networks] == [{"macs": 0.8}, {"macs": 0.65}, {"macs": 0.5}]
    loaded = [ifso.load(network.folder, SmallResNet()) for network in result.networks if network.folder]
    assert [named_tensors(model).keys() for model in loaded] == 3 * [named_tensors(result.model).keys()]
    for name, tensor in named_tensors(first.model).items():
        assert torch.equal(named_tensors(loaded[0])[name], tensor)
    for name, tensor in named_tensors(result.model).items():
        assert torch.equal(named_tensors(loaded[-1])[name], tensor)
    assert result.networks[0].shares == first.shares
    assert result.networks[0].values == first.measures[-1].values
    assert [network.values.keys() for network in result.networks] == 3 * [{"loss"}]
    stages = result.summary()["stages"]
    gone = sum(int((~choice).sum()) for choice in result.keep.values())
    assert [stage["shares"]["macs"] <= share for stage, share in zip(stages, (0.8, 0.65, 0.5), strict=True)] == 3 * [
        True
    ]
    assert sum(stage["units"] for stage in stages) == gone
    here = prune("plain", budget=PATH)
    assert all(network.model is not None for network in here.networks)


@pytest.mark.parametrize("case", ["plain", "shuffled"])
def test_stopped_on_the_way_through_several_budgets(case: str, tmp_path: Path, shrinking: list[int]) -> None:
    prune(case, tmp_path / "whole", budget=PATH)
    interrupted(case, tmp_path / "run", StopAt(3), StopAt(4), StopAt(2), budget=PATH)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")
    networks = files_in(tmp_path / "whole" / "networks")
    assert len(networks) >= 4
    assert files_in(tmp_path / "run" / "networks") == networks


def test_a_batch_that_is_spoilt_at_a_budget_on_the_way(tmp_path: Path) -> None:
    images, labels = small_runs.samples()
    batches = [*small_runs.listed(), (torch.full_like(images[:8], math.nan), labels[:8])]
    with pytest.raises(DataError, match="hold NaN or infinity"):
        prune("magnitude", tmp_path / "run", budget=PATH, train_batches=batches, recalibrate=6)
