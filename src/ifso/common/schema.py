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


def to_plain(value: Any) -> Any:
    """Dataclasses and dicts as dicts, tuples as lists, everything else as it is."""
    if is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    return [to_plain(item) for item in value] if isinstance(value, tuple) else value


def from_plain(kind: type[T], value: Any, where: str) -> T:
    """``value`` as the dataclass ``kind``; a RecipeError that begins with the place where it does not fit."""
    _expect(value, dict, where)
    hints = _hints(kind)  # type: ignore[arg-type]
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    _check_keys(names, value, where)
    arguments = {name: _decode(hints[name], value[name], f"{where}.{name}") for name in sorted(names)}
    try:
        return kind(**arguments)
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from None


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _check_keys(names: set[str], value: dict[str, Any], where: str) -> None:
    for name in sorted(names - value.keys()):
        raise RecipeError(f"{where}: key {name!r} is missing")
    for name in value.keys() - names:
        raise RecipeError(f"{where}: unknown key {reprlib.repr(name)}")


def _decode(hint: Any, value: Any, where: str) -> Any:
    if hint is int or hint is str:
        return scalar(hint, value, where)
    if is_dataclass(hint):
        return from_plain(hint, value, where)  # type: ignore[arg-type]
    decoders = {UnionType: _optional, dict: _mapping, tuple: _items}
    return decoders[get_origin(hint)](get_args(hint), value, where)


def scalar(hint: type[T], value: Any, where: str) -> T:
    """``value`` if it is an int or str of sensible size, as ``hint`` asks; else a RecipeError."""
    _expect(value, hint, where)
    if hint is int and abs(value) > MAX_NUMBER:
        raise RecipeError(f"{where}: the number is too large")
    if hint is str and len(value) > MAX_TEXT:
        raise RecipeError(f"{where}: the text is longer than {MAX_TEXT} characters")
    return value


def _optional(hints: tuple[Any, ...], value: Any, where: str) -> Any:
    return None if value is None else _decode(hints[0], value, where)


def _mapping(hints: tuple[Any, ...], value: Any, where: str) -> dict[str, Any]:
    _expect(value, dict, where)
    return {
        scalar(str, key, f"{where}: a key"): _decode(hints[1], item, f"{where}[{reprlib.repr(key)}]")
        for key, item in value.items()
    }


def _items(hints: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    _expect(value, list, where)
    if hints[-1] is Ellipsis:
        return tuple(_decode(hints[0], item, f"{where}[{position}]") for position, item in enumerate(value))
    if len(value) != len(hints):
        raise RecipeError(f"{where}: {len(value)} items instead of {len(hints)}")
    return tuple(
        _decode(hint, item, f"{where}[{position}]")
        for position, (hint, item) in enumerate(zip(hints, value, strict=True))
    )


def _expect(value: object, kind: type, where: str) -> None:
    """The exact type, since True is an int and a subclass may behave in its own way."""
    if type(value) is not kind:
        raise RecipeError(f"{where}: {type(value).__name__} instead of {kind.__name__}")
