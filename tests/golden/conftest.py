"""Runs that golden files are of; made once."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from golden_runs import Done, run_all
from golden_store import write_machine


class Runs(NamedTuple):
    """The folder that everything was run in, and what the commands answered."""

    folder: Path
    done: dict[str, Done]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """All commands of ``golden_runs.COMMANDS``."""
    folder = tmp_path_factory.mktemp("golden")
    write_machine()
    return Runs(folder, run_all(folder))
