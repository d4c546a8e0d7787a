"""``print(result)``: compared as text; and what of it a run folder brings back."""

import json
import re
import shutil

import pytest
import torch
from small_runs import prune
from torch import nn

import ifso
from ifso.costs.cost import count
from ifso.errors import RunError
from ifso.pruning.result import Check, Measure, PruneResult

GOLDEN = """\
Sequential: 4 of 8 units removed in 9.5 s, 0.50% below the target

                      before  after    kept  asked for
MACs                     792    396  50.00%     50.50%
MACs of convolutions     648    324  50.00%
parameters               218    110  50.46%
activations               74     38  51.35%

stage                     accuracy
unpruned                     71.25
pruned                       64.06
batch norms recalibrated      66.5

stage  MACs kept  units removed  accuracy  top5  seconds so far
1         75.00%              3        70    90             3.2
2         62.50%              0                             6.1
10        50.00%              1     64.06                   9.4

reached their floor: layer1.0.conv1, a, b, c, d (and 2 more)

ok     budget met: 50.00% of macs kept
note: a word
to train it further make the optimizer anew: the one before holds parameters of the larger network
"""

STAGES = (
    {"stage": 1, "units": 3, "shares": {"macs": 0.75}, "values": {"accuracy": 70.0, "top5": 90.0}, "seconds": 3.21},
    {"stage": 2, "units": 0, "shares": {"macs": 0.625}, "values": {}, "seconds": 6.1},
    {"stage": 10, "units": 1, "shares": {"macs": 0.5}, "values": {"accuracy": 64.0625}, "seconds": 9.4},
)
FLOORS = ("layer1.0.conv1", *"abcdef")


def result(**changes):
    model = nn.Sequential(nn.Conv2d(1, 8, 3, bias=False), nn.Flatten(), nn.Linear(72, 2))
    graph = ifso.trace(model, torch.zeros(1, 1, 5, 5))
    keep = {name: torch.arange(choice.numel()) < 4 for name, choice in graph.keep_all().items()}
    before, after = count(graph, graph.kept(None)), count(graph, graph.kept(keep))
    kinds = ("macs", "conv_macs", "params", "activations")
    shares = {kind: after.as_dict()[kind] / before.as_dict()[kind] for kind in kinds}
    chosen = {
        "targets": {"macs": 0.505}, "shares": shares, "removals": 4, "seconds": 9.54, "timings": {},
        "checks": (Check("budget met", True, "50.00% of macs kept"),), "notes": ("a word",),
        "measures": (
            Measure("unpruned", {"accuracy": 71.25}), Measure("pruned", {"accuracy": 64.0625}),
            Measure("batch norms recalibrated", {"accuracy": 66.5}),
        ),
        "stages": STAGES, "floors": FLOORS, **changes,
    }  # fmt: skip
    return PruneResult(model=model, graph=graph, keep=keep, recipe=None, before=before, after=after, **chosen)


def test_a_staged_run_as_a_whole():
    assert f"{result()}\n" == GOLDEN


def test_a_run_without_stages_says_nothing_of_them():
    plain = str(result(stages=(), floors=()))
    assert "seconds so far" not in plain
    assert "floor" not in plain
    assert plain.splitlines()[:12] == GOLDEN.splitlines()[:12]


def stages_shown(number, **changes):
    stages = [{**STAGES[0], "stage": stage} for stage in range(1, number + 1)]
    lines = str(result(stages=tuple(stages), measures=(), **changes)).splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith("stage "))
    table = lines[first + 1 : lines.index("", first)]
    return [int(line.split()[0]) for line in table if "%" in line], [line for line in table if "%" not in line]


@pytest.mark.parametrize("number", [1, 12])
def test_up_to_twelve_stages_are_all_shown(number):
    assert stages_shown(number) == (list(range(1, number + 1)), [])


def test_of_many_stages_the_first_the_last_and_some_between_are_shown():
    assert stages_shown(100) == (list(range(1, 101, 9)), ["12 of 100 stages are shown"])
    numbers, _ = stages_shown(13)
    assert (len(set(numbers)), numbers[0], numbers[-1]) == (12, 1, 13)


def test_the_shares_that_were_asked_for_are_shown_beside_the_macs():
    told = str(result(targets={"params": 0.51}, stages=({**STAGES[0], "shares": {"macs": 0.75, "params": 0.8}},)))
    (head, row) = (line for line in told.splitlines() if line.startswith(("stage  MACs", "1 ")))
    assert head.startswith("stage  MACs kept  parameters kept  units removed")
    assert row.split()[:4] == ["1", "75.00%", "80.00%", "3"]


def test_of_several_budgets_the_binding_one_is_named():
    room = "room left in the others: parameters 9.5%"
    assert f"binding: the budget of MACs; {room}\n" in str(result(targets={"macs": 0.505, "params": 0.6}))
    assert "binding" not in str(result())
    assert f"binding: the budget of MACs; {room}" in result(targets={"macs": 0.505, "params": 0.6})._repr_html_()


def test_a_latency_has_its_spread_and_one_that_is_too_long_is_told():
    latency = {"before": 0.004, "after": 0.0025, "share": 0.625, "spread": 0.0004}
    shares = {**result().shares, "latency": 0.5}
    told = str(result(targets={"latency": 0.55}, shares=shares, latency=latency))
    assert re.search(r"latency \(measured\) +4\.00 ms  2\.50 ms ± 0\.20  62\.50%\n", told)
    assert "the latency budget is missed: 62.5% of the time is left as measured, 55.0% was asked for" in told
    assert "missed" not in str(result(targets={"latency": 0.63}, shares=shares, latency=latency))


def test_few_floors_are_all_named():
    assert "reached their floor: a, b\n" in str(result(floors=("a", "b")))


class TestRunFolder:
    @pytest.fixture(scope="class")
    def finished(self, tmp_path_factory):
        folder = tmp_path_factory.mktemp("finished") / "run"
        prune("one-shot", folder)
        return folder

    @pytest.fixture
    def run(self, finished, tmp_path):
        """The folder of a finished run, and what its summary says."""
        folder = shutil.copytree(finished, tmp_path / "run")
        return folder, json.loads((folder / "summary.json").read_text())

    @staticmethod
    def again(folder, summary):
        (folder / "summary.json").write_text(json.dumps(summary))
        return prune("one-shot", folder)

    def test_a_summary_holds_stages_and_floors_as_plain_values(self):
        summary = json.loads(json.dumps(result().summary()))
        assert summary["stages"] == list(STAGES)
        assert summary["floors"] == list(FLOORS)

    def test_they_are_read_back(self, run):
        folder, summary = run
        stages = [*STAGES[:2], {**STAGES[2], "values": {"accuracy": None}}]
        found = self.again(folder, {**summary, "stages": stages, "floors": list(FLOORS)})
        assert (list(found.stages), found.floors) == (stages, FLOORS)
        assert "reached their floor" in str(found)
        assert found.summary()["stages"] == stages

    def test_an_older_folder_has_none(self, run):
        folder, summary = run
        assert (summary.pop("stages"), summary.pop("floors")) == ([], [])
        found = self.again(folder, summary)
        assert (found.stages, found.floors) == ((), ())

    @pytest.mark.parametrize(
        "change",
        [
            {"floors": "conv"},
            {"floors": [3]},
            {"stages": {}},
            {"stages": [3]},
            {"stages": [{key: value for key, value in STAGES[0].items() if key != "seconds"}]},
            *({"stages": [{**STAGES[0], key: "x"}]} for key in STAGES[0]),
            {"stages": [{**STAGES[0], "values": {"accuracy": "good"}}]},
            {"stages": [{**STAGES[0], "stage": True}]},
            {"stages": [{**STAGES[0], "units": 1.5}]},
        ],
    )
    def test_damaged_ones_are_refused(self, run, change):
        folder, summary = run
        with pytest.raises(RunError, match="damaged"):
            self.again(folder, {**summary, **change})


def test_a_notebook_shows_the_same_as_tables():
    found = result(stages=STAGES, floors=FLOORS, notes=("a < b",))
    page = found._repr_html_()
    cells = re.findall(r"<t[hd]>(.*?)</t[hd]>", page)
    assert cells[:10] == ["", "before", "after", "kept", "asked for", "MACs", "792", "396", "50.00%", "50.50%"]
    assert page.count("<table>") == page.count("</table>") == 3
    assert "<summary>3 stages</summary>" in page
    assert "✓ budget met: 50.00% of macs kept" in page
    assert "note: a &lt; b" in page
    words = re.sub(r"<[^>]*>", " ", page)
    assert all(word in words for word in ("4 of 8 units removed", "unpruned", "71.25", "reached their floor"))
