"""What files are made of: JSON, checkpoints, and frozen dataclasses as plain JSON values.

A checkpoint is one safetensors file: tensors, a JSON state beside them, and a hash of both. Metrics are lines of JSON.
Whatever fails names the file and says what to do. Of dataclasses only what the annotations allow comes back: no missing
or further keys, no bool or float for an int, no long texts.
"""

from __future__ import annotations

import hashlib
import json
import math
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from errno import EBUSY, ELOOP, ENAMETOOLONG
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ifso.common.files import ADVICE, NO_ROOM, NOT_ALLOWED, NOT_THERE, explained, replacing, storable, write_tensors
from ifso.common.text import one_line
from ifso.errors import RecipeError, RunError

MAX_JSON_BYTES = 16 * 2**20
MAX_METRICS_BYTES = 2**30
MAX_LEVELS = 64
"""Lists and objects one in the other; no file of a run has a tenth of that."""
MAX_NUMBER = 2**63 - 1
MAX_TEXT = 4096

T = TypeVar("T")

_hints = cache(get_type_hints)

_ADVICE = {
    **dict.fromkeys(
        NO_ROOM,
        "make room, then resume the run, or start it again if its folder is gone; what was written before is whole",
    ),
    **dict.fromkeys(NOT_ALLOWED, ADVICE[NOT_ALLOWED[0]]),
    **dict.fromkeys(NOT_THERE, "give a run folder that is there, or start the run again"),
    **{code: ADVICE[code] for code in (EBUSY, ELOOP, ENAMETOOLONG)},
}


@contextmanager
def located(path: Path) -> Iterator[None]:
    """Every failure to read or write as a RunError of one line that names the file and says what to do."""
    try:
        yield
    except RunError as error:
        raise RunError(f"{path}: {one_line(error)}") from error.__cause__
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path}: {explained(error, _ADVICE, 'check the disk, then resume the run')}") from error


def strict_json(document: object) -> str:
    """As JSON that means the same when it is read again; RunError for NaN, tensors and other things JSON has not."""
    try:
        text = json.dumps(document, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RunError(f"cannot be written as JSON ({one_line(error)}); give finite numbers, texts and lists") from None
    if len(text) > MAX_JSON_BYTES:
        raise RunError(f"takes {len(text)} bytes, more than the {MAX_JSON_BYTES} that are read again; store less")
    return text


def finite(value: Any) -> Any:
    """The same tree with None for every number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def pretty_json(document: Mapping[str, Any], path: Path) -> bytes:
    """A JSON file for people to read."""
    with located(path):
        return (json.dumps(json.loads(strict_json(document)), indent=2) + "\n").encode()


def json_line(line: Mapping[str, Any]) -> bytes:
    """A line of JSON, with null for every number that is not finite."""
    return (strict_json(finite(line)) + "\n").encode()


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The JSON objects of a file, one a line, and the number of lines that are none. No file: no lines."""
    lines: list[dict[str, Any]] = []
    broken = 0
    if not path.exists():
        return lines, broken
    with located(path):
        refuse_special(path)
    with located(path), path.open("rb") as file:
        if path.stat().st_size > MAX_METRICS_BYTES:
            raise RunError(f"larger than {MAX_METRICS_BYTES} bytes, which no run's metrics are; give another folder")
        for data in file:
            line = parsed(data) if len(data) <= MAX_JSON_BYTES + 1 else None
            if line is None:
                broken += 1
            else:
                lines.append(line)
    return lines, broken


def refuse_special(path: Path) -> None:
    """RunError for what would block or never end when it is read: a pipe, a device, a folder."""
    if path.exists() and not path.is_file():
        raise RunError("is no plain file; remove it, or give another folder")


def parsed(data: bytes) -> dict[str, Any] | None:
    """A JSON object, or None if it is anything else, nested too deeply, or with half a surrogate pair: no text."""
    try:
        document = json.loads(data.decode(), parse_constant=no_constant, object_pairs_hook=unique_keys)
        if b"\\ud" in data or b"\\uD" in data:
            json.dumps(document, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    nested = data.count(b"{") + data.count(b"[") > MAX_LEVELS and _is_too_deep(document)
    return document if isinstance(document, dict) and not nested else None


def _is_too_deep(document: Any) -> bool:
    level = [document]
    for _ in range(MAX_LEVELS):
        holders = [each for each in level if isinstance(each, (dict, list))]
        level = [item for each in holders for item in (each.values() if isinstance(each, dict) else each)]
    return bool(level)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are all different: of two that are the same nobody knows which one is meant."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def no_constant(constant: str) -> NoReturn:
    """Refuse NaN and infinity."""
    raise ValueError(f"{constant} is no number")


def write_tensor_file(path: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any] | None = None) -> None:
    """Put tensors from any device, and a JSON ``state``, in the place of ``path``: all of it or nothing."""
    with located(path), replacing(path) as new:
        try:
            ready, text = storable(tensors), strict_json(state)
            metadata = {"format": "pt", "state": text, "sha256": _digest(ready, text)}
            write_tensors(new, ready, metadata)
        except ValueError as error:
            raise RunError(str(error)) from error


def read_tensor_file(path: Path) -> tuple[dict[str, Tensor], Any]:
    """The tensors, on the CPU, and the state; RunError if one bit of them is not what was written."""
    with located(path):
        refuse_special(path)
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 it is no dict
        text = metadata.get("state", "")
        if metadata.get("sha256") != _digest(tensors, text):
            raise RunError("damaged or edited, its hash does not fit")
        try:
            return tensors, json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RunError(f"its state is no JSON ({one_line(error)})") from None


def _digest(tensors: Mapping[str, Tensor], text: str) -> str:
    """SHA-256 of the state and of the name, dtype, shape and bytes of every tensor."""
    sha = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        sha.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def to_plain(value: Any) -> Any:
    """Dataclasses and dicts as dicts, tuples as lists, everything else as it is."""
    if is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    return [to_plain(item) for item in value] if isinstance(value, tuple) else value


def from_plain(kind: type[T], value: Any, where: str) -> T:
    """``value`` as the dataclass ``kind``; a RecipeError that begins with the path to what does not fit."""
    _expect(value, dict, where)
    hints = _hints(kind)  # type: ignore[arg-type]
    for name in sorted(hints.keys() - value.keys()):
        raise RecipeError(f"{where}: key {name!r} is missing")
    for name in value.keys() - hints.keys():
        raise RecipeError(f"{where}: unknown key {reprlib.repr(name)}")
    arguments = {name: _decode(hints[name], value[name], f"{where}.{name}") for name in sorted(hints)}
    try:
        return kind(**arguments)
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from None


def scalar(hint: type[T], value: Any, where: str) -> T:
    """``value`` if it is an int or str of sensible size, as ``hint`` asks; else a RecipeError."""
    _expect(value, hint, where)
    if hint is int and abs(value) > MAX_NUMBER:
        raise RecipeError(f"{where}: the number is too large")
    if hint is str and len(value) > MAX_TEXT:
        raise RecipeError(f"{where}: the text is longer than {MAX_TEXT} characters")
    return value


def _decode(hint: Any, value: Any, where: str) -> Any:
    """``value`` as the annotation ``hint``: int, str, a dataclass, a dict or tuple of such, or one of them or None."""
    inner = get_args(hint)
    if hint is int or hint is str:
        return scalar(hint, value, where)
    if is_dataclass(hint):
        return from_plain(hint, value, where)  # type: ignore[arg-type]
    if get_origin(hint) is UnionType:
        return None if value is None else _decode(inner[0], value, where)
    if get_origin(hint) is dict:
        _expect(value, dict, where)
        return {
            scalar(str, key, f"{where}: a key"): _decode(inner[1], item, f"{where}[{reprlib.repr(key)}]")
            for key, item in value.items()
        }
    _expect(value, list, where)
    hints = [inner[0]] * len(value) if inner[-1] is Ellipsis else inner
    if len(value) != len(hints):
        raise RecipeError(f"{where}: {len(value)} items instead of {len(hints)}")
    return tuple(_decode(each, item, f"{where}[{k}]") for k, (each, item) in enumerate(zip(hints, value, strict=True)))


def _expect(value: object, kind: type, where: str) -> None:
    """The exact type, since True is an int and a subclass may behave in its own way."""
    if type(value) is not kind:
        raise RecipeError(f"{where}: {type(value).__name__} instead of {kind.__name__}")
