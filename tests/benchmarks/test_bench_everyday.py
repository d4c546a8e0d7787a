"""``python -m benchmarks everyday``: what it prints, and that it names what takes more than before."""

import copy
import json
from pathlib import Path

import pytest
from benchmarks import everyday as bench_everyday
from benchmarks.__main__ import main
from benchmarks.everyday import differing, grown, missing, read_record

from ifso.errors import IfsoError

KEPT = Path(__file__).parents[2] / "docs" / "bench" / "everyday-cpu.json"


@pytest.fixture
def record():
    return read_record(KEPT)


@pytest.fixture
def quick(monkeypatch, record):
    """The command without its measurements: numbers of the kept record."""
    found = copy.deepcopy(record)
    monkeypatch.setattr(bench_everyday, "_commands", lambda repeats: found["commands"])
    about = {key: found[key] for key in ("cpu", "python", "torch")}
    monkeypatch.setattr(bench_everyday, "_about", lambda: about)
    sizes = {model["model"]: model for model in found["models"]}
    monkeypatch.setattr(bench_everyday, "measure_apart", lambda worker, words: sizes[words[0]])
    return found


def test_the_kept_record_meets_what_is_promised(record):
    commands = record["commands"]
    assert commands["import ifso"]["cpu_s"] <= 0.3
    assert commands["ifso --help"]["cpu_s"] <= 0.6
    assert all(found["heavy"] == [] for found in commands.values())
    assert {model["model"] for model in record["models"]} == {"torchvision:resnet50", "torchvision:vit_b_16"}
    for model in record["models"]:
        assert model["trace_growth_bytes"] < 96 * 2**20
        assert model["score_in_gradients"] < (3 if "resnet" in model["model"] else 7)


def test_the_same_again_is_no_more(quick, capsys):
    assert main(["everyday", "--against", str(KEPT), "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["commands"] == quick["commands"]
    assert "nothing takes more than ×1.5 the time or ×1.1 the memory" in told.err


def test_what_takes_more_is_named(quick, capsys):
    quick["commands"]["ifso --help"]["cpu_s"] *= 2
    quick["models"][1]["score_bytes"] *= 1.2
    quick["models"][0]["trace_cpu_s"] *= 1.4
    assert main(["everyday", "--against", str(KEPT)]) == 1
    told = capsys.readouterr()
    lines = [line for line in told.err.splitlines() if "more than before" in line]
    assert len(lines) == 2
    assert "ifso --help, cpu_s" in lines[0]
    assert "(×2.00)" in lines[0]
    assert "torchvision:vit_b_16 224×224, batch 2, score_bytes" in lines[1]
    assert "in gradients" in told.out


def test_times_of_another_machine_are_not_compared(record):
    other = copy.deepcopy(record)
    other["cpu"] = "another"
    other["commands"]["ifso --help"]["cpu_s"] *= 10
    other["models"][0]["forward_bytes"] *= 2
    other["models"][1]["trace_growth_bytes"] *= 1.3
    assert differing(record, other) == [f"cpu is another, was {record['cpu']}"]
    assert [more.name.rpartition(", ")[2] for more in grown(record, other, 1.5, 1.1)] == ["forward_bytes"]


def test_what_is_no_longer_measured_is_named(record):
    fewer = {**record, "models": record["models"][:1]}
    assert {name.split()[0] for name in missing(record, fewer)} == {"torchvision:vit_b_16"}
    assert missing(record, record) == []


NO_RECORDS = (
    "",
    "{",
    "[]",
    "{}",
    '{"bench": "everyday"}',
    '{"bench": "everyday", "commands": {"x": 1}, "models": []}',
    '{"bench": "trace", "commands": {"x": {"cpu_s": 1}}, "models": []}',
    "[" * 100_000,
)


@pytest.mark.parametrize("content", NO_RECORDS)
def test_a_file_that_is_no_record_is_refused(tmp_path, content, capsys):
    path = tmp_path / "old.json"
    path.write_text(content)
    assert main(["everyday", "--against", str(path)]) == 2
    assert capsys.readouterr().err == (
        f"ifso: error: {path}: not a record of python -m benchmarks everyday --json; give another file\n"
    )


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(IfsoError, match="No such file or directory; give a file of python -m benchmarks everyday"):
        read_record(tmp_path / "none.json")


@pytest.mark.parametrize("text", ["torchvision:resnet50", "resnet50@224", "a@0x4", "a@x", "@224x4", "a@224x-1"])
def test_sizes_that_cannot_be_read_are_refused(text, capsys):
    assert main(["everyday", "--models", text]) == 2
    assert "write MODEL@SIZExBATCH" in capsys.readouterr().err


@pytest.mark.slow
def test_it_measures(capsys):
    assert main(["everyday", "--models", "ifso:resnet20@32x2", "--repeats", "1", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    (model,) = record["models"]
    assert model["score_in_gradients"] > 1
    assert record["commands"]["ifso --help"]["modules"] > record["commands"]["python"]["modules"]
    assert all(found["heavy"] == [] for found in record["commands"].values())
