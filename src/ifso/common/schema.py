"""Frozen dataclasses to plain JSON values and, strictly, back again.

Only what the annotations allow comes through: no missing or further keys, no bool or float for an int, no long texts.
"""

from __future__ import annotations

import reprlib
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from ifso.errors import RecipeError

MAX_NUMBER = 2**63 - 1
MAX_TEXT = 4096

T = TypeVar("T")

_hints = cache(get_type_hints)


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
