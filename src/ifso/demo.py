"""What ``ifso demo`` does: a small network is trained, halved by several criteria, fine-tuned and compared."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from ifso.demo_study import CRITERIA, DATA, KEPT, MODEL, OURS, Effort, Row, Study, write_json
from ifso.errors import RunError
from ifso.pruning.events import Listener
from ifso.report import write_report
from ifso.surgery.store import save

POINTS = 1.0
"""By so many points of accuracy the fine-tuned network may stay behind the unpruned one."""

Checks = tuple[tuple[str, bool], ...]
"""What was checked, in words, and whether it is so."""

SUMMARY, FINAL, REPORT = "demo.json", "finetuned", "report.html"


@dataclass(frozen=True)
class Outcome:
    """The table, the folder with everything, and what was checked."""

    rows: tuple[Row, ...]
    folder: Path
    seconds: float
    test_images: int
    checks: Checks

    @property
    def passed(self) -> bool:
        """Is everything as it should be?"""
        return all(passed for _, passed in self.checks)

    def as_json(self) -> dict[str, Any]:
        """As plain values."""
        checks = [{"what": what, "passed": passed} for what, passed in self.checks]
        rows = [asdict(row) for row in self.rows]
        return {
            "model": MODEL, "data": DATA, "kept": KEPT, "folder": str(self.folder), "seconds": self.seconds,
            "test_images": self.test_images, "rows": rows, "checks": checks,
        }  # fmt: skip


def demonstrate(
    out: Path,
    seed: int,
    say: Callable[[str], None],
    listener: Listener,
    effort: Effort = Effort(),  # noqa: B008
) -> Outcome:
    """Train, prune, fine-tune and compare; everything is written into ``out``, or a numbered folder beside it.

    One thread does it all: more are no quicker with layers this small, and far slower where other work is going on.
    """
    begun, folder = time.perf_counter(), _free(out)
    with _one_thread():
        study = Study(seed, say, effort)
        rows, checks = _compare(folder, study, listener)
    outcome = Outcome(tuple(rows), folder, time.perf_counter() - begun, study.test_images, checks)
    write_json(folder / SUMMARY, outcome.as_json())
    write_report([folder / name for name in run_names()], folder / REPORT)
    return outcome


def _compare(folder: Path, study: Study, listener: Listener) -> tuple[list[Row], Checks]:
    unpruned, row = study.trained()
    rows, models = [row], {}
    for name, runs in CRITERIA.items():
        places = {number: folder / _run_name(name, number) for number in range(1, runs + 1)}
        found = [study.pruned(unpruned, name, number, place, listener) for number, place in places.items()]
        rows.append(_mean([row for _, row in found]))
        models[name] = found[0][0]
    save(models[OURS], folder / FINAL)
    return rows, _checks(rows, study.same_again(models[OURS], folder / FINAL))


def run_names() -> list[str]:
    """The folders of all prunings."""
    return [_run_name(name, number) for name, runs in CRITERIA.items() for number in range(1, runs + 1)]


def _run_name(name: str, number: int) -> str:
    return name if CRITERIA[name] == 1 else f"{name}-{number}"


def _mean(rows: Sequence[Row]) -> Row:
    """One row for all runs of a criterion.

    >>> a, b = Row("random", 0.5, 0.4, 90.0, 98.0, 0.1, 3.0, 2.0), Row("random", 0.5, 0.3, 80.0, 99.0, 0.3, 5.0, 2.0)
    >>> mean = _mean([a, b])
    >>> mean.before, mean.after, mean.seconds, mean.runs
    (85.0, 98.5, 4.0, 2)
    """
    numbers = ("macs", "params", "before", "after", "loss", "seconds", "finetune_seconds")
    means = {name: fmean(getattr(row, name) for row in rows) for name in numbers}
    return Row(rows[0].name, **means, runs=len(rows))


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _free(out: Path) -> Path:
    """``out`` if nothing is there yet, else the first of ``out-2``, ``out-3``, … that is free."""
    names = itertools.chain([out], (out.with_name(f"{out.name}-{number}") for number in itertools.count(2)))
    try:
        folder = next(name for name in names if not name.exists() or (name.is_dir() and not any(name.iterdir())))
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{out} cannot be made: {error.strerror or error}; give another --out") from error
    return folder


def _checks(rows: Sequence[Row], same_again: bool) -> Checks:
    unpruned, ours = rows[0], rows[1]
    least = unpruned.after - POINTS
    return (
        (f"every pruned network keeps at most {KEPT:.0%} of the MACs", all(row.macs <= KEPT for row in rows[1:])),
        (f"accuracy with {ours.name} after fine-tuning is at least {least:.2f} %", ours.after >= least - 1e-9),
        ("the saved network, loaded into a fresh one, gives the same bits", same_again),
    )
