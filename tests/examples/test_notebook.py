"""The notebook in examples/ runs from its first cell to its last, and shows a table where it shows a result."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import ifso
from ifso.pruning.result import PruneResult

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """The value of the last line, as a notebook shows it; None if that is no expression."""
    *lines, last = ast.parse(source).body
    exec(compile(ast.Module(lines, []), "cell", "exec"), names)
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    exec(compile(ast.Module([last], []), "cell", "exec"), names)
    return None


@pytest.mark.slow
def test_a_kernel_shows_one_bar_and_the_tables(tmp_path: Path):
    """Where nbclient and ipykernel are installed; no widgets are needed."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    book = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(book, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in book.cells for output in cell.get("outputs", ())]
    assert not [output for output in outputs if output.output_type == "stream"]
    texts = [output.data["text/plain"] for output in outputs]
    (bar,) = (text for text in texts if "stage" in text and "left" in text)
    assert "100% stage 10/10 MACs" in bar
    (result,) = (output.data for output in outputs if "PruneResult(" in output.data["text/plain"])
    assert result["text/html"].count("<table>") == 3
    assert len(result["text/plain"]) < 2000


def test_every_cell_runs(tmp_path: Path, monkeypatch, few_samples):
    monkeypatch.chdir(tmp_path)
    book = json.loads(NOTEBOOK.read_text())
    assert book["nbformat"] == 4
    sources = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in book["cells"])
    names: dict[str, Any] = {}
    shown = [run_cell(source, names) for source in sources]
    (result,) = (value for value in shown if isinstance(value, PruneResult))
    assert result.shares["macs"] <= 0.5
    assert not any("untrained" in note or "pruned before" in note for note in result.notes)
    assert "<table>" in result._repr_html_()
    assert shown[-2]["accuracy"] > 80
    assert shown[-1] == ifso.recipe(names["model"]).removed_units > 0
