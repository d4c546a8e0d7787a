"""A run folder opened again: the same data and networks, also after files have moved, and one line if they are gone."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ifso
from ifso.cli.main import main
from ifso.errors import ModelNotFound, RunError
from ifso.runs.open import open_run
from ifso.surgery.recipe import digest_of

NET = """
from torch import nn

def make():
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 10),
    )
"""
QUICK = shlex.split("--macs 0.7 --criterion magnitude --schedule one-shot --recalibrate 0 --batch 32 --seed 3")
IMAGES = torch.linspace(-1, 1, 2 * 64).view(2, 1, 8, 8)


def make():
    names = {}
    exec(NET, names)
    return names["make"]()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A project with a network, its weights and a pruning run, all named by relative paths."""
    project = tmp_path_factory.mktemp("project")
    (project / "net.py").write_text(NET)
    torch.manual_seed(0)
    trained = make()
    save_file(trained.state_dict(), project / "trained.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        task = shlex.split("--model net.py:make --weights trained.safetensors --data digits --out runs/a")
        assert main(["prune", *task, *QUICK]) == 0
    return project, trained


@pytest.fixture
def project(made, tmp_path, monkeypatch):
    copy = Path(shutil.copytree(made[0], tmp_path / "project"))
    monkeypatch.chdir(copy)
    return copy


@pytest.fixture
def trained(made):
    return made[1]


def same(one: nn.Module, other: nn.Module) -> bool:
    with torch.no_grad():
        return torch.equal(one.eval()(IMAGES), other.eval()(IMAGES))


class TestNetworks:
    def test_original_and_pruned_from_another_folder(self, project, trained, monkeypatch):
        monkeypatch.chdir(project.parent)
        run = open_run(project / "runs" / "a", model=f"{project / 'net.py'}:make")
        assert (run.arguments["batch"], run.arguments["macs"]) == (32, 0.7)
        assert same(run.original(), trained)
        pruned = run.pruned()
        assert same(pruned, ifso.load(run.folder, make()))
        assert pruned[2].weight.numel() < trained[2].weight.numel()
        assert (run.finetuning, run.finetuned()) == ("none", None)

    @pytest.mark.parametrize("place", [".", "runs"])
    def test_a_program_that_came_with_a_run_is_not_executed(self, project, tmp_path, monkeypatch, place):
        (project / "net.py").unlink()
        (project / place / "net.py").write_text("raise SystemExit('executed')")
        monkeypatch.chdir(tmp_path)
        with pytest.raises(RunError, match=r"net\.py executed, which came with it; if you .* give --model .*:make$"):
            open_run(project / "runs" / "a").pruned()
        told = open_run(project / "runs" / "a", model=f"{project / place / 'net.py'}:make")
        with pytest.raises(ModelNotFound, match="SystemExit: executed"):
            told.pruned(data=told.open_data())

    def test_a_program_within_a_run_is_not_executed_even_from_there(self, project, monkeypatch):
        (project / "net.py").rename(project / "runs" / "a" / "net.py")
        monkeypatch.chdir(project / "runs" / "a")
        with pytest.raises(RunError, match="which came with it"):
            open_run(Path()).pruned()

    def test_weights_that_moved(self, project, trained):
        (project / "trained.safetensors").rename(project / "elsewhere.safetensors")
        run = open_run(project / "runs" / "a")
        with pytest.raises(RunError, match=r"trained\.safetensors.*\(tried trained\.safetensors, .*say with --weights"):
            run.original()
        assert same(run.original(weights=str(project / "elsewhere.safetensors")), trained)
        assert run.pruned()[6].weight.shape[0] == 10

    def test_other_weights_are_refused(self, project):
        torch.manual_seed(1)
        save_file(make().state_dict(), project / "other.safetensors")
        with pytest.raises(RunError, match=r"other\.safetensors does not hold the weights that the run in"):
            open_run(project / "runs" / "a").original(weights=str(project / "other.safetensors"))

    def test_a_network_file_that_moved(self, project, trained):
        moved = (project / "net.py").rename(project / "nets.py")
        with pytest.raises(RunError, match=r"--model net\.py:make, which is not there any more"):
            open_run(project / "runs" / "a").pruned()
        assert same(open_run(project / "runs" / "a", model=f"{moved}:make").original(), trained)

    def test_weights_of_a_seed_come_again(self, project):
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(project)
            assert main(["prune", "--model", "net.py:make", "--data", "digits", "--out", "b", *QUICK]) == 0
        torch.manual_seed(3)
        truth, state = make(), torch.get_rng_state()
        assert same(open_run(project / "b").original(), truth)
        assert torch.equal(torch.get_rng_state(), state)

    def test_fine_tuning(self, project):
        run = open_run(project / "runs" / "a")
        tuned = run.pruned()
        nn.init.ones_(tuned[6].bias)
        place = ifso.save(tuned, run.folder / "finetune")
        config = {"format": "ifso-run", "version": 1, "settings": {"weights": digest_of(run.pruned())}}
        (place / "config.json").write_text(json.dumps(config))
        assert (run.finetuning, run.finetuned()) == ("unfinished", None)
        (place / "summary.json").write_text("{}")
        assert same(run.finetuned(), tuned)
        with pytest.raises(RunError, match=r"is the fine-tuning of a run; give the run itself, .*runs/a$"):
            open_run(place)

    def test_a_fine_tuning_of_another_pruning_is_refused(self, project):
        run = open_run(project / "runs" / "a")
        place = ifso.save(run.pruned(), run.folder / "finetune")
        config = {"format": "ifso-run", "version": 1, "settings": {"weights": "of another"}}
        (place / "config.json").write_text(json.dumps(config))
        (place / "summary.json").write_text("{}")
        with pytest.raises(RunError, match=r"finetune began with another network than .*runs/a holds now"):
            run.finetuned()


class TestData:
    def test_as_in_the_run_or_another(self, project):
        run = open_run(project / "runs" / "a")
        data = run.open_data(validation=0.1)
        assert (data.name, data.seed, len(data.validation)) == ("digits", 3, 144)
        assert run.open_data(seed=5).seed == 5
        (project / "own.py").write_text("class Own:\n    train_batches, num_classes = [], 7\n")
        assert run.open_data(data=f"{project / 'own.py'}:Own").num_classes == 7

    def test_data_that_moved(self, project):
        run = open_run(project / "runs" / "a")
        config = json.loads((run.folder / "config.json").read_text())
        config["about"]["arguments"]["data"] = "cifar10:sets/c.npz"
        (run.folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(RunError) as caught:
            open_run(run.folder).open_data()
        assert "--data cifar10:sets/c.npz, which is not there any more (tried sets/c.npz, " in str(caught.value)
        assert f"{project / 'sets' / 'c.npz'}" in str(caught.value)
        assert str(caught.value).endswith("say with --data where it is now")


class TestFolders:
    def test_a_run_of_python_needs_to_be_told(self, project):
        run = open_run(project / "runs" / "a")
        config = json.loads((run.folder / "config.json").read_text())
        (run.folder / "config.json").write_text(json.dumps({**config, "about": {}}))
        with pytest.raises(RunError, match="does not say which model it was made with; give --model"):
            open_run(run.folder).pruned()
        told = open_run(run.folder, model=f"{project / 'net.py'}:make")
        assert same(told.pruned(data=told.open_data(data="digits")), run.pruned())

    def test_a_saved_network_is_enough(self, project):
        run = open_run(project / "runs" / "a")
        alone = ifso.save(run.pruned(), project / "alone")
        told = open_run(alone, model=f"{project / 'net.py'}:make")
        assert same(told.pruned(data=told.open_data(data="digits")), run.pruned())

    def test_refused(self, project):
        with pytest.raises(RunError, match=r"holds no run \(no config\.json\); give a folder that ifso prune --out"):
            open_run(project)
        (project / "runs" / "a" / "summary.json").unlink()
        with pytest.raises(RunError, match=r"is not finished; go on with it: ifso prune --resume --out .*runs/a$"):
            open_run(project / "runs" / "a")
        (project / "runs" / "a" / "config.json").write_text("{")
        with pytest.raises(RunError, match=r"config\.json: damaged"):
            open_run(project / "runs" / "a")


class TestResume:
    def test_a_program_within_a_run_is_not_executed(self, project, capsys):
        config = project / "runs" / "a" / "config.json"
        told = json.loads(config.read_text())
        (project / "runs" / "a" / "net.py").write_text("raise SystemExit('executed')")
        told["about"]["arguments"]["model"] = "runs/a/net.py:make"
        config.write_text(json.dumps(told))
        assert main(["prune", "--resume", "--out", "runs/a"]) != 0
        assert "the program runs/a/net.py executed, which came with it" in capsys.readouterr().err
