"""Which layers lose units: ``ignore``, ``only`` and floors, by name, by pattern and by module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_runs import SmallResNet, listed, loss_fn
from torch import nn

import ifso
from ifso.errors import BudgetError, IfsoError, TraceError


def pruned(budget: float = 0.6, **options: Any) -> SmallResNet:
    model = SmallResNet(width=8, inner=8)
    choice = {name: value(model) if callable(value) else value for name, value in options.items()}
    ifso.prune(
        model, listed(), loss_fn, budget=ifso.Budget(macs=budget), example_inputs=torch.zeros(1, 2, 5, 5),
        progress=False, **choice,
    )  # fmt: skip
    return model


def widths(model: SmallResNet) -> dict[str, int]:
    return {name: module.out_channels for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}


@pytest.mark.parametrize("ignore", [("one.conv1",), ("o*.conv1",), lambda model: [model.one.conv1]])
def test_ignored_layers_by_name_pattern_and_module(ignore: Any):
    found = widths(pruned(ignore=ignore))
    assert found["one.conv1"] == 8
    assert found["two.conv1"] < 8


@pytest.mark.parametrize(
    "only", [("one.conv1", "two.conv1"), ("*.conv1",), lambda model: [model.one.conv1, model.two.conv1]]
)
def test_only_named_layers_lose_units(only: Any):
    found = widths(pruned(0.7, only=only))
    assert {found[name] for name in ("stem", "one.conv2", "two.conv2")} == {8}
    assert found["one.conv1"] + found["two.conv1"] < 16


def test_only_says_what_stays_where_the_budget_cannot_be_met():
    with pytest.raises(BudgetError, match=r"only=\('one\.conv1',\) \(without it"):
        pruned(0.3, only=("one.conv1",))


def test_a_pattern_is_not_spelled_out_in_an_error():
    with pytest.raises(BudgetError, match="nothing of stem") as caught:
        pruned(0.3, only=("one.*",))
    assert "only=('one.conv1', " in str(caught.value)
    assert "one.conv1.weight" not in str(caught.value)


def test_a_group_that_other_layers_make_too_stays_whole():
    with pytest.raises(BudgetError, match="only= names other layers"):
        pruned(0.9, only=("stem",))


@pytest.mark.parametrize("schedule", ["staged", "one-shot"])
def test_floors_of_single_layers(schedule: str):
    options = {"schedule": schedule, "criterion": "magnitude", "round_to": None}
    free = widths(pruned(0.35, **options))
    assert 0 < min(free["one.conv1"], free["two.conv1"]) < 6
    for floors in ({"min_units": {"one.conv1": 6}}, {"min_share": {"*": 0.0, "one.conv1": 0.75}}):
        assert widths(pruned(0.35, **options, **floors))["one.conv1"] == 6


def test_the_last_pattern_that_fits_counts():
    found = widths(pruned(0.5, min_share={"*.conv1": 0.2, "two.conv1": 0.99}))
    assert found["two.conv1"] == 8 > found["one.conv1"]


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"ignore": "stem"}, BudgetError, r"ignore='stem' is one string; give a tuple"),
        ({"only": "stem"}, BudgetError, r"only='stem' is one string"),
        ({"only": ("stm",)}, TraceError, r"only names 'stm', which is no module .* did you mean 'stem'\?"),
        ({"ignore": ("layer*",)}, TraceError, r"ignore names 'layer\*', which is no module"),
        ({"ignore": [nn.ReLU()]}, TraceError, "ignore holds a ReLU that is no part of SmallResNet"),
        ({"ignore": [3]}, TraceError, "ignore holds 3; give names of modules"),
        ({"min_units": {"nowhere": 3}}, TraceError, "min_units names 'nowhere'"),
        ({"min_units": {"stem": 0}}, BudgetError, "min_units must be a whole number of channels from 1 up, got 0"),
        ({"min_share": {"stem": 2.0}}, BudgetError, "min_share must be a share"),
    ],
)
def test_what_is_refused_in_one_line(options: dict[str, Any], kind: type[IfsoError], message: str):
    with pytest.raises(kind, match=message) as refused:
        pruned(**options)
    assert "\n" not in str(refused.value)


def test_a_run_with_floors_and_choices_goes_on_and_refuses_others(tmp_path):
    model = SmallResNet(width=8, inner=8)
    options: dict[str, Any] = {
        "budget": ifso.Budget(macs=0.7), "example_inputs": torch.zeros(1, 2, 5, 5), "progress": False,
        "only": ("*.conv1",), "min_units": {"one.*": 3},
    }  # fmt: skip
    ifso.prune(model, listed(), loss_fn, out=tmp_path / "run", **options)
    again = SmallResNet(width=8, inner=8)
    ifso.prune(again, listed(), loss_fn, resume=tmp_path / "run", **options)
    assert widths(again) == widths(model)
    other = SmallResNet(width=8, inner=8)
    with pytest.raises(IfsoError, match="min_units"):
        ifso.prune(other, listed(), loss_fn, resume=tmp_path / "run", **{**options, "min_units": 3})
