"""``ifso train``: what it makes is what ``ifso prune`` begins with; it goes on where it was interrupted."""

import argparse
import dataclasses
import io
import json
import shlex
from types import SimpleNamespace

import pytest
import torch
from interrupting import interrupt_at
from rich.console import Console
from safetensors.torch import load_file

import ifso
from ifso.cli import train
from ifso.cli.main import main
from ifso.cli.progress import PlainTrainingProgress, RichTrainingProgress
from ifso.cli.train import FIELDS, gather, settings_of
from ifso.data import open_data
from ifso.training.evaluation import evaluate
from ifso.training.precision import PRECISIONS
from ifso.training.settings import RECIPES, SCHEDULES, TrainSettings, training_recipe
from ifso.training.trainer import Epoch, fit

HEAD = {"format": "ifso-run", "version": 1, "settings": {}}
NET = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 10))

def wide():
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))

class Outside:
    train_batches = test_batches = [(torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 12]))]

class Odd:
    train_batches = test_batches = [(torch.randn(4, 1, 9, 9), torch.tensor([0, 1, 2, 3]))]
"""


@pytest.fixture
def net(tmp_path):
    (tmp_path / "net.py").write_text(NET)
    return f"{tmp_path}/net.py"


@pytest.fixture
def out(tmp_path):
    return tmp_path / "base"


@pytest.fixture
def command(net, out):
    return ["train", "--model", f"{net}:make", "--data", "digits", "--out", str(out), "--epochs", "2"]


class TestTrained:
    def test_as_by_hand_and_good_for_pruning(self, command, net, out, capsys):
        assert main([*command, "--recipe", "scratch", "--seed", "4", "--json"]) == 0
        summary = json.loads(capsys.readouterr().out)
        torch.manual_seed(4)
        model = ifso.create_model(f"{net}:make")
        data, settings = open_data("digits", seed=4), training_recipe("scratch", epochs=2, seed=4)
        fit(model, data.train_batches(256), settings)
        stored = load_file(out / "model.safetensors")
        assert all(torch.equal(stored[name], value) for name, value in model.state_dict().items())
        assert summary["last_top1"] == evaluate(model, data.test_batches()).top1
        assert summary["settings"] == settings.as_dict()
        pruning = shlex.split("--macs 0.7 --criterion magnitude --schedule one-shot --recalibrate 0 --data digits")
        named = ["--model", f"{net}:make", "--weights", str(out / "model.safetensors"), "--out", f"{out}-pruned"]
        assert main(["prune", *named, *pruning]) == 0

    def test_a_table_and_lines_for_people(self, command, out, capsys):
        assert main(command) == 0
        printed = capsys.readouterr()
        assert printed.out.startswith("Accuracy in per cent ± standard error on test images")
        assert printed.out.splitlines()[-1] == f"weights: {out / 'model.safetensors'}"
        lines = printed.err.splitlines()
        assert [line.split("epoch")[1][:6] for line in lines if "epoch=" in line] == ["=1/2 l", "=2/2 l"]

    def test_on_from_weights(self, command, net, out, tmp_path, capsys):
        torch.manual_seed(7)
        model = ifso.create_model(f"{net}:make")
        ifso.save(model, tmp_path / "given")
        command += ["--weights", str(tmp_path / "given" / "model.safetensors"), "--lr", "0", "--json"]
        assert main(command) == 0
        summary = json.loads(capsys.readouterr().out)
        truth = evaluate(model, open_data("digits").test_batches()).top1
        assert summary["before"] == {"weights given": truth}
        assert torch.equal(load_file(out / "model.safetensors")["4.weight"], model[4].weight)


class TestResume:
    def test_the_same_bits_with_the_command_that_is_shown(self, command, out, monkeypatch, capsys):
        command += ["--ema", "0.9", "--evaluate-every", "2", "--validation", "100", "--seed", "3"]
        assert main(command) == 0
        whole = out.rename(out.with_name("whole"))
        interrupt_at(monkeypatch, 1.5)
        assert main(command) == 130
        shown = capsys.readouterr().err.splitlines()[-2]
        assert shown == f"to go on: ifso train --resume --out {out}"
        monkeypatch.undo()
        assert main(shlex.split(shown.removeprefix("to go on: ifso "))) == 0
        assert "resumed_at=1" in capsys.readouterr().err
        assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
        assert main(shlex.split(shown.removeprefix("to go on: ifso "))) == 0

    def test_others_are_refused(self, command, net, out, monkeypatch, capsys):
        interrupt_at(monkeypatch, 1.5)
        assert main(command) == 130
        monkeypatch.undo()
        capsys.readouterr()
        for options, message in {
            f"--model {net}:wide": "model is 'net.py:wide' and was 'net.py:make'",
            "--epochs 3 --lr 0.2": "epochs is 3 and was 2; lr is 0.2 and was not set",
        }.items():
            assert main(["train", "--resume", "--out", str(out), *options.split()]) == 2
            assert capsys.readouterr().err == f"ifso: error: other settings than the run in {out}: {message}\n"
        assert main(command) == 2
        assert "already holds a run (1 epochs, unfinished); resume it" in capsys.readouterr().err

    def test_other_weights_of_the_same_name_are_refused(self, command, out, tmp_path, monkeypatch, capsys):
        given, other = tmp_path / "given", tmp_path / "other"
        for place, seed in ((given, "1"), (other, "2")):
            assert main([*command[: command.index("--out")], "--epochs", "1", "--seed", seed, "--out", str(place)]) == 0
        interrupt_at(monkeypatch, 1.5)
        assert main([*command, "--weights", str(given / "model.safetensors")]) == 130
        monkeypatch.undo()
        capsys.readouterr()
        resumed = ["train", "--resume", "--out", str(out)]
        assert main([*resumed, "--weights", str(other / "model.safetensors")]) == 2
        assert f"other settings than the run in {out}: the weights are other ones" in capsys.readouterr().err
        assert main(resumed) == 0

    def test_nothing_to_resume(self, out, capsys):
        assert main(["train", "--resume", "--out", str(out)]) == 2
        assert "holds no run to resume" in capsys.readouterr().err


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ("--epochs 0", "--epochs 0 trains nothing; give 1 or more"),
            ("--epochs -1", "epochs must be a whole number from 0"),
            ("--epochs 2 --warm-up 2", "2 epochs of warm-up leave nothing of 2"),
            ("--epochs 0 --warm-up 1", "--epochs 0 trains nothing"),
            ("--recipe best", "recipe 'best' is unknown; choose one of paper, brief, short, quick, ours"),
            ("--schedule slow", "schedule 'slow' is unknown"),
            ("--milestones 0.8 0.6", "must be rising shares of the run"),
            ("--batch 100 --accumulate 3", "a batch of 100 cannot be cut into 3"),
            ("--batch 5000", "cannot be filled by 1442 training images"),
            ("--validation 2000", "1442 training images that leaves some to train on, got 2000"),
            ("--data cifar10:none.npz", "none.npz"),
            ("--data NET:Outside", "label 12 is outside the 10 outputs"),
            ("--data NET:Odd", "1×9×9"),
            ("--model ifso:resnet20", "1×8×8"),
            ("--model ifso:resnet21", "no model 'ifso:resnet21'"),
            ("--weights none.safetensors", "none.safetensors"),
            ("--weights WIDE", "does not fit the model: 7 of another shape (0.weight [8, 1, 3, 3] for [6, 1, 3, 3]"),
            ("--device tpu9", "device 'tpu9' cannot be used"),
            ("--precision int4", "precision 'int4' is unknown"),
            ("--lr 1e30", "lower the learning rate"),
        ],
    )
    def test_one_line_and_nothing_left(self, options, message, command, net, out, tmp_path, capsys):
        if "WIDE" in options:
            ifso.save(ifso.create_model(f"{net}:wide"), tmp_path / "wide")
        given = options.replace("NET", net).replace("WIDE", str(tmp_path / "wide" / "model.safetensors"))
        assert main([*command, *given.split()]) == 2
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ifso: error: ")]
        assert len(errors) == 1
        assert message in errors[0]
        assert not out.exists()

    def test_what_is_missing(self, out, capsys):
        assert main(["train", "--data", "digits", "--out", str(out)]) == 2
        assert "--model is missing; ifso train --help" in capsys.readouterr().err


class TestOptions:
    def test_every_setting_is_an_option(self):
        assert {field.name for field in dataclasses.fields(TrainSettings)} == set(FIELDS)
        parser = argparse.ArgumentParser()
        for add in (train.add_recipe, train.add_data, train.add_running):
            add(parser)
        elsewhere = {"distill", "temperature", "seed"}
        assert set(FIELDS) - elsewhere <= {action.dest for action in parser._actions}
        shown = " ".join(parser.format_help().split())
        for name in (*RECIPES, *SCHEDULES, *PRECISIONS):
            assert name in shown

    def test_all_of_them_reach_the_settings(self, tmp_path):
        parser = argparse.ArgumentParser()
        for add in (train.add_recipe, train.add_data, train.add_running):
            add(parser)
        given = (
            "--recipe ours --epochs 7 --batch 64 --lr 0.2 --schedule step --milestones 0.3 0.5 --factor 0.2 "
            "--warm-up 1 --momentum 0.8 --no-nesterov --weight-decay 0.001 --decay-norms --label-smoothing 0.1 "
            "--ema 0.99 --clip 2 --accumulate 2 --precision bf16 --channels-last --compile"
        )
        options = gather(parser.parse_args(given.split()), tmp_path, {"seed": 5, "distill": 0.5}, "ifso train")
        assert settings_of(options) == TrainSettings(
            epochs=7, batch=64, lr=0.2, schedule="step", milestones=(0.3, 0.5), factor=0.2, warm_up=1.0, momentum=0.8,
            nesterov=False, weight_decay=0.001, decay_all=True, label_smoothing=0.1, ema=0.99, clip=2.0, accumulate=2,
            precision="bf16", channels_last=True, compile=True, distill=0.5, temperature=2.0, seed=5,
        )  # fmt: skip

    @pytest.mark.parametrize(
        ("device", "precision", "settings"),
        [("cpu", None, ("float32", False)), ("cuda:1", None, ("bf16", True)), ("cuda", "tf32", ("tf32", True))],
    )
    def test_a_gpu_has_defaults_of_its_own(self, device, precision, settings, tmp_path):
        args = SimpleNamespace(device=device, precision=precision, resume=False)
        found = settings_of(gather(args, tmp_path, {}, "ifso train"))
        assert (found.precision, found.channels_last) == settings

    @pytest.mark.parametrize(("begun_on", "precision"), [("cuda", "bf16"), ("cpu", "float32")])
    def test_a_training_that_goes_on_elsewhere_keeps_its_precision(self, begun_on, precision, tmp_path):
        begun = gather(SimpleNamespace(device=begun_on, resume=False), tmp_path, {}, "ifso train")
        (tmp_path / "config.json").write_text(json.dumps({**HEAD, "about": {"arguments": begun}}))
        args = SimpleNamespace(device="cpu" if begun_on == "cuda" else "cuda", resume=True)
        found = gather(args, tmp_path, {}, "ifso train")
        assert (found["device"], settings_of(found).precision) == (args.device, precision)


class TestProgress:
    def test_lines_every_few_seconds(self):
        file, now = io.StringIO(), SimpleNamespace(time=0.0)
        shown = PlainTrainingProgress("finetune", file, lambda: now.time)
        shown.started("a", 0, 4)
        now.time = 1.0
        shown.stepped("a", 0.5)
        now.time = 2.0
        shown.ended("a", Epoch(1, 0.5, 0.1, 2.0, {"top1": 50.0}))
        now.time = 3.0
        shown.ended("a", Epoch(2, 0.5, 0.1, 2.0, {"top1": 90.0}, samples=900))
        now.time = 8.0
        shown.stepped("a", 2.5)
        now.time = 10.0
        shown.ended("a", Epoch(4, 0.25, 0.1, 2.0))
        assert file.getvalue().splitlines() == [
            "finetune: a start epochs=4",
            "finetune: a epoch=1/4 loss=0.5 lr=0.1 top1=50.00 elapsed=0:00:02 left=0:00:06",
            "finetune: a epoch=2.50/4 loss=0.5 lr=0.1 top1=90.00±1.00 elapsed=0:00:08 left=0:00:05",
            "finetune: a epoch=4/4 loss=0.25 lr=0.1 elapsed=0:00:10 left=0:00:00",
        ]

    def test_a_bar_for_each_on_a_terminal(self):
        console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
        shown = RichTrainingProgress(console, clock=lambda: 6.0, refresh=False)
        shown.started("runs/a", 0, 4)
        shown.started("runs/[b]", 2, 4)
        shown.stepped("runs/[b]", 2.5)
        shown.stepped("runs/[b]", 3.5)
        shown.ended("runs/a", Epoch(1, 0.5, 0.1, 2.0, {"top1": 90.0}, samples=900))
        shown.said("something")
        shown.finished()
        text = console.file.getvalue()
        assert "epoch 1/4 loss 0.5 top1 90.00 ± 1.00 0:00:00 left 0:00:00 runs/a" in text
        assert "epoch 2/4 0:00:00 left 0:00:00 runs/[b]" in text
        assert "something" in text
