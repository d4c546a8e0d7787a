"""Criteria by name. A new one is a class, in a short file of its own or beside its kin, and a line here."""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ifso.errors import ScoreError

if TYPE_CHECKING:
    from ifso.criteria.base import Criterion

_HOME = {
    "ifso": ("ifso", "Ifso"),
    "true-loss": ("true_loss", "TrueLoss"),
    "authors": ("ifso", "Authors"),
    "group-fisher": ("gradients", "GroupFisher"),
    "taylor": ("gradients", "Taylor"),
    "magnitude": ("weights", "Magnitude"),
    "magnitude-average": ("weights", "MagnitudeAverage"),
    "fpgm": ("weights", "Fpgm"),
    "bn-scale": ("weights", "BnScale"),
    "hrank": ("gradients", "HRank"),
    "random": ("weights", "Random"),
}
"""Name: module of this package and class."""


def names() -> tuple[str, ...]:
    """Names of all criteria."""
    return tuple(_HOME)


def find(name: str) -> type[Criterion]:
    """The class of a criterion."""
    if name not in _HOME:
        raise ScoreError(f"no criterion {name!r}; choose one of {', '.join(_HOME)}")
    module, kind = _HOME[name]
    return getattr(import_module(f"ifso.criteria.{module}"), kind)


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
