"""Two records of ``ifso bench everyday`` beside each other: what takes more than it did."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ifso.errors import IfsoError

MAX_BYTES = 2**20
UNNOTICED = {"cpu_s": 0.02, "bytes": 16 * 2**20}
"""Seconds and bytes that no one notices, by how the name of a figure ends: what grew by less has not grown."""

SAME = ("cpu", "python", "torch")
"""What two records must share for their times to be compared."""


class More(NamedTuple):
    """A figure that grew by more than was allowed."""

    name: str
    before: float
    now: float

    def __str__(self) -> str:
        return f"{self.name}: {self.now:.4g}, was {self.before:.4g} (×{self.now / self.before:.2f})"


def read_record(path: Path) -> dict[str, Any]:
    """A file that ``ifso bench everyday --json`` printed."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES)
    except OSError as error:
        raise IfsoError(f"{path}: {error.strerror or error}; give a file of ifso bench everyday --json") from None
    document: Any = {}
    with suppress(ValueError, RecursionError):
        document = json.loads(data.decode())
    try:
        if document["bench"] == "everyday" and dict(_figures(document)):
            return document
    except (KeyError, TypeError, AttributeError, ValueError):
        pass
    raise IfsoError(f"{path}: not a record of ifso bench everyday --json; give another file")


def differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """In which of :data:`SAME` the records differ: then their times say nothing about each other."""
    return [f"{key} is {new.get(key)}, was {old.get(key)}" for key in SAME if old.get(key) != new.get(key)]


def grown(old: Mapping[str, Any], new: Mapping[str, Any], time_factor: float, memory_factor: float) -> list[More]:
    """Figures of both records that grew by more than a factor; times only where the machines are alike.

    >>> old = {"commands": {"import ifso": {"cpu_s": 0.02}}, "models": []}
    >>> new = {"commands": {"import ifso": {"cpu_s": 0.05}}, "models": []}
    >>> [str(more) for more in grown(old, new, 1.5, 1.1)]
    ['import ifso, cpu_s: 0.05, was 0.02 (×2.50)']
    """
    factors = {"cpu_s": float("inf") if differing(old, new) else time_factor, "bytes": memory_factor}
    before = dict(_figures(old))
    return [
        More(name, before[name], value)
        for name, value in _figures(new)
        if name in before
        and value > factors[_kind(name)] * before[name]
        and value > UNNOTICED[_kind(name)] + before[name]
    ]


def missing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Figures of the old record that the new one has not."""
    now = dict(_figures(new))
    return [name for name, _ in _figures(old) if name not in now]


def _figures(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for command, found in record["commands"].items():
        yield f"{command}, cpu_s", float(found["cpu_s"])
    for found in record["models"]:
        place = f"{found['model']} {found['size']}×{found['size']}, batch {found['batch']}"
        for key, value in found.items():
            if key.endswith(("_cpu_s", "_bytes")):
                yield f"{place}, {key}", float(value)


def _kind(name: str) -> str:
    return "bytes" if name.endswith("bytes") else "cpu_s"
