"""Shared by all tests: one thread, a fixed seed, files in memory, little garbage collection."""

import gc
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # also of processes that tests start: each core has a worker already

import torch

torch.set_num_threads(1)

MEMORY, ROOM = Path("/dev/shm"), 4 << 30


def pytest_configure() -> None:
    """Put the folders of tests into memory, if there is room: most of a small run is waiting for a disk to be sure."""
    if "TMPDIR" not in os.environ and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ROOM:
        os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)


def pytest_collection_finish() -> None:
    """Look for garbage less often: among all modules and tests that takes half a second each time."""
    gc.set_threshold(10_000, 20, 20)


@pytest.fixture(autouse=True)
def _seed():
    torch.default_generator.manual_seed(0)  # torch.manual_seed also looks for every kind of device, 10,000 times
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@contextmanager
def _third_of_the_digits():
    from ifso.data.digits import Digits, digits

    third = Digits(*(part[: len(part) // 3] for part in digits()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ifso.data.digits.digits", lambda: third)
        yield


@pytest.fixture
def few_digits():
    """A third of the digits."""
    with _third_of_the_digits():
        yield


@pytest.fixture(scope="module")
def few_digits_throughout():
    """A third of the digits for all tests of a module."""
    with _third_of_the_digits():
        yield


@pytest.fixture
def few_samples(monkeypatch):
    """Staged runs look at 256 samples where they are told nothing else, not at 1,024."""
    monkeypatch.setattr("ifso.pruning.settings.CALIBRATION", 256)
