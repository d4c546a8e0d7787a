"""The JSON lines of ``ifso bench zoo``: a row for each network, added when it is done."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ifso.common.files import append_bytes, explained
from ifso.errors import IfsoError

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
            raise IfsoError(f"{path} must hold JSON lines of ifso bench zoo --out, got something else")
        rows |= {row["network"]: row for row in found}
    return rows


def _row(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(row, dict) and isinstance(row.get("network"), str) and isinstance(row.get("failed", {}), dict)
    return row if whole else None
