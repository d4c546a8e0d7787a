"""Networks of the zoo in turn, each into the record when it is done."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.zoo import float64 as zoo_float64
from benchmarks.zoo.examine import NO_ROOM, Found, Setup, poisoned, serve
from benchmarks.zoo.networks import Entry, by_cost
from benchmarks.zoo.worker import Worker
from ifso.common.files import append_bytes, explained
from ifso.errors import IfsoError

Row = dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """Seconds for one network, minutes for all, and how many processes share the device.

    When the minutes are over, networks under way are given up, too, and are left for the next run.
    """

    seconds: float = 240.0
    minutes: float | None = None
    jobs: int = 1


def run(
    entries: Sequence[Entry], setup: Setup, out: Path | None, limits: Limits, say: Callable[[str], None]
) -> tuple[int, int]:
    """Examine the networks and add their rows to ``out``; how many were examined, and how many time was too short for.

    A quarter of the processes takes the most expensive networks, the others the cheapest ones. What had too little
    memory beside others is examined once more, alone. Rows go nowhere if only scores in float64 are computed: these
    lie in their folder.
    """
    queue = _Queue(by_cost(entries), setup, out, limits, say)
    many = min(limits.jobs, len(entries))
    dear = many // DEAR
    threads = [threading.Thread(target=queue.work, args=(number < dear,)) for number in range(many)]
    with queue:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if many > 1 and queue.crowded:
            say(f"{len(queue.crowded)} networks ran out of memory beside others: now each alone")
            queue.todo.extend(queue.crowded)
            queue.work(False)
    return len(queue.done), len(entries) - len(queue.done)


DEAR = 4
"""One process of so many begins with the most expensive networks, of which few fit into the memory together."""

LEAST_SECONDS = 5.0
"""With less time left, no network is begun."""


class _Queue(AbstractContextManager["_Queue"]):
    """Networks that are left, cheap ones first, taken by several threads with a process each."""

    def __init__(
        self, entries: Sequence[Entry], setup: Setup, out: Path | None, limits: Limits, say: Callable[[str], None]
    ) -> None:
        self.todo, self.crowded, self.done = deque(entries), list[Entry](), set[str]()
        self._count, self._setup, self._out, self._say = len(entries), setup, out, say
        self._seconds = limits.seconds
        self._end = float("inf") if limits.minutes is None else time.monotonic() + 60 * limits.minutes
        self._lock, self._stopped = threading.Lock(), threading.Event()

    def __exit__(self, *_: object) -> None:
        """Whoever leaves early, as by Ctrl-C, leaves networks under way for the next run."""
        self._stopped.set()

    def work(self, dearest: bool) -> None:
        """Examine networks until none, or no time, is left."""
        with Worker(serve, self._setup, stopped=self._stopped) as worker:
            while (entry := self._next(dearest)) is not None:
                start = time.monotonic()
                limit = min(self._seconds, self._end - start)
                found, in_time = examined(worker, entry, limit)
                if self._stopped.is_set() or not (in_time or limit >= self._seconds):
                    continue
                told_before = {"batch": self._setup.batch, "processes": self._setup.processes}
                row = {"network": entry.key, "kind": entry.kind, **told_before, **found}
                row["total_s"] = round(time.monotonic() - start, 1)
                self._note(entry, row)

    def _next(self, dearest: bool) -> Entry | None:
        with self._lock:
            if not self.todo or self._stopped.is_set() or self._end - time.monotonic() < LEAST_SECONDS:
                return None
            return self.todo.pop() if dearest else self.todo.popleft()

    def _note(self, entry: Entry, row: Row) -> None:
        with self._lock:
            if self._out is not None:
                add(self._out, row)
            self.done.add(entry.key)
            if any(reason.startswith(NO_ROOM) for reason in row.get("failed", {}).values()):
                self.crowded.append(entry)
            self._say(f"{len(self.done)}/{self._count} {entry.key}: {told(row)}")


def examined(worker: Worker, entry: Entry, limit: float) -> tuple[Found, bool]:
    """All that was found out about a network, ``failed`` says where it hung or ended, and why; and if time was enough.

    A process that has lost its GPU is ended.
    """
    row, reason = worker.ask(entry, limit)
    stage = row.pop("stage", "start")
    if reason:
        row["failed"] = {**row.get("failed", {}), stage: reason}
    if any(poisoned(each) for each in row.get("failed", {}).values()):
        worker.end()
    return row, reason != worker.out_of_time(limit)


def left(entries: Sequence[Entry], setup: Setup, out: Path | None, retry: bool) -> list[Entry]:
    """Those without a row in ``out``, and with ``retry`` those where something failed; or without a file in float64."""
    if setup.only_float64:
        assert setup.kept is not None
        return [entry for entry in entries if not zoo_float64.path_of(Path(setup.kept), entry).exists()]
    rows = read([out]) if out is not None and out.exists() else {}
    done = {name for name, row in rows.items() if not (retry and row.get("failed"))}
    return [entry for entry in entries if entry.key not in done]


def told(row: dict[str, Any]) -> str:
    """A row in a line.

    >>> told({"units": 9, "rank_in_groups": {"ifso": 1.0}, "total_s": 2.5})
    '9 units, rank 1.0000, 2.5 s'
    """
    parts = [f"{row['units']} units"] if "units" in row else []
    if row.get("rank_in_groups", {}).get("ifso") is not None:
        parts.append(f"rank {row['rank_in_groups']['ifso']:.4f}")
    if "seconds" in row:
        parts.append(f"{row['seconds']['in_gradients']['ifso']:.1f} gradients")
    parts += [f"{stage} failed ({reason})" for stage, reason in row.get("failed", {}).items()]
    return ", ".join([*parts, f"{row['total_s']} s"])


MAX_BYTES = 2**26


def add(path: Path, row: Row) -> None:
    """One more line. Several processes may write into one file; what a killed one left of a line stays alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    start = b"" if _whole(path) else b"\n"
    append_bytes(path, start + json.dumps(row, ensure_ascii=False).encode() + b"\n")


def _whole(path: Path) -> bool:
    """Does the file end with a line's end?"""
    if not path.exists() or not path.stat().st_size:
        return True
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"


def read(paths: Iterable[Path]) -> dict[str, Row]:
    """The last row of every network in these files; lines that were not written to their end are passed over."""
    rows: dict[str, Row] = {}
    for path in paths:
        try:
            with path.open("rb") as file:
                data = file.read(MAX_BYTES)
        except OSError as error:
            raise IfsoError(f"{path}: {explained(error)}") from None
        found = list(filter(None, map(_row, data.splitlines())))
        if data.strip() and not found:
            raise IfsoError(f"{path} must hold JSON lines of python -m benchmarks zoo --out, got something else")
        rows |= {row["network"]: row for row in found}
    return rows


def _row(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(row, dict) and isinstance(row.get("network"), str) and isinstance(row.get("failed", {}), dict)
    return row if whole else None
