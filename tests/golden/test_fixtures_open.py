"""Folders that ifso 0.1.0 wrote open in every later version, and what was interrupted ends as it would have."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from golden_runs import MODEL, WEIGHTS, command, describe, write_weights
from golden_store import at_home
from safetensors.torch import load_file
from small_net import small

import ifso

HERE = Path(__file__).parent
QUICK = ("--repeats", "1", "--latency-batch", "1", "--train-batch", "8")
CHANGING = ("versions", "recipe_sha256", "weights_sha256")
INTERRUPTED = {
    "pruned": ("pruned-interrupted", ("prune", "--resume", "--out", "pruned-interrupted")),
    "staged": ("staged-interrupted", ("prune", "--resume", "--out", "staged-interrupted")),
    "pruned/finetune": ("tuned-interrupted/finetune", ("finetune", "--resume", "tuned-interrupted")),
}
"""Finished folder: the same, interrupted, and the command that goes on with it."""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The folders, and what they were made of."""
    for path in sorted((HERE / "fixtures").glob("*.zip")):
        with zipfile.ZipFile(path) as file:
            file.extractall(tmp_path)
    shutil.copy(HERE / "small_net.py", tmp_path)
    write_weights(tmp_path / WEIGHTS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def answer(*arguments):
    """The JSON document of a command that succeeds."""
    done = command(*arguments, "--json")
    assert done.status == 0, done.err
    return done.document


def read(path):
    return json.loads(Path(path).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["pruned", "staged"])
def test_finished_run_is_shown_and_measured(name, here):
    summary = read(f"{name}/summary.json")
    assert answer("report", name)["runs"] == [name]
    assert "<html" in Path(name, "report.html").read_text(encoding="utf-8")
    found = answer("eval", name, *QUICK)["networks"]
    assert found["pruned"]["macs"] == summary["after"]["macs"]
    accuracies = {measure["stage"]: measure["accuracy"] for measure in summary["measures"]}
    assert found["unpruned"]["top1"] == pytest.approx(accuracies["unpruned"], abs=0.3)
    assert found["pruned"]["top1"] == pytest.approx(summary["measures"][-1]["accuracy"], abs=0.3)


@pytest.mark.parametrize("name", ["pruned", "staged"])
def test_finished_run_is_resumed_as_it_is(name, here):
    before = {path: path.read_bytes() for path in Path(name).glob("*.*")}
    summary = read(f"{name}/summary.json")
    found = answer("prune", "--resume", "--out", name)
    assert {key: found[key] for key in ("kept", "after", "shares", "removals")} == {
        key: summary[key] for key in ("kept", "after", "shares", "removals")
    }
    assert {path: path.read_bytes() for path in before} == before


def test_finished_fine_tuning_is_resumed_as_it_is(here):
    summary = read("pruned/finetune/summary.json")
    (found,) = answer("finetune", "--resume", "pruned")["runs"]
    assert found == {key: value for key, value in summary.items() if key != "digests"}


@pytest.mark.parametrize("finished", INTERRUPTED)
def test_interrupted_ends_as_it_would_have(finished, here):
    folder, arguments = INTERRUPTED[finished]
    assert len(steps(folder)) < len(steps(finished))
    answer(*arguments)
    assert steps(folder) == steps(finished)
    expected, found = (describe(Path(each, "recipe.json")) for each in (finished, folder))
    if at_home():
        assert finished == "staged" or found["weights_sha256"] == expected["weights_sha256"]
    assert without(found) == without(expected)
    weights, tensors = (load_file(Path(each, "model.safetensors")) for each in (finished, folder))
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        name: tensor.shape for name, tensor in weights.items()
    }
    if finished == "staged":
        return  # the last step of the fit came after 0.1.0
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if at_home() else {"rtol": 1e-3, "atol": 1e-4}
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, weights[name], **tolerance)


def steps(folder):
    """The units that went, in that order, or the epochs."""
    return [line.get("units", line.get("epoch")) for line in describe(Path(folder, "metrics.jsonl"))]


def without(recipe):
    return {key: value for key, value in recipe.items() if key not in CHANGING}


@pytest.mark.parametrize("name", ["pruned", "pruned/finetune", "staged", "trained"])
def test_networks_are_loaded(name, here):
    original = small() if name in ("staged", "trained") else ifso.create_model(MODEL)
    model = ifso.load(name, original)
    stored = load_file(Path(name, "model.safetensors"))
    assert model.state_dict().keys() == stored.keys()
    assert all(torch.equal(tensor, stored[key]) for key, tensor in model.state_dict().items())


def test_training_is_gone_on_from(here):
    """What ``ifso train`` left is what ``ifso prune`` takes, and its folder is known as finished."""
    found = answer("train", "--resume", "--out", "trained")
    assert found["last_top1"] == read("trained/summary.json")["last_top1"]
    summary = read("staged/summary.json")
    assert summary["before"] == ifso.cost(small(), ifso.trace(small(), torch.zeros(1, 1, 8, 8))).as_dict()
