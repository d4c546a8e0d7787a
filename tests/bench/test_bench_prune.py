"""``ifso bench prune``: whole runs are made, counted and set against a training step."""

import json

import pytest
import torch
from torch import nn

import ifso
from ifso.bench import prune as bench
from ifso.bench.prune import PruneBench, PruneMethod, PruneSetup, stream_units_removed
from ifso.cli import bench as bench_command
from ifso.cli.main import main

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.body = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.inner, self.fc = nn.Conv2d(8, 12, 1), nn.Linear(12, 10)

    def forward(self, x):
        x = self.stem(x).relu()
        x = self.inner(x + self.body(x)).relu()
        return self.fc(x.mean((2, 3)))
"""

ROWS = {
    "ifso, incremental": {
        "seconds": 12.34, "timings": {"trace": 0.5, "rounds": 11.0}, "removals": 40, "rounds": 400,
        "round_seconds": 0.0275, "scores_per_second": 72.7, "ratio": 5.5, "macs": 0.598, "params": 0.7,
        "weights": 0.675, "stream_units_removed": 0, "accuracy": 88.125, "memory_in_steps": 1.625,
    },
    "[magnitude], one-shot": {
        "seconds": 1.0, "timings": {"rounds": 0.25}, "removals": 40, "rounds": 1, "round_seconds": 0.25,
        "scores_per_second": 8.0, "ratio": 50.0, "memory_in_steps": None, "macs": 0.6, "params": 0.7, "weights": 0.5,
        "stream_units_removed": 3, "accuracy": None,
    },
}  # fmt: skip
TABLES = """\
┏━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━┳━━━━━━━━━━┳━━━━━━━━━━┳━━━━━━━━┳━━━━━━━━━━┳━━━━━━━┳━━━━━━━━━┳━━━━━━━━━┳━━━━━━━━━━┓
┃ method                ┃    s ┃ removals ┃ scores/s ┃ × step ┃ × memory ┃  MACs ┃ weights ┃ streams ┃ accuracy ┃
┡━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━╇━━━━━━━━━━╇━━━━━━━━━━╇━━━━━━━━╇━━━━━━━━━━╇━━━━━━━╇━━━━━━━━━╇━━━━━━━━━╇━━━━━━━━━━┩
│ ifso, incremental     │ 12.3 │       40 │       73 │   5.50 │     1.62 │ 59.8% │   67.5% │       0 │    88.12 │
│ [magnitude], one-shot │  1.0 │       40 │        8 │  50.00 │        – │ 60.0% │   50.0% │       3 │        – │
└───────────────────────┴──────┴──────────┴──────────┴────────┴──────────┴───────┴─────────┴─────────┴──────────┘"""
PARTS = """\
seconds by part of the run
┏━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━┳━━━━━━━━┓
┃ method                ┃ trace ┃ rounds ┃
┡━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━╇━━━━━━━━┩
│ ifso, incremental     │  0.50 │  11.00 │
│ [magnitude], one-shot │  0.00 │   0.25 │
└───────────────────────┴───────┴────────┘"""


@pytest.fixture
def net(tmp_path):
    path = tmp_path / "net.py"
    path.write_text(NET)
    return f"{path}:Net"


@pytest.fixture
def argv(net):
    settings = ["--macs", "0.8", "--batch", "16", "--accumulate", "2", "--batches-per-score", "1"]
    return ["bench", "prune", "--model", net, "--data", "digits", *settings]


def test_runs_are_counted(argv, capsys):
    assert main([*argv, "--criteria", "taylor", "magnitude", "--presets", "authors", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    rows = result["methods"]
    schedules = ("incremental", "one-shot")
    criteria = ("taylor", "magnitude", "preset authors")
    assert list(rows) == [f"{criterion}, {schedule}" for criterion in criteria for schedule in schedules]
    for name, row in rows.items():
        assert row["macs"] <= 0.8
        assert row["rounds"] == {"taylor, one-shot": 2, "preset authors, one-shot": 2, "magnitude, one-shot": 1}.get(
            name, 2 * row["removals"]
        )
        assert row["ratio"] == pytest.approx(row["timings"]["rounds"] / row["rounds"] / result["step_seconds"])
        assert row["scores_per_second"] == pytest.approx(row["rounds"] / row["timings"]["rounds"])
        assert sum(row["timings"].values()) <= row["seconds"]
        assert 0 <= row["accuracy"] <= 100


def test_the_default_is_measured_beside_algorithm_2(argv, capsys):
    assert main([*argv, "--batch", "64", "--accumulate", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert list(result["methods"]) == ["ifso, incremental", "ifso, one-shot", "true-loss, staged"]
    row = result["methods"]["true-loss, staged"]
    batches, stages = 1024 // 64, 4
    assert (row["macs"] <= 0.8, row["rounds"]) == (True, batches * stages)
    assert row["timings"].keys() >= {"scores", "update"}
    assert row["scores_per_second"] == pytest.approx(row["rounds"] / row["timings"]["scores"])
    assert "update" not in result["methods"]["ifso, incremental"]["timings"]


def test_a_staged_run_is_told_nothing_of_algorithm_2():
    setup = PruneSetup(accumulate=3, batches_per_score=4)
    assert PruneMethod.default().options(setup) == {"criterion": "true-loss", "schedule": "staged"}
    told = {"accumulate": 3, "batches_per_score": 4, "schedule": "one-shot"}
    assert PruneMethod("taylor", "one-shot").options(setup) == {**told, "preset": "paper", "criterion": "taylor"}
    assert PruneMethod.of_preset("authors", "one-shot").options(setup) == {**told, "preset": "authors"}


def test_memory_is_that_of_the_run_over_that_of_a_step(net, monkeypatch):
    setup = PruneSetup(net, macs=0.8, data="digits", batch=64)
    (row,) = bench.measure(setup, [PruneMethod.default()], print)["methods"].values()
    assert row["peak_bytes"] is row["memory_in_steps"] is None  # counting takes time on a CPU
    monkeypatch.setattr(PruneBench, "counts_memory", True)
    result = bench.measure(setup, [PruneMethod.default()], print)
    (row,) = result["methods"].values()
    assert row["memory_in_steps"] == row["peak_bytes"] / result["step_peak_bytes"]
    weights = 4 * (8 * 9 + 8 * 8 * 9 + 8 * 12 + 12 * 10)
    maps = 4 * 64 * 64 * (8 + 8 + 12)  # what the convolutions give, which a step keeps
    assert result["step_peak_bytes"] > maps + 2 * weights
    assert row["peak_bytes"] > maps


def test_weights_and_streams_are_those_of_the_result(net):
    workbench = PruneBench(PruneSetup(net, macs=0.5, data="digits", batch=16, accumulate=1, batches_per_score=1))
    row = workbench.run(PruneMethod("magnitude", "one-shot"))
    model = bench.copy.deepcopy(workbench.model)
    graph = ifso.trace(model, workbench.example)
    result = ifso.prune(
        model, workbench.train_batches(), workbench.loss_fn, budget=ifso.Budget(macs=0.5),
        example_inputs=workbench.example, criterion="magnitude", schedule="one-shot", accumulate=1, batches_per_score=1,
    )  # fmt: skip
    left = (result.model.stem, result.model.body, result.model.inner, result.model.fc)
    assert row["weights"] == sum(layer.weight.numel() for layer in left) / (8 * 9 + 8 * 8 * 9 + 8 * 12 + 12 * 10)
    assert row["stream_units_removed"] == 8 - result.model.stem.out_channels
    assert {group.name for group in graph.groups} == set(result.keep)


def test_only_units_of_several_layers_count_as_a_stream(net):
    workbench = PruneBench(PruneSetup(net, data="digits"))
    sizes = {group.name: group.size for group in workbench.graph.groups}
    assert sizes == {"stem": 8, "inner": 12}
    keep = {"stem": torch.arange(8) > 2, "inner": torch.arange(12) > 5}
    assert stream_units_removed(workbench.graph, keep) == 3


def test_random_images_where_no_data_is_given(monkeypatch, capsys):
    small = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )
    monkeypatch.setattr(bench, "network_for", lambda *args, **kwargs: small)
    argv = ["--batch", "4", "--accumulate", "1", "--criteria", "taylor", "--schedules", "one-shot", "--json"]
    assert main(["bench", "prune", *argv]) == 0
    row = json.loads(capsys.readouterr().out)["result"]["methods"]["taylor, one-shot"]
    assert row["accuracy"] is None
    assert row["macs"] <= 0.6


def test_the_tables(monkeypatch, capsys):
    setup = {
        "model": "net", "macs": 0.6, "batch": 128, "accumulate": 10, "batches_per_score": 2, "device_name": "CPU",
        "precision": "float32", "channels_last": False, "torch": "2.11", "step_seconds": 0.005,
    }  # fmt: skip
    monkeypatch.setattr(bench, "measure", lambda *args: {**setup, "methods": ROWS})
    assert main(["bench", "prune"]) == 0
    out = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert "ifso bench prune: net to 60% of its MACs; batch 128, k=10, 2 batches for a score; CPU, float32," in out
    assert "training step 5.0 ms" in out
    assert TABLES in out
    assert PARTS in out
    assert " ".join(bench_command.PRUNE_CAPTION.split()) in " ".join(out.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--device tpu9", "device 'tpu9' cannot be used"),
        ("--precision int4", "precision 'int4' is unknown"),
        ("--criteria best", "no criterion 'best'"),
        ("--presets nobody", "nobody"),
        ("--macs 2", "macs=2.0 is not a share"),
        ("--schedules slowly", "slowly"),
    ],
)
def test_bad_input_is_one_line_and_2(options, message, argv, capsys):
    assert main([*argv, *options.split()]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("· ")]
    assert len(errors) == 1
    assert message in errors[0]


@pytest.mark.parametrize("option", ["--batch 0", "--threads 0", "--threads few"])
def test_counts_are_whole_numbers(option, argv, capsys):
    with pytest.raises(SystemExit) as caught:
        main([*argv, *option.split()])
    assert caught.value.code == 2
    assert f"argument {option.split()[0]}: must be a whole number from 1 up" in capsys.readouterr().err
