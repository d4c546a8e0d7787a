"""Fixtures for the runs of a study."""

import pytest
import torch
from tiny_rows import AtOnce

from ifso_repro import runner as running


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def at_once(monkeypatch):
    AtOnce.made = []
    monkeypatch.setattr(running, "PrunePool", AtOnce)
    return AtOnce.made
