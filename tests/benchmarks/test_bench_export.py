"""``python -m benchmarks export``: numbers that belong together, and one line for whatever is wrong."""

import json
from pathlib import Path

import pytest
from benchmarks.__main__ import main


def test_every_network_in_every_runtime(capsys):
    told = "--models ifso:resnet8-digits --batches 1 2 --rounds 3 --threads 1 --runtimes torch --json"
    assert main(["export", *told.split()]) == 0
    document = json.loads(capsys.readouterr().out)
    (result,) = document["results"]
    networks = result["networks"]
    assert list(networks) == ["unpruned", "pruned", "pruned, round_to=8"]
    assert networks["unpruned"]["macs_share"] == 1
    assert all(networks[name]["macs_share"] <= 0.5 for name in networks if name != "unpruned")
    assert networks["pruned"]["multiples_of_8"] < networks["pruned, round_to=8"]["multiples_of_8"] == 1
    assert [(line["batch"], line["network"]) for line in result["timings"]] == [
        (batch, name) for batch in (1, 2) for name in networks
    ]
    assert all(line["speedup"] == 1 for line in result["timings"] if line["network"] == "unpruned")
    assert all(0 < line["fastest"] <= line["seconds"] for line in result["timings"])


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (["--runtimes", "tvm", "--models", "ifso:resnet20"], "'tvm' is no runtime"),
        (["--weights", "x.safetensors"], "--weights are those of one network"),
    ],
)
def test_what_cannot_be_measured(told, message, capsys):
    assert main(["export", *told]) == 2
    assert message in capsys.readouterr().err


def test_the_table_of_the_page_is_that_of_the_file():
    docs = Path(__file__).parents[2] / "docs"
    rows = [line for line in (docs / "export.md").read_text().splitlines() if "×224 |" in line or "×32" in line]
    rows = [[cell.strip() for cell in row.split("|")[2:-1]] for row in rows if row.startswith("| ResNet")]
    wanted = []
    for result in json.loads((docs / "bench" / "export-cpu.json").read_text())["results"]:
        for batch, runtime in ((batch, runtime) for batch in result["batches"] for runtime in result["runtimes"]):
            lines = [line for line in result["timings"] if (line["batch"], line["runtime"]) == (batch, runtime)]
            speeds = [f"×{line['speedup']:.2f}" for line in lines[1:]]
            wanted.append([str(batch), runtime, f"{lines[0]['seconds'] * 1e3:.1f}", *speeds])
    assert rows == wanted
    assert len(rows) == 24
