"""Commands on data with boxes: train, prune, fine-tune with a teacher, evaluate, go on after Ctrl-C; bad input."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import small_detectors
import torch
from interrupting import interrupt_at
from safetensors.torch import load_file
from small_detectors import boxes, write_coco

from ifso.cli.main import main

NETS = Path(small_detectors.__file__)
SHORT = ["--epochs", "3", "--batch", "4", "--lr", "0.05", "--warm-up-steps", "2"]
PRUNING = ["--macs", "0.7", "--criterion", "magnitude", "--schedule", "one-shot", "--recalibrate", "0", "--batch", "4"]

OWN = """
from types import SimpleNamespace

import torch
from torch import nn

class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1))

    def forward(self, images, targets=None):
        found = self.layers(torch.stack(images)).mean((2, 3))
        if self.training:
            boxes = torch.stack([target["boxes"][0] for target in targets])
            return {"first": (found - boxes).abs().mean(), "second": found.square().mean()}
        one = torch.ones(1)
        return [{"boxes": box[None], "scores": one, "labels": one.long()} for box in found]

def batch(first):
    targets = [
        {"boxes": torch.tensor([[1.0, 1, 6, 6]]), "labels": torch.tensor([1]), "image_id": torch.tensor(number)}
        for number in (first, first + 1)
    ]
    return [torch.rand(3, 8, 8), torch.rand(3, 8, 8)], targets

def data():
    return SimpleNamespace(
        train_batches=[batch(1), batch(3)], test_batches=[batch(5)], num_classes=2, task="detection"
    )
"""

OTHERS = """
import sys

from torch import nn

sys.path.append({folder!r})
from small_detectors import retina

def bright():
    model = retina()
    model.transform.image_mean = [0, 0, 0]
    return model

def plain():
    return nn.Sequential(nn.Conv2d(3, 4, 3))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Files with boxes, and a detector that was trained on them and pruned."""
    project = tmp_path_factory.mktemp("project")
    write_coco(project / "cells", boxes())
    task = ["--model", f"{NETS}:retina", "--data", f"coco:{project}/cells"]
    assert main(["train", *task, *SHORT, "--out", f"{project}/base"]) == 0
    weights = ["--weights", f"{project}/base/model.safetensors"]
    assert main(["prune", *task, *weights, *PRUNING, "--out", f"{project}/half"]) == 0
    return project


def answer(capsys, *argv):
    capsys.readouterr()
    assert main([*map(str, argv), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def complaint(capsys, *argv):
    capsys.readouterr()
    assert main([*map(str, argv)]) == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_training_wrote_what_it_did(made):
    lines = [json.loads(line) for line in (made / "base" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    assert {"map", "map50", "map75", "loss_classification", "loss_bbox_regression"} <= lines[-1].keys()
    settings = json.loads((made / "base" / "config.json").read_text())["settings"]["training"]
    assert (settings["clip"], settings["milestones"], settings["warm_up_steps"]) == (35.0, [8 / 12, 11 / 12], 2)


def test_fine_tuning_with_a_teacher_and_evaluation(made, capsys, tmp_path):
    out = tmp_path / "tuned"
    [summary] = answer(capsys, "finetune", made / "half", *SHORT, "--distill", "--out", out)["runs"]
    assert summary["settings"]["distill"] == 0.5
    assert summary["before"].keys() == {"unpruned", "pruned"}
    assert {"distilled_classes", "distilled_boxes", "classification"} <= summary["losses"].keys()
    assert summary["last_map"] == summary["last"]["map"]
    found = answer(capsys, "eval", out, "--repeats", "1", "--latency-batch", "1")
    networks = found["networks"]
    assert list(networks) == ["unpruned", "pruned", "fine-tuned"]
    assert networks["fine-tuned"]["map"] == pytest.approx(summary["last_map"])
    assert networks["unpruned"]["map"] == pytest.approx(summary["before"]["unpruned"])
    assert networks["pruned"]["macs"] == networks["fine-tuned"]["macs"] <= 0.7 * networks["unpruned"]["macs"]
    assert networks["pruned"]["training_peak_bytes"] < networks["unpruned"]["training_peak_bytes"]
    assert networks["pruned"]["by_category"].keys() == {"square", "disc", "cross"}
    assert (networks["pruned"]["samples"], found["train_batch"]) == (6, 2)


def test_another_teacher(made, capsys, tmp_path):
    """One of another width teaches; one that sees other pixels, classes or anchors, or is none, is refused."""
    tuning, model = ["finetune", made / "half", *SHORT, "--distill"], f"{NETS}:retina"
    [summary] = answer(capsys, *tuning, "--teacher", f"{model},width=12", "--out", tmp_path / "tuned")["runs"]
    assert list(summary["before"]) == ["unpruned", "teacher", "pruned"]
    assert {"distilled_classes", "distilled_boxes"} <= summary["losses"].keys()
    own = tmp_path / "own.py"
    own.write_text(OTHERS.format(folder=str(NETS.parent)))
    for teacher, message in {
        f"{model},classes=5": "of the teacher [1, 160, 5]; give a teacher with the same anchors and classes",
        f"{own}:bright": "image_mean is [0.485, 0.456, 0.406] of the network and [0, 0, 0] of the teacher",
        f"{own}:plain": "the teacher is Sequential; distillation of detectors is for RetinaNet and FCOS",
    }.items():
        assert message in complaint(capsys, *tuning, "--teacher", teacher, "--out", tmp_path / "none")
        assert not (tmp_path / "none").exists()


def test_the_table_of_an_evaluation(made, capsys):
    capsys.readouterr()
    assert main(["eval", str(made / "half"), "--repeats", "1", "--latency-batch", "1", "--only", "pruned"]) == 0
    shown = capsys.readouterr().out
    for label in ("mAP50", "mAP75", "mAP, small boxes", "mAP of disc", "MACs", "peak of a training step, batch 2"):
        assert label in shown
    assert "top-1" not in shown


def test_the_validation_part_has_a_file_of_its_own(made, capsys):
    quick = ["--repeats", "1", "--latency-batch", "1", "--only", "pruned"]
    found = [answer(capsys, "eval", made / "half", "--split", split, *quick) for split in ("validation", "test")]
    assert found[0]["split"] == "validation"
    assert found[0]["networks"]["pruned"]["map"] == found[1]["networks"]["pruned"]["map"]


def test_costs_are_counted_on_an_input_that_is_named(made, capsys):
    quick = ["--repeats", "1", "--latency-batch", "1", "--only", "pruned", "--input", "1,3,32,64"]
    assert answer(capsys, "eval", made / "half", *quick)["counted_on"] == "3x32x64"


def test_gone_on_with_after_ctrl_c(made, capsys, tmp_path, monkeypatch):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    [wanted] = answer(capsys, "finetune", made / "half", *SHORT, "--distill", "--ema", "0.9", "--out", whole)["runs"]
    with monkeypatch.context() as patched:
        interrupt_at(patched, 2.3)
        assert main(["finetune", str(made / "half"), *SHORT, "--distill", "--ema", "0.9", "--out", str(broken)]) == 130
    assert "mAP=" in capsys.readouterr().err
    [found] = answer(capsys, "finetune", made / "half", "--resume", "--out", broken)["runs"]
    assert (broken / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert found["last"] == wanted["last"]


def test_a_detector_and_data_of_your_own(capsys, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    task = ["--model", f"{tmp_path}/own.py:Detector", "--data", f"{tmp_path}/own.py:data", "--recipe", "detection"]
    summary = answer(capsys, "train", *task, "--epochs", 2, "--warm-up-steps", 0, "--out", tmp_path / "run")
    assert summary["losses"].keys() == {"first", "second"}
    assert summary["last_map"] >= 0
    weights = ["--weights", tmp_path / "run" / "model.safetensors"]
    found = answer(capsys, "eval", *task[:4], *weights, "--repeats", 1, "--latency-batch", 1)
    assert found["networks"]["network"]["map"] == pytest.approx(summary["last_map"])


class TestBadInput:
    @pytest.mark.parametrize(
        ("model", "data", "line"),
        [
            ("ifso:resnet20", "coco:{}", "has boxes, but CifarResNet does not take a list of images as a detector"),
            (f"{NETS}:retina", "digits", "digits has a label for each image and no boxes, but the network is"),
            (f"{NETS}:for_one_category", "coco:{}", "has 3 categories, so 4 classes with the background, but"),
        ],
        ids=["a classifier for boxes", "a detector for labels", "too few classes"],
    )
    @pytest.mark.parametrize("command", ["train", "eval"])
    def test_networks_that_do_not_fit(self, made, capsys, tmp_path, command, model, data, line):
        argv = [command, "--model", model, "--data", data.format(made / "cells")]
        argv += ["--out", tmp_path / "run", *SHORT] if command == "train" else ["--train-batch", "2"]
        assert line in complaint(capsys, *argv)
        assert not (tmp_path / "run").exists()

    def test_a_detector_is_not_pruned_on_labels(self, made, capsys, tmp_path):
        argv = ["prune", "--model", f"{NETS}:retina", "--data", "digits", "--macs", "0.5", "--out", tmp_path / "run"]
        assert "digits has no boxes, but the network is a detector" in complaint(capsys, *argv)

    @pytest.mark.parametrize("command", ["train", "prune"])
    def test_without_the_evaluator_nothing_is_begun(self, made, capsys, tmp_path, monkeypatch, command):
        monkeypatch.setitem(sys.modules, "faster_coco_eval", None)
        argv = [command, "--model", f"{NETS}:retina", "--data", f"coco:{made}/cells", "--out", tmp_path / "run"]
        argv += SHORT if command == "train" else ["--macs", "0.5"]
        with monkeypatch.context() as patched:
            patched.setattr("ifso.training.steps.TrainStep.__call__", lambda *_: pytest.fail("a step was made"))
            assert "average precision is computed by faster-coco-eval" in complaint(capsys, *argv)
        assert not (tmp_path / "run").exists()

    def test_settings_that_do_not_fit(self, made, capsys, tmp_path):
        task = ["train", "--model", f"{NETS}:retina", "--data", f"coco:{made}/cells", "--out", tmp_path / "run"]
        assert "500 steps of warm-up leave nothing of the 72 of the run" in complaint(capsys, *task)
        assert "label smoothing is for classifiers" in complaint(capsys, *task, *SHORT, "--label-smoothing", "0.1")
        assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_two_processes_fine_tune_the_detector_of_one(made, capsys, tmp_path):
    """Without norms that learn, images do not see each other: half a batch on each process makes the same steps."""
    task = ["--model", f"{NETS}:frozen", "--data", f"coco:{made}/cells"]
    assert main(["train", *task, *SHORT, "--out", str(tmp_path / "base")]) == 0
    weights = ["--weights", str(tmp_path / "base" / "model.safetensors")]
    assert main(["prune", *task, *weights, *PRUNING, "--out", str(tmp_path / "half")]) == 0
    command = ["finetune", str(tmp_path / "half"), *SHORT, "--distill", "--ema", "0.8"]
    started = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 -m ifso.cli".split()
    done = subprocess.run(
        [*started, *command, "--out", str(tmp_path / "both"), "--json"],
        capture_output=True, text=True, check=False, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    [both], [one] = json.loads(done.stdout)["runs"], answer(capsys, *command, "--out", tmp_path / "one")["runs"]
    assert both["losses"] == pytest.approx(one["losses"], rel=1e-3, abs=1e-6)
    assert both["last_map"] == pytest.approx(one["last_map"], abs=0.1)
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("both", "one")]
    torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-5)
