"""Docstrings of public names say what goes in, what comes out and what is raised; those of options name all of them."""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

import ifso
from ifso.criteria import registry
from ifso.curvature import solvers

FUNCTIONS = [name for name in ifso.__all__ if inspect.isfunction(getattr(ifso, name))]
CLASSES = [
    *(getattr(ifso, name) for name in ifso.__all__ if is_dataclass(getattr(ifso, name))),
    *map(registry.find, registry.names()),
    *(each for each in vars(solvers).values() if inspect.isclass(each) and is_dataclass(each)),
]


def sections(documented: Any) -> dict[str, str]:
    """The sections of a docstring in Google's style, by name."""
    found: dict[str, str] = {}
    name = ""
    for line in (inspect.getdoc(documented) or "").splitlines():
        if line and not line.startswith(" "):
            name = line[:-1] if line.endswith(":") and line[:-1].isalpha() else ""
        elif name:
            found[name] = found.get(name, "") + line + "\n"
    return found


def entries(section: str) -> list[str]:
    """The names that a section explains."""
    return [line.strip().partition(":")[0] for line in section.splitlines() if line[4:5].strip() and line[:4] == "    "]


def test_sections_are_told_apart():
    def example() -> None:
        """Do it.

        Args:
            one: a thing,
                at length.
            two: another.

        Returns:
            Nothing.
        """

    assert list(sections(example)) == ["Args", "Returns"]
    assert entries(sections(example)["Args"]) == ["one", "two"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_says_what_goes_in_what_comes_out_and_what_is_raised(name: str):
    function = getattr(ifso, name)
    found = sections(function)
    assert entries(found["Args"]) == list(inspect.signature(function).parameters)
    assert ("Returns" in found) != ("Yields" in found)
    raised = entries(found["Raises"])
    assert raised
    assert all(issubclass(getattr(ifso.errors, each), ifso.IfsoError) for each in raised)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_a_class_explains_all_of_its_fields(kind: type):
    found = sections(kind)
    explained = entries(found.get("Args", found.get("Attributes", "")))
    told = [each.name for each in fields(kind) if not each.name.startswith("_")]
    assert set(explained) >= set(told)
    assert set(explained) <= {*told, *inspect.signature(kind).parameters}
