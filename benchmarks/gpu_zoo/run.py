"""Networks of the zoo in turn, each into the record when it is done."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_zoo import float64 as zoo_float64
from benchmarks.gpu_zoo.examine import Setup
from benchmarks.gpu_zoo.networks import Entry
from benchmarks.gpu_zoo.worker import Worker
from ifso.common.files import append_bytes, explained
from ifso.errors import IfsoError


@dataclass(frozen=True)
class Limits:
    """Seconds for one network, and minutes after which no further one is begun."""

    seconds: float = 240.0
    minutes: float | None = None


def run(
    entries: Sequence[Entry], setup: Setup, out: Path | None, limits: Limits, say: Callable[[str], None]
) -> tuple[int, int]:
    """Examine the networks and add their rows to ``out``; how many were examined, and how many time was too short for.

    Rows go nowhere if only scores in float64 are computed: these lie in their folder.
    """
    begun, done = time.monotonic(), 0
    with Worker(setup) as worker:
        for number, entry in enumerate(entries, start=1):
            if limits.minutes is not None and time.monotonic() - begun > 60 * limits.minutes:
                break
            start = time.monotonic()
            found = worker.examine(entry, limits.seconds)
            told_before = {"batch": setup.batch, "processes": setup.processes}
            row = {"network": entry.key, "kind": entry.kind, **told_before, **found}
            row["total_s"] = round(time.monotonic() - start, 1)
            if out is not None:
                add(out, row)
            done += 1
            say(f"{number}/{len(entries)} {entry.key}: {told(row)}")
    return done, len(entries) - done


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


Row = dict[str, Any]

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
