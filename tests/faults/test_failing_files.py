"""Files that cannot be written, and machines that stop, at any file operation: nothing earlier is lost."""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path

import every_fault
import pytest
import tiny
import trials
from failing_files import GROWING, KINDS, Crash, Disk, provisional_files

from ifso.common.files import replacing, write_text
from ifso.errors import IfsoError
from ifso.exporting.formats import program_of, write_program
from ifso.exporting.samples import Sample
from ifso_repro.figure1.study import Record

SAMPLED = {"save": 1, "report": 1, "train": 66, "finetune": 84, "prune": 168, "prune staged": 192}
"""Every so many operations one fails, in the quick tests."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SAMPLED)
def test_a_sample_of_all_operations(name: str, kind: str, tmp_path: Path) -> None:
    operations, _ = trials.reference(name)
    begin = KINDS.index(kind) * SAMPLED[name] // len(KINDS)
    for at in range(1 + begin, len(operations) + 1, SAMPLED[name]):
        if kind != "full" or operations[at - 1] in GROWING:
            trials.trial(name, kind, at, tmp_path / str(at))


@pytest.mark.slow
@pytest.mark.parametrize("name", every_fault.FILES)
def test_every_operation(name: str) -> None:
    assert every_fault.failures_of_files(name)["failures"] == []


# ------------------------------------------------------------------------------------------------- small regressions


def test_an_empty_folder_that_could_not_be_removed_goes_when_the_run_is_resumed(tmp_path: Path) -> None:
    operations, _ = trials.reference("prune staged")
    saved = max(at for at, what in enumerate(operations, 1) if what == "rmdir")
    assert trials.trial("prune staged", "refused", saved, tmp_path).status == 0


def test_a_training_that_was_over_leaves_no_checkpoint(tmp_path: Path) -> None:
    operations, _ = trials.reference("train")
    assert operations[-1] == "unlink"
    trials.trial("train", "crash", len(operations), tmp_path)


def test_the_last_lines_of_a_training_outlive_a_power_failure(tmp_path: Path) -> None:
    operations, _ = trials.reference("train")
    trials.trial("train", "power", len(operations), tmp_path)


def test_a_full_disk_while_a_program_is_packed(tmp_path: Path) -> None:
    """PyTorch would end the process if its own writing failed."""
    program = program_of(tiny.network().eval(), Sample.of(tiny.listed()[0][0]))
    for at in range(1, 4):
        with (
            Disk(tmp_path, "full", at) as disk,
            pytest.raises(OSError, match="No space left") as caught,
            replacing(tmp_path / "model.pt2") as new,
        ):
            write_program(program, new)
        assert disk.failed
        assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_lines_of_a_study_are_whole_or_not_there(tmp_path: Path) -> None:
    base, model = {"trained": {"loss": 1.0}}, tiny.network()
    (tmp_path / "whole").mkdir()
    with Disk(tmp_path) as counting:
        _studied(tmp_path / "whole", base, model)
    for kind in ("refused", "crash", "power"):
        for at in range(1, len(counting.done) + 1):
            folder = tmp_path / f"{kind} {at}"
            folder.mkdir()
            with Disk(folder, kind, at) as disk, suppress(IfsoError, Crash):
                _studied(folder, base, model)
            assert disk.failed
            found = Record(folder, "a").read()
            assert found.rows in ([], [{"mask": 0}], [{"mask": 0}, {"mask": 1}])
            assert found.base in (None, base)
            if found.base is not None:
                found.load_(tiny.network())


def _studied(folder: Path, base: dict[str, object], model: object) -> None:
    record = Record(folder, "a")
    record.start(base, model)
    record.add({"mask": 0})
    record.replace(base, record.rows)
    record.add({"mask": 1})


# -------------------------------------------------------------------------------------------- the failing disk itself


def test_operations_are_counted_and_fail_one_by_one(tmp_path: Path) -> None:
    with Disk(tmp_path) as disk:
        write_text(tmp_path / "a.txt", "first")
    assert disk.done == ["open", "write", "open", "fsync", "replace", "fsync"]
    for at in range(1, 6):
        with Disk(tmp_path, "crash", at) as disk, pytest.raises(Crash):
            write_text(tmp_path / "a.txt", "second")
        assert (tmp_path / "a.txt").read_text() == "first"
    assert provisional_files(tmp_path) == [".a.txt.new"]


def test_what_was_not_synced_is_lost(tmp_path: Path) -> None:
    """A disk that forgets must spoil what is written without care, or nothing could be learned from it."""
    place = tmp_path / "a.txt"
    place.write_text("first")
    with Disk(tmp_path, "power", 4), pytest.raises(Crash):
        _careless(place, "second")
    assert place.read_text() == ""
    with Disk(tmp_path, "names", 4), pytest.raises(Crash):
        _careless(place, "third")
    assert place.read_text() == ""
    assert (tmp_path / "new").read_text() == "third"


def _careless(place: Path, text: str) -> None:
    """Written and renamed without a sync; the next operation is the fourth."""
    place.with_name("new").write_text(text)
    place.with_name("new").replace(place)
    place.unlink()


def test_a_folder_that_may_not_be_written_is_told_in_one_line(tmp_path: Path) -> None:
    for name, words in (("train", "Read-only file system; make it"), ("prune", "Read-only file system; make it")):
        folder = tmp_path / name
        folder.mkdir()
        outcome = trials.stopped(trials.SCENARIOS[name], folder, "read-only", 1)
        assert outcome.status == 2
        assert words in outcome.words
        assert list(folder.iterdir()) == []
