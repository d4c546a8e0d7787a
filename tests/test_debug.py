"""Errors in a user's own code name the file and the line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ifso
from ifso.errors import ScoreError, TraceError, users_line


def line_of(words: str) -> int:
    """Where these words stand in this file, for the first time."""
    return next(number for number, line in enumerate(Path(__file__).read_text().splitlines(), 1) if words in line)


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.reshape(-1, 3))  # does not fit


def test_a_loss_that_fails():
    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return {"output": model(batch)}["loss"]  # there is no such key

    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    place = rf"\(\S*test_debug\.py, line {line_of('# there is no such key')}\)"
    with pytest.raises(ScoreError, match=rf"loss_fn failed.*{place}; ") as refused:
        ifso.prune(
            net, [torch.zeros(2, 4)], loss_fn, budget=ifso.Budget(macs=0.5), example_inputs=torch.zeros(1, 4),
            progress=False,
        )  # fmt: skip
    assert "\n" not in str(refused.value)


def test_a_network_that_does_not_run():
    with pytest.raises(TraceError, match=rf"test_debug\.py, line {line_of('# does not fit')}\); check that"):
        ifso.trace(Broken(), torch.zeros(1, 4))


def test_an_error_in_installed_code_alone_names_no_line():
    try:
        re.compile("(")
    except re.error as error:
        found = error.with_traceback(error.__traceback__.tb_next)
    assert users_line(found) == ""
    assert users_line(ValueError()) == ""
