"""Values from files that people and older versions may have written: of the type that is wanted, or not there.

Where a file must be right, a ``Kind`` says whether a value is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

LARGEST = 1e30
"""Numbers beyond this are no numbers of a run."""

LARGEST_WHOLE = 2**63 - 1
"""The largest whole number that torch takes, as a seed among other things."""

Kind = Callable[[Any], bool]


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


def is_text(value: object) -> bool:
    """Return whether it is a text without NUL, which no path can hold."""
    return isinstance(value, str) and "\0" not in value


def is_truth(value: object) -> bool:
    """Return whether it is true or false."""
    return isinstance(value, bool)


def is_whole(value: object) -> bool:
    """Return whether it is a whole number that torch takes."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST_WHOLE


def is_number(value: object) -> bool:
    """Return whether it is a finite number."""
    return is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def optional(kind: Kind) -> Kind:
    """None, or a value of a kind."""
    return lambda value: value is None or kind(value)


def list_of(kind: Kind) -> Kind:
    """A list of values of a kind."""
    return lambda value: isinstance(value, list) and all(map(kind, value))


def dict_of(kind: Kind) -> Kind:
    """An object whose values are of a kind."""
    return lambda value: isinstance(value, dict) and all(map(kind, value.values()))


def with_keys(needed: Mapping[str, Kind], later: Mapping[str, Kind] | None = None) -> Kind:
    """An object with these keys, each of its kind; those that came ``later`` need not be there.

    >>> with_keys({"a": is_whole}, {"b": is_text})({"a": 1, "c": 2}), with_keys({"a": is_whole})({"a": "1"})
    (True, False)
    """
    return lambda value: (
        isinstance(value, dict)
        and all(name in value and kind(value[name]) for name, kind in needed.items())
        and all(kind(value[name]) for name, kind in (later or {}).items() if name in value)
    )
