"""A strict reader: plain values of TOML and JSON files as dataclasses, and an error with file and key if one is wrong.

What a value must be is written as an annotation: ``str``, ``int``, ``float``, ``bool``, ``X | None``, ``Literal``,
``list``, ``tuple[X, ...]``, ``Mapping[str, X]``, a dataclass, or ``Annotated`` with a :class:`Check`. A mapping in
place of an annotation is a table with these keys, all of which may be left out but those that are ``Required``.
Modules of such dataclasses do without ``from __future__ import annotations``: no text of theirs is evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Required, Union, get_args, get_origin

from ifso.common.text import one_line
from ifso.errors import IfsoError

LARGEST = 2**53
"""No number in a file reaches it."""

KINDS = {
    str: "text",
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    list: "a list",
    dict: "a table",
}


@dataclass(frozen=True)
class Check:
    """What a value must be beside its type: the words for an error, and a test."""

    words: str
    holds: Callable[[Any], bool]


Count = Annotated[int, Check("1 or more", lambda value: value >= 1)]
Size = Annotated[float, Check("0 or more", lambda value: value >= 0)]
Whole = Annotated[int, Check("0 or more", lambda value: value >= 0)]
Percent = Annotated[float, Check("in per cent, from 0 to 100", lambda value: 0 <= value <= 100)]
WITHOUT_REPETITION = Check("a list without repetition", lambda values: len(set(values)) == len(values))


def decode(hint: Any, value: Any, file: str = "", key: str = "") -> Any:
    """The value as the annotation ``hint`` describes it; IfsoError that names ``file`` and ``key`` if it does not fit.

    >>> decode({"epochs": Required[int], "batch": int}, {"epochs": 200, "bacth": 128}, "some.toml")
    Traceback (most recent call last):
    ifso.errors.IfsoError: some.toml: unknown key 'bacth'; known here: epochs, batch
    """
    if isinstance(hint, Mapping):
        origins: dict[str, Any] = {name: get_origin(hint[name]) for name in hint}
        required = [name for name, origin in origins.items() if origin is Required]
        return _table(hint, required, value, file, key)
    if is_dataclass(hint):
        return _record(hint, value, file, key)
    return _DECODERS.get(get_origin(hint), _scalar)(hint, value, file, key)


def _table(hints: Mapping[str, Any], required: Iterable[str], value: Any, file: str, key: str) -> dict[str, Any]:
    """A table with known keys."""
    values = decode(dict, value, file, key)
    for name in values:
        if name not in hints:
            raise wrong(f"unknown key {_inside(key, name)!r}; known here: {', '.join(hints)}", file)
    for name in required:
        if name not in values:
            raise wrong(f"key {_inside(key, name)!r} is missing", file)
    return {name: decode(hints[name], item, file, _inside(key, name)) for name, item in values.items()}


def _record(kind: Any, value: Any, file: str, key: str) -> Any:
    """A dataclass, which may have checks of its own."""
    required = [each.name for each in fields(kind) if MISSING is each.default is each.default_factory]
    decoded = _table({each.name: each.type for each in fields(kind)}, required, value, file, key)
    try:
        return kind(**decoded)
    except IfsoError as error:
        raise wrong(str(error), file, key) from error


def _annotated(hint: Any, value: Any, file: str, key: str) -> Any:
    kind, extra = get_args(hint)
    if not isinstance(extra, Check):
        return decode(extra, value, file, key)
    decoded = decode(kind, value, file, key)
    if not extra.holds(decoded):
        raise wrong(f"must be {extra.words}, got {value!r}", file, key)
    return decoded


def _optional(hint: Any, value: Any, file: str, key: str) -> Any:
    return None if value is None else decode(get_args(hint)[0], value, file, key)


def _choice(hint: Any, value: Any, file: str, key: str) -> Any:
    if decode(str, value, file, key) not in get_args(hint):
        raise wrong(f"must be one of {', '.join(get_args(hint))}, got {value!r}", file, key)
    return value


def _items(hint: Any, value: Any, file: str, key: str) -> Any:
    items = enumerate(decode(list, value, file, key))
    return get_origin(hint)(decode(get_args(hint)[0], item, file, f"{key}[{index}]") for index, item in items)


def _mapping(hint: Any, value: Any, file: str, key: str) -> dict[str, Any]:
    values = decode(dict, value, file, key)
    return {name: decode(get_args(hint)[1], item, file, _inside(key, name)) for name, item in values.items()}


def _scalar(kind: Any, value: Any, file: str, key: str) -> Any:
    """A value of just that type; a whole number is a ``float``, too."""
    if kind is Any:
        return value
    if kind is float and type(value) is int and abs(value) < LARGEST:
        return float(value)
    if type(value) is not kind or (kind in (int, float) and not abs(value) < LARGEST):
        raise wrong(f"must be {KINDS[kind]}, got {value!r}", file, key)
    return value


_DECODERS: dict[Any, Callable[[Any, Any, str, str], Any]] = {
    Annotated: _annotated, Required: lambda hint, *rest: decode(get_args(hint)[0], *rest), UnionType: _optional,
    Union: _optional, Literal: _choice, tuple: _items, list: _items, dict: _mapping, Mapping: _mapping,
}  # fmt: skip


def wrong(words: str, file: str, key: str = "") -> IfsoError:
    """An error about a key of a file."""
    return IfsoError(f"{f'{file}: ' if file else ''}{one_line(f'{key} {words}' if key else words)}")


def _inside(table: str, key: str) -> str:
    return f"{table}.{key}" if table else key
