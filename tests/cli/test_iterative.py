"""Pruning again: the folder of a run, a training or a saved network is taken wherever MODEL or ``--weights`` is."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from digits_commands import QUICK, TASK, ifso_, loaded

import ifso
from ifso.errors import RecipeError
from ifso.surgery.recipe import digest_of

IMAGES = torch.linspace(-1, 1, 2 * 64).view(2, 1, 8, 8)


def macs(model) -> int:
    return ifso.cost(model, ifso.trace(model, IMAGES[:1])).macs


@pytest.fixture(scope="module")
def made(tmp_path_factory, few_digits_throughout):
    """A training, a pruning of it that was fine-tuned, and a second pruning."""
    project = tmp_path_factory.mktemp("project")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        assert ifso_(f"train {TASK} --epochs 1 --out trained") == 0
        assert ifso_(f"prune trained --macs 0.7 {QUICK} --out runs/first") == 0
        assert ifso_("finetune runs/first --epochs 1") == 0
        assert ifso_(f"prune runs/first --macs 0.6 {QUICK} --out runs/second") == 0
    return project


def told(run):
    return json.loads((Path(run) / "config.json").read_text())["about"]["arguments"]


class TestPruning:
    def test_goes_on_from_the_fine_tuned_network(self, project):
        first, tuned, second = map(loaded, ("runs/first", "runs/first/finetune", "runs/second"))
        assert told("runs/first")["weights"] == "trained"
        names = ("model", "weights", "data")
        assert [told("runs/second")[name] for name in names] == ["ifso:resnet8-digits", "runs/first/finetune", "digits"]
        assert macs(first) == macs(tuned)
        assert macs(second) <= 0.6 * macs(first)
        settings = json.loads(Path("runs/second/config.json").read_text())["settings"]
        assert settings["weights"] == digest_of(tuned)
        assert len(ifso.recipe(second).rounds) == 2
        assert ifso.recipe(second).cost_before["macs"] == macs(ifso.create_model("ifso:resnet8-digits"))

    def test_a_run_as_model_or_its_weights_are_the_same(self, project):
        line = f"--macs 0.6 {QUICK}"
        assert ifso_(f"prune --model runs/first {line} --out a") == 0
        assert ifso_(f"prune {TASK} --weights runs/first {line} --out b") == 0
        truth = loaded("runs/second")(IMAGES)
        assert all(torch.equal(loaded(run)(IMAGES), truth) for run in "ab")

    def test_resumed_without_being_told_again(self, project):
        assert ifso_("prune --resume --out runs/second") == 0

    def test_says_which_network(self, project, capsys):
        assert ifso_(f"prune runs/first --macs 0.9 {QUICK} --out c") == 0
        said = capsys.readouterr().err
        assert "the network is the fine-tuned network of runs/first" in said
        assert re.search(
            r"pruned before to .*; this budget is a share of what was left then, 6\d\.\d% of the orig", said
        )
        assert "notebook" not in said

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            ("prune runs/first --weights w.pth --macs 0.5 --out x", "runs/first brings weights of its own; leave"),
            ("prune nowhere --macs 0.5 --out x", "nowhere holds no run"),
            ("prune alone --data digits --macs 0.5 --out x", "--model is missing"),
            (f"prune {TASK} --weights runs --macs 0.5 --out x", "no such file; give a folder that ifso saved"),
            ("finetune runs/first --teacher alone --distill", "alone does not say which MODEL it holds; write"),
        ],
    )  # fmt: skip
    def test_refused(self, project, capsys, line, words):
        ifso.save(loaded("runs/first"), "alone")
        assert ifso_(line) == 2
        assert words in capsys.readouterr().err

    def test_a_training_that_is_not_finished(self, project, capsys):
        Path("trained/summary.json").unlink()
        assert ifso_("prune trained --macs 0.5 --out x") == 2
        assert "is not finished; go on with it: ifso train --resume --out trained" in capsys.readouterr().err

    def test_a_fine_tuned_network_of_another_pruning(self, project, capsys):
        shutil.rmtree("runs/second/finetune", ignore_errors=True)
        shutil.copytree("runs/first/finetune", "runs/second/finetune")
        assert ifso_("prune runs/second --macs 0.5 --out x") == 2
        assert "holds a network of other sizes than runs/second" in capsys.readouterr().err


class TestOtherCommands:
    def test_evaluates_all_and_one(self, project, capsys):
        assert ifso_("eval runs/second --repeats 1 --json") == 0
        both = json.loads(capsys.readouterr().out)
        unpruned, pruned = (both["networks"][name]["macs"] for name in ("unpruned", "pruned"))
        assert (unpruned, pruned) == (macs(loaded("runs/first")), macs(loaded("runs/second")))
        assert both["notes"][-1] == "The run began with the network of runs/first/finetune, pruned before."
        assert ifso_("eval --model runs/second --repeats 1 --json") == 0
        alone = json.loads(capsys.readouterr().out)["networks"]["network"]
        assert (alone["macs"], alone["top1"]) == (pruned, both["networks"]["pruned"]["top1"])

    def test_fine_tunes_the_second_run_in_its_own_shape_or_the_first_one(self, project, capsys):
        assert ifso_("finetune runs/second --epochs 1 --distill --json") == 0
        assert ifso_("finetune runs/second --epochs 1 --padded --out padded") == 0
        assert all(macs(loaded(run)) == macs(loaded("runs/second")) for run in ("runs/second/finetune", "padded"))

    def test_a_run_teaches(self, project):
        assert ifso_("finetune runs/second --epochs 1 --distill --teacher runs/first --out taught") == 0
        assert told("taught")["teacher_weights"] == "runs/first/finetune"

    def test_is_inspected(self, project, capsys):
        assert ifso_("inspect runs/second --json") == 0
        document = json.loads(capsys.readouterr().out)
        assert document["model"] == "runs/second"
        assert document["cost"]["macs"] == macs(loaded("runs/second"))

    def test_is_exported(self, project, programs_run_here, capsys):
        assert ifso_("export runs/second --to torch --json") == 0
        networks = json.loads(capsys.readouterr().out)["networks"]
        assert [each["macs"] for each in networks.values()] == [
            macs(loaded(f"runs/{run}")) for run in ("first", "second")
        ]

    def test_is_trained_further(self, project):
        assert ifso_("train --model runs/second --epochs 1 --out more") == 0
        assert macs(loaded("more")) == macs(loaded("runs/second"))


class TestPrograms:
    """A program in a folder that somebody sent is executed only if the command names it."""

    @pytest.fixture
    def hostile(self, project):
        config = Path("runs/first/config.json")
        document = json.loads(config.read_text())
        document["about"]["arguments"]["model"] = "runs/first/net.py:make"
        config.write_text(json.dumps(document))
        program = "from pathlib import Path\nPath('executed').touch()\nimport ifso\n"
        Path("runs/first/net.py").write_text(f"{program}def make(): return ifso.create_model('ifso:resnet8-digits')\n")

    @pytest.mark.parametrize(
        "line",
        [
            f"prune runs/first --macs 0.5 {QUICK} --out x",
            f"prune --model runs/first --macs 0.5 {QUICK} --out x",
            "inspect runs/first",
            "eval --model runs/first",
            "train --model runs/first --epochs 1 --out x",
            "finetune runs/second --teacher runs/first --distill --epochs 1 --out x",
        ],
    )
    def test_not_by_the_run_that_it_is_in(self, hostile, capsys, line):
        assert ifso_(line) == 2
        assert "the program runs/first/net.py executed, which came with it" in capsys.readouterr().err
        assert not Path("executed").exists()

    @pytest.mark.parametrize(
        "line", ["eval runs/second", "finetune runs/second --epochs 1", "prune --resume --out runs/second"]
    )
    def test_not_by_the_run_that_began_there(self, hostile, capsys, line):
        for name in ("runs/first", "runs/first/finetune"):
            config = Path("runs/second/config.json")
            document = json.loads(config.read_text())
            document["about"]["arguments"] |= {"model": "runs/first/net.py:make", "weights": name}
            config.write_text(json.dumps(document))
            assert ifso_(line) == 2
            assert "the program runs/first/net.py executed, which came with it" in capsys.readouterr().err
            assert not Path("executed").exists()

    def test_by_name(self, hostile):
        assert ifso_(f"prune runs/first --model runs/first/net.py:make --macs 0.5 {QUICK} --out x") == 0
        assert Path("executed").exists()


def test_folder_as_weights_in_python(made):
    model = ifso.create_model("ifso:resnet8-digits", weights=made / "runs/second").eval()
    assert torch.equal(model(IMAGES), loaded(made / "runs/second")(IMAGES))
    with pytest.raises(RecipeError, match="another model"):
        ifso.create_model("ifso:resnet20", weights=made / "runs/second")


@pytest.fixture(scope="module")
def budgets(tmp_path_factory, few_digits_throughout):
    """Where a run with two budgets is."""
    folder = tmp_path_factory.mktemp("budgets")
    assert ifso_(f"prune {TASK} --macs 0.9 0.8 --calibration 64 --out {folder}/run") == 0
    return folder


class TestNetworksOfBudgets:
    @pytest.fixture
    def network(self, budgets, monkeypatch):
        """The folder of the network for the first budget."""
        monkeypatch.chdir(budgets)
        return Path("run/networks/macs-0.9")

    def test_it_is_taken_like_a_run(self, network, capsys):
        assert ifso_(f"inspect {network}") == 0
        assert ifso_(f"finetune {network} --epochs 1") == 0
        capsys.readouterr()
        assert ifso_(f"eval {network} --repeats 1 --latency-batch 1 --json") == 0
        found = json.loads(capsys.readouterr().out)["networks"]
        assert set(found) == {"unpruned", "pruned", "fine-tuned"}
        assert found["pruned"]["macs"] == macs(loaded(network)) > macs(loaded("run"))
        assert ifso_(f"prune {network} --macs 0.9 {QUICK} --out again") == 0
        assert told("again")["weights"] == f"{network}/finetune"

    def test_a_program_in_the_run_around_it_is_not_executed(self, network, capsys):
        shutil.copytree("run", "sent")
        config = json.loads(Path("sent/config.json").read_text())
        config["about"]["arguments"]["model"] = "sent/net.py:make"
        Path("sent/config.json").write_text(json.dumps(config))
        Path("sent/net.py").write_text("raise SystemExit(77)")
        assert ifso_(f"eval sent/{network.relative_to('run')}") == 2
        assert "which came with it" in capsys.readouterr().err


def test_a_network_that_tells_no_model_is_no_traceback(project, capsys):
    ifso.save(loaded("runs/first"), "alone")
    assert ifso_("inspect alone") == 2
    assert "alone does not say which MODEL its network is of; in Python: " in capsys.readouterr().err
