"""Run folders: refusals, resuming, damage, full disks, and two processes that want the same one."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import torch
from processes import APART
from safetensors.torch import load_file
from torch import Tensor, nn

import ifso
from ifso.common import files, locks
from ifso.common import serialization as checkpoint
from ifso.errors import RunError
from ifso.runs.folder import RunFolder

CONFIG = {"settings": {"accumulate": 10, "budget": {"macs": 0.5}, "ignore": ["fc"]}, "created": "yesterday"}
FULL = OSError(28, "No space left on device")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder.create(tmp_path / "runs" / "x", CONFIG) as made:
        yield made


def refused(message: str, function: Callable[..., object], *arguments: object) -> str:
    """RunError of one line that matches; returns the line."""
    with pytest.raises(RunError, match=message) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def tensors_of(number: int) -> dict[str, Tensor]:
    random_ = torch.Generator().manual_seed(number)
    return {"weight": torch.randn(3, 4, generator=random_), "steps": torch.tensor(number)}


def checkpoint_(run: RunFolder, number: int) -> None:
    run.write_checkpoint(number, tensors_of(number), {"removals": number})


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        found[name].dtype == wanted[name].dtype and torch.equal(found[name], wanted[name]) for name in wanted
    )


def names(path: Path) -> set[str]:
    return {str(entry.relative_to(path)) for entry in path.rglob("*") if entry.name != ".lock"}


# ------------------------------------------------------------------------------------------------ create and resume


def test_create_makes_parents_and_writes_the_config(run: RunFolder):
    stored = json.loads((run.path / "config.json").read_text())
    assert {name: stored[name] for name in CONFIG} == CONFIG
    assert names(run.path) == {"config.json"}
    assert not run.finished


def test_create_takes_an_empty_folder(tmp_path: Path):
    RunFolder.create(tmp_path, CONFIG).close()
    assert names(tmp_path) == {"config.json"}


def test_create_after_a_create_that_was_killed(tmp_path: Path):
    (tmp_path / ".lock").touch()
    (tmp_path / ".config.json.new").write_text('{"sett')
    RunFolder.create(tmp_path, CONFIG).close()
    assert names(tmp_path) == {"config.json"}


def test_create_refuses_a_folder_that_holds_a_run(run: RunFolder):
    for removal in (1, 2, 3):
        run.append({"removal": removal})
    run.close()
    again = "already holds a run \\(3 removals, {}\\); resume it .* or give another folder"
    refused(again.format("unfinished"), RunFolder.create, run.path, CONFIG)
    run.finish({"macs": 1})
    refused(again.format("finished"), RunFolder.create, run.path, CONFIG)
    assert run.metrics() == ([{"removal": 1}, {"removal": 2}, {"removal": 3}], 0)


def test_create_refuses_what_is_no_run(tmp_path: Path):
    (tmp_path / "file").write_text("precious")
    refused("file: is no folder", RunFolder.create, tmp_path / "file", CONFIG)
    refused("Not a directory", RunFolder.create, tmp_path / "file" / "inner", CONFIG)
    refused("is not empty and no run folder; give another", RunFolder.create, tmp_path, CONFIG)
    (tmp_path / "config.json").write_text('{"model_type": "bert", "settings": {}}')
    refused("is not empty and no run folder", RunFolder.create, tmp_path, CONFIG)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    refused("link: is no folder", RunFolder.create, tmp_path / "link", CONFIG)
    assert (tmp_path / "file").read_text() == "precious"
    assert names(tmp_path) == {"file", "config.json", "link"}


@pytest.mark.parametrize("value", [float("nan"), torch.ones(1), {1j}])
def test_a_config_that_json_cannot_hold(value: object, tmp_path: Path):
    refused("config.json: cannot be written as JSON", RunFolder.create, tmp_path, {"settings": {"a": value}})
    assert names(tmp_path) == set()


def test_resume_takes_the_same_settings(run: RunFolder):
    run.close()
    settings = {"ignore": ("fc",), "budget": {"macs": 0.5}, "accumulate": 10.0}
    with RunFolder.resume(run.path, {"settings": settings, "created": "today"}) as again:
        assert again.config["created"] == "yesterday"
        assert again.config == run.config


def test_resume_shows_other_settings(run: RunFolder):
    run.close()
    settings = {"accumulate": 5, "budget": {"macs": 0.4}, "ignore": ["fc"]}
    line = refused("other settings", RunFolder.resume, run.path, {"settings": settings})
    assert (
        line == f"other settings than the run in {run.path}: accumulate is 5 and was 10; budget.macs is 0.4 and was 0.5"
    )
    settings = {"accumulate": True, "budget": 0.5, "new": "a" * 200}
    line = refused("accumulate is True and was 10", RunFolder.resume, run.path, {"settings": settings})
    assert "budget is 0.5 and was {'macs': 0.5}" in line
    assert "ignore is not set and was ['fc']" in line
    assert "aaa… and was not set" in line
    many = {**CONFIG["settings"], **{f"option{number}": number for number in range(8)}}
    refused("option4 is 4 and was not set and 3 more$", RunFolder.resume, run.path, {"settings": many})
    RunFolder.resume(run.path, CONFIG).close()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"holds no run to resume \(no config.json\)"),
        (b"", "config.json: damaged"),
        (b'{"format": "ifso-run", "version": 1, "settin', "config.json: damaged"),
        (b"\xff\xfe", "config.json: damaged"),
        (b"[1]", "config.json: damaged"),
        (b'{"format": "ifso-run", "version": 1}', "config.json: damaged"),
        (b'{"format": "ifso-run", "version": 1, "settings": 3}', "config.json: damaged"),
        (b'{"format": "ifso-run", "version": 1, "settings": {"a": NaN}}', "config.json: damaged"),
        (b'{"settings": {}}', "config.json: damaged"),
        (b'{"format": "ifso-run", "version": 2, "settings": {}}', "version 2 is unknown"),
        (b"[" * 200_000, "config.json: damaged"),
        (b" " * (16 * 2**20 + 1), "config.json: larger than 16777216 bytes"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_resume_refuses_a_config_that_is_damaged(content: bytes | None, message: str, tmp_path: Path):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    refused(message, RunFolder.resume, tmp_path, CONFIG)


def test_resume_removes_what_a_killed_process_was_writing(run: RunFolder):
    checkpoint_(run, 1)
    run.close()
    before = names(run.path)
    for name in (".summary.json.new", ".scores.safetensors.new.d/.tmpAb12Cd", "checkpoints/.00000002.safetensors.new"):
        (run.path / name).parent.mkdir(exist_ok=True)
        (run.path / name).write_text("half")
    for name in (".recipe.json.new", ".model.safetensors.new", "notes.txt"):
        (run.path / name).write_text("of another")
    RunFolder.resume(run.path, CONFIG).close()
    assert names(run.path) == before | {".recipe.json.new", ".model.safetensors.new", "notes.txt"}


# ------------------------------------------------------------------------------------------------------ checkpoints


def test_a_checkpoint_comes_back_bit_for_bit(run: RunFolder):
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "plain": torch.tensor([0.1, -0.0, float("nan"), float("inf")]), "turned": base.T, "columns": base[:, ::2],
        "rows": base[1:3], "tied": base, "half": base.bfloat16(), "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3), "mask": base > 5, "random": torch.get_rng_state(),
        "parameter": nn.Parameter(torch.ones(2)),
        "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    }  # fmt: skip
    state = {"removals": 7, "loss": 0.1 + 0.2, "nested": {"a": [1, None, True, "é\n"]}}
    run.write_checkpoint(7, tensors, state)
    number, found, found_state = run.newest_checkpoint()
    assert (number, found_state) == (7, state)
    assert found.keys() == tensors.keys()
    for name, wanted in tensors.items():
        assert found[name].dtype == wanted.dtype, name
        torch.testing.assert_close(found[name], wanted.detach(), rtol=0, atol=0, equal_nan=True)
    assert found["plain"].view(torch.int32).tolist() == tensors["plain"].view(torch.int32).tolist()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_checkpoint_of_a_gpu(run: RunFolder):
    run.write_checkpoint(1, {"a": torch.arange(5.0, device="cuda")}, {})
    assert torch.equal(run.newest_checkpoint()[1]["a"], torch.arange(5.0))


def test_the_newest_two_checkpoints_stay(run: RunFolder):
    assert run.newest_checkpoint() is None
    for number in (3, 9, 10, 100_000_001):
        checkpoint_(run, number)
        assert run.newest_checkpoint()[0] == number
    wanted = {"checkpoints/00000010.safetensors", "checkpoints/100000001.safetensors"}
    assert {name for name in names(run.path) if "safetensors" in name} == wanted
    assert load_file(run.path / "checkpoints" / "00000010.safetensors").keys() == {"weight", "steps"}


def test_an_earlier_checkpoint_takes_over_from_a_damaged_one(run: RunFolder):
    checkpoint_(run, 1)
    checkpoint_(run, 2)
    newest = run.path / "checkpoints" / "00000002.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    number, tensors, state = run.newest_checkpoint()
    assert (number, state) == (1, {"removals": 1})
    assert same(tensors, tensors_of(1))
    assert len(run.notes) == 1
    assert str(newest) in run.notes[0]
    (run.path / "checkpoints" / "00000001.safetensors").write_bytes(b"")
    assert run.newest_checkpoint() is None
    assert len(run.notes) == 2
    checkpoint_(run, 1)
    assert names(run.path) == {"config.json", "checkpoints", "checkpoints/00000001.safetensors"}


def test_damage_of_a_checkpoint_is_noticed(run: RunFolder):
    """Flip bits and cut: what is read is what was written, or nothing."""
    chance = random.Random(0)
    checkpoint_(run, 5)
    path = run.path / "checkpoints" / "00000005.safetensors"
    data = path.read_bytes()
    noticed = 0
    for _ in range(300):
        changed = bytearray(data)
        for place in chance.sample(range(len(data)), chance.randint(1, 3)):
            changed[place] ^= 1 << chance.randrange(8)
        path.write_bytes(changed[: chance.randrange(len(data))] if chance.random() < 0.2 else changed)
        found = run.newest_checkpoint()
        noticed += found is None
        assert found is None or (same(found[1], tensors_of(5)) and found[2] == {"removals": 5})
    assert noticed > 280


@pytest.mark.parametrize(
    ("tensors", "state", "message"),
    [
        ({"a": torch.empty(2, device="meta")}, {}, "cannot save 'a': only dense tensors"),
        ({"a": torch.zeros(2, dtype=torch.complex128)}, {}, "safetensors cannot hold such a tensor"),
        ({}, {"loss": float("nan")}, "cannot be written as JSON"),
        ({}, {"loss": torch.ones(1)}, "cannot be written as JSON"),
        ({}, {"text": "a" * 2**24}, "more than the 16777216"),
    ],
    ids=["meta", "complex", "nan", "tensor", "large"],
)
def test_checkpoints_that_cannot_be_stored(tensors: dict, state: dict, message: str, run: RunFolder):
    checkpoint_(run, 1)
    refused(f"00000002.safetensors: .*{message}", run.write_checkpoint, 2, tensors, state)
    assert run.newest_checkpoint()[0] == 1
    assert names(run.path) == {"config.json", "checkpoints", "checkpoints/00000001.safetensors"}


def test_checkpoints_are_as_readable_as_the_config(run: RunFolder):
    checkpoint_(run, 1)
    run.write_scores({"a": torch.ones(1)})
    modes = {path.stat().st_mode for path in run.path.rglob("*") if path.is_file()}
    assert len(modes) == 1


# ---------------------------------------------------------------------------------------------------------- metrics


def test_metrics_are_valid_json_whatever_the_numbers(run: RunFolder):
    assert run.metrics() == ([], 0)
    run.append({"removal": 1, "loss": float("nan"), "shares": {"macs": float("inf")}, "units": (1, float("-inf"))})
    run.append({"removal": 2, "loss": 0.1 + 0.2})
    wanted = [
        {"removal": 1, "loss": None, "shares": {"macs": None}, "units": [1, None]},
        {"removal": 2, "loss": 0.1 + 0.2},
    ]
    assert run.metrics() == (wanted, 0)
    text = (run.path / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    refused("metrics.jsonl: cannot be written as JSON", run.append, {"loss": torch.ones(1)})
    assert run.metrics() == (wanted, 0)


def test_broken_lines_are_counted_and_rewound(run: RunFolder):
    path = run.path / "metrics.jsonl"
    broken = [b'{"removal": 2, "lo', b"[1]", b"\xff", b"NaN", b'{"a": NaN}', b"[" * 100_000, b""]
    path.write_bytes(b'{"removal": 1}\n' + b"\n".join(broken) + b'\n{"note": 1}\n{"removal": 3}\n{"removal": 4}')
    lines, count = run.metrics()
    assert lines == [{"removal": 1}, {"note": 1}, {"removal": 3}, {"removal": 4}]
    assert count == len(broken)
    run.rewind(4)
    run.append({"removal": 5})
    assert path.read_text() == '{"removal": 1}\n{"removal": 3}\n{"removal": 4}\n{"removal": 5}\n'
    run.rewind(3)
    assert run.metrics() == ([{"removal": 1}, {"removal": 3}], 0)
    run.rewind(0)
    assert path.read_bytes() == b""


def test_rewinding_a_run_that_wrote_nothing(run: RunFolder):
    run.rewind(0)
    assert run.metrics() == ([], 0)


def test_metrics_that_are_too_large(run: RunFolder, monkeypatch: pytest.MonkeyPatch):
    run.append({"removal": 1})
    monkeypatch.setattr(checkpoint, "MAX_METRICS_BYTES", 3)
    refused("metrics.jsonl: larger than 3 bytes", run.metrics)


# ------------------------------------------------------------------------------------------------------ other files


def test_scores_and_summary(run: RunFolder):
    scores = {"layer1.0.conv1": torch.rand(16), "fc": torch.rand(3, dtype=torch.float64)}
    run.write_scores(scores)
    assert same(load_file(run.path / "scores.safetensors"), scores)
    run.finish({"macs": 0.5, "accuracy": float("nan")})
    assert run.finished
    stored = json.loads((run.path / "summary.json").read_text())
    assert stored.pop("digests").keys() == {"settings", "recipe", "metrics"}
    assert stored == {"macs": 0.5, "accuracy": None}
    run.close()
    with RunFolder.resume(run.path, CONFIG) as again:
        assert again.finished


def test_a_model_is_saved_beside_the_run(run: RunFolder):
    checkpoint_(run, 1)
    model = nn.Linear(3, 2)
    ifso.save(model, run.path)
    run.close()
    RunFolder.resume(run.path, CONFIG).close()
    assert torch.equal(ifso.load(run.path, nn.Linear(3, 2)).weight, model.weight)


@pytest.mark.parametrize("name", ["", "..", "a/b.json", "config.json", "metrics.jsonl"])
def test_names_of_json_files(name: str, run: RunFolder):
    with pytest.raises(ValueError, match="no name for a JSON file"):
        run.write_json(name, {})


# --------------------------------------------------------------------------------------------------- failing writes


def failing(
    monkeypatch: pytest.MonkeyPatch, owner: object, function: str, call: int, error: BaseException
) -> list[int]:
    """Let the given call of a function fail; what a failing write takes before that is half of what it was given."""
    real, calls = getattr(owner, function), []

    def instead(*arguments: object, **options: object) -> object:
        calls.append(len(calls))
        if calls[-1] == call:
            if function == "write":
                real(arguments[0], arguments[1][: len(arguments[1]) // 2])
            raise error
        return real(*arguments, **options)

    monkeypatch.setattr(owner, function, instead)
    return calls


def work(run: RunFolder) -> None:
    """Everything that is written, once."""
    run.append({"removal": 2})
    checkpoint_(run, 2)
    run.write_scores({"a": torch.full((3,), 2.0)})
    run.rewind(1)
    run.finish({"macs": 2})


def state_is_whole(run: RunFolder) -> None:
    """All that can be read is of the first or of the second writing, and nothing provisional is left."""
    number, tensors, state = run.newest_checkpoint()
    assert number in {1, 2}
    assert state == {"removals": number}
    assert same(tensors, tensors_of(number))
    lines, broken = run.metrics()
    assert broken == 0
    assert lines in ([{"removal": 1}], [{"removal": 1}, {"removal": 2}])
    assert set(load_file(run.path / "scores.safetensors")["a"].tolist()) <= {1.0, 2.0}
    assert json.loads((run.path / "summary.json").read_text())["macs"] in (1, 2)
    assert run.notes == []
    assert {Path(name).name[0] == "." for name in names(run.path)} == {False}


class Stop(BaseException):
    """What an interruption looks like: no Exception."""


def outcome(function: Callable[[RunFolder], None], run: RunFolder) -> str | None:
    """What a RunError said; an empty text for an interruption, None if all went well."""
    try:
        function(run)
    except RunError as error:
        return str(error)
    except Stop:
        return ""
    return None


PLACES = {"replace": os, "fsync": os, "write": os, "open": os, "save_file": files}


@pytest.mark.parametrize(
    "error", [FULL, OSError(30, "Read-only file system"), Stop()], ids=["full", "read-only", "stop"]
)
@pytest.mark.parametrize("function", PLACES)
def test_a_failing_write_loses_nothing_earlier(
    function: str, error: BaseException, run: RunFolder, monkeypatch: pytest.MonkeyPatch
):
    checkpoint_(run, 1)
    run.append({"removal": 1})
    run.write_scores({"a": torch.ones(3)})
    run.finish({"macs": 1})
    for call in range(100):
        monkeypatch.setattr(locks, "_open_folder", lambda _folder: None)  # a lock that fails is done without
        calls = failing(monkeypatch, PLACES[function], function, call, error)
        message = outcome(work, run)
        if len(calls) > call:
            assert message is not None
        if message:
            assert str(run.path) in message
            assert f"{error.strerror}; make" in message
            assert "\n" not in message
        monkeypatch.undo()
        state_is_whole(run)
        run.rewind(1)
        if len(calls) <= call:
            break
    assert 1 <= call < 99
    assert run.newest_checkpoint()[0] == 2


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.parametrize("size", [0, 1, 5, 20, 100, 200])
def test_the_system_itself_stops_writing(size: int, run: RunFolder):
    """No stand-ins: the kernel refuses to let files grow, in the middle of a line and of a checkpoint."""
    checkpoint_(run, 1)
    run.append({"removal": 1})
    run.write_scores({"a": torch.ones(3)})
    run.finish({"macs": 1})
    with files_of_at_most(size):
        message = refused("00000002.safetensors: File too large; make room", checkpoint_, run, 2)
        assert str(run.path) in message
        with suppress(RunError):
            run.append({"removal": 2})
        if size < 20:
            refused("summary.json: File too large", run.finish, {"macs": 2})
            refused("metrics.jsonl: File too large", run.append, {"removal": 2})
    state_is_whole(run)


def test_a_full_disk_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    failing(monkeypatch, os, "write", 0, FULL)
    refused("config.json: No space left on device; make room", RunFolder.create, tmp_path / "x", CONFIG)
    monkeypatch.undo()
    assert names(tmp_path / "x") == set()
    RunFolder.create(tmp_path / "x", CONFIG).close()


def test_a_run_folder_that_vanished(run: RunFolder):
    (run.path / "config.json").unlink()
    (run.path / ".lock").unlink()
    run.path.rmdir()
    refused("metrics.jsonl: No such file or directory; give", run.append, {"removal": 1})
    refused("checkpoints: No such file or directory; give", checkpoint_, run, 1)
    refused("summary.json: No such file or directory; give", run.finish, {})


def test_an_old_checkpoint_that_cannot_be_removed_is_told(run: RunFolder):
    stubborn = run.path / "checkpoints" / "00000001.safetensors"
    stubborn.mkdir(parents=True)
    for number in (2, 3, 4):
        checkpoint_(run, number)
    assert len(run.notes) == 1
    assert str(stubborn) in run.notes[0]
    assert run.newest_checkpoint()[0] == 4


# ------------------------------------------------------------------------------------------------------------ locks

HOLD = """
import os, sys, time
from ifso.runs.folder import RunFolder
run = RunFolder.create(sys.argv[1], {"settings": {}})
if sys.argv[2] == "fork" and os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(60)
    os._exit(0)
if sys.argv[2] == "alone":
    print("ready", flush=True)
time.sleep(60)
"""


def holder(path: Path, way: str) -> tuple[subprocess.Popen[str], str]:
    """Another process that runs in the folder, and the line it said."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path), way], stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().strip()


needs_locks = pytest.mark.skipif(locks.fcntl is None, reason="no locks on this system")


@needs_locks
def test_one_process_at_a_time_and_kill_lets_go(tmp_path: Path):
    process, _ = holder(tmp_path, "alone")
    try:
        refused("is in use by another process; wait", RunFolder.resume, tmp_path, {"settings": {}})
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    RunFolder.resume(tmp_path, {"settings": {}}).close()


@needs_locks
def test_a_worker_that_outlives_its_run_holds_no_lock(tmp_path: Path):
    process, worker = holder(tmp_path, "fork")
    process.kill()
    process.wait()
    try:
        os.kill(int(worker), 0)
        RunFolder.resume(tmp_path, {"settings": {}}).close()
    finally:
        os.kill(int(worker), signal.SIGKILL)
        process.stdout.close()


@needs_locks
def test_a_folder_is_let_go_when_closed_or_forgotten(run: RunFolder):
    refused("is in use", RunFolder.resume, run.path, CONFIG)
    run.close()
    run.close()
    again = RunFolder.resume(run.path, CONFIG)
    refused("is in use", RunFolder.resume, run.path, CONFIG)
    del again
    RunFolder.resume(run.path, CONFIG).close()


@needs_locks
def test_a_disk_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    failing(monkeypatch, locks.fcntl, "flock", 0, OSError(95, "Operation not supported"))
    with RunFolder.create(tmp_path, CONFIG) as run:
        assert len(run.notes) == 1
        assert "without locks" in run.notes[0]


def write_on_and_on(folder: Path, ready: Event) -> None:
    """Until the process is killed."""
    torch.set_num_threads(1)
    with RunFolder.resume(folder, {"settings": {}}) as run:
        newest = run.newest_checkpoint()
        number = newest[0] if newest else 0
        run.rewind(number)
        ready.set()
        while True:
            number += 1
            run.append({"removal": number})
            run.write_checkpoint(number, {"a": torch.full((20000,), float(number))}, {"number": number})


def test_kill_at_any_moment(tmp_path: Path):
    """The newest checkpoint is always whole, never earlier than before, and the lines lead up to it."""
    RunFolder.create(tmp_path, {"settings": {}}).close()
    chance, reached = random.Random(0), 0
    for _ in range(3):
        ready = APART.Event()
        process = APART.Process(target=write_on_and_on, args=(tmp_path, ready))
        process.start()
        assert ready.wait(60)
        time.sleep(0.05 + chance.random() / 5)
        process.kill()
        process.join()
        with RunFolder.resume(tmp_path, {"settings": {}}) as run:
            number, tensors, state = run.newest_checkpoint()
            run.rewind(number)
            assert number >= max(reached, 1)
            assert state == {"number": number}
            assert torch.equal(tensors["a"], torch.full((20000,), float(number)))
            assert [line["removal"] for line in run.metrics()[0]] == list(range(1, number + 1))
            assert run.notes == []
            assert len(list((tmp_path / "checkpoints").iterdir())) <= 3
            reached = number
    state = checkpoint.read_tensor_file(tmp_path / "checkpoints" / f"{reached:08d}.safetensors")[1]
    assert state["number"] == reached
