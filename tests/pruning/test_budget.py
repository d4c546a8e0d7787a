"""Budgets: what they ask for, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ifso.errors import BudgetError
from ifso.pruning.budget import Budget


def test_targets_are_those_given():
    assert Budget(macs=0.5).targets == {"macs": 0.5}
    given = {"macs": 0.5, "conv_macs": 0.4, "params": 0.3, "activations": 0.9, "latency": 0.8}
    assert Budget(**given).targets == given
    assert Budget(params=np.float32(0.25)).targets == {"params": 0.25}


def test_an_empty_budget_is_refused():
    with pytest.raises(BudgetError, match=r"empty budget.*share KEPT.*macs, conv_macs, params, activations, latency"):
        Budget()


BAD = [
    0,
    1,
    0.0,
    1.0,
    -0.1,
    1.5,
    50,
    True,
    False,
    "0.5",
    float("nan"),
    float("inf"),
    torch.tensor(0.5),
]


@pytest.mark.parametrize("value", BAD, ids=repr)
@pytest.mark.parametrize("name", ["macs", "latency"])
def test_no_share_is_refused_in_one_line(name, value):
    with pytest.raises(BudgetError) as error:
        Budget(**{"params": 0.5, name: value})
    message = str(error.value)
    assert message.startswith(f"{name}={value!r} is not a share between 0 and 1")
    assert "KEPT" in message
    assert f"{name}=0.5 keeps half" in message
    assert "\n" not in message


@pytest.mark.parametrize("shares", [(0.5, 0.8), (0.5, 0.5), (), (0.5, 1.5), (0.5, None), [True, 0.5]])
def test_several_shares_must_be_shares_and_fall(shares):
    with pytest.raises(BudgetError, match=r"macs=.* must (fall|hold shares)"):
        Budget(macs=shares)


def test_several_shares_are_a_path_that_ends_at_the_smallest():
    budget = Budget(macs=[0.8, 0.5], params=0.9)
    assert budget.targets == {"macs": 0.5, "params": 0.9}
    assert budget.path == (Budget(macs=0.8, params=0.9), Budget(macs=0.5, params=0.9))
    with pytest.raises(BudgetError, match="same length"):
        _ = Budget(macs=(0.8, 0.5), params=(0.9, 0.8, 0.7)).path
