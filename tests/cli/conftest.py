"""A folder to be in, with what a module has made once."""

import shutil
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

from ifso.exporting import export


@pytest.fixture
def project(made, tmp_path, monkeypatch):
    """A copy of the folder ``made``, as the current one."""
    copy = Path(shutil.copytree(made, tmp_path / "project"))
    monkeypatch.chdir(copy)
    return copy


@pytest.fixture
def programs_run_here(monkeypatch):
    """Exported programs are checked in this process: a fresh one takes seconds to start, and other tests start it."""

    def run(path, samples):
        program = torch.export.load(path).module()
        return [tree_leaves(program(*sample.args, **sample.kwargs)) for sample in samples]

    monkeypatch.setitem(export.RUNNERS, "torch", (run, "the program"))
