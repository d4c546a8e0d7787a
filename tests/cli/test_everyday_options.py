"""Options of everyday use: where a command computes, rehearsals, floors by layer, words that mean the same."""

import json
import re
from pathlib import Path

import pytest
import torch
from digits_commands import QUICK, TASK, ifso_

import ifso
from ifso.cli.distributed import device_of
from ifso.common.text import standard_error
from ifso.errors import DataError
from ifso.pruning import preflight
from ifso.report.results import cards
from ifso.runs.reading import read_run
from ifso.training.runs import RunningTraining


def summary_of(folder):
    return json.loads(Path(folder, "summary.json").read_text())


def worth(folder):
    """The card of the accuracy in a report."""
    return cards(read_run(Path(folder)))[-1]


def shown_by_report(accuracy):
    return f"{accuracy:.2f}\u00a0±\u00a0{standard_error(accuracy, 355):.2f}\u00a0%"


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


class TestDevice:
    @pytest.mark.parametrize("name", [None, "auto"])
    @pytest.mark.parametrize(
        ("there", "device", "line"),
        [(False, "cpu", "device: cpu"), (True, "cuda", "device: cuda (Some GPU), unless --device cpu")],
    )
    def test_what_there_is(self, monkeypatch, name, there, device, line):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
        said: list[str] = []
        assert (device_of(name, said), said) == (device, [line])

    def test_one_that_is_named_is_taken_without_a_word(self):
        said: list[str] = []
        assert (device_of("cuda:1", said), said) == ("cuda:1", [])

    @pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
    @pytest.mark.parametrize(
        "line",
        [f"prune {TASK} --macs 0.9 {QUICK} --out a", f"train {TASK} --epochs 1 --out a", f"eval {TASK} --repeats 1"],
    )
    def test_is_said(self, line, capsys):
        assert ifso_(line) == 0
        assert "device: cpu\n" in capsys.readouterr().err


@pytest.mark.usefixtures("few_samples")
class TestDryRun:
    def test_of_the_staged_run(self, capsys):
        assert ifso_(f"prune {TASK} --macs 0.8 --dry-run --json") == 0
        document = json.loads(capsys.readouterr().out)
        assert list(Path().iterdir()) == []
        assert ifso_(f"prune {TASK} --macs 0.8 --out run --json") == 0
        run = json.loads(capsys.readouterr().out)
        assert document["stages"] == len(run["stages"])
        assert (document["before"], document["units"]) == (run["before"], run["units"])
        assert 0 < document["first"] < document["seconds"]

    @pytest.mark.parametrize(
        "more",
        ["", "--min-units 4", "--min-units 4 conv1=16", "--round-to 8", "--preset paper --accumulate 1 --batch 8"],
    )
    def test_the_smallest_budget_can_be_met_and_no_smaller_one(self, more, capsys):
        assert ifso_(f"prune {TASK} --macs 0.9 --dry-run --json {more}") == 0
        smallest = json.loads(capsys.readouterr().out)["smallest"]["macs"]
        assert ifso_(f"prune {TASK} --macs {smallest * 0.99} --dry-run --json {more}") == 3
        assert f"{smallest:.4f} the smallest" in capsys.readouterr().err
        assert ifso_(f"prune {TASK} --macs {smallest} --dry-run --json {more}") == 0

    def test_the_network_is_traced_once(self, monkeypatch, capsys):
        traced = []

        def trace(*arguments, **options):
            traced.append(arguments)
            return original(*arguments, **options)

        original = preflight.trace
        monkeypatch.setattr(preflight, "trace", trace)
        assert ifso_(f"prune {TASK} --macs 0.8 --calibration 128 --dry-run") == 0
        assert len(traced) == 1

    def test_in_words(self, capsys):
        assert ifso_(f"prune {TASK} --macs 0.5 {QUICK} --dry-run") == 0
        out = capsys.readouterr().out
        assert out.startswith("dry run: nothing was written\nnetwork    CifarResNet: 224 units, 763.52 k MACs")
        assert "units go one by one" in out

    def test_refused(self, capsys):
        for line, words in (("--dry-run --resume --out run", "leave --resume out"), ("", "--out is missing")):
            assert ifso_(f"prune {TASK} --macs 0.5 {line}") == 2
            assert words in capsys.readouterr().err


class TestFloors:
    def test_by_layer(self, capsys):
        assert ifso_(f"prune {TASK} --macs 0.4 {QUICK} --min-units 2 conv1=16 layer1.0.*=9 --out run --json") == 0
        kept = {name: count for name, (count, _) in json.loads(capsys.readouterr().out)["kept"].items()}
        assert kept["conv1"] == 16
        assert kept["layer1.0.conv1"] >= 9
        told = json.loads(Path("run/config.json").read_text())["about"]["arguments"]["min_units"]
        assert told == {"*": 2, "conv1": 16, "layer1.0.*": 9}
        assert ifso_("prune --resume --out run") == 0
        assert ifso_("report run") == 0
        assert "--min-units 2 conv1=16" in Path("run/report.html").read_text()

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ("four", "'four' is no floor"),
            ("conv1=", "is no floor"),
            ("nobody=4", "min_units"),
            ("conv1=0", "min_units"),
        ],
    )
    def test_refused(self, words, message, capsys):
        with pytest.raises(SystemExit) if "no floor" in message else pytest.MonkeyPatch.context():
            assert ifso_(f"prune {TASK} --macs 0.4 --min-units {words} --out run") == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("line", ["prune --macs 0.5 --out run", "train --out run", "eval"])
def test_workers_are_passed_on(line, monkeypatch, capsys):
    def opened(name, *, workers, **_):
        raise DataError(f"{workers} open {name}")

    monkeypatch.setattr("ifso.data.open_data", opened)
    assert ifso_(f"{line} --model ifso:resnet20 --data folder:images --workers 3") == 2
    assert "error: 3 open folder:images" in capsys.readouterr().err


class TestNumbers:
    def test_accuracies_have_a_standard_error(self, capsys):
        assert ifso_(f"train {TASK} --epochs 1 --out trained") == 0
        summary = summary_of("trained")
        shown = f"{summary['last_top1']:.2f} ± {standard_error(summary['last_top1'], 355):.2f}"
        assert summary["samples"] == 355
        assert shown in capsys.readouterr().out
        assert ifso_("eval --model trained --repeats 1") == 0
        assert f"{shown} %" in capsys.readouterr().out
        assert ifso_(f"prune trained --macs 0.9 {QUICK} --out run") == 0
        printed = capsys.readouterr().out
        assert re.search(r"\naccuracy: \d+\.\d\d ± \d\.\d\d %, ± standard error of 355 test images\n", printed)
        assert summary_of("run")["samples"] == 355
        assert worth("run").after == shown_by_report(summary_of("run")["measures"][-1]["accuracy"])
        assert ifso_("finetune run --epochs 1") == 0
        assert worth("run").after == shown_by_report(summary_of("run/finetune")["last_top1"])
        assert re.search(r"│ run/finetune │ +\d+\.\d\d ± \d\.\d\d │", capsys.readouterr().out)

    def test_stages_have_one_too(self, capsys):
        assert ifso_(f"prune {TASK} --macs 0.9 0.8 --calibration 128 --out run") == 0
        printed = capsys.readouterr()
        value = next(stage["values"]["accuracy"] for stage in summary_of("run")["stages"] if "budget" in stage)
        shown = f"{value:.2f} ± {standard_error(value, 355):.2f}"
        assert f" accuracy={shown.replace(' ', '')} " in printed.err
        assert printed.out.count(f" {shown} ") >= 2

    def test_a_run_of_before_does_without(self):
        assert ifso_(f"prune {TASK} --macs 0.9 {QUICK} --out run") == 0
        summary = summary_of("run")
        del summary["samples"]
        Path("run/summary.json").write_text(json.dumps(summary))
        assert "±" not in worth("run").after
        assert ifso_("prune --resume --out run") == 0

    def test_budgets(self, capsys):
        assert ifso_(f"prune {TASK} --macs 0.5 --params 0.99 {QUICK} --out run") == 0
        out = capsys.readouterr().out
        assert "binding: the budget of MACs; room left in the others: parameters " in out
        assert "to train it further make the optimizer anew" in out


@pytest.mark.parametrize("command", ["train {TASK} --out", "finetune run --out"])
def test_options_have_one_meaning_and_their_former_names_still_work(command, capsys):
    assert ifso_(f"prune {TASK} --macs 0.9 {QUICK} --out run") == 0
    now, before = (command.format(TASK=TASK) + place for place in (" now", " before"))
    more = "--epochs 1 --batch 128"
    assert ifso_(f"{now} {more} --lr-schedule cosine --micro-batches 2") == 0
    assert "note:" not in capsys.readouterr().err
    assert ifso_(f"{before} {more} --schedule cosine --accumulate 2") == 0
    said = capsys.readouterr().err.splitlines()
    assert "ifso: note: --schedule is called --lr-schedule here" in said
    assert "ifso: note: --accumulate is called --micro-batches here" in said
    first, second = (json.loads(Path(place, "summary.json").read_text())["settings"] for place in ("now", "before"))
    assert first == second
    assert (first["schedule"], first["accumulate"]) == ("cosine", 2)


class TestOptimizer:
    def test_adamw_trains_and_goes_on_with_the_same_bits(self, monkeypatch, capsys):
        line = f"train {TASK} --epochs 3 --opt adamw --out"
        assert ifso_(f"{line} whole") == 0
        settings = json.loads(Path("whole/summary.json").read_text())["settings"]
        assert (settings["opt"], settings["lr"]) == ("adamw", 0.001)
        with monkeypatch.context() as patch:
            ended = RunningTraining._ended

            def stop(self, epoch):
                ended(self, epoch)
                if epoch.number == 2:
                    raise KeyboardInterrupt

            patch.setattr(RunningTraining, "_ended", stop)
            patch.setattr("ifso.training.runs.SAVE_EVERY", 0.0)
            assert ifso_(f"{line} parted") == 130
        assert ifso_("train --resume --out parted") == 0
        first, second = (ifso.create_model("ifso:resnet8-digits", weights=place) for place in ("whole", "parted"))
        assert all(torch.equal(one, other) for one, other in zip(first.parameters(), second.parameters(), strict=True))

    def test_fine_tunes_also_in_the_former_shape(self):
        assert ifso_(f"prune {TASK} --macs 0.7 {QUICK} --out run") == 0
        for more in ("--padded --out wide", "--recipe ours --distill=0.5 --out own"):
            assert ifso_(f"finetune run --epochs 1 --opt adamw {more}") == 0
        wide = ifso.create_model("ifso:resnet8-digits", weights="wide")
        assert {name: tuple(each.shape) for name, each in wide.named_parameters()} == {
            name: tuple(each.shape)
            for name, each in ifso.create_model("ifso:resnet8-digits", weights="run").named_parameters()
        }

    def test_unknown(self, capsys):
        assert ifso_(f"train {TASK} --opt lion --out run") == 2
        assert "optimizer 'lion' is unknown; choose one of sgd, adam, adamw" in capsys.readouterr().err


FILE = """
import torch

BATCH = (torch.zeros(8, 1, 8, 8), torch.zeros(8, dtype=torch.long))

class Loss:
    num_classes, input_shape, train_batches = 10, (1, 8, 8), [BATCH]
    @staticmethod
    def loss_fn(model, batch):
        return model(batch[0]).nothing()

class Loader:
    def __iter__(self):
        yield BATCH
        raise ValueError("no more")

class Breaks:
    num_classes, input_shape, train_batches = 10, (1, 8, 8), Loader()

def net():
    return torch.nothing

class Odd(torch.nn.Conv2d):
    def forward(self, images):
        return super().forward(images).view(3, 5)

def odd():
    return Odd(1, 4, 3)
"""


@pytest.mark.parametrize(
    ("own", "line"),
    [("--data own.py:Loss", 9), ("--data own.py:Breaks", 14), ("--data digits --model own.py:net", 20)],
)
@pytest.mark.parametrize("command", ["prune --macs 0.5 --out run", "train --epochs 1 --batch 8 --out run"])
def test_errors_in_the_users_file_name_file_and_line(own, line, command, capsys):
    Path("own.py").write_text(FILE.lstrip())
    model = "" if "--model" in own else "--model ifso:resnet8-digits"
    assert ifso_(f"{command} {model} {own}") == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("ifso: error: ")
    assert f"(own.py, line {line})" in last
    assert ifso_(f"{command} {model} {own} --debug") == 2
    assert "Traceback" in capsys.readouterr().err


def test_inspect_names_the_line_that_fails_too(capsys):
    Path("own.py").write_text(FILE.lstrip())
    assert ifso_("inspect own.py:odd --input 1,1,8,8") == 2
    assert "(own.py, line 24); give the shape" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["prune", "train", "finetune", "eval"])
def test_batch_means_the_same_in_all_commands(command, capsys):
    with pytest.raises(SystemExit):
        ifso_(f"{command} --help")
    helped = " ".join(capsys.readouterr().out.split())
    assert "--batch N images in one batch, however many processes share the work (" in helped
