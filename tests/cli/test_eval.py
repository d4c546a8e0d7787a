"""``ifso eval``: the same numbers as by hand, in a table and as JSON, and one line for whatever is wrong."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import ANY

import numpy
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ifso
from ifso.cli.console import console
from ifso.cli.evaluate import Report, report_parts
from ifso.cli.main import main
from ifso.costs.cost import Cost
from ifso.costs.latency import Latency
from ifso.data import open_data
from ifso.runs.open import open_run, open_tuned
from ifso.training.evaluation import Evaluation, evaluate
from ifso.training.profiling import Profile, Timing

NET = """
import torch
from torch import nn

def make():
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 10),
    )

def few():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3))

class Few:
    train_batches = test_batches = [(torch.randn(8, 1, 2, 2), torch.arange(8) % 3)]
    input_shape = (1, 2, 2)

class Outside(Few):
    test_batches = [(torch.randn(2, 1, 2, 2), torch.tensor([0, 3]))]

class Odd(Few):
    test_batches = [(torch.randn(2, 1, 3, 3), torch.tensor([0, 1]))]

class Own(Few):
    def loss_fn(self, model, batch):
        return model(batch[0]).square().mean()

class Dealt:
    train_batches, input_shape = Few.train_batches, (1, 2, 2)

    def __init__(self, rank=0, ranks=1):
        images = torch.randn(6, 4, 1, 2, 2, generator=torch.Generator().manual_seed(0))
        everything = [(part * (number + 1), torch.arange(4) % 3) for number, part in enumerate(images[:5])]
        self.test_batches = everything[rank::ranks]

    def loss_fn(self, model, batch):
        return model(batch[0]).square().mean()

class Untested:
    train_batches, input_shape = Few.train_batches, (1, 2, 2)
"""
QUICK = shlex.split("--repeats 2 --latency-batch 1 --latency-batch 4 --train-batch 8")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    project = tmp_path_factory.mktemp("project")
    (project / "net.py").write_text(NET)
    names = {}
    exec(NET, names)
    torch.manual_seed(0)
    save_file(names["make"]().state_dict(), project / "trained.safetensors")
    task = ["--model", f"{project}/net.py:make", "--weights", f"{project}/trained.safetensors", "--data", "digits"]
    pruning = shlex.split("--macs 0.7 --criterion magnitude --schedule one-shot --recalibrate 0 --seed 3")
    assert main(["prune", *task, *pruning, "--out", str(project / "run")]) == 0
    return project, task


@pytest.fixture
def project(made, tmp_path):
    """A copy that may be spoiled; its run names the files of the first."""
    return Path(shutil.copytree(made[0], tmp_path / "project"))


@pytest.fixture
def task(made):
    return made[1]


def measured(argv, capsys):
    capsys.readouterr()
    assert main(["eval", *map(str, argv), *QUICK, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


class TestRun:
    def test_every_network_with_the_numbers_it_has_by_hand(self, project, capsys):
        run = open_run(project / "run")
        tuned = run.pruned()
        nn.init.normal_(tuned[6].weight)
        ifso.save(tuned, run.folder / "finetune")
        (run.folder / "finetune" / "summary.json").write_text("{}")
        found = measured([run.folder], capsys)
        models = {"unpruned": run.original(), "pruned": run.pruned(), "fine-tuned": tuned}
        assert list(found["networks"]) == list(models)
        costs = {name: ifso.cost(model, ifso.trace(model, torch.zeros(1, 1, 8, 8))) for name, model in models.items()}
        for name, model in models.items():
            numbers, truth = found["networks"][name], evaluate(model, open_data("digits").test_batches())
            assert (numbers["top1"], numbers["top5"], numbers["samples"]) == (truth.top1, truth.top5, 355)
            assert numbers["loss"] == pytest.approx(truth.loss)
            assert {kind: numbers[kind] for kind in costs[name].as_dict()} == costs[name].as_dict()
            assert numbers["macs_share"] == costs[name].macs / costs["unpruned"].macs
            assert numbers["activation_bytes"] == 4 * costs[name].activations
            assert [(timing["batch"], timing["runs"]) for timing in numbers["latency"]] == [(1, 2), (4, 2)]
            assert numbers["training_peak_bytes"] > 4 * (3 * costs[name].params + 8 * 64)
        assert (found["run"], found["data"], found["torch"]) == (str(run.folder), "digits", str(torch.__version__))
        assert found["notes"] == []

    def test_what_is_not_there_is_said(self, project, capsys):
        found = measured([project / "run"], capsys)
        assert list(found["networks"]) == ["unpruned", "pruned"]
        assert found["notes"] == [f"No fine-tuned network: the fine-tuning in {project}/run/finetune was not run."]
        found = measured([project / "run", "--only", "pruned"], capsys)
        assert list(found["networks"]) == ["pruned"]
        assert found["train_batch"] == 8
        assert "macs_share" not in found["networks"]["pruned"]

    def test_a_run_of_python(self, project, capsys):
        config = json.loads((project / "run" / "config.json").read_text())
        (project / "run" / "config.json").write_text(json.dumps({**config, "about": {}}))
        told = [project / "run", "--model", f"{project}/net.py:make", "--data", "digits"]
        found = measured(told, capsys)
        assert list(found["networks"]) == ["pruned"]
        assert "the weights that the run in" in found["notes"][0]
        found = measured([*told, "--weights", project / "trained.safetensors"], capsys)
        assert list(found["networks"]) == ["unpruned", "pruned"]

    def test_images_that_the_fine_tuning_was_not_shown(self, project, capsys):
        run, tuned = project / "run", project / "tuned"
        options = ["--seed", "5", "--validation", "300", "--epochs", "1"]
        assert main(["finetune", str(run), "--out", str(tuned), *options]) == 0
        split = [tuned, "--split", "validation", "--only", "fine-tuned"]
        found = measured(split, capsys)["networks"]["fine-tuned"]
        data, network = open_data("digits", seed=5, validation=300), open_tuned(tuned).finetuned()
        truth = evaluate(network, data.validation_batches())
        assert (found["samples"], found["top1"]) == (300, truth.top1)
        assert measured([*split, "--seed", "5", "--validation", "300"], capsys)["networks"]["fine-tuned"] == {
            **found, "latency": ANY, "training_peak_bytes": ANY
        }  # fmt: skip
        for option, other in (("--seed", "3"), ("--validation", "200")):
            assert main(["eval", *map(str, split), option, other, *QUICK]) == 2
            assert f"{option} {other}: the fine-tuning in {tuned} had " in capsys.readouterr().err


class TestNetwork:
    def test_alone_as_a_table_and_a_file(self, task, tmp_path, capsys):
        capsys.readouterr()
        assert main(["eval", *task, *QUICK, "--out", str(tmp_path / "found.json"), "--threads", "1"]) == 0
        printed, document = capsys.readouterr().out, json.loads((tmp_path / "found.json").read_text())
        numbers = document["networks"]["network"]
        assert f"│ {numbers['top1']:.2f} ± ".replace(" ", "") in printed.replace(" ", "")
        assert printed.splitlines()[0] == f"{task[1]} on 355 test images of digits"
        assert document["notes"] == []

    def test_images_set_apart(self, task, capsys):
        found = measured([*task, "--split", "validation", "--validation", "100", "--seed", "5"], capsys)
        data = open_data("digits", seed=5, validation=100)
        model = ifso.create_model(task[1], weights=task[3])
        truth = evaluate(model, data.validation_batches())
        assert found["networks"]["network"]["samples"] == 100
        assert found["networks"]["network"]["top1"] == truth.top1

    def test_as_large_a_batch_for_training_as_there_is(self, tmp_path, capsys):
        random = torch.Generator().manual_seed(0)
        arrays = {
            "x_train": (torch.rand(40, 32, 32, 3, generator=random) * 255).byte(),
            "y_train": torch.arange(40) % 10,
        }
        arrays |= {"x_test": arrays["x_train"], "y_test": arrays["y_train"]}
        numpy.savez(tmp_path / "small.npz", **{name: value.numpy() for name, value in arrays.items()})
        few = ["--model", "ifso:resnet20", "--data", f"cifar10:{tmp_path}/small.npz", "--repeats", "1", "--json"]
        capsys.readouterr()
        assert main(["eval", *few, "--latency-batch", "1"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["train_batch"], found["networks"]["network"]["samples"]) == (32, 40)
        assert main(["eval", *few, "--latency-batch", "1", "--train-batch", "64"]) == 2
        assert "batches of 64 cannot be filled by 40 training images" in capsys.readouterr().err

    def test_half_precision_and_layout(self, task, capsys):
        found = measured([*task, "--precision", "bf16", "--channels-last"], capsys)
        whole = measured(task, capsys)
        one, other = found["networks"]["network"], whole["networks"]["network"]
        assert 2 * one["activation_bytes"] == other["activation_bytes"]
        assert one["loss"] != other["loss"]
        assert one["loss"] == pytest.approx(other["loss"], rel=0.02)

    def test_few_classes_and_a_loss_of_its_own(self, project, capsys):
        found = measured(["--model", f"{project}/net.py:few", "--data", f"{project}/net.py:Few"], capsys)
        numbers = found["networks"]["network"]
        assert (numbers["top5"], numbers["samples"]) == (None, 8)
        found = measured(["--model", f"{project}/net.py:few", "--data", f"{project}/net.py:Own"], capsys)
        numbers = found["networks"]["network"]
        assert (numbers["top1"], numbers["samples"]) == (None, 8)
        assert numbers["loss"] > 0

    def test_random_weights_are_said(self, capsys):
        found = measured(["--model", "ifso:resnet8-digits", "--data", "digits"], capsys)
        assert found["notes"] == ["The weights are random: none were given with --weights."]


@pytest.fixture
def lost(project):
    """A run whose weights are gone."""
    config = (project / "run" / "config.json").read_text()
    (project / "run" / "config.json").write_text(config.replace("trained.safetensors", "gone/trained.safetensors"))
    return project / "run"


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ("", "give a RUN folder, or a network with --model and --data"),
            ("--model {net}:make", "give a RUN folder, or a network with --model and --data"),
            ("--model {net}:make --data digits --only pruned", "--only chooses among the networks of a RUN"),
            ("{run} --only fine-tuned", "--only fine-tuned: the fine-tuning in {run}/finetune was not run"),
            ("{run} --validation 0.1", "give both or neither"),
            ("{run} --split validation", "say with --validation how much of the training set was set apart"),
            ("{run} --precision int4", "precision 'int4' is unknown"),
            ("{run} --device tpu9", "device 'tpu9' cannot be used"),
            ("{run} --out {project}/none/a.json", "there is no folder {project}/none; make it, or give another file"),
            ("{lost}", "trained.safetensors, which is not there any more (tried "),
            ("{lost}", "say with --weights where it is now, or measure the rest: --only pruned"),
            ("{run} --weights none.safetensors", "none.safetensors"),
            ("{run} --data cifar10:none.npz", "none.npz"),
            ("{run} --train-batch 2000", "batches of 2000 cannot be filled by 1442 training images"),
            ("{project}", "{project} holds no run (no config.json)"),
            ("--model {net}:few --data {net}:Outside", "label 3 is none of the 3 classes of the network"),
            ("--model {net}:make --data {net}:Few", "images 1×2×2 of {net}:Few do not fit the network"),
            ("--model {net}:few --data {net}:Odd", "the network fails on batches of {net}:Odd (RuntimeError: "),
            ("--model {net}:few --data {net}:Untested", "has no test_batches"),
            ("--model {net}:few --data digits", "images 1×8×8 of digits do not fit the network"),
        ],
    )
    def test_bad_input_is_one_line(self, options, message, made, lost, capsys):
        project = made[0]

        def placed(text):
            return text.format(net=project / "net.py", run=project / "run", project=project, lost=lost)

        capsys.readouterr()
        assert main(["eval", *placed(options).split(), *([] if "--train" in options else QUICK)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        (error,) = [line for line in captured.err.splitlines() if not line.startswith("· ")]
        assert error.startswith("ifso: error: ")
        assert placed(message) in error

    @pytest.mark.parametrize("options", ["--batch 0", "--latency-batch x", "--validation much", "--repeats -1"])
    def test_numbers_that_are_none(self, options, capsys):
        with pytest.raises(SystemExit) as stopped:
            main(["eval", "run", *options.split()])
        assert stopped.value.code == 2
        assert f"argument {options.split()[0]}: " in capsys.readouterr().err


GOLDEN = """\
a:net on 1,000 test images of set:place
┏━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━┓
┃                                   ┃          unpruned ┃           pruned ┃
┡━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━┩
│ top-1                             │    93.50 ± 0.78 % │   92.25 ± 0.85 % │
│ top-5                             │    99.00 ± 0.31 % │                — │
│ loss                              │            0.2500 │           0.5000 │
│ MACs                              │   2.00 M (100.0%) │   1.00 M (50.0%) │
│ parameters                        │ 200.00 k (100.0%) │ 100.00 k (50.0%) │
│ activations of one image          │ 80.00 kB (100.0%) │ 40.00 kB (50.0%) │
│ latency, batch 1                  │    4.00 ms ± 0.20 │   2.00 ms ± 0.10 │
│ latency, batch 128                │  512.00 ms ± 0.20 │ 256.00 ms ± 0.10 │
│ throughput, batch 128             │      250 images/s │     500 images/s │
│ peak of a training step, batch 64 │             999 B │            999 B │
└───────────────────────────────────┴───────────────────┴──────────────────┘
Measured on Abacus, 1 thread, with torch 9.9, float32.
Costs and latency: of inputs 1x3x8x8.
Accuracy: ± its standard error.
Latency: median of 15 warm runs ± half the width of their middle half.
Peak of a training step: weights, momentum, batch, and all other tensors alive at once, without workspaces of kernels.
No more.
"""


def made_up(macs, top1, top5, loss, seconds):
    timings = tuple(Timing(batch, Latency(seconds * batch, seconds / 10, (seconds,) * 15)) for batch in (1, 128))
    cost = Cost(macs, 0, 0, macs // 10, macs // 100)
    return Profile(Evaluation(loss, 1000, top1, top5), cost, macs // 25, timings, 999)


def test_the_table_as_people_see_it(capsys):
    hardware = {"device": "Abacus", "cpu": "Abacus", "cpu_cores": 2, "threads": 1}
    about = {"model": "a:net", "data": "set:place", "split": "test", "precision": "float32", "channels_last": False}
    about |= {"train_batch": 64, "counted_on": "1x3x8x8", "hardware": hardware, "torch": "9.9"}
    networks = {
        "unpruned": made_up(2_000_000, 93.5, 99.0, 0.25, 0.004),
        "pruned": made_up(1_000_000, 92.25, None, 0.5, 0.002),
    }
    console().print(*report_parts(Report(networks, about, ("No more.",))), sep="\n")
    assert capsys.readouterr().out == GOLDEN


def in_two_processes(argv):
    started = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 -m ifso.cli".split()
    done = subprocess.run(
        [*started, "eval", *argv, *QUICK, "--json"],
        capture_output=True, text=True, check=False, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["ranks"] == 2
    return found["networks"]["network"]


@pytest.mark.slow
def test_two_processes_under_torchrun_find_the_same(task, capsys):
    together, alone = in_two_processes(task), measured(task, capsys)["networks"]["network"]
    for kind in ("top1", "top5", "samples", "loss"):
        assert together[kind] == pytest.approx(alone[kind])


@pytest.mark.slow
def test_two_processes_find_the_mean_loss_of_the_batches_of_both(project, capsys):
    dealt = ["--model", f"{project}/net.py:few", "--data", f"{project}/net.py:Dealt", "--seed", "1"]
    together, alone = in_two_processes(dealt), measured(dealt, capsys)["networks"]["network"]
    assert (together["samples"], alone["samples"]) == (20, 20)
    assert together["loss"] == pytest.approx(alone["loss"])
