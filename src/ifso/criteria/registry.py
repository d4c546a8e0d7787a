"""Criteria by name. A new one is a short file and a line here."""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ifso.errors import ScoreError

if TYPE_CHECKING:
    from ifso.criteria.base import Criterion

_HOME = {
    "ifso": "Ifso",
    "true-loss": "TrueLoss",
    "authors": "Authors",
    "group-fisher": "GroupFisher",
    "taylor": "Taylor",
    "magnitude": "Magnitude",
    "magnitude-average": "MagnitudeAverage",
    "fpgm": "Fpgm",
    "bn-scale": "BnScale",
    "hrank": "HRank",
    "random": "Random",
}
"""Name: class, in the module of that name (with ``_`` for ``-``)."""


def names() -> tuple[str, ...]:
    """Names of all criteria."""
    return tuple(_HOME)


def find(name: str) -> type[Criterion]:
    """The class of a criterion."""
    if name not in _HOME:
        raise ScoreError(f"no criterion {name!r}; choose one of {', '.join(_HOME)}")
    module = import_module(f"ifso.criteria.{name.replace('-', '_')}")
    return getattr(module, _HOME[name])


def create(name: str, **options: Any) -> Criterion:
    """The criterion of that name with options.

    >>> create("magnitude", p=2)
    Magnitude(p=2)
    """
    kind = find(name)
    known = {field.name: field.default for field in fields(kind)}  # type: ignore[arg-type]
    unknown = [option for option in options if option not in known]
    if unknown:
        takes = ", ".join(f"{option}={default!r}" for option, default in known.items())
        raise ScoreError(f"criterion {name!r} has no option {unknown[0]!r}; it takes {takes or 'no options'}")
    return kind(**options)
