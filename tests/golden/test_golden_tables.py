"""What is printed, and scores in float64, of a small network with couplings of every kind."""

from __future__ import annotations

import re

import numpy
import pytest
import torch
from golden_runs import command
from golden_store import at_home, check_json, check_text, steady
from internals import registries
from small_net import small
from torch.nn.functional import cross_entropy

import ifso

EXACT = {"rel_tol": 1e-9, "abs_tol": 1e-15}
SCORED = {
    **{name: (name, {}) for name in registries()["criteria"]},
    **{f"ifso-{name}": ("ifso", {"inverse": name}) for name in registries()["solvers"] if name != "jacobian"},
    "ifso-layers": ("ifso", {"coupled": "layers"}),
    "true-loss-loss": ("true-loss", {"target": "loss"}),
}
"""Name of a golden file: criterion and options."""

OF_SAMPLES = ("ifso-sherman-morrison",)
"""Those that need gradients of single samples, which batch norm in train mode has not."""

DRAWN = ("true-loss",)
"""Those that draw numbers with torch, whose last bits depend on the processor."""


@pytest.fixture
def task():
    """Network, graph, loss and two batches, in float64."""
    model = small().double()
    images = torch.from_numpy(numpy.random.Generator(numpy.random.PCG64(7)).standard_normal((16, 1, 8, 8)))
    labels = torch.arange(16) % 10
    batches = [(images[:8], labels[:8]), (images[8:], labels[8:])]
    return model, ifso.trace(model, images[:1]), batches


def without_time(text):
    """The table of stages ends with seconds."""
    return steady(re.sub(r"^(\d+ .*?) +\d+\.\d$", r"\1 <seconds>", text, flags=re.MULTILINE))


def loss(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


def test_graph(task):
    _, graph, _ = task
    check_text("print-graph", str(graph))


def test_graph_of_a_command():
    check_text("print-inspect", command("inspect", "ifso:resnet8-digits").out)


def test_result(task):
    model, _, batches = task
    result = ifso.prune(
        model, batches, loss, budget=ifso.Budget(macs=0.6), example_inputs=batches[0][0][:1], progress=False
    )
    check_text("print-result", without_time(str(result)))


def test_result_of_algorithm_2(task):
    model, _, batches = task
    result = ifso.prune(
        model, batches, loss, budget=ifso.Budget(params=0.7, macs=0.8), example_inputs=batches[0][0][:1],
        preset="paper", accumulate=2, weight_update=1, progress=False,
    )  # fmt: skip
    check_text("print-result-paper", without_time(str(result)))


def test_costs(task):
    model, graph, _ = task
    keep = {group.name: torch.arange(group.size) % 3 > 0 for group in graph.groups}
    keep = ifso.balance(graph, keep)
    found = {
        "all": ifso.cost(model, graph).as_dict(),
        "kept": ifso.cost(model, graph, keep).as_dict(),
        "keep": {name: choice.int().tolist() for name, choice in keep.items()},
        "frozen": [[each.parameter, each.dim, each.reason] for each in graph.frozen],
    }
    check_json("costs", found)


@pytest.mark.parametrize("name", SCORED)
def test_scores_in_float64(name, task):
    model, graph, batches = task
    criterion, options = SCORED[name]
    model.train(name not in OF_SAMPLES)
    scores = ifso.score(model, graph, loss, batches, criterion=criterion, **options)
    tolerance = None if name in DRAWN and not at_home() else EXACT
    check_json(f"score-{name}", {group: values.tolist() for group, values in scores.items()}, tolerance)


def test_true_loss_change(task):
    model, graph, batches = task
    keep = {group.name: torch.arange(group.size) % 4 > 0 for group in graph.groups}
    found = ifso.true_loss_change(model, graph, ifso.balance(graph, keep), loss, batches, solver="cg", path_steps=4)
    sums = {name: float(update.square().sum()) for name, update in sorted(found.weight_update.items())}
    values = {"existing": found.existing, "true": found.true, "trust": found.trust, "weight_update": sums}
    check_json("true-loss-change", values, {"rel_tol": 1e-7, "abs_tol": 1e-12})
