"""``ifso export``: the right network of a run, a table that compares, and one line for whatever is wrong."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from running_onnx import need_onnx, session_of
from safetensors.torch import save_file
from torch import nn

import ifso
from ifso.cli.main import main
from ifso.exporting import export as exporting
from ifso.runs.open import open_run

NET = """
from torch import nn

def make():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    project = tmp_path_factory.mktemp("project")
    (project / "net.py").write_text(NET)
    names = {}
    exec(NET, names)
    torch.manual_seed(0)
    save_file(names["make"]().state_dict(), project / "trained.safetensors")
    task = ["--model", f"{project}/net.py:make", "--weights", f"{project}/trained.safetensors", "--data", "digits"]
    pruning = shlex.split("--macs 0.5 --criterion magnitude --schedule one-shot --recalibrate 0")
    assert main(["prune", *task, *pruning, "--out", str(project / "run")]) == 0
    return project


@pytest.fixture
def project(made, tmp_path):
    """A copy that may be spoiled; its run names the files of the first."""
    return Path(shutil.copytree(made, tmp_path / "project"))


def exported(argv, capsys):
    capsys.readouterr()
    assert main(["export", *map(str, argv), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(argv, capsys, status=2):
    """The one line on standard error."""
    capsys.readouterr()
    assert main(["export", *map(str, argv)]) == status
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("· ")]
    assert len(lines) == 1
    return lines[0]


def scores(path, images):
    session = session_of(path)
    return torch.as_tensor(session.run(None, {session.get_inputs()[0].name: images.numpy()})[0])


def test_the_pruned_network_beside_the_unpruned_one(project, capsys):
    need_onnx()
    run = open_run(project / "run")
    assert main(["export", str(run.folder), "--to", "onnx"]) == 0
    printed = capsys.readouterr().out
    images = torch.randn(3, 1, 8, 8)
    file = run.folder / "model.onnx"
    assert torch.allclose(scores(file, images), run.pruned().eval()(images), rtol=1e-4, atol=1e-5)
    cost = ifso.cost(run.pruned(), ifso.trace(run.pruned(), images[:1]))
    whole = ifso.cost(run.original(), ifso.trace(run.original(), images[:1]))
    assert f"{cost.macs / 1e3:.2f} k ({cost.macs / whole.macs:.1%})" in printed
    assert f"{cost.params / 1e3:.2f} k ({cost.params / whole.params:.1%})" in printed
    assert f"{file.stat().st_size / 1e3:.2f} kB (" in printed
    assert "Checked in onnxruntime on batches of 1, 2, 5" in printed
    assert "The run was not fine-tuned" in printed


def test_the_fine_tuned_network_if_there_is_one_and_the_original_if_asked_for(project, capsys, monkeypatch):
    run = open_run(project / "run")
    tuned = run.pruned()
    nn.init.normal_(tuned[6].weight)
    ifso.save(tuned, run.folder / "finetune")
    (run.folder / "finetune" / "summary.json").write_text("{}")
    images = torch.randn(2, 1, 8, 8)
    monkeypatch.setitem(exporting.RUNNERS, "torch", (in_this_process, ""))
    found = exported([run.folder, "--out", project / "tuned.pt2", "--input", "1,1,8,8"], capsys)
    assert (found["network"], found["notes"], found["to"]) == ("fine-tuned", [], "torch")
    assert torch.allclose(loaded(project / "tuned.pt2")(images), tuned.eval()(images), atol=1e-6)
    small, whole = found["networks"]["fine-tuned"], found["networks"]["unpruned"]
    assert small["macs"] < 0.51 * whole["macs"]
    assert small["bytes"] == (project / "tuned.pt2").stat().st_size < whole["bytes"]
    found = exported([run.folder, "--to", "torch", "--original", "--static"], capsys)
    assert (found["network"], list(found["networks"])) == ("unpruned", ["unpruned"])
    assert found["inputs"] == [{"name": "input", "shape": [1, 1, 8, 8]}]
    program = loaded(run.folder / "original.pt2")
    assert torch.allclose(program(images[:1]), run.original().eval()(images[:1]), atol=1e-6)


def in_this_process(path, samples):
    """What the check of a program does, without the seconds that a fresh process takes."""
    return [[loaded(path)(*sample.args).detach()] for sample in samples]


def loaded(path):
    with path.open("rb") as file:
        return torch.export.load(file).module()


def test_a_fine_tuning_that_is_not_finished_is_said(project, capsys, monkeypatch):
    monkeypatch.setitem(exporting.RUNNERS, "torch", (in_this_process, ""))
    (project / "run" / "finetune").mkdir()
    (project / "run" / "finetune" / "config.json").write_text('{"settings": {}}')
    found = exported([project / "run", "--to", "torch", "--out", project / "x.pt2"], capsys)
    assert found["network"] == "pruned"
    assert f"{project}/run/finetune that is not finished" in found["notes"][0]


def test_weights_that_are_gone_leave_the_pruned_network_alone(project, capsys, monkeypatch):
    monkeypatch.setitem(exporting.RUNNERS, "torch", (in_this_process, ""))
    config = json.loads((project / "run" / "config.json").read_text())
    config["about"]["arguments"]["weights"] = "gone.safetensors"
    (project / "run" / "config.json").write_text(json.dumps(config))
    found = exported([project / "run", "--to", "torch"], capsys)
    assert list(found["networks"]) == ["pruned"]
    assert "No unpruned network to compare with" in found["notes"][-1]
    assert "gone.safetensors" in refused([project / "run", "--to", "torch", "--original"], capsys)


def test_without_the_data(project, capsys, monkeypatch):
    monkeypatch.setitem(exporting.RUNNERS, "torch", (in_this_process, ""))
    config = json.loads((project / "run" / "config.json").read_text())
    config["about"]["arguments"]["data"] = "cifar10:gone.npz"
    (project / "run" / "config.json").write_text(json.dumps(config))
    told = [project / "run", "--to", "torch"]
    assert "export without it: --input" in refused(told, capsys)
    found = exported([*told, "--input", "1,1,8,8"], capsys)
    assert found["inputs"] == [{"name": "input", "shape": ["batch", 1, 8, 8]}]
    assert list(found["networks"]) == ["unpruned", "pruned"]


class TestRefusals:
    def test_what_and_where(self, project, capsys):
        run = project / "run"
        assert "--to onnx or --to torch" in refused([run], capsys)
        assert "must be .onnx or .pt2, got .pth" in refused([run, "--out", project / "x.pth"], capsys)
        assert "must be .pt2, got .onnx" in refused([run, "--to", "torch", "--out", project / "x.onnx"], capsys)
        assert "there is no folder" in refused([run, "--out", project / "none" / "x.pt2"], capsys)
        assert "is a folder" in refused([run, "--out", project], capsys)
        assert not list(project.glob("**/.*.new"))

    def test_folders_that_are_no_finished_run(self, project, capsys):
        assert "holds no run" in refused([project, "--to", "torch"], capsys)
        (project / "run" / "summary.json").unlink()
        assert "is not finished; go on with it" in refused([project / "run", "--to", "torch"], capsys)

    def test_an_input_that_does_not_fit(self, project, capsys):
        told = [project / "run", "--to", "torch", "--input", "1,3,8,8"]
        assert "does not run on the example inputs" in refused(told, capsys)

    def test_a_place_that_cannot_be_written(self, project, capsys, monkeypatch):
        def denied(program, path):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(exporting, "write_program", denied)
        told = [project / "run", "--to", "torch"]
        assert f"{project}/run/model.pt2 cannot be written: Permission denied" in refused(told, capsys)

    def test_a_result_that_differs_ends_with_status_4(self, project, capsys, monkeypatch):
        def wrong(path, samples):
            return [[result + 1 for result in results] for results in in_this_process(path, samples)]

        monkeypatch.setitem(exporting.RUNNERS, "torch", (wrong, "a wrong runner"))
        told = [project / "run", "--to", "torch"]
        assert "does not compute what PyTorch does" in refused(told, capsys, status=4)
        assert not list((project / "run").glob("*.pt2*"))

    def test_ctrl_c(self, project, capsys, monkeypatch):
        def interrupted(path, samples):
            raise KeyboardInterrupt

        monkeypatch.setitem(exporting.RUNNERS, "torch", (interrupted, ""))
        assert main(["export", str(project / "run"), "--to", "torch"]) == 130
        assert not [path for path in (project / "run").iterdir() if "pt2" in path.name]
