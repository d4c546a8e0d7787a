"""The user's own program fine-tuned the network: ``--finetuned DIR``, or saved by it in RUN/finetune."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from digits_commands import QUICK, TASK, ifso_, loaded

import ifso
from ifso.data import open_data
from ifso.tasks.classification import cross_entropy
from ifso.training.evaluation import evaluate


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run, and its network after a loop of one's own."""
    project = tmp_path_factory.mktemp("project")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        assert ifso_(f"prune {TASK} --macs 0.7 {QUICK} --out run") == 0
        model = loaded("run").train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for images, labels in open_data("digits").train_batches(128):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        ifso.save(model, "own")
    return project


def accuracy(folder) -> float:
    return evaluate(loaded(folder), open_data("digits").test_batches()).top1


@pytest.mark.parametrize("where", ["own", "run/finetune"])
def test_evaluated_reported_and_exported(project, programs_run_here, capsys, where):
    if where != "own":
        shutil.copytree("own", where)
    option = "" if where != "own" else "--finetuned own"
    assert ifso_(f"eval run {option} --repeats 1 --json --out run/eval.json") == 0
    networks = json.loads(capsys.readouterr().out)["networks"]
    assert networks["fine-tuned"]["top1"] == pytest.approx(accuracy(where))
    assert networks["fine-tuned"]["top1"] > networks["pruned"]["top1"]

    assert ifso_(f"export run {option} --to torch --json") == 0
    assert json.loads(capsys.readouterr().out)["network"] == "fine-tuned"

    assert ifso_(f"report run {option}") == 0
    page = Path("run/report.html").read_text()
    assert f"{accuracy(where):.2f}" in page
    assert f"ifso.load(&#39;{where}&#39;" in page
    assert "is not finished" not in page


def test_the_report_says_how_to_measure_it(project):
    assert ifso_("report run --finetuned own") == 0
    assert "ifso eval RUN --finetuned own --out RUN/eval.json" in Path("run/report.html").read_text()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("eval run --finetuned nowhere", "--finetuned nowhere holds no network (no recipe.json)"),
        ("report run --finetuned nowhere", "--finetuned nowhere holds no network (no recipe.json)"),
        (f"eval {TASK} --finetuned own", "give the RUN, too"),
        ("report run run --finetuned own", "give one RUN"),
        ("eval run --finetuned whole", "whole holds a network of other sizes than run"),
    ],
)
def test_refused(project, capsys, line, words):
    ifso.save(ifso.create_model("ifso:resnet8-digits"), "whole")
    assert ifso_(line) == 2
    assert words in capsys.readouterr().err


def test_pruned_further(project, capsys):
    shutil.copytree("own", "run/finetune")
    assert ifso_(f"prune run --macs 0.7 {QUICK} --out second") == 0
    assert "the network is the fine-tuned network of run" in capsys.readouterr().err


class TestPython:
    """A run that Python began, and was told there what the command line calls its network and data."""

    @pytest.fixture
    def begun(self, project):
        def begin(**about):
            torch.manual_seed(1)
            model, data = ifso.create_model("ifso:resnet8-digits"), open_data("digits")
            ifso.save(model, "whole")
            ifso.prune(
                model, data.train_batches(64), cross_entropy,
                budget=ifso.Budget(macs=0.7), example_inputs=data.example_inputs(), criterion="magnitude",
                schedule="one-shot", recalibrate=0, out="python", about=about, progress=False,
            )  # fmt: skip

        return begin

    def test_needs_to_be_told_only_once(self, begun, programs_run_here, capsys):
        begun(model="ifso:resnet8-digits", weights="whole", data="digits")
        assert ifso_("eval python --repeats 1 --json") == 0
        assert list(json.loads(capsys.readouterr().out)["networks"]) == ["unpruned", "pruned"]
        assert ifso_("finetune python --epochs 1 --distill") == 0
        assert ifso_("export python --to torch") == 0
        assert ifso_(f"prune python --macs 0.7 {QUICK} --out again") == 0

    def test_without_weights_the_rest_is_measured(self, begun, capsys):
        begun(model="ifso:resnet8-digits", data="digits")
        assert ifso_("eval python --repeats 1 --json") == 0
        document = json.loads(capsys.readouterr().out)
        assert list(document["networks"]) == ["pruned"]
        assert "does not come with the weights" in document["notes"][0]

    def test_says_where_to_tell_it(self, begun, capsys):
        begun()
        assert ifso_("eval python") == 2
        assert 'give --data, or tell it once: ifso.prune(…, about={"data": …})' in capsys.readouterr().err

    def test_a_name_that_is_none(self, begun, capsys):
        begun(model=["ifso:resnet8-digits"], data="digits")
        assert ifso_("eval python") == 2
        assert "model must be a text" in capsys.readouterr().err

    def test_a_program_in_the_run_is_not_executed(self, begun, capsys):
        begun(model="python/net.py:make", data="digits")
        Path("python/net.py").write_text("raise SystemExit('executed')")
        assert ifso_("eval python") == 2
        assert "which came with it" in capsys.readouterr().err
