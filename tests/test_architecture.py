"""Rooms import only from rooms before them, without exceptions, and there are no cycles."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import ifso

ORDER = (
    "errors", "_version", "common", "graph", "costs", "surgery", "curvature", "criteria", "tasks", "models", "data",
    "runs", "pruning", "training", "exporting", "report", "bench", "cli",
)  # fmt: skip
"""The rooms, each a folder or a file: one imports from those before it, and from itself."""


SOURCE = Path(ifso.__file__).parent
TYPES, LATE = "for type checkers", "within a function"


class Import(NamedTuple):
    """That ``module`` imports ``other``: when it is itself imported, late, or for type checkers only."""

    module: str
    other: str
    when: str


@cache
def modules() -> dict[str, Path]:
    """Every module of the package, by its name without ``ifso.``; the root is ``""``."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports() -> tuple[Import, ...]:
    """Every import of a module of the package by another."""
    return tuple(
        Import(name, other, when)
        for name, path in sorted(modules().items())
        for other, when in imported(ast.parse(path.read_text(encoding="utf-8")), name)
    )


def imported(node: ast.AST, name: str, when: str = "") -> Iterator[tuple[str, str]]:
    """What is imported somewhere within ``node``, and when."""
    if isinstance(node, ast.Import):
        yield from ((own, when) for alias in node.names if (own := own_name(alias.name)) is not None)
    elif isinstance(node, ast.ImportFrom):
        package = source_of(node, name)
        for alias in node.names:
            own = own_name(f"{package}.{alias.name}")
            own = own if own in modules() else own_name(package)
            if own is not None:
                yield own, when
    elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for part in node.body:
            yield from imported(part, name, TYPES)
        for part in node.orelse:
            yield from imported(part, name, when)
    else:
        inner = LATE if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and not when else when
        for part in ast.iter_child_nodes(node):
            yield from imported(part, name, inner)


def source_of(node: ast.ImportFrom, name: str) -> str:
    """The module that is imported from, in full; ``from . import x`` is told from where it stands."""
    if not node.level:
        return node.module or ""
    parts = ["ifso", *name.split(".")] if name else ["ifso"]
    above = node.level - (modules()[name].name == "__init__.py")
    return ".".join([*parts[: len(parts) - above], *([node.module] if node.module else [])])


def own_name(full: str) -> str | None:
    """Without ``ifso.``; None if it is of another package."""
    first, _, rest = full.partition(".")
    return rest if first == "ifso" else None


def room(name: str) -> str:
    """The folder or file below ``ifso`` that a module belongs to."""
    return name.partition(".")[0]


def upward() -> set[tuple[str, str]]:
    """Imports of modules of later rooms, whenever they happen."""
    place = {name: number for number, name in enumerate(ORDER)}
    return {
        (each.module, each.other)
        for each in imports()
        if each.module and each.other and place[room(each.module)] < place[room(each.other)]
    }


def test_every_room_has_its_place():
    assert sorted({room(name) for name in modules()} - {""}) == sorted(ORDER)


def test_imports_are_found():
    found = set(imports())
    assert Import("cli.main", "errors", "") in found
    assert Import("cli.prune", "data", LATE) in found
    assert Import("cli.prune", "data.base", TYPES) in found
    assert len(found) > 1000


def test_rooms_import_only_from_those_before_them():
    assert upward() == set()


def test_nothing_inside_imports_the_root_package():
    """It imports from all rooms when a name is asked for."""
    assert [each.module for each in imports() if each.module and each.other == ""] == []


def test_only_the_command_line_imports_the_reproduction_package():
    users = {path for path in SOURCE.rglob("*.py") if "ifso_repro" in path.read_text(encoding="utf-8")}
    assert {str(path.relative_to(SOURCE)) for path in users} == {"cli/main.py"}


def test_importing_has_no_cycles():
    """Importing a module imports the packages it lies in, too; the root package is always there before."""
    later: dict[str, set[str]] = {name: set() for name in modules() if name}
    for each in imports():
        if each.module and each.other and not each.when:
            later[each.module] |= {each.other} | {above for above in later if each.other.startswith(f"{above}.")}
    for name, others in later.items():
        others -= {name, *(above for above in later if name.startswith(f"{above}."))}
    assert cycle(later) is None


def cycle(later: dict[str, set[str]]) -> list[str] | None:
    """Modules that import each other in a ring, if there are any: what is left when all else is taken away.

    >>> cycle({"a": {"b"}, "b": set()}), cycle({"a": {"b"}, "b": {"a"}, "c": set()})
    (None, ['a', 'b'])
    """
    left = {name: set(others) for name, others in later.items()}
    while ready := {name for name, others in left.items() if not others & left.keys()}:
        left = {name: others for name, others in left.items() if name not in ready}
    needed = {other for others in left.values() for other in others}
    return sorted(left.keys() & needed) or None


@pytest.mark.parametrize(("line", "found"), [
    ("import ifso", [("", "")]),
    ("from ifso.errors import IfsoError", [("errors", "")]),
    ("from ifso.graph import tape", [("graph.tape", "")]),
    ("from . import tape", [("graph.tape", "")]),
    ("from ..errors import IfsoError", [("errors", "")]),
    ("import ifsofar, torch.nn", []),
    ("def f():\n    from ifso.graph import tape", [("graph.tape", LATE)]),
    ("if TYPE_CHECKING:\n    import ifso.cli.main", [("cli.main", TYPES)]),
])  # fmt: skip
def test_an_import_is_read(line, found):
    assert list(imported(ast.parse(line), "graph.tracing")) == found
