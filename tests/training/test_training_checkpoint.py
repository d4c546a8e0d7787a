"""Checkpoints of a training: whole after a kill at any moment, refused when damaged or of something else."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from ifso.errors import RunError
from ifso.training.checkpoint import (
    FILE,
    check_same_model,
    check_same_settings,
    copy_tensors_,
    describe_model,
    load_checkpoint,
    restore_rng,
    rng_states,
    save_checkpoint,
)
from ifso.training.settings import TrainSettings, training_recipe

FACTS = {"epoch": 3, "history": [{"loss": 0.5, "top5": None}], "settings": TrainSettings().as_dict()}


def names(folder):
    return [path.name for path in folder.iterdir()]


def refused(message, function, *arguments):
    with pytest.raises(RunError, match=message) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_was_stored_comes_back(tmp_path):
    tensors = {
        "weight": torch.randn(3, 4),
        "seen": torch.tensor(7),
        "half": torch.randn(2).bfloat16(),
        "view": torch.randn(4, 6)[:, ::2],
        "rng.cpu": torch.get_rng_state(),
    }
    folder = tmp_path / "new" / "run"
    assert load_checkpoint(folder, "cpu") is None
    save_checkpoint(folder, tensors, FACTS)
    found, facts = load_checkpoint(folder, "cpu")
    assert facts == FACTS
    assert found.keys() == tensors.keys()
    assert all(found[name].dtype == value.dtype and torch.equal(found[name], value) for name, value in tensors.items())
    save_checkpoint(folder, {"weight": torch.ones(1)}, {**FACTS, "epoch": 4})
    found, facts = load_checkpoint(folder, "cpu")
    assert (list(found), facts["epoch"]) == (["weight"], 4)
    assert names(folder) == [FILE]


def test_only_states_of_generators_stay_on_the_cpu(tmp_path):
    save_checkpoint(tmp_path, {"weight": torch.ones(2), **rng_states("cpu")}, {})
    found, _ = load_checkpoint(tmp_path, "meta")
    assert {name: tensor.device.type for name, tensor in found.items()} == {"weight": "meta", "rng.cpu": "cpu"}


def test_random_numbers_go_on_where_they_were(tmp_path):
    torch.manual_seed(5)
    torch.rand(3)
    save_checkpoint(tmp_path, rng_states("cpu"), {})
    wanted = torch.rand(4)
    torch.manual_seed(9)
    tensors, _ = load_checkpoint(tmp_path, "cpu")
    restore_rng(tensors, "cpu")
    assert torch.equal(torch.rand(4), wanted)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.99])
def test_damage_is_refused(tmp_path, share):
    save_checkpoint(tmp_path, {"weight": torch.randn(50, 50)}, FACTS)
    whole = (tmp_path / FILE).read_bytes()
    place = int(share * len(whole))
    (tmp_path / FILE).write_bytes(whole[:place])
    refused(f"{FILE}: .*; to train from the beginning, delete the file", load_checkpoint, tmp_path, "cpu")
    flipped = bytearray(whole)
    flipped[place] ^= 1
    (tmp_path / FILE).write_bytes(flipped)
    refused(f"{FILE}: .*delete the file", load_checkpoint, tmp_path, "cpu")


def test_a_file_of_something_else_is_refused(tmp_path):
    from ifso.common.serialization import write_tensor_file

    write_tensor_file(tmp_path / FILE, {"weight": torch.ones(1)})
    refused("holds no training", load_checkpoint, tmp_path, "cpu")


def test_facts_that_json_has_not_leave_the_former_file(tmp_path):
    save_checkpoint(tmp_path, {}, FACTS)
    refused("cannot be written as JSON", save_checkpoint, tmp_path, {}, {"loss": float("nan")})
    assert load_checkpoint(tmp_path, "cpu")[1] == FACTS
    assert names(tmp_path) == [FILE]


def test_a_place_that_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    refused("file", save_checkpoint, tmp_path / "file", {}, {})


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from ifso.training.checkpoint import load_checkpoint, save_checkpoint

torch.set_num_threads(1)
folder, chance, epoch = Path(sys.argv[1]), random.Random(0), 0
save_checkpoint(folder, {"weight": torch.zeros(200000)}, {"epoch": 0})
for _ in range(25):
    child = os.fork()
    while not child:
        epoch += 1
        save_checkpoint(folder, {"weight": torch.full((200000,), float(epoch))}, {"epoch": epoch})
    time.sleep(0.04 * chance.random())
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    tensors, facts = load_checkpoint(folder, "cpu")
    assert facts["epoch"] >= epoch and bool((tensors["weight"] == facts["epoch"]).all())
    epoch = facts["epoch"]
print(epoch)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
def test_killed_at_any_moment_the_former_or_the_new_one_is_there(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 5
    save_checkpoint(tmp_path, {}, FACTS)
    assert names(tmp_path) == [FILE]


@pytest.mark.parametrize("moment", ["write_tensors", "sync_file"])
def test_a_failure_at_any_moment_leaves_the_former_one(tmp_path, monkeypatch, moment):
    from ifso.common import files
    from ifso.common import serialization as stored

    save_checkpoint(tmp_path, {"weight": torch.zeros(3)}, FACTS)

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stored if moment == "write_tensors" else files, moment, fail)
    refused("No space left on device; make room", save_checkpoint, tmp_path, {"weight": torch.ones(3)}, FACTS)
    monkeypatch.undo()
    assert not load_checkpoint(tmp_path, "cpu")[0]["weight"].any()


def network(width=4, bias=True):
    return nn.Sequential(nn.Linear(3, width, bias=bias), nn.BatchNorm1d(width), nn.Linear(width, 2))


def test_a_fingerprint_is_of_shapes_and_names_not_of_values():
    def fingerprint(model):
        return describe_model(model)["fingerprint"]

    known = fingerprint(network())
    assert fingerprint(network()) == known
    others = (network(5), network(bias=False), network().double(), nn.Sequential(*network(), nn.PReLU()))
    assert len({known, *map(fingerprint, others)}) == 5


def test_another_model_is_refused_with_the_first_differences():
    before = json.loads(json.dumps(describe_model(network())))
    check_same_model(network(), before, "runs/x")
    line = refused("the training in runs/x is of another network", check_same_model, network(5), before, "runs/x")
    assert "0.weight is float32 [5, 3] and was float32 [4, 3]; 0.bias is float32 [5] and was float32 [4]" in line
    assert line.endswith(" and 4 more; resume with the same network, or train in another folder")
    line = refused("0.bias is not there and was float32", check_same_model, network(bias=False), before, "x")
    assert "more" not in line


def test_other_settings_are_refused_with_what_differs():
    before = json.loads(json.dumps(training_recipe("paper").as_dict()))
    check_same_settings(training_recipe("paper"), before, "runs/x")
    message = "the training in runs/x has other settings: epochs is 100 and was 200; resume with the same"
    refused(message, check_same_settings, training_recipe("paper", epochs=100), before, "runs/x")
    message = r"milestones is \[0.5\] and was \[0.6, 0.8\]"
    refused(message, check_same_settings, training_recipe("paper", milestones=(0.5,)), before, "runs/x")
    line = refused("other settings", check_same_settings, training_recipe("quick", lr=0.2, seed=3), before, "runs/x")
    assert "lr is 0.2 and was 0.1; schedule is 'one-cycle' and was 'step'" in line
    assert "more; resume" in line


@pytest.mark.parametrize("field", dataclasses.fields(TrainSettings), ids=lambda field: field.name)
def test_no_setting_may_change(field):
    other = {
        "schedule": "cosine", "precision": "bf16", "milestones": (0.5,), "batch": 64, "accumulate": 2, "epochs": 7,
        "warm_up_steps": 5, "opt": "adamw",
    }  # fmt: skip
    value = other.get(field.name, not field.default if isinstance(field.default, bool) else 0.5)
    rate = {"lr": TrainSettings().lr} if field.name == "opt" else {}  # other optimizers have other rates
    now = training_recipe("paper", **rate, **{field.name: 3 if field.name == "seed" else value})
    refused(f"other settings: {field.name} is ", check_same_settings, now, TrainSettings().as_dict(), "x")


def test_tensors_are_filled_in_place_all_or_none():
    live = {"a": torch.zeros(2), "b": torch.zeros(3)}
    place = live["a"].data_ptr()
    refused(r"b is float32 \[3\] and was not there", copy_tensors_, live, {"a": torch.ones(2)})
    refused(
        r"c is not there and was float32",
        copy_tensors_,
        live,
        {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(1)},
    )
    assert not live["a"].any()
    copy_tensors_(live, {"a": torch.ones(2), "b": torch.full((3,), 2.0)})
    assert live["a"].data_ptr() == place
    assert live["a"].tolist() + live["b"].tolist() == [1, 1, 2, 2, 2]
