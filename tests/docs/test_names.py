"""Names in the documentation are names in the code: tables of symbols, flags, criteria, solvers, errors, the API."""

import ast
import importlib
import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
from documents import DOCS

import ifso
from ifso import errors
from ifso.criteria import registry
from ifso.criteria.base import Needs, Task
from ifso.curvature.solvers import SOLVERS
from ifso.graph.channel_ids import Labels
from ifso.pruning.budget import NORMALIZERS
from ifso.training.settings import RECIPES

PACKAGE = Path(ifso.__file__).parent
FIRST_CELL = re.compile(r"^\| (.+?) \|", re.MULTILINE)


def section(page, heading):
    """A page's text under a heading, up to the next of its kind."""
    _, _, rest = (DOCS / page).read_text().partition(f"\n## {heading}\n")
    assert rest, f"{page} has no section {heading!r}"
    return rest.partition("\n## ")[0]


def rows(page, heading):
    """Cells of all rows of the tables under a heading, but for headings and rules."""
    lines = [line for line in section(page, heading).splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [row for row in cells if not set("".join(row)) <= set("-: ")][1:]


def found(name):
    """What a dotted name stands for; a field of a dataclass stands for itself."""
    parts = name.split(".")
    value = importlib.import_module(parts[0])
    for depth, part in enumerate(parts[1:], 2):
        known = {field.name for field in fields(value)} if hasattr(value, "__dataclass_fields__") else ()
        if part in known:
            return part
        if not hasattr(value, part):
            importlib.import_module(".".join(parts[:depth]))
        value = getattr(value, part)
    return value


TABLE = rows("method.md", "Symbols, equations, names")
SYMBOLS = [(row[0], name) for row in TABLE for name in re.findall(r"`(ifso[\w.]+)`", row[3])]


@pytest.mark.parametrize(("symbol", "name"), SYMBOLS, ids=[name for _, name in SYMBOLS])
def test_a_symbol_has_its_name(symbol, name):
    assert found(name) is not None


def test_every_symbol_has_a_name_and_a_place_in_the_paper():
    assert len(TABLE) > 25
    assert all(re.search(r"`ifso[._]", row[3]) and row[2] for row in TABLE)


@pytest.mark.parametrize("name", ["ifso.nothing", "ifso.Budget.watts", "ifso.curvature.products.Products.jacobian"])
def test_a_name_that_is_none_is_noticed(name):
    with pytest.raises((AttributeError, ImportError)):
        found(name)


def test_a_guide_names_what_rules_and_criteria_can_ask_for():
    page = (DOCS / "guides" / "extending.md").read_text()
    said = set(re.findall(r"`labels\.(\w+)`", page))
    assert len(said) > 7
    assert [name for name in sorted(said) if not hasattr(Labels, name)] == []
    (line,) = (part for part in page.split("\n\n") if part.startswith("The `task` has"))
    asked = re.findall(r"`(?:task\.)?(\w+)[`(]", line.partition("The score\nof")[0])
    known = {field.name for field in fields(Task)} | set(vars(Task))
    assert len(asked) > 7
    assert [name for name in asked if name not in known | {"task"}] == []
    assert set(get_args(Needs)) == {row[0].strip('`"') for row in rows("guides/extending.md", "A criterion")}


def test_the_api_has_every_public_name():
    page = (DOCS / "api" / "index.md").read_text()
    shown = re.findall(r"^::: ifso\.(\w+)$", page, re.MULTILINE)
    assert sorted(shown) == sorted(set(ifso.__all__) - {"__version__", "IfsoError"})
    assert [name for name in shown if f"[ifso.{name}]" not in page] == []


def test_the_api_has_every_criterion_and_solver():
    page = (DOCS / "api" / "criteria.md").read_text()
    kinds = {registry.find(name).__name__ for name in registry.names()} | {kind.__name__ for kind in SOLVERS.values()}
    assert {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)", page, re.MULTILINE)} == kinds | {"Solution"}


def test_tables_have_every_criterion_solver_normalizer_and_recipe():
    criteria = {row[0].strip("`") for row in rows("scores.md", "Criteria") if len(row) == 3}
    assert criteria == set(registry.names())
    inverses = {row[0].strip("`") for row in rows("scores.md", "Criteria") if len(row) == 2} - {"inverse"}
    assert inverses == set(SOLVERS) - {"jacobian"}
    normalizers = re.findall(r'"([a-z-]+)"', " ".join(row[0] for row in rows("pruning.md", "Algorithm 2")))
    assert set(NORMALIZERS) <= set(normalizers)
    assert all(f"`{name}`" in (DOCS / "training.md").read_text() for name in RECIPES)


def test_every_flag_is_explained():
    told = set(re.findall(r"`([a-z ]+)`", " ".join(row[0] for row in rows("coupling.md", FLAGS))))
    assert told == set(flags())


FLAGS = "Flags, and why masking is exact all the same"


def flags():
    """Texts that rules give to ``labels.flag``, and the one that ``Labels`` adds itself."""
    for file in PACKAGE.glob("graph/**/*.py"):
        tree = ast.parse(file.read_text())
        constants = {
            node.targets[0].id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and len(node.targets) == 1
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "flag":
                yield from _texts(node.args[1], constants)
            if isinstance(node, ast.Tuple) and len(node.elts) == 3 and "attention scale" in ast.dump(node):
                yield "attention scale"


def _texts(node, constants):
    if isinstance(node, ast.Name):
        if node.id != "flag":  # one that is there already, handed on
            yield constants[node.id]
    elif isinstance(node, ast.IfExp):
        yield from (node.body.value, node.orelse.value)
    else:
        yield node.value


def test_a_reason_for_freezing_stands_once():
    """tests/test_cli.py looks whether all are there."""
    reasons = [row[0] for row in rows("coupling.md", "What is frozen, and what you can do")]
    assert len(reasons) > 30
    assert len(set(reasons)) == len(reasons)


def test_exit_statuses_are_those_of_the_errors():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.IfsoError)]
    assert {kind.exit_status for kind in kinds} == {2, 3, 4}
    page = (DOCS / "api" / "errors.md").read_text()
    assert "2 for bad input, 3 for\na budget that cannot be met, 4 for a check" in page
    assert errors.UnreachableBudget.exit_status == 3
    assert errors.VerificationError.exit_status == 4
