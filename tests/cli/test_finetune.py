"""``ifso finetune``: pruned networks of runs, trained alone, side by side or by several processes, and gone on with."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from interrupting import interrupt_at
from safetensors.torch import load_file, save_file

from ifso.cli.main import main
from ifso.cli.train import summary_table
from ifso.data import open_data
from ifso.models import create_model
from ifso.report.results import warnings
from ifso.runs.open import open_run
from ifso.runs.reading import read_run
from ifso.surgery.recipe import digest_of
from ifso.training import runs
from ifso.training.evaluation import evaluate
from ifso.training.objective import batches_and_loss
from ifso.training.settings import training_recipe
from ifso.training.trainer import fit

NET = """
from torch import nn

def make():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Flatten(), nn.Linear(128, 10),
    )

def teacher(classes=10, size=8):
    return nn.Sequential(nn.Flatten(), nn.Linear(size * size, 32), nn.ReLU(), nn.Linear(32, classes))

def more():
    return teacher(classes=12)

def large():
    return teacher(size=9)
"""
PRUNING = "--macs 0.7 --criterion magnitude --schedule one-shot --recalibrate 0 --seed 3"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A network that was trained and pruned twice."""
    project = tmp_path_factory.mktemp("project")
    (project / "net.py").write_text(NET)
    task = ["--model", f"{project}/net.py:make", "--data", "digits"]
    assert main(["train", *task, "--epochs", "2", "--out", f"{project}/base"]) == 0
    other = ["--model", f"{project}/net.py:teacher", *task[2:], "--epochs", "2"]
    assert main(["train", *other, "--out", f"{project}/teacher"]) == 0
    for name, macs in (("a", "0.7"), ("b", "0.5")):
        pruning = [*PRUNING.replace("0.7", macs).split(), "--weights", f"{project}/base/model.safetensors"]
        assert main(["prune", *task, *pruning, "--out", f"{project}/{name}"]) == 0
    return project


@pytest.fixture
def project(made, tmp_path):
    """A copy that may be spoiled; its runs name the files of the first."""
    return Path(shutil.copytree(made, tmp_path / "project"))


def finetuned(argv, capsys):
    capsys.readouterr()
    assert main(["finetune", *map(str, argv), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["runs"]


def stored(folder):
    return (folder / "model.safetensors").read_bytes()


class TestFinetuned:
    @pytest.mark.parametrize(
        ("options", "settings"),
        [
            ("--epochs 2", training_recipe("paper", epochs=2, seed=3)),
            ("--epochs 2 --distill", training_recipe("paper", epochs=2, seed=3, distill=0.9)),
            (
                "--epochs 2 --recipe ours --temperature 2 --seed 5",
                training_recipe("ours", epochs=2, seed=5, temperature=2.0),
            ),
        ],
    )
    def test_as_by_hand(self, options, settings, project, capsys):
        run = open_run(project / "a")
        (summary,) = finetuned([run.folder, *options.split()], capsys)
        data, model, teacher = open_data("digits", seed=settings.seed), run.pruned(), run.original()
        before = {"pruned": evaluate(model, data.test_batches()).top1}
        if settings.distill:
            before["unpruned"] = evaluate(teacher, data.test_batches()).top1
        batches, loss_fn = batches_and_loss(data, settings, teacher)
        fit(model, batches, settings, loss_fn=loss_fn)
        found = open_run(project / "a").finetuned()
        assert all(torch.equal(value, found.state_dict()[name]) for name, value in model.state_dict().items())
        assert summary["last_top1"] == evaluate(model, data.test_batches()).top1
        assert (summary["before"], summary["settings"]) == (before, settings.as_dict())
        assert summary["about"]["run"] == str(run.folder)

    def test_several_are_as_one_after_another(self, project, tmp_path, capsys):
        options = ["--epochs", "1", "--distill", "0.5"]
        both = finetuned([project / "a", project / "b", *options], capsys)
        for name, summary in zip("ab", both, strict=True):
            (alone,) = finetuned([project / name, *options, "--out", tmp_path / f"alone-{name}"], capsys)
            assert stored(tmp_path / f"alone-{name}") == stored(project / name / "finetune")
            assert (alone["last_top1"], alone["before"]) == (summary["last_top1"], summary["before"])
            assert summary["folder"] == str(project / name / "finetune")

    def test_a_table_for_people(self, project, capsys):
        assert main(["finetune", str(project / "a"), "--epochs", "1", "--validation", "0.1"]) == 0
        printed = capsys.readouterr().out.splitlines()
        assert printed[0].strip() == "Accuracy in per cent ± standard error on validation images"
        assert [word.strip() for word in printed[2].split("┃")[2:-1]] == [
            "pruned", "last epoch", "best epoch", "epochs", "seconds",
        ]  # fmt: skip

    def test_a_training_that_does_harm_says_so_at_last(self, project, capsys):
        assert main(["finetune", str(project / "a"), "--epochs", "1", "--lr", "100"]) == 0
        *_, last = capsys.readouterr().out.splitlines()
        assert last.startswith(f"note: {project / 'a'}/finetune: the training diverged: the loss went from ")
        (line,) = (line for line in warnings(read_run(project / "a")) if "Fine-tuning" in line)
        assert last.partition("finetune: ")[2] in line

    def test_a_table_of_losses(self):
        summary = {"folder": "a", "split": "test", "before": {}, "last_top1": None, "best_top1": None, "epochs": 2}
        found = summary_table([{**summary, "seconds": 1.0, "last": {"eval_loss": 0.25}}])
        assert found.title == "Loss on test images"
        assert [(column.header, *column.cells) for column in found.columns][1] == ("last epoch", "0.25")
        columns = summary_table([{**summary, "seconds": 1.0, "last": {}}]).columns
        assert columns[2].header == "best epoch"

    def test_another_folder_is_measured_with_its_run(self, project, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(project)
        (summary,) = finetuned(["a", "--epochs", "1", "--out", "elsewhere/tuned"], capsys)
        monkeypatch.chdir(tmp_path)
        quick = shlex.split("--repeats 1 --latency-batch 1 --train-batch 8 --json")
        assert main(["eval", str(project / "elsewhere" / "tuned"), *quick]) == 0
        found = json.loads(capsys.readouterr().out)
        assert list(found["networks"]) == ["unpruned", "pruned", "fine-tuned"]
        assert found["networks"]["pruned"]["top1"] == summary["before"]["pruned"]
        assert found["networks"]["fine-tuned"]["top1"] == summary["last_top1"]
        assert main(["finetune", str(project / "elsewhere" / "tuned")]) == 2
        assert "is the fine-tuning of a run; give the run itself, a" in capsys.readouterr().err
        shutil.move(project / "a", project / "moved")
        assert main(["eval", str(project / "elsewhere" / "tuned")]) == 2
        assert "is the fine-tuning of the run in a, which is not there any more (tried a, " in capsys.readouterr().err


class TestResume:
    def test_both_go_on_to_the_same_bits(self, project, monkeypatch, capsys):
        argv = ["finetune", f"{project}/a", f"{project}/b", *shlex.split("--epochs 2 --recipe ours --lr 0.05")]
        assert main(argv) == 0
        whole = [(project / name / "finetune").rename(project / f"whole-{name}") for name in "ab"]
        interrupt_at(monkeypatch, 1.3)
        assert main(argv) == 130
        shown = capsys.readouterr().err.splitlines()[-2]
        assert shown == f"to go on: ifso finetune --resume {project}/a {project}/b"
        monkeypatch.undo()
        for _ in ("goes on", "is finished"):
            assert main(shlex.split(shown.removeprefix("to go on: ifso "))) == 0
            assert [stored(project / name / "finetune") for name in "ab"] == [stored(folder) for folder in whole]
        assert not list(project.glob("*/finetune/training.safetensors"))

    def test_files_may_have_moved(self, project, tmp_path, monkeypatch):
        argv = ["finetune", str(project / "a"), "--epochs", "2", "--distill"]
        assert main(argv) == 0
        whole = (project / "a" / "finetune").rename(project / "whole")
        interrupt_at(monkeypatch, 1.3)
        assert main(argv) == 130
        monkeypatch.undo()
        config = (project / "a" / "config.json").read_text()
        (project / "a" / "config.json").write_text(config.replace("base/model", "gone/model"))
        moved = shutil.copytree(project / "base", tmp_path / "moved") / "model.safetensors"
        assert main(["finetune", "--resume", str(project / "a"), "--weights", str(moved)]) == 0
        assert stored(project / "a" / "finetune") == stored(whole)

    def test_others_are_refused(self, project, monkeypatch, capsys):
        interrupt_at(monkeypatch, 1.3)
        assert main(["finetune", str(project / "a"), "--epochs", "2"]) == 130
        monkeypatch.undo()
        shutil.rmtree(project / "b" / "finetune", ignore_errors=True)
        shutil.copytree(project / "a" / "finetune", project / "b" / "finetune")
        capsys.readouterr()
        for options, message in {
            f"{project}/a --resume --epochs 3": "epochs is 3 and was 2",
            f"{project}/a": f"{project}/a/finetune already holds a run (1 epochs, unfinished); resume it",
            f"{project}/b --resume": "the weights are other ones",
        }.items():
            assert main(["finetune", *options.split()]) == 2
            captured = capsys.readouterr().err
            assert captured.count("ifso: error") == 1
            assert message in captured


def taught(project):
    return ["--teacher", f"{project}/net.py:teacher", "--teacher-weights", f"{project}/teacher/model.safetensors"]


class TestAnotherTeacher:
    def test_as_by_hand(self, project, capsys):
        run, settings = open_run(project / "a"), training_recipe("paper", epochs=2, seed=3, distill=0.9)
        (summary,) = finetuned([run.folder, *["--epochs", "2", "--distill"], *taught(project)], capsys)
        data, model = open_data("digits", seed=3), run.pruned()
        weights = project / "teacher" / "model.safetensors"
        teacher = create_model(f"{project}/net.py:teacher", weights=weights)
        worth = {"unpruned": run.original(), "teacher": teacher, "pruned": model}
        before = {name: evaluate(network, data.test_batches()).top1 for name, network in worth.items()}
        assert summary["before"] == before
        assert list(summary["before"]) == list(before)
        batches, loss_fn = batches_and_loss(data, settings, teacher)
        fit(model, batches, settings, loss_fn=loss_fn)
        found = run.finetuned()
        assert all(torch.equal(value, found.state_dict()[name]) for name, value in model.state_dict().items())
        assert [column.header for column in summary_table([summary]).columns][1:4] == ["unpruned", "teacher", "pruned"]
        fixed = json.loads((run.folder / "finetune" / "config.json").read_text())["settings"]
        assert fixed["teacher_weights"] == digest_of(teacher)

    def test_runs_side_by_side_share_one(self, project, monkeypatch, capsys):
        seen, original = [], runs.batches_and_loss

        def listened(data, settings, teacher, **more):
            seen.append((teacher, more["networks"], more["caches"]))
            return original(data, settings, teacher, **more)

        monkeypatch.setattr(runs, "batches_and_loss", listened)
        monkeypatch.setattr("ifso.training.objective.cache_pays_off", lambda *_: True)
        finetuned([project / "a", project / "b", "--epochs", "1", "--distill", *taught(project)], capsys)
        (first, *ones), (second, *others) = seen
        assert first is second
        assert ones[0] == others[0] == 2
        assert ones[1] is others[1]
        assert list(ones[1]) == [first]

    def test_goes_on_with_the_same_and_no_other(self, project, tmp_path, monkeypatch, capsys):
        argv = ["finetune", str(project / "a"), *["--epochs", "2", "--recipe", "ours"], *taught(project)]
        assert main(argv) == 0
        whole = (project / "a" / "finetune").rename(project / "whole")
        interrupt_at(monkeypatch, 1.3)
        assert main(argv) == 130
        monkeypatch.undo()
        resume = ["finetune", "--resume", str(project / "a")]
        moved = shutil.copytree(project / "teacher", tmp_path / "moved") / "model.safetensors"
        save_file({name: value + 1 for name, value in load_file(moved).items()}, moved)
        capsys.readouterr()
        for options, message in (
            (["--teacher-weights", str(moved)], "the teacher's weights are other ones (give those that the run began"),
            (["--teacher", f"{project}/net.py:more"], "teacher is 'net.py:more' and was 'net.py:teacher'"),
            (["--teacher-weights", "other.pth"], "the teacher's weights are other ones"),
        ):
            assert main([*resume, *options]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert message in line
        assert main(resume) == 0
        assert stored(project / "a" / "finetune") == stored(whole)

    def test_a_program_that_came_with_the_run_is_not_executed(self, project, monkeypatch, capsys):
        inside = Path(shutil.copy(project / "net.py", project / "a" / "net.py"))
        argv = ["finetune", str(project / "a"), *["--epochs", "2", "--distill"], *taught(project)]
        argv[argv.index("--teacher") + 1] = f"{inside}:teacher"
        interrupt_at(monkeypatch, 1.3)
        assert main(argv) == 130
        monkeypatch.undo()
        capsys.readouterr()
        assert main(["finetune", "--resume", str(project / "a")]) == 2
        assert f"if you trust it, give --teacher {inside}:teacher" in capsys.readouterr().err
        assert main(["finetune", "--resume", str(project / "a"), "--teacher", f"{inside}:teacher"]) == 0

    def test_without_the_unpruned_network(self, project, capsys):
        config = (project / "a" / "config.json").read_text()
        (project / "a" / "config.json").write_text(config.replace("base/model", "gone/model"))
        argv = ["finetune", str(project / "a"), *["--epochs", "1", "--distill", "--json"], *taught(project)]
        assert main(argv) == 0
        printed = capsys.readouterr()
        assert "the unpruned network is not measured, because the run in" in printed.err
        assert list(json.loads(printed.out)["runs"][0]["before"]) == ["teacher", "pruned"]

    def test_one_that_cannot_teach_is_refused_before_it_is_measured(self, project, monkeypatch, capsys):
        def measured(*_, **__):
            raise AssertionError("measured")

        monkeypatch.setattr("ifso.training.evaluation.evaluate_once", measured)
        for factory, message in {
            "more": "the teacher knows 12 classes and the network 10; give a teacher for the same data",
            "large": "the teacher, Sequential, failed on the first images of digits (",
        }.items():
            capsys.readouterr()
            assert main(["finetune", str(project / "a"), "--distill", "--teacher", f"{project}/net.py:{factory}"]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert message in line
            assert not (project / "a" / "finetune").exists()


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ("{a} {a}", "the same RUN is given twice"),
            ("{a} {b} --out {project}/out", "--out is for one RUN"),
            ("{a}/finetune", "is the fine-tuning of a run; give the run itself"),
            (
                "{project}/base",
                "{project}/base holds a training and no pruning; ifso eval --model {project}/base measures",
            ),
            ("{a} --epochs 0", "--epochs 0 trains nothing"),
            ("{a} --epochs 1 --warm-up 1", "1 epochs of warm-up leave nothing of 1"),
            ("{a} --distill 2", "distill must be a weight from 0 to 1, got 2.0"),
            ("{a} --resume", "holds no run to resume"),
            ("{a} --data cifar10:none.npz", "none.npz"),
            ("{a} --weights none.safetensors --distill", "no weight file none.safetensors"),
            ("{a} --model none.py:make", "none.py"),
            ("{a} --validation 2000", "validation must be a share"),
            ("{a} --teacher {project}/net.py:teacher", "nothing is distilled; add --distill, or --recipe ours"),
            ("{a} --distill 0 --recipe ours --teacher {project}/net.py:teacher", "nothing is distilled"),
            ("{a} --distill --teacher-weights w.pth", "--teacher-weights without --teacher; give the MODEL"),
            ("{a} --distill --teacher ifso:resnet20", "--teacher ifso:resnet20 has random weights; give trained ones"),
            ("{a} --distill --teacher ifso:resnet21 --teacher-weights w.pth", "no model 'ifso:resnet21'"),
            ("{a} --distill --teacher {project}/net.py:teacher --teacher-weights w.pth", "no weight file w.pth"),
            ("{a} --distill --teacher {project}/net.py:more --teacher-weights {weights}", "3.weight"),
        ],
    )
    def test_one_line_and_nothing_left(self, options, message, project, capsys):
        capsys.readouterr()
        weights = project / "teacher" / "model.safetensors"
        given = options.format(a=project / "a", b=project / "b", project=project, weights=weights)
        assert main(["finetune", *given.split()]) == 2
        errors = capsys.readouterr().err.splitlines()
        assert len(errors) == 1
        assert errors[0].startswith("ifso: error: ")
        assert message.format(project=project) in errors[0]
        assert not any((project / name / "finetune").exists() for name in ("a", "base"))

    def test_one_that_is_there_already_stops_all(self, project, capsys):
        assert main(["finetune", str(project / "b"), "--epochs", "1"]) == 0
        assert main(["finetune", str(project / "a"), str(project / "b"), "--epochs", "1"]) == 2
        assert f"{project}/b/finetune already holds a run (1 epochs, finished)" in capsys.readouterr().err
        assert not (project / "a" / "finetune").exists()
        assert (project / "b" / "finetune" / "model.safetensors").is_file()

    def test_a_run_in_the_place_of_a_weight(self, project, capsys):
        with pytest.raises(SystemExit):
            main(["finetune", "--distill", str(project / "a")])
        assert "is no weight; write --distill after the runs" in capsys.readouterr().err

    def test_one_that_fails_is_told_after_the_others(self, project, monkeypatch, capsys):
        capsys.readouterr()
        original = runs.RunningTraining._ended

        def spoilt(self, epoch):
            original(self, epoch)
            if self._training.name.endswith("b"):
                raise runs.TrainingError("spoilt")

        monkeypatch.setattr(runs.RunningTraining, "_ended", spoilt)
        assert main(["finetune", str(project / "a"), str(project / "b"), "--epochs", "1", "--json"]) == 2
        captured = capsys.readouterr()
        document = json.loads(captured.out)
        assert [summary["folder"] for summary in document["runs"]] == [str(project / "a" / "finetune")]
        assert document["failures"] == {str(project / "b" / "finetune"): "spoilt"}
        assert captured.err.splitlines()[-1] == f"ifso: error: {project}/b/finetune: spoilt"
