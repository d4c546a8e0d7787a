"""Results of the paper's rows that lie in the checkout: all are read, and the same tables are made of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from golden_runs import command
from golden_store import check_json, check_text, golden_text

RESULTS = Path(__file__).parents[2] / "repro" / "results"
SHOWN = ("table2", "retinanet-bccd")
"""Tables that are held letter by letter; the others by their cells."""


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """``--out`` with the results that the golden files are of; newer ones are left out."""
    names = "\n".join(sorted(path.name for path in RESULTS.glob("*.json")))
    folder = tmp_path_factory.mktemp("repro")
    (folder / "results").mkdir()
    for name in golden_text("repro-results", names).splitlines():
        shutil.copy(RESULTS / name, folder / "results")
    return folder


def test_every_result_is_read_and_counted(out):
    found = command("repro", "--list", "--json", "--out", out).document["studies"]
    assert not [study for study in found if "damaged" in study]
    check_json("repro-list", found)


@pytest.mark.parametrize("study", SHOWN)
def test_a_table_is_printed_as_before(study, out):
    done = command("repro", "--table", study, "--out", out)
    assert done.status == 0
    check_text(f"repro-{study}", done.out)


def test_cells_of_all_tables(out):
    found = command("repro", "--table", "--json", "--out", out).document["tables"]
    check_json("repro-tables", found)
