"""Golden files: what users and other programs see, as it was when ``UPDATE_GOLDEN=1 pytest tests/golden`` was run.

JSON is compared value by value, text letter by letter. What depends on the clock, the machine or a version is blanked:
its type stays. On the processor and the version of torch that wrote the files, computed numbers are held to 1e-6, and
hashes of weights to the bit; elsewhere sums are rounded in another order, so that numbers are held to 1e-3.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import platform
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

FILES = Path(__file__).parent / "files"
UPDATE = "UPDATE_GOLDEN"
ADVICE = f"if that is what you want, renew it with {UPDATE}=1 pytest tests/golden"

HERE, ELSEWHERE = {"rel_tol": 1e-6, "abs_tol": 1e-9}, {"rel_tol": 1e-3, "abs_tol": 1e-6}
"""How far a computed number may be from the golden one."""

HASHES = frozenset({"weights_sha256", "weights"})
"""Keys of hashes over weights that were computed, which are compared only where bits can be."""

BLANKED = frozenset({
    "seconds", "hardware", "versions", "torch", "ifso", "python", "threads", "timings", "digests", "device_name",
    "sha256", "recipe_sha256", "training_peak_bytes", "peak_bytes", "bytes", "spread", "times", "memory",
    "images_per_second", "error",
})  # fmt: skip
"""Keys of values that come from the clock, the machine, a version, rounding, or a hash over such values."""
WHOLE = frozenset({"hardware", "versions", "timings", "digests"})
"""Those of them that hold values by name."""
TIMED = "samples"
"""A list of seconds, or a number of images."""

_ROUNDING = re.compile(r"\b\d(?:\.\d+)?e-\d\d\b")
_SECONDS = re.compile(r"\b\d+(?:\.\d+)? s\b")


@cache
def machine() -> dict[str, str]:
    """What rounding depends on."""
    return {"torch": torch.__version__, "instructions": torch.backends.cpu.get_cpu_capability(), "cpu": _processor()}


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


@cache
def at_home() -> bool:
    """Were the golden files written on a machine such as this?"""
    return bool(os.environ.get(UPDATE)) or json.loads((FILES / "machine.json").read_text(encoding="utf-8")) == machine()


def write_machine() -> None:
    """Beside new golden files."""
    if os.environ.get(UPDATE):
        (FILES / "machine.json").write_text(f"{pretty(machine())}\n", encoding="utf-8")


def check_json(name: str, found: Any, tolerance: Mapping[str, float] | None = None) -> None:
    """Compare a JSON value with ``files/NAME.json``, or write that file.

    ``tolerance`` is for :func:`math.isclose`, if it does not depend on the machine.
    """
    tolerance = tolerance or (HERE if at_home() else ELSEWHERE)
    found, path = json.loads(json.dumps(found)), FILES / f"{name}.json"
    if _updated(path, f"{pretty(found)}\n"):
        return
    differences = list(_differences(json.loads(path.read_text(encoding="utf-8")), found, tolerance))
    assert not differences, "\n".join([f"{path.name} is another now; {ADVICE}", *differences[:20]])


def check_text(name: str, found: str) -> None:
    """Compare a text with ``files/NAME.txt``, or write that file."""
    path = FILES / f"{name}.txt"
    found = "".join(f"{line.rstrip()}\n" for line in found.splitlines())
    if _updated(path, found):
        return
    golden = path.read_text(encoding="utf-8")
    lines = difflib.unified_diff(golden.splitlines(), found.splitlines(), path.name, "now", lineterm="", n=1)
    assert golden == found, "\n".join([f"{path.name} is another now; {ADVICE}", *lines])


def golden_text(name: str, found: str) -> str:
    """What is in ``files/NAME.txt``, which is ``found`` where it is written."""
    path = FILES / f"{name}.txt"
    _updated(path, f"{found}\n")
    return path.read_text(encoding="utf-8")


def blanked(value: Any) -> Any:
    """The same without what differs from run to run; keys and types stay.

    >>> blanked({"seconds": 1.5, "versions": {"torch": "2.15"}, "note": "error 1.4e-07 in 3.2 s", "units": 3})
    {'seconds': '<number>', 'versions': {'torch': '<text>'}, 'note': 'error <rounding> in <seconds>', 'units': 3}
    """
    if isinstance(value, dict):
        return {key: _kind(part) if _is_blanked(key, part) else blanked(part) for key, part in value.items()}
    if isinstance(value, list):
        return [blanked(part) for part in value]
    return steady(value) if isinstance(value, str) else value


def _is_blanked(key: str, value: Any) -> bool:
    if key == TIMED:
        return isinstance(value, list)
    return key in BLANKED and (key in WHOLE or not isinstance(value, dict))


def steady(text: str) -> str:
    """A text without seconds and rounding errors."""
    return _SECONDS.sub("<seconds>", _ROUNDING.sub("<rounding>", text))


def pretty(value: Any, indent: str = "") -> str:
    """JSON with a line for each entry, and lists of plain values in one line.

    >>> print(pretty({"a": [1, 2], "b": {}}))
    {
     "a": [1, 2],
     "b": {}
    }
    """
    inner = f"{indent} "
    if isinstance(value, dict) and value:
        parts = [f"{inner}{json.dumps(key)}: {pretty(part, inner)}" for key, part in value.items()]
        return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(part, (dict, list)) for part in value):
        return "[\n" + ",\n".join(f"{inner}{pretty(part, inner)}" for part in value) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False)


def _updated(path: Path, text: str) -> bool:
    """Was the golden file written rather than to be compared?"""
    if not os.environ.get(UPDATE):
        assert path.is_file(), f"there is no golden file {path.name}; make it with {UPDATE}=1 pytest tests/golden"
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return True


def _kind(value: Any) -> Any:
    """What takes the place of a value: its type, for a dict those of its entries."""
    if isinstance(value, dict):
        return {key: _kind(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_kind(part) for part in value[:1]]
    if value is None or isinstance(value, bool):
        return value
    return "<text>" if isinstance(value, str) else "<number>"


def _differences(golden: Any, found: Any, tolerance: Mapping[str, float], place: str = "$") -> Iterator[str]:
    if isinstance(golden, dict) and isinstance(found, dict):
        if list(golden) != list(found):
            gone, new = [key for key in golden if key not in found], [key for key in found if key not in golden]
            yield f"{place}: keys gone {gone}, new {new}" if gone or new else f"{place}: keys in another order"
        for key in (key for key in golden if key in found and (at_home() or key not in HASHES)):
            yield from _differences(golden[key], found[key], tolerance, f"{place}.{key}")
    elif isinstance(golden, list) and isinstance(found, list):
        if len(golden) != len(found):
            yield f"{place}: {len(found)} entries, were {len(golden)}"
        for number, (old, new) in enumerate(zip(golden, found, strict=False)):
            yield from _differences(old, new, tolerance, f"{place}[{number}]")
    elif type(golden) is not type(found) or not _close(golden, found, tolerance):
        yield f"{place}: {found!r}, was {golden!r}"


def _close(golden: Any, found: Any, tolerance: Mapping[str, float]) -> bool:
    if isinstance(golden, float):
        return math.isclose(golden, found, **tolerance)
    return golden == found
