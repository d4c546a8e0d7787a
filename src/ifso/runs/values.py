"""Values from files that people and older versions may have written: of the type that is wanted, or not there.

Where a file must be right, a :data:`Kind` says what a value has to be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

LARGEST = 1e30
"""Numbers beyond this are no numbers of a run."""

LARGEST_WHOLE = 2**63 - 1
"""The largest whole number that torch takes, as a seed among other things."""

Kind = Any
"""``str``, ``bool``, ``int``, ``float``, a constant; a tuple of kinds for one of them, ``[kind]`` for a list of such.

An object is a dict of kinds, in which a name with ``?`` need not be there, and ``str`` stands for all other names.
"""


def number(value: object) -> float | None:
    """A number that can be drawn.

    >>> number(3), number("3"), number(True), number(float("nan")), number(1e300)
    (3, None, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if abs(value) < LARGEST else None


def whole(value: object) -> int | None:
    """A whole number from 0 up that a float can hold."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else None


def percent(share: float, digits: int = 1) -> str:
    r"""A share in percent, with a space that does not break.

    >>> percent(0.4971)
    '49.7\xa0%'
    """
    return in_percent(100 * share, digits)


def in_percent(value: float, digits: int = 2) -> str:
    """A number that is a percentage already."""
    return f"{value:.{digits}f}\u00a0%"


def text(value: object) -> str | None:
    """A text with something in it."""
    return value if isinstance(value, str) and value else None


def mapping(value: object) -> dict[str, Any]:
    """A JSON object; an empty one in place of anything else."""
    return value if isinstance(value, dict) else {}


def listing(value: object) -> list[Any]:
    """A JSON list; an empty one in place of anything else."""
    return value if isinstance(value, list) else []


def objects(value: object) -> Iterator[dict[str, Any]]:
    """The JSON objects in a list."""
    return (each for each in listing(value) if isinstance(each, dict))


def numbers(value: object) -> dict[str, float]:
    """The finite numbers of a JSON object, by name."""
    found = ((name, number(each)) for name, each in mapping(value).items())
    return {name: each for name, each in found if each is not None}


def wholes(value: object) -> tuple[int, ...]:
    """The whole numbers of a JSON list."""
    return tuple(each for each in listing(value) if whole(each) is not None)


def at(document: Mapping[str, Any], *path: str) -> Any:
    """What stands at a path of names in a JSON document, None where there is nothing.

    >>> at({"budget": {"macs": 0.5}}, "budget", "macs"), at({"budget": 3}, "budget", "macs")
    (0.5, None)
    """
    found: Any = document
    for name in path:
        found = mapping(found).get(name)
    return found


def is_kind(value: Any, kind: Kind) -> bool:
    """Return whether a JSON value is of a kind; numbers must be finite, and whole ones not larger than torch takes.

    >>> is_kind(3, int), is_kind(True, int), is_kind(None, (float, None)), is_kind(["a", 1], [str])
    (True, False, True, False)
    >>> is_kind({"a": 1, "c": 2}, {"a": int, "b?": str}), is_kind({"a": 1, "b": "x"}, {"a": int, str: float})
    (True, False)
    """
    if isinstance(kind, tuple):
        return any(is_kind(value, each) for each in kind)
    if isinstance(kind, list):
        return isinstance(value, list) and all(is_kind(each, kind[0]) for each in value)
    if isinstance(kind, dict):
        named = {name.removesuffix("?"): name for name in kind if name is not str}
        return (
            isinstance(value, dict)
            and all(is_kind(value[name], kind[key]) if name in value else key[-1] == "?" for name, key in named.items())
            and (str not in kind or all(is_kind(each, kind[str]) for name, each in value.items() if name not in named))
        )
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST_WHOLE
    if kind is float:
        return is_kind(value, int) or (isinstance(value, float) and math.isfinite(value))
    if kind is str:  # NUL stands in no path
        return isinstance(value, str) and "\0" not in value
    return isinstance(value, bool) if kind is bool else bool(value == kind)
