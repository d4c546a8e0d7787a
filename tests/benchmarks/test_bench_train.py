"""``python -m benchmarks train``: shapes that are what they are called, steps that are counted, one document."""

import json
from contextlib import suppress

import pytest
import torch
from benchmarks import train as bench
from benchmarks.__main__ import main
from benchmarks.train import EPOCHS, STEPS_OF_AN_EPOCH, Setup, Way, Workbench, ways

from ifso.errors import DataError
from ifso.training.steps import PlainSteps
from ifso.training.triton_layers import available

torch.set_num_threads(1)

ARGV = ["train", "--model", "ifso:resnet8-digits", "--data", "digits", "--batch", "8", "--repeats", "2"]
PLAIN = Way("plain", captured=False, narrow=False)
ROWS = [
    {
        "shape": "compact", "way": "plain", "macs": 0.5, "step_seconds": 0.01, "spread": 0.001, "floor_seconds": 0.004,
        "projected_seconds": 780.0, "side_by_side": {}, "notes": [],
    },
    {
        "shape": "padded", "way": "CUDA graph", "macs": 1.0, "step_seconds": 0.002, "spread": 0.0,
        "floor_seconds": 0.0015, "projected_seconds": 156.0, "notes": ["it runs without"],
        "side_by_side": {"8": {"step_seconds": 0.008, "throughput": 2.0}},
    },
]  # fmt: skip
TABLE = """\
┏━━━━━━━━━┳━━━━━━━━━━━━━━┳━━━━━━━━┳━━━━━━━┳━━━━━━┳━━━━━━━━━━┳━━━━━━┳━━━━━━━━━━━━━┓
┃ shape   ┃ steps        ┃   MACs ┃    ms ┃ ± ms ┃ floor ms ┃  × 8 ┃ projected s ┃
┡━━━━━━━━━╇━━━━━━━━━━━━━━╇━━━━━━━━╇━━━━━━━╇━━━━━━╇━━━━━━━━━━╇━━━━━━╇━━━━━━━━━━━━━┩
│ compact │ plain        │  50.0% │ 10.00 │ 1.00 │     4.00 │    – │         780 │
│ padded  │ CUDA graph * │ 100.0% │  2.00 │ 0.00 │     1.50 │ 2.00 │         156 │
└─────────┴──────────────┴────────┴───────┴──────┴──────────┴──────┴─────────────┘"""


@pytest.fixture(scope="module")
def workbench():
    return Workbench(Setup("ifso:resnet8-digits", batch=8, steps=3, repeats=2, data="digits"))


@pytest.fixture(scope="module")
def shapes(workbench):
    with torch.random.fork_rng(devices=[]):
        return {shape.name: shape for shape in workbench.shapes()}


def widths(model):
    return [layer.out_channels for layer in model.modules() if isinstance(layer, torch.nn.Conv2d)]


def test_shapes(shapes, workbench):
    assert list(shapes) == ["compact", "rounded to 8", "padded"]
    compact, rounded, padded = (shape.model for shape in shapes.values())
    assert all(width % 8 == 0 for width in widths(rounded))
    assert any(width % 8 for width in widths(compact))
    assert widths(padded) == widths(workbench._network())
    x = workbench.data.example_inputs()
    with torch.no_grad():
        torch.testing.assert_close(padded.eval()(x), compact.eval()(x))
    assert [shape.macs <= 0.5 for shape in shapes.values()] == [True, True, False]


def test_an_epoch_has_as_many_steps_as_asked_for(workbench):
    assert len(workbench.data.train_batches(8)) == 3
    pixels = {image.numpy().tobytes() for image in workbench.data.x_train}
    assert len(pixels) > 10


def test_seconds_are_of_a_step_of_every_network(workbench, shapes, monkeypatch):
    """Every epoch but the first counts; with a clock that only a step moves, a step takes a second."""
    clock = [0.0]
    original = PlainSteps.epoch

    def slow(self, number):
        for stepped in original(self, number):
            clock[0] += 1
            yield stepped

    monkeypatch.setattr(PlainSteps, "epoch", slow)
    monkeypatch.setattr("ifso.training.trainer.time.perf_counter", lambda: clock[0])
    assert workbench.side_by_side(shapes["compact"], PLAIN, 1) == ([1.0, 1.0], [])
    together, _ = workbench.side_by_side(shapes["compact"], PLAIN, 2)
    assert len(together) == 4
    assert sum(together) / 4 == pytest.approx(2.0, abs=0.4)
    monkeypatch.setattr(Workbench, "floor", lambda *_: 0.5)
    row = workbench.row(shapes["compact"], PLAIN)
    assert (row["step_seconds"], row["projected_seconds"]) == (1.0, EPOCHS * STEPS_OF_AN_EPOCH)
    assert list(row["side_by_side"]) == ["8"]
    assert row["side_by_side"]["8"]["throughput"] == pytest.approx(1.0, abs=0.15)


def test_ways_of_a_gpu():
    names = [way.name for way in ways(torch.device("cuda"), "bf16")]
    assert names == ["plain", "CUDA graph", *["CUDA graph, narrow kernels"] * available()]
    assert [way.name for way in ways(torch.device("cuda"), "float32")] == ["plain", "CUDA graph"]


def test_json_and_file(tmp_path, capsys):
    out = tmp_path / "bench.json"
    assert main([*ARGV, "--steps", "1", "--lanes", "1", "2", "--json", "--out", str(out)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads(out.read_text())
    result = document["result"]
    assert [(row["shape"], row["way"]) for row in result["rows"]] == [
        ("compact", "plain"), ("rounded to 8", "plain"), ("padded", "plain"),
    ]  # fmt: skip
    for row in result["rows"]:
        assert 0 < row["floor_seconds"] < 10 * row["step_seconds"]
        assert row["side_by_side"]["2"]["throughput"] > 0.3
    assert (result["data"], result["projected"]) == ("digits", {"epochs": 200, "steps": 390})
    assert result["complete"] is True


def test_one_shape_alone(capsys):
    assert main([*ARGV, "--steps", "1", "--lanes", "1", "--shapes", "padded", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["result"]["rows"]
    assert (row["shape"], row["macs"]) == ("padded", 1.0)


def test_what_was_measured_before_the_end_is_in_the_file(tmp_path, monkeypatch):
    rows = [{**ROWS[0], "shape": "compact"}, KeyboardInterrupt()]

    def row(*_):
        found = rows.pop(0)
        if isinstance(found, BaseException):
            raise found
        return found

    monkeypatch.setattr(Workbench, "row", row)
    out = tmp_path / "bench.json"
    assert main([*ARGV, "--steps", "1", "--lanes", "1", "--out", str(out)]) == 130
    result = json.loads(out.read_text())["result"]
    assert (result["complete"], [row["shape"] for row in result["rows"]]) == (False, ["compact"])


def test_the_whole_network(capsys):
    assert main([*ARGV, "--kept", "1", "--steps", "1", "--lanes", "1", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["result"]["rows"]
    assert (row["shape"], row["macs"], row["side_by_side"]) == ("whole", 1.0, {})


def test_a_shape_that_cannot_be_had_is_told():
    few = Workbench(Setup("ifso:resnet8-digits", kept=0.05, batch=8, steps=1, repeats=1, data="digits"))
    with torch.random.fork_rng(devices=[]):
        assert [shape.name for shape in few.shapes()] == ["compact", "padded"]
    assert few.notes[0].startswith("not rounded to 8: ")


def test_the_table(monkeypatch, capsys):
    about = {
        "model": "net", "kept": 0.5, "batch": 128, "data": "generated", "device_name": "abacus", "precision": "bf16",
        "channels_last": True, "compile": False, "torch": "2.11", "projected": {"epochs": 200, "steps": 390},
        "notes": ["not rounded to 8: too small"],
    }  # fmt: skip
    monkeypatch.setattr(bench, "measure", lambda *_: {**about, "rows": ROWS})
    assert main(["train"]) == 0
    out = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert TABLE in out
    assert out.endswith("not rounded to 8: too small\n* padded, CUDA graph: it runs without")
    words = " ".join(out.split())
    assert "net with 50% of its MACs; batch 128, generated images; abacus, bf16, channels last, torch 2.11" in words
    assert " ".join(bench.CAPTION.format(epochs=200, steps=390).split()) in words
    assert "Projected: not run, but 200 epochs of 390 steps" in words


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--kept 0", "kept=0.0 is not a share"),
        ("--kept 1.5", "kept=1.5 is not a share"),
        ("--lanes 1 0", "numbers from 1 up"),
        ("--steps 0", "numbers from 1 up"),
        ("--shapes round", "shapes round will not do; give some of compact, rounded, padded"),
        ("--threads 0", "--threads: must be a whole number"),
        ("--precision int4", "precision 'int4' is unknown"),
        ("--device tpu9", "device 'tpu9' cannot be used"),
        ("--data cifar10:none.npz", "none.npz"),
        ("--model ifso:resnet21", "resnet21"),
    ],
)
def test_bad_input_is_one_line_and_2(options, message, capsys):
    with suppress(SystemExit):
        assert main([*ARGV, *options.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


def test_images_that_are_not_held_in_memory(monkeypatch):
    monkeypatch.setattr(bench, "open_data", lambda *_, **__: object())
    with pytest.raises(DataError, match="images held in memory, which imagenet:there are not"):
        Workbench(Setup(data="imagenet:there"))
