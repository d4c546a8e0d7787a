"""NaN and infinity in data, weights and losses, and memory that runs out: one line that says where, nothing lost."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
import trials

from ifso.common.devices import out_of_memory

SPOILT = """
import sys
from types import SimpleNamespace

import torch

sys.path.insert(0, {folder!r})
import tiny

NO_MEMORY = {{
    "gpu": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    "cpu": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 80000000000 bytes."),
    "python": MemoryError(),
}}


class Late:
    def __init__(self, epochs):
        self.epochs, self.epoch = epochs, 0

    def __len__(self):
        return len(tiny.listed())

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        batches = tiny.listed()
        if self.epoch >= self.epochs:
            batches[1] = (batches[1][0].index_fill(0, torch.tensor([3]), float("inf")), batches[1][1])
        return iter(batches)


def with_batches(batches):
    data = tiny.data()
    data.train_batches = batches
    return data


def infinite_later():
    return with_batches(Late(1))


def nan_in_second():
    batches = tiny.listed()
    batches[1] = (batches[1][0] * float("nan"), batches[1][1])
    return with_batches(batches)


def nan_weights():
    model = tiny.network()
    model[3].weight.data[1, 1, 1, 1] = float("nan")
    return model


class Hungry(torch.nn.Sequential):
    left, error = 7, None

    def forward(self, x):
        if self.training:
            Hungry.left -= 1
        if Hungry.left < 0:
            raise self.error
        return super().forward(x)


def hungry(kind):
    def make():
        Hungry.left = 7
        model = Hungry(*tiny.network())
        model.error = NO_MEMORY[kind]
        return model

    return make


gpu, cpu, python = hungry("gpu"), hungry("cpu"), hungry("python")
"""


@pytest.fixture
def spoilt(tmp_path: Path) -> Path:
    path = tmp_path / "spoilt.py"
    path.write_text(SPOILT.format(folder=str(trials.TINY.parent)))
    return path


def line(*arguments: object) -> str:
    """The one line that a command ends with, which fails because of what it was given."""
    words = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(words), trials.often():
        assert trials.command(*arguments) == 2
    found = [each for each in words.getvalue().splitlines() if each.startswith("ifso: error: ")]
    assert len(found) == 1
    assert "Traceback" not in words.getvalue()
    return found[0]


def given(command: tuple[object, ...], option: str, value: object) -> tuple[object, ...]:
    """The same command with another value of an option."""
    place = command.index(option)
    return (*command[: place + 1], value, *command[place + 2 :])


def test_training_on_a_bad_batch_names_it_and_leaves_nothing(spoilt: Path, tmp_path: Path) -> None:
    told = line(*given(trials.TRAIN, "--data", f"{spoilt}:nan_in_second"), "--out", tmp_path / "run")
    assert "the loss was nan in epoch 1 of training: batch 1 of them, from 0, holds NaN or infinity" in told
    assert not (tmp_path / "run").exists()


def test_training_on_data_that_goes_bad_keeps_the_epochs_before(spoilt: Path, tmp_path: Path) -> None:
    told = line(*given(trials.TRAIN, "--data", f"{spoilt}:infinite_later"), "--out", tmp_path / "run")
    assert "in epoch 2 of training: batch 1 of them" in told
    assert (tmp_path / "run" / "training.safetensors").is_file()
    trials.readable(tmp_path / "run")


def test_pruning_on_a_bad_batch_keeps_the_last_good_state(spoilt: Path, tmp_path: Path) -> None:
    told = line(*given(trials.PRUNE, "--data", f"{spoilt}:nan_in_second"), "--out", tmp_path / "run")
    assert "batches up to 2 of epoch 0 hold NaN or infinity (1 of them)" in told
    assert "after 1 removals" in told
    trials.readable(tmp_path / "run")


@pytest.mark.parametrize("command", [trials.TRAIN, trials.PRUNE], ids=["train", "prune"])
def test_weights_that_are_no_numbers_are_refused_by_name(command: tuple[str, ...], spoilt: Path, tmp_path: Path):
    told = line(*given(command, "--model", f"{spoilt}:nan_weights"), "--out", tmp_path / "run")
    assert told == "ifso: error: 3.weight of the network holds NaN or infinity; give other weights"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["gpu", "cpu", "python"])
def test_memory_that_runs_out_in_training(kind: str, spoilt: Path, tmp_path: Path) -> None:
    told = line(*given(trials.TRAIN, "--model", f"{spoilt}:{kind}"), "--out", tmp_path / "run")
    assert "there is too little memory for a batch of 128; give a smaller one" in told
    assert (tmp_path / "run" / "training.safetensors").is_file()
    trials.readable(tmp_path / "run")


@pytest.mark.parametrize("kind", ["gpu", "cpu", "python"])
def test_memory_that_runs_out_in_pruning(kind: str, spoilt: Path, tmp_path: Path) -> None:
    told = line(*given(trials.PRUNE, "--model", f"{spoilt}:{kind}"), "--out", tmp_path / "run")
    assert told == "ifso: error: out of memory with a single sample; prune on a larger device"


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    assert not out_of_memory(RuntimeError("shapes do not fit"))
    assert not out_of_memory(None)
    told = ValueError("a word")
    told.__cause__ = torch.OutOfMemoryError("too much")
    assert out_of_memory(told)
