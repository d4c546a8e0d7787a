"""The command line: what it prints, where, and the status it ends with. Printed tables are compared as text."""

import ast
import doctest
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from xml.etree import ElementTree

import pytest
import torch

import ifso
from ifso.cli import bench, inspect
from ifso.cli.demo import MODEL, Effort, Outcome, Row, check, demonstrate, free_folder
from ifso.cli.main import main
from ifso.data import open_data
from ifso.errors import IfsoError
from ifso.graph.channel_graph import ChannelGraph, Frozen, Group, Member
from ifso.graph.printing import by_reason
from ifso.training.evaluation import evaluate

ROOT = Path(__file__).parents[1]
NET = """
from torch import nn

def make():
    print("chatter")
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))

def ok():
    return nn.Linear(3, 4)

def broken():
    raise OSError("no weights\\nhere")

class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(3, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 2)

    def forward(self, x):
        x = self.stem(x)
        return self.head(x + self.body(x))
"""

FREEZERS = ("freeze", "freeze_all", "_freeze", "setdefault")

TABLE = """\
groups: 1, units: 2, flagged: mean (1)
┏━━━━━━━┳━━━━━━━┳━━━━━━━━━━━━━┳━━━━━━━━━┳━━━━━━━┓
┃ group ┃ units ┃ produced by ┃ read by ┃ flags ┃
┡━━━━━━━╇━━━━━━━╇━━━━━━━━━━━━━╇━━━━━━━━━╇━━━━━━━┩
│ a     │     2 │ a +1        │ fc      │ mean  │
└───────┴───────┴─────────────┴─────────┴───────┘
frozen: what cannot be pruned, and why
┏━━━━━━━━━━━━━━━━━━━━━┳━━━━━━┳━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━┓
┃ reason              ┃ axes ┃ channels ┃ parameters         ┃
┡━━━━━━━━━━━━━━━━━━━━━╇━━━━━━╇━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━┩
│ output of the model │    2 │        6 │ fc.weight, fc.bias │
│ input of the model  │    1 │        1 │ a.weight           │
└─────────────────────┴──────┴──────────┴────────────────────┘
note: [one] branch was not taken"""


@pytest.fixture
def graph():
    places = [
        ("a.weight", 0, "produces"),
        ("a.bias", 0, "follows"),
        ("b.weight", 0, "produces"),
        ("fc.weight", 1, "consumes"),
    ]
    members = tuple(Member(*place, owner=torch.arange(2), size=2) for place in places)
    frozen = (
        Frozen("a.weight", 1, "input of the model", (0,)),
        Frozen("fc.weight", 0, "output of the model", (0, 1, 2)),
        Frozen("fc.bias", 0, "output of the model", (0, 1, 2)),
    )
    return ChannelGraph(
        groups=(Group("a", first=0, size=2, members=members, flags=frozenset({"mean"})),),
        frozen=frozen,
        balances=(),
        layouts={},
        attributes=(),
        terms=(),
        inputs=None,
        output_shapes=((1, 3),),
        notes=("[one] branch was not taken",),
    )


@pytest.fixture
def net(tmp_path):
    path = tmp_path / "net.py"
    path.write_text(NET)
    return f"{path}:make"


def test_a_graph_prints_as_tables(graph):
    lines = [line.rstrip() for line in str(graph).splitlines()]
    assert "\n".join(lines) == TABLE


def test_reasons_that_differ_in_numbers_are_one_row(graph):
    reasons = ("size fixed in blocks.3.attn", "size fixed in blocks.11.attn", "output 7 of the model")
    graph.frozen = tuple(Frozen(f"p{i}", 0, reason, (0, 1)) for i, reason in enumerate(reasons))
    rows = [(item.reason, len(item.axes), item.slices) for item in by_reason(graph)]
    assert rows == [("size fixed in blocks.*.attn", 2, 4), ("output 7 of the model", 1, 2)]


class TestMain:
    @pytest.mark.parametrize(
        ("line", "words", "command"),
        [
            ("unknown", "'unknown'", "ifso"),
            ("inspect", "MODEL", "ifso inspect"),
            ("bench nothing", "'nothing'", "ifso bench"),
            ("bench", "WHAT", "ifso bench"),
            ("inspect m --inptu", "--inptu", "ifso inspect"),
            ("train --model m", "--out", "ifso train"),
            ("train --out a --lr fast", "--lr", "ifso train"),
            ("repro --seeds many", "--seeds", "ifso repro run"),
        ],
    )
    def test_wrong_usage_is_one_line_and_2(self, line, words, command, capsys):
        with pytest.raises(SystemExit) as caught:
            main(line.split())
        assert caught.value.code == 2
        captured = capsys.readouterr()
        (said,) = captured.err.splitlines()
        assert said.startswith("ifso: error: ")
        assert said.endswith(f"; {command} --help shows what can be given")
        assert words in said
        assert captured.out == ""

    def test_nothing_shows_the_help_and_ends_with_2(self, capsys):
        with pytest.raises(SystemExit) as caught:
            main([])
        assert caught.value.code == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("usage: ifso ")
        assert all(command in captured.err for command in ("prune", "finetune", "repro"))

    def test_version(self, capsys):
        with pytest.raises(SystemExit) as caught:
            main(["--version"])
        assert caught.value.code == 0
        assert capsys.readouterr().out == f"ifso {ifso.__version__}\n"

    def test_errors_are_one_line_with_their_status(self, monkeypatch, capsys):
        class Unmet(IfsoError):
            exit_status = 3

        def fail(*_):
            raise Unmet("first\n  second")

        monkeypatch.setattr("ifso.cli.demo.demonstrate", fail)
        assert main(["demo"]) == 3
        captured = capsys.readouterr()
        assert captured.err == "ifso: error: first second\n"
        assert captured.out == ""

    def test_interrupts_end_with_130(self, monkeypatch, capsys):
        def interrupt(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr("ifso.cli.demo.demonstrate", interrupt)
        assert main(["demo"]) == 130
        assert capsys.readouterr().err == "ifso: interrupted\n"

    def test_a_reader_that_goes_away_is_no_error(self):
        reader, writer = os.pipe()
        os.close(reader)
        command = [sys.executable, "-m", "ifso.cli", "repro", "--list", "--json"]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
        os.close(writer)
        assert (done.returncode, done.stderr) == (141, b"")


class TestInspect:
    def test_table(self, capsys):
        assert main(["inspect", "ifso:resnet20"]) == 0
        out = capsys.readouterr().out
        assert "layer1.0.conv1" in out
        assert "frozen: what cannot be pruned, and why" in out
        assert "ifso:resnet20: 272.47 k parameters" in out
        assert inspect.COUNTED in " ".join(out.split())

    def test_json_holds_what_the_graph_holds(self, capsys):
        assert main(["inspect", "ifso:resnet20", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        model = ifso.create_model("ifso:resnet20").eval()
        graph = ifso.trace(model, torch.randn(1, 3, 32, 32))
        assert document["units"] == graph.num_units
        assert [(g["name"], g["units"]) for g in document["groups"]] == [(g.name, g.size) for g in graph.groups]
        assert document["cost"]["params"] == sum(p.numel() for p in model.parameters())
        axes = [(axis["parameter"], axis["dim"], axis["channels"], axis["reason"]) for axis in document["frozen"]]
        assert axes == [(axis.parameter, axis.dim, len(axis.index), axis.reason) for axis in graph.frozen]

    def test_shares_are_what_removing_all_units_saves(self, net, capsys):
        assert main(["inspect", net, "--input", "1,3,8,8", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        (group,) = document["groups"]
        assert group["units"] == 8
        assert group["params"] == 8 * (3 * 9 + 1) + 2 * 8 + 4 * 8
        assert group["macs"] == 36 * (8 * 27 + 4 * 8)
        assert group["macs_share"] == 1.0
        assert group["params_share"] == pytest.approx(group["params"] / (group["params"] + 4))

    def test_a_weight_inside_one_group_counts_once(self, net, capsys):
        assert main(["inspect", net.replace(":make", ":Residual"), "--input", "1,3", "--json"]) == 0
        (group,) = json.loads(capsys.readouterr().out)["groups"]
        assert group["macs"] == 8 * 3 + 8 * 8 + 2 * 8
        assert group["params_share"] == (24 + 64 + 16) / (24 + 64 + 16 + 2)

    def test_no_groups_is_said(self, net, capsys):
        assert main(["inspect", net.replace(":make", ":ok"), "--input", "1,3"]) == 0
        out = capsys.readouterr().out
        assert out.startswith(inspect.NOTHING)
        assert "is an output of the model" in out
        assert f"{net.removesuffix('make')}ok: 16 parameters" in out.replace("\n", "")

    def test_svg_shows_the_same_tables_without_anything_from_outside(self, net, tmp_path, capsys):
        file = tmp_path / "net.svg"
        assert main(["inspect", net, "--input", "1,3,8,8", "--svg", str(file)]) == 0
        picture = ElementTree.parse(file).getroot()
        words = [
            word for text in picture.iter("{http://www.w3.org/2000/svg}text") for word in (text.text or "").split()
        ]
        printed = [word for word in capsys.readouterr().out.split() if word.isalnum()]
        assert printed
        assert set(printed) <= set(words)
        source = file.read_text()
        assert "@font-face" not in source
        assert source.count("http") == 1, "the name space only"

    def test_svg_that_cannot_be_written(self, net, tmp_path, capsys):
        file = tmp_path / "no" / "net.svg"
        assert main(["inspect", net, "--input", "1,3,8,8", "--svg", str(file)]) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith(f"ifso: error: {file} cannot be written: ")

    def test_json_is_all_that_is_printed(self, net, capsys):
        assert main(["inspect", net, "--input", "1,3,8,8", "--json"]) == 0
        captured = capsys.readouterr()
        assert json.loads(captured.out)["model"] == net
        assert "chatter" in captured.err

    def test_ignored_modules_are_left_alone(self, net, capsys):
        assert main(["inspect", net, "--input", "1,3,8,8", "--ignore", "0", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["groups"] == []

    @pytest.mark.parametrize("shape", ["1,3,x", "", "1,0,8", "-1,3"])
    def test_bad_shapes(self, net, shape, capsys):
        with pytest.raises(SystemExit) as caught:
            main(["inspect", net, f"--input={shape}"])
        assert caught.value.code == 2
        assert f"{shape!r} is no shape" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["ifso:resnet21"], "no model 'ifso:resnet21'"),
            (["no/such.py:make"], "no file no/such.py"),
            (
                ["ifso:resnet20", "--input", "1,4,32,32"],
                "resnet20 does not run on --input 1,4,32,32: RuntimeError",
            ),
            (["ifso:resnet20", "--input", "1,9", "--input", "1,2"], "on --input 1,9 and --input 1,2: TypeError"),
            (
                ["ifso:resnet20", "--input", "99999,99999,99999,99999"],
                "99999,99999 takes 372,514,128,908.5 GiB of memory",
            ),
            (["ifso:resnet20", "--ignore", "layer9"], "layer9"),
        ],
    )
    def test_bad_input_is_one_line_and_2(self, argv, message, capsys):
        assert main(["inspect", *argv]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("ifso: error: ")
        assert captured.err.count("\n") == 1
        assert message in captured.err

    def test_a_file_without_a_shape(self, net, capsys):
        assert main(["inspect", net]) == 2
        assert "no example input is known" in capsys.readouterr().err

    def test_a_factory_that_fails(self, net, capsys):
        assert main(["inspect", net.replace(":make", ":broken"), "--input", "1,3"]) == 2
        said = capsys.readouterr().err
        program = Path(net.partition(":")[0]).read_text()
        line = program[: program.index("raise OSError")].count("\n") + 1
        assert "net.py:broken failed: OSError: no weights here (" in said
        assert said.endswith(f"net.py, line {line})\n")
        assert said.count("\n") == 1

    @pytest.mark.parametrize("place", [0, 1, 4])
    def test_debug_shows_the_traceback_too(self, net, place, capsys):
        words = ["inspect", net.replace(":make", ":broken"), "--input", "1,3"]
        assert main([*words[:place], "--debug", *words[place:]]) == 2
        said = capsys.readouterr().err
        assert "Traceback (most recent call last)" in said
        assert "in broken" in said
        assert said.splitlines()[-1].startswith("ifso: error: ")


class TestDemo:
    QUICK = Effort(train_epochs=2, finetune_epochs=1, calibration=64)

    @pytest.fixture
    def quick(self, monkeypatch, few_digits):
        def demonstrated(out, seed, say):
            return demonstrate(out, seed, say, self.QUICK)

        monkeypatch.setattr("ifso.cli.demo.demonstrate", demonstrated)

    def test_prunes_compares_and_saves(self, quick, tmp_path, capsys):
        threads = torch.get_num_threads()
        status = main(["demo", "--out", str(tmp_path / "run"), "--json"])
        assert torch.get_num_threads() == threads
        captured = capsys.readouterr()
        document = json.loads(captured.out)
        budget, accuracy, same_bits = (check["passed"] for check in document["checks"])
        assert (budget, same_bits, status) == (True, True, 0 if accuracy else 4)
        assert document == json.loads((tmp_path / "run" / "demo.json").read_text())
        assert "demo: training ifso:resnet8-digits on digits, 2 epochs" in captured.err
        assert "demo: removing half of the MACs with magnitude" in captured.err
        for run in ("true-loss", "magnitude", "random-3"):
            settings = json.loads((tmp_path / "run" / run / "config.json").read_text())["settings"]
            assert (settings["schedule"], settings["update"], settings["normalize"]) == ("staged", True, "macs")
        assert [row["name"] for row in document["rows"]] == ["unpruned", "true-loss", "magnitude", "random"]
        assert all(0.45 < row["macs"] <= 0.5 for row in document["rows"][1:])
        pruned = ifso.load(tmp_path / "run" / "finetuned", ifso.create_model(MODEL))
        test = open_data("digits").test_batches()
        assert evaluate(pruned, test).top1 == pytest.approx(document["rows"][1]["after"])
        graph = ifso.trace(pruned, torch.zeros(1, 1, 8, 8))
        assert ifso.cost(pruned, graph).macs == round(document["rows"][1]["macs"] * 763_520)
        for row in document["rows"][1:]:
            runs = [row["name"]] if row["runs"] == 1 else [f"{row['name']}-{number}" for number in (1, 2, 3)]
            models = [ifso.load(tmp_path / "run" / run, ifso.create_model(MODEL)) for run in runs]
            assert fmean(evaluate(model, test).top1 for model in models) == pytest.approx(row["before"])

    def test_a_folder_that_is_taken_is_left_alone(self, tmp_path):
        names = []
        for _ in range(3):
            folder = free_folder(tmp_path / "run")
            (folder / "file").write_text("")
            names.append(folder.name)
        assert names == ["run", "run-2", "run-3"]
        (tmp_path / "empty").mkdir()
        assert free_folder(tmp_path / "empty") == tmp_path / "empty"

    def test_a_folder_that_cannot_be_made(self, tmp_path, capsys):
        (tmp_path / "file").write_text("")
        assert main(["demo", "--out", str(tmp_path / "file" / "run")]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith(f"ifso: error: {tmp_path / 'file' / 'run'} cannot be made: ")
        assert (captured.err.count("\n"), captured.out) == (1, "")

    @pytest.mark.parametrize("seed", ["-1", "x", "1.5", ""])
    def test_bad_seeds(self, seed, capsys):
        with pytest.raises(SystemExit) as caught:
            main(["demo", f"--seed={seed}"])
        assert caught.value.code == 2
        assert f"must be a whole number from 0 to 9223372036854775807, got {seed!r}" in capsys.readouterr().err

    def test_the_table(self, monkeypatch, capsys):
        monkeypatch.setattr("ifso.cli.demo.demonstrate", lambda *_: outcome())
        assert main(["demo"]) == 0
        lines = capsys.readouterr().out.splitlines()
        cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
        assert cells == [
            ["unpruned", "100.0%", "100.0%", "99.00 ± 0.50", "99.00 ± 0.50", "0.0200", "5.0", ""],
            ["true-loss", "49.9%", "40.0%", "97.00 ± 0.85", "98.50 ± 0.61", "0.0300", "20.0", "2.0"],
            ["random, 3 runs", "50.0%", "40.0%", "90.00 ± 1.50", "98.00 ± 0.70", "0.0400", "3.0", "2.0"],
        ]
        assert [line for line in lines if line.startswith("ok: ")] == [
            "ok: every pruned network keeps at most 50% of the MACs",
            "ok: accuracy with true-loss after fine-tuning is at least 98.00 %",
            "ok: the saved network, loaded into a fresh one, gives the same bits",
        ]
        assert any(
            line.startswith("run folder: some/where (runs true-loss, magnitude, random-1 to random-3;")
            for line in lines
        )

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"after": 97.99}, "at least 98.00 %"),
            ({"after": float("nan")}, "at least 98.00 %"),
            ({"macs": 0.501}, "at most 50% of the MACs"),
            ({"same_again": False}, "gives the same bits"),
        ],
    )
    def test_a_failed_check_ends_with_4(self, change, words, monkeypatch, capsys):
        monkeypatch.setattr("ifso.cli.demo.demonstrate", lambda *_: outcome(**change))
        assert main(["demo"]) == 4
        captured = capsys.readouterr()
        assert captured.err.startswith("ifso: error: a check of the result failed: ")
        assert words in captured.err
        assert f"FAILED: {captured.err.removeprefix('ifso: error: a check of the result failed: ').strip()}" in (
            captured.out
        )

    @pytest.mark.slow
    def test_as_it_is_within_the_time_and_accuracy_promised(self, tmp_path, capsys):
        start = time.monotonic()
        assert main(["demo", "--out", str(tmp_path / "run"), "--json"]) == 0
        assert time.monotonic() - start < 90
        document = json.loads(capsys.readouterr().out)
        rows = {row["name"]: row for row in document["rows"]}
        image = 100 / document["test_images"]
        assert rows["true-loss"]["after"] >= rows["unpruned"]["after"] - 1
        assert rows["true-loss"]["before"] >= rows["unpruned"]["before"] - 1
        assert rows["true-loss"]["before"] > rows["magnitude"]["before"]
        assert rows["true-loss"]["before"] >= rows["random"]["before"] - image
        assert rows["true-loss"]["after"] >= rows["random"]["after"] - 2 * image


def outcome(after=98.5, macs=0.499, same_again=True):
    rows = (
        Row("unpruned", 1.0, 1.0, 99.0, 99.0, 0.02, seconds=5.0, finetune_seconds=0.0),
        Row("true-loss", macs, 0.4, 97.0, after, 0.03, seconds=20.0, finetune_seconds=2.0),
        Row("random", 0.5, 0.4, 90.0, 98.0, 0.04, seconds=3.0, finetune_seconds=2.0, runs=3),
    )
    return Outcome(rows, Path("some/where"), 60.0, 400, check(rows, same_again=same_again))


class TestBench:
    def test_trace_measures_each_model(self, capsys):
        assert main(["bench", "trace", "--models", "ifso:resnet20", "--json"]) == 0
        (result,) = json.loads(capsys.readouterr().out)["results"]
        model = ifso.create_model("ifso:resnet20")
        assert result["model"] == "ifso:resnet20"
        assert result["model_bytes"] == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        assert 0 < result["cpu_s_again"] <= result["cpu_s_first"] * 2
        assert result["peak_growth_bytes"] >= 0
        assert result["units"] > 0

    def test_the_table_shows_growth_against_the_model(self, monkeypatch, capsys):
        numbers = {"units": 3, "cpu_s_first": 1.0, "cpu_s_again": 0.5, "model_bytes": 2**21, "peak_growth_bytes": 2**20}
        monkeypatch.setattr(bench, "measure_apart", lambda _, names: {"model": names[0], **numbers})
        assert main(["bench", "trace", "--models", "a"]) == 0
        row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("│ a"))
        assert row.replace("│", "").split() == ["a", "3", "1.00", "0.50", "2", "1", "0.50"]

    def test_a_failing_model_ends_with_2(self, capfd):
        assert main(["bench", "trace", "--models", "ifso:resnet21"]) == 2
        errors = [line for line in capfd.readouterr().err.splitlines() if "error" in line]
        assert len(errors) == 1
        assert errors[0].startswith("ifso: error: no model 'ifso:resnet21'")


def test_the_python_of_the_readme_runs_as_it_stands(tmp_path, monkeypatch):
    (code,) = (part.split("```")[0] for part in (ROOT / "README.md").read_text().split("```python\n")[1:])
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(code.replace("range(10)", "range(1)"), names)
    assert names["result"].after.macs <= 0.5 * names["result"].before.macs
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["half"]
    images = names["digits"].example_inputs()
    loaded = ifso.load("runs/half", ifso.create_model("ifso:resnet8-digits")).eval()
    assert torch.equal(loaded(images), names["model"].eval()(images))


def test_the_examples_of_the_coupling_page_run():
    page = ROOT / "docs" / "coupling.md"
    flags = doctest.NORMALIZE_WHITESPACE
    results = doctest.testfile(str(page), module_relative=False, optionflags=flags, encoding="utf-8")
    assert results.attempted > 10
    assert results.failed == 0


def test_the_coupling_page_explains_every_reason():
    page = (ROOT / "docs" / "coupling.md").read_text()
    reasons = {reason for file in Path(ifso.__file__).parent.glob("graph/**/*.py") for reason in _reasons(file)}
    assert len(reasons) > 30
    assert [reason for reason in sorted(reasons) if reason not in page] == []


def _reasons(file):
    """Fixed words of the reasons for freezing: texts given to freeze(…) and freeze_all(…), or named ``reason``."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in FREEZERS:
            values = node.args[1:]
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in ("reason", "UNUSED", "UNPRODUCED"):
            values = [node.value]
        else:
            continue
        texts = [part for value in values for part in ast.walk(value) if isinstance(part, ast.Constant)]
        yield from (text.value.strip() for text in texts if isinstance(text.value, str) and text.value.count(" ") > 1)
