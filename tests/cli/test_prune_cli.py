"""``ifso prune``: what it passes on, prints, writes and refuses. ``QUICK`` asks for Algorithm 2."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ifso
from ifso.cli.main import main
from ifso.common.serialization import read_tensor_file, write_tensor_file
from ifso.common.text import measured
from ifso.criteria.ifso import Authors, Ifso
from ifso.criteria.registry import names
from ifso.criteria.true_loss import TrueLoss
from ifso.data import open_data
from ifso.pruning import progress
from ifso.pruning import run as pruning_run
from ifso.pruning.budget import NORMALIZERS, PRESETS
from ifso.pruning.result import Check
from ifso.training.evaluation import evaluate
from ifso.training.precision import SCORE_PRECISIONS

NET = """
from pathlib import Path

import torch
from torch import nn

import ifso

def make():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 10),
    )

def again():
    return ifso.load(Path(__file__).parent / "first", make())

class Empty:
    train_batches, input_shape = (), (1, 8, 8)

class Nan:
    train_batches, input_shape = [(torch.full((4, 1, 8, 8), float("nan")), torch.zeros(4, dtype=torch.long))], (1, 8, 8)

class Own:
    train_batches = [(torch.randn(8, 1, 8, 8), torch.randint(0, 10, (8,))) for _ in range(3)]
    input_shape = (1, 8, 8)
"""
QUICK = ["--accumulate", "1", "--batches-per-score", "1", "--batch", "32", "--units-per-step", "2"]


@pytest.fixture
def net(tmp_path):
    path = tmp_path / "net.py"
    path.write_text(NET)
    return f"{path}:make"


@pytest.fixture
def out(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def command(net, out):
    return ["prune", "--model", net, "--data", "digits", "--out", str(out)]


@pytest.fixture
def passed_on(monkeypatch):
    """What ``ifso.prune`` was called with, which does nothing."""

    class Nothing(Exception):
        pass

    seen = {}

    def record(model, train_batches, loss_fn, **options):
        seen.update(options, model=model, train_batches=train_batches, loss_fn=loss_fn)
        raise Nothing

    def call(argv):
        monkeypatch.setattr("ifso.pruning.prune.prune", record)
        with pytest.raises(Nothing):
            main(argv)
        return seen

    return call


def fresh(net):
    path, _, factory = net.rpartition(":")
    names = {}
    exec(Path(path).read_text(), names)
    return names[factory]()


def last_line(captured):
    return captured.err.splitlines()[-1]


class TestRun:
    def test_a_smaller_network_lies_in_the_folder(self, command, net, out, capsys):
        assert main([*command, "--macs", "0.6", *QUICK]) == 0
        captured = capsys.readouterr()
        before, after = fresh(net), ifso.load(out, fresh(net))
        x = torch.zeros(1, 1, 8, 8)
        share = ifso.cost(after, ifso.trace(after, x)).macs / ifso.cost(before, ifso.trace(before, x)).macs
        assert 0.5 < share <= 0.6
        assert f"run folder: {out}" in captured.out
        lines = [line for line in captured.err.splitlines() if line.startswith("prune: ")]
        start = lines.index(f"prune: start model=Sequential units=20 macs=1.0000/0.6 folder={out}")
        assert lines[start + 1].startswith("prune: done=")
        assert sum(line.startswith("prune: done=100% ") for line in lines[start:]) == 1

    def test_json_is_all_that_is_printed(self, command, capsys):
        assert main([*command, "--params", "0.7", *QUICK, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["shares"]["params"] <= 0.7

    def test_accuracy_on_the_test_set_is_told(self, command, capsys):
        assert main([*command, "--macs", "0.8", *QUICK, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert all(0 <= measure["accuracy"] <= 100 for measure in document["measures"])
        assert len(document["measures"]) >= 2

    def test_data_of_a_file_without_a_test_set(self, command, net, capsys):
        command[command.index("digits")] = net.replace(":make", ":Own")
        assert main([*command, "--macs", "0.8", *QUICK]) == 0

    def test_a_network_already_pruned_is_pruned_further(self, command, net, out, capsys):
        assert main([*command, "--macs", "0.7", *QUICK]) == 0
        out.rename(out.with_name("first"))
        command[2] = net.replace(":make", ":again")
        assert main([*command, "--macs", "0.7", *QUICK]) == 0
        first, second = (ifso.load(folder, fresh(net)) for folder in (out.with_name("first"), out))
        assert 0 < second[3].weight.numel() < first[3].weight.numel() < fresh(net)[3].weight.numel()

    def test_scalars_for_tensorboard_lie_in_the_folder(self, command, out):
        pytest.importorskip("tensorboard")
        assert main([*command, "--macs", "0.8", *QUICK, "--tensorboard"]) == 0
        assert list((out / "tensorboard").iterdir())


class TestResume:
    def test_an_interrupted_run_goes_on_with_its_own_settings(self, command, out, monkeypatch, capsys):
        assert main([*command, "--macs", "0.5", *QUICK]) == 0
        whole = out.rename(out.with_name("whole"))
        interrupt_after(monkeypatch, 2)
        assert main([*command, "--macs", "0.5", *QUICK]) == 130
        assert f"ifso prune --resume --out {out}" in capsys.readouterr().err
        monkeypatch.undo()
        assert main(["prune", "--resume", "--out", str(out)]) == 0
        assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
        assert json.loads((out / "recipe.json").read_text()) == json.loads((whole / "recipe.json").read_text())

    def test_repeating_the_command_works_too_with_moved_files(self, command, net, out, tmp_path, monkeypatch):
        interrupt_after(monkeypatch, 1)
        assert main([*command, "--macs", "0.5", *QUICK]) == 130
        monkeypatch.undo()
        (tmp_path / "elsewhere").mkdir()
        moved = shutil.move(net.removesuffix(":make"), tmp_path / "elsewhere")
        command[command.index(net)] = f"{moved}:make"
        assert main([*command, "--macs", "0.5", *QUICK, "--resume"]) == 0

    def test_other_settings_are_refused_with_the_difference(self, command, out, monkeypatch, capsys):
        interrupt_after(monkeypatch, 1)
        assert main([*command, "--macs", "0.5", *QUICK]) == 130
        monkeypatch.undo()
        capsys.readouterr()
        argv = ["prune", "--resume", "--out", str(out), "--batch", "64", "--macs", "0.4", "--round-to", "2"]
        assert main(argv) == 2
        assert capsys.readouterr().err == (
            f"ifso: error: other settings than the run in {out}: "
            "batch is 64 and was 32; macs is 0.4 and was 0.5; round_to is 2 and was not set\n"
        )

    def test_a_run_that_python_started_says_nothing_of_the_command_line(self, out, capsys):
        out.mkdir()
        (out / "config.json").write_text('{"format": "ifso-run", "version": 1, "settings": {}}')
        assert main(["prune", "--resume", "--out", str(out)]) == 2
        assert "does not say how ifso prune was called" in capsys.readouterr().err


def interrupt_after(monkeypatch, removals):
    original = progress.PlainProgress.removed

    def removed(self, removal):
        original(self, removal)
        if removal.removal >= removals:
            raise KeyboardInterrupt

    monkeypatch.setattr(progress.PlainProgress, "removed", removed)


def interrupt_after_stages(monkeypatch, stages):
    original = progress.PlainProgress.staged

    def staged(self, stage):
        original(self, stage)
        if stage.number >= stages:
            raise KeyboardInterrupt

    monkeypatch.setattr(progress.PlainProgress, "staged", staged)


class TestStages:
    """The default run."""

    FEW = ("--calibration", "256", "--batch", "64")

    def test_no_optimizer_takes_a_step(self, command, out, monkeypatch, capsys):
        monkeypatch.setattr(torch.optim.SGD, "step", lambda *_: pytest.fail("a step was made"))
        assert main([*command, "--macs", "0.6", *self.FEW]) == 0
        settings = json.loads((out / "config.json").read_text())["settings"]
        told = ("schedule", "normalize", "update", "min_share", "calibration")
        assert {name: settings[name] for name in told} == {
            "schedule": "staged", "normalize": "macs", "update": True, "min_share": 0.1, "calibration": 256,
        }  # fmt: skip
        assert settings["criterion"]["name"] == "true-loss"
        printed = capsys.readouterr().out
        assert "ok     budget met" in printed
        assert "a network for each budget" not in printed

    def test_a_network_for_each_share(self, command, net, out, capsys):
        assert main([*command, "--macs", "0.8", "0.6", *self.FEW]) == 0
        printed = capsys.readouterr().out
        lines = [[cell.strip() for cell in line.strip("│").split("│")] for line in printed.splitlines() if "│" in line]
        assert [line[0] for line in lines] == ["unpruned", "networks/macs-0.8", "."]
        assert [line[2] for line in lines] == ["", "80.0%", "60.0%"]
        x, data = torch.zeros(1, 1, 8, 8), open_data("digits")
        whole = ifso.cost(fresh(net), ifso.trace(fresh(net), x)).macs
        for place, kept, asked, accuracy, _ in lines[1:]:
            model = ifso.load(out / place, fresh(net))
            share = ifso.cost(model, ifso.trace(model, x)).macs / whole
            assert share <= float(asked.rstrip("%")) / 100
            assert f"{share:.1%}" == kept
            assert measured("accuracy", evaluate(model, data.test_batches()).top1, 355) == accuracy

    def test_the_path_as_json_also_when_opened_again(self, command, out, capsys):
        command = [*command, "--params", "0.9", "0.7", "0.5", "--macs", "0.9", *self.FEW, "--json"]
        assert main(command) == 0
        document = json.loads(capsys.readouterr().out)
        asked = [step["asked"] for step in document["path"]]
        assert asked == [{}, *({"macs": 0.9, "params": share} for share in (0.9, 0.7, 0.5))]
        assert [step["folder"] for step in document["path"]] == [
            None, "networks/macs-0.9-params-0.9", "networks/macs-0.9-params-0.7", ".",
        ]  # fmt: skip
        assert document["path"][0]["values"]["accuracy"] == document["measures"][0]["accuracy"]
        assert document["path"][-1]["values"]["accuracy"] == document["measures"][-1]["accuracy"]
        assert document["path"][-1]["shares"] == document["shares"]
        assert main(["prune", "--resume", "--out", str(out), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["path"] == document["path"]

    def test_interrupted_and_resumed_to_the_same_bits(self, command, out, monkeypatch, capsys):
        command = [*command, "--macs", "0.8", "0.5", *self.FEW, "--recover", "2"]
        assert main(command) == 0
        whole = out.rename(out.with_name("whole"))
        interrupt_after_stages(monkeypatch, 6)
        assert main(command) == 130
        assert not (out / "summary.json").exists()
        monkeypatch.undo()
        assert main(["prune", "--resume", "--out", str(out)]) == 0
        for place in ("", "networks/macs-0.8"):
            files = [folder / place / "model.safetensors" for folder in (out, whole)]
            assert files[0].read_bytes() == files[1].read_bytes()

    def test_other_shares_are_refused(self, command, out, monkeypatch, capsys):
        interrupt_after_stages(monkeypatch, 1)
        assert main([*command, "--macs", "0.8", "0.5", *self.FEW]) == 130
        monkeypatch.undo()
        capsys.readouterr()
        assert main(["prune", "--resume", "--out", str(out), "--macs", "0.5", "--no-update"]) == 2
        assert capsys.readouterr().err == (
            f"ifso: error: other settings than the run in {out}: "
            "macs is 0.5 and was [0.8, 0.5]; update is False and was not set\n"
        )

    def test_an_early_end_keeps_the_last_network_that_held(self, command, net, out, capsys):
        trained = ["--epochs", "6", "--lr", "0.1", "--batch", "64", "--out", str(out.with_name("base"))]
        assert main(["train", "--model", net, "--data", "digits", *trained]) == 0
        command = [*command[:-1], str(out), "--weights", str(out.with_name("base") / "model.safetensors")]
        capsys.readouterr()
        assert main([*command, "--macs", "0.3", *self.FEW, "--stop", "10", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert 0.3 < document["shares"]["macs"] < 1
        assert any("by more than stop=10" in note for note in document["notes"])
        first = document["measures"][0]["accuracy"]
        assert document["stages"]
        assert all(stage["values"]["accuracy"] >= first - 10 for stage in document["stages"])
        assert document["path"][-1]["values"]["accuracy"] >= first - 10
        model = ifso.load(out, fresh(net))
        assert ifso.cost(model, ifso.trace(model, torch.zeros(1, 1, 8, 8))).macs == document["after"]["macs"]
        command[command.index(str(out))] = str(out.with_name("far"))
        assert main([*command, "--macs", "0.3", *self.FEW, "--stop", "100"]) == 0
        summary = json.loads((out.with_name("far") / "summary.json").read_text())
        assert summary["shares"]["macs"] <= 0.3

    def test_an_old_run_of_algorithm_2_goes_on_as_it_began(self, command, out, monkeypatch, capsys):
        """It went without saying then: no option of its own, no preset."""
        interrupt_after(monkeypatch, 1)
        assert main([*command, "--macs", "0.9", "--preset", "paper", "--batch", "32"]) == 130
        monkeypatch.undo()
        config = json.loads((out / "config.json").read_text())
        del config["about"]["arguments"]["preset"]
        (out / "config.json").write_text(json.dumps(config))
        for path in (out / "checkpoints").iterdir():
            tensors, state = read_tensor_file(path)
            write_tensor_file(path, tensors, {name: value for name, value in state.items() if name != "run"})
        assert main(["prune", "--resume", "--out", str(out)]) == 0
        assert json.loads((out / "summary.json").read_text())["stages"] == []


class TestPassedOn:
    def test_what_is_not_given_is_left_to_the_library(self, command, out, passed_on):
        seen = passed_on([*command, "--macs", "0.5"])
        known = {
            "model",
            "train_batches",
            "loss_fn",
            "budget",
            "example_inputs",
            "evaluate",
            "listener",
            "about",
            "out",
        }
        assert set(seen) == known
        assert seen["budget"] == ifso.Budget(macs=0.5)
        assert seen["out"] == out
        assert len(next(iter(seen["train_batches"]))[1]) == 128
        assert seen["about"] == {"arguments": {"model": command[2], "data": "digits", "macs": 0.5}}

    def test_every_option_reaches_it(self, command, passed_on):
        options = (
            "--conv-macs 0.5 --params 0.6 --activations 0.7 --criterion ifso --criterion-option inverse=neumann "
            "--criterion-option inverse_options.terms=2 --schedule mixed:0.75 --normalize memory --accumulate 3 "
            "--batches-per-score 4 --units-per-step 5 --round-to 8 --min-units 2 --ignore 0 3 --only 0 *.1 "
            "--batch 16 --lr 0.05 --input 2,1,8,8 --seed 7 --recalibrate 6 --weight-update 2"
        )
        argv = options.split()
        seen = passed_on([*command, *argv])
        assert seen["budget"] == ifso.Budget(conv_macs=0.5, params=0.6, activations=0.7)
        assert seen["criterion"] == Ifso(inverse="neumann", inverse_options={"terms": 2})
        assert seen["schedule"] == ifso.Mixed(0.75)
        plain = {
            "normalize": "memory", "accumulate": 3, "batches_per_score": 4, "units_per_step": 5, "round_to": 8,
            "min_units": 2, "ignore": ["0", "3"], "only": ["0", "*.1"], "seed": 7, "recalibrate": 6, "weight_update": 2,
        }  # fmt: skip
        assert {name: seen[name] for name in plain} == plain
        assert seen["example_inputs"].shape == (2, 1, 8, 8)
        assert len(next(iter(seen["train_batches"]))[1]) == 16
        (group,) = seen["optimizer"](list(seen["model"].parameters())).param_groups
        assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.05, 0.9, 1e-4)

    def test_options_of_stages_reach_it(self, command, passed_on):
        options = (
            "--macs 0.8 0.5 --params 0.9 --schedule staged --no-update --recover 9 --stop 0.5 --calibration 64 "
            "--min-share 0.2 --criterion true-loss"
        )
        seen = passed_on([*command, *options.split()])
        assert seen["budget"] == ifso.Budget(macs=(0.8, 0.5), params=0.9)
        plain = {
            "schedule": "staged", "update": False, "recover": 9, "stop": 0.5, "calibration": 64, "min_share": 0.2,
        }  # fmt: skip
        assert {name: seen[name] for name in plain} == plain
        assert isinstance(seen["criterion"], TrueLoss)
        assert "optimizer" not in seen
        assert passed_on([*command, "--macs", "0.5", "--update"])["update"] is True

    def test_options_are_for_the_criterion_of_algorithm_2(self, command, passed_on):
        seen = passed_on([*command, "--macs", "0.5", "--lr", "0.1", "--criterion-option", "inverse=neumann"])
        assert seen["criterion"] == Ifso(inverse="neumann")

    def test_options_are_for_the_criterion_of_the_preset(self, command, passed_on):
        argv = ["--macs", "0.5", "--preset", "authors", "--criterion-option", "step=0.1"]
        seen = passed_on([*command, *argv])
        assert (seen["preset"], seen["criterion"]) == ("authors", Authors(step=0.1))

    def test_networks_get_the_classes_of_the_data(self, command, passed_on):
        command[2] = "ifso:resnet8-digits"
        assert passed_on([*command, "--macs", "0.5"])["model"].fc.out_features == 10

    def test_precision_and_layout(self, command, passed_on):
        seen = passed_on([*command, "--macs", "0.5", "--precision", "bf16", "--channels-last"])
        dtypes = []
        seen["model"][3].register_forward_hook(lambda _, args, output: dtypes.append(output.dtype))
        loss = seen["loss_fn"](seen["model"], next(iter(seen["train_batches"])))
        assert (loss.dtype, dtypes) == (torch.float32, [torch.bfloat16])
        assert seen["model"][3].weight.is_contiguous(memory_format=torch.channels_last)


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "status", "message"),
        [
            ("--macs 0", 2, "macs=0.0 is not a share between 0 and 1"),
            ("--macs 1", 2, "macs=1.0 is not a share between 0 and 1"),
            ("--macs nan", 2, "macs=nan is not a share between 0 and 1"),
            ("--params 50", 2, "params=50.0 is not a share between 0 and 1"),
            ("", 2, "no budget; give the share KEPT of one of --macs, --conv-macs"),
            ("--macs 0.0001", 3, ""),
            ("--macs 0.5 --round-to 12", 3, "round_to"),
            ("--macs 0.5 --min-units 8", 3, "min_units"),
            ("--macs 0.5 --round-to 0", 2, "round_to"),
            ("--macs 0.5 --criterion best", 2, "no criterion 'best'; choose one of ifso"),
            ("--macs 0.5 --criterion-option best=1", 2, "has no option 'best'"),
            ("--macs 0.5 --criterion-option best", 2, "'best' is not KEY=VALUE"),
            ("--macs 0.5 --schedule slowly", 2, "slowly"),
            ("--macs 0.5 --schedule mixed:x", 2, "write mixed:SHARE"),
            ("--macs 0.5 --schedule mixed:2", 2, "2.0"),
            ("--macs 0.5 --normalize length", 2, "length"),
            ("--macs 0.5 --preset nobody", 2, "nobody"),
            ("--macs 0.5 --accumulate 0", 2, "accumulate"),
            ("--macs 0.5 --batch 0", 2, "batch"),
            ("--macs 0.5 --lr 0", 2, "--lr 0.0: give a learning rate above 0"),
            ("--macs 0.5 --device tpu9", 2, "device 'tpu9' cannot be used"),
            ("--macs 0.5 --precision int4", 2, "precision 'int4' is unknown; choose one of float32"),
            ("--macs 0.5 --weights none.safetensors", 2, "none.safetensors"),
            ("--macs 0.5 --ignore 99", 2, "99"),
            ("--macs 0.5 --data nothing", 2, "'nothing' is no data set"),
            ("--macs 0.5 --data cifar10:none.npz", 2, "none.npz"),
            ("--macs 0.5 --data NET:Empty", 2, "empty"),
            ("--macs 0.5 --data NET:Nan", 2, "NaN"),
            ("--macs 0.5 --model ifso:resnet21", 2, "no model 'ifso:resnet21'"),
            ("--macs 0.5 --model ifso:resnet20", 2, "channels"),
            ("--macs 0.5 --lr 1e30", 2, "no longer finite"),
            ("--macs 0.8 0.5 --schedule one-shot", 2, "several shares need schedule='staged' or 'incremental'"),
            ("--macs 0.5 --stop 1", 2, "stop=1.0 needs schedule='staged'"),
            ("--macs 0.5 --update", 2, "update=True needs schedule='staged'"),
            ("--macs 0.5 --recover 2", 2, "recover=2 needs schedule='staged'"),
            ("--macs 0.5 --lr 1e30 --accumulate 3", 2, "no longer finite"),
        ],
    )
    def test_bad_input_is_one_line_and_a_status(self, options, status, message, command, net, capsys):
        words = options.replace("NET", net.removesuffix(":make")).split()
        assert main([*command, *QUICK, *words]) == status
        captured = capsys.readouterr()
        assert captured.out == ""
        errors = [line for line in captured.err.splitlines() if not line.startswith("prune: ")]
        assert len(errors) == 1
        assert errors[0].startswith("ifso: error: ")
        assert message in errors[0]

    @pytest.mark.parametrize(
        ("options", "status", "message"),
        [
            ("--macs 0.5 0.8", 2, "macs=(0.5, 0.8) must fall: give the largest share first"),
            ("--macs 0.8 5", 2, "macs=(0.8, 5.0) must hold shares between 0 and 1"),
            ("--macs 0.8 0.5 --params 0.8 0.7 0.6", 2, "tuples of shares must have the same length"),
            ("--macs 0.8 0.0001", 3, ""),
            ("--macs 0.5 --min-share 1.5", 2, "min_share"),
            ("--macs 0.1 --min-share 0.9", 3, "min_share"),
            ("--macs 0.5 --stop -1", 2, "stop must be how far the measure may fall"),
            ("--macs 0.5 --recover -1", 2, "recover must be a whole number from 0 up, got -1"),
            ("--macs 0.5 --calibration 0", 2, "calibration must be a number of samples"),
            ("--macs 0.8 0.5 --schedule one-shot", 2, "several shares need schedule='staged' or 'incremental'"),
            ("--macs 0.5 --data NET:Nan", 2, "NaN"),
        ],
    )
    def test_bad_input_of_a_staged_run_too(self, options, status, message, command, net, out, capsys):
        words = options.replace("NET", net.removesuffix(":make")).split()
        assert main([*command, *words]) == status
        captured = capsys.readouterr()
        errors = [line for line in captured.err.splitlines() if not line.startswith("prune: ")]
        assert (captured.out, len(errors)) == ("", 1)
        assert errors[0].startswith("ifso: error: ")
        assert message in errors[0]
        assert not out.exists()

    @pytest.mark.parametrize("missing", ["--model", "--data"])
    def test_something_is_missing(self, missing, command, capsys):
        place = command.index(missing)
        del command[place : place + 2]
        assert main([*command, "--macs", "0.5"]) == 2
        assert capsys.readouterr().err.startswith(f"ifso: error: {missing} is missing")

    def test_a_result_that_fails_its_check(self, command, monkeypatch, capsys):
        failed = Check("compacted equals masked", passed=False, detail="largest relative error 1 on a batch")
        monkeypatch.setattr(pruning_run, "compare", lambda masked, compacted: failed)
        assert main([*command, "--macs", "0.9", *QUICK]) == 4
        captured = capsys.readouterr()
        assert captured.out == ""
        assert last_line(captured).startswith("ifso: error: the result failed its check: compacted equals masked")

    def test_a_folder_that_holds_a_run(self, command, capsys):
        assert main([*command, "--macs", "0.9", *QUICK]) == 0
        capsys.readouterr()
        assert main([*command, "--macs", "0.9", *QUICK]) == 2
        assert "already holds a run" in last_line(capsys.readouterr())

    def test_nothing_to_resume(self, out, capsys):
        assert main(["prune", "--resume", "--out", str(out)]) == 2
        assert "holds no run to resume" in last_line(capsys.readouterr())


def test_help_names_what_can_be_chosen(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["prune", "--help"])
    assert caught.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    for name in (*names(), *PRESETS, *NORMALIZERS, *SCORE_PRECISIONS):
        assert re.search(rf"[ ,]{name}[,.]", out), name


@pytest.mark.slow
def test_two_processes_under_torchrun_make_one_run(command, net, out):
    """Both prune; the first one prints and writes, and the network it leaves is whole."""
    started = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 -m ifso.cli".split()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*started, *command, *QUICK, "--macs", "0.8", "--json"],
        capture_output=True, text=True, check=False, timeout=90, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "prune: batches: 32 samples, shared by 2 processes: 16 of each batch on each of them\n" in done.stderr
    summary = json.loads(done.stdout)
    assert summary["shares"]["macs"] <= 0.8
    model = ifso.load(out, fresh(net))
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
