"""A folder to be in, with what a module has made once."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def project(made, tmp_path, monkeypatch):
    """A copy of the folder ``made``, as the current one."""
    copy = Path(shutil.copytree(made, tmp_path / "project"))
    monkeypatch.chdir(copy)
    return copy
