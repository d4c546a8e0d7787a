"""``python -m benchmarks zoo``: what is found out about a network, failures, resuming, and the page."""

import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from benchmarks.__main__ import main
from benchmarks.zoo import examine as zoo
from benchmarks.zoo import float64 as zoo_float64
from benchmarks.zoo import page as zoo_page
from benchmarks.zoo import record as zoo_record
from benchmarks.zoo import record as zoo_run
from benchmarks.zoo.cases import logits_loss, moved_, native_case, on, small_case, still_
from benchmarks.zoo.examine import Setup, examine
from benchmarks.zoo.float64 import CRITERIA, Sample
from benchmarks.zoo.networks import Entry, by_cost, matching, named, timm_entries, torchvision_entries
from benchmarks.zoo.record import Limits, examined, left
from benchmarks.zoo.worker import Worker
from torch import Tensor, nn
from zoo_servers import die, hang

from ifso.errors import IfsoError
from ifso.graph.tracing import trace

DIGITS = named(["ifso:resnet8-digits"])[0]
QUICK = {"batch": 2, "repeats": 1}


def row_of(entry=DIGITS, **options):
    """All that is found out about a network."""
    row = {}
    for found in examine(entry, Setup(**{**QUICK, **options})):
        row |= found
    return row


@pytest.fixture(scope="module")
def row():
    return row_of()


def test_a_network_goes_through_all_stages(row):
    assert "failed" not in row
    assert row["scored"]
    assert row["units"] == 224
    assert all(row["rank_in_groups"][name] > 0.9999 for name in CRITERIA)
    assert row["pruned"]["macs"] <= zoo.KEPT
    assert row["pruned"]["stages"] == 1
    assert row["step"]["gradients"] == row["step_after"]["gradients"] == 1
    assert row["step"]["loss"] != row["step_after"]["loss"]
    assert row["seconds"]["in_gradients"]["ifso"] > 1
    assert row["peak_bytes"]["ifso"] > row["peak_bytes"]["group-fisher"] > 0


def test_scores_in_float64_are_kept_and_used_for_the_same_network_only(row, tmp_path):
    row_of(kept=str(tmp_path), only_float64=True)
    path = zoo_float64.path_of(tmp_path, DIGITS)
    assert path.stat().st_size < 4096
    small = small_case(DIGITS, torch.device("cpu"))
    sums = zoo_float64.sums_of(small.model, small.feed(0)[0])
    assert zoo_float64.read(path, sums, row["compared_units"]) is not None
    with torch.no_grad():
        next(small.model.parameters()).mul_(-1)
    other = zoo_float64.sums_of(small.model, small.feed(0)[0])
    assert zoo_float64.read(path, other, row["compared_units"]) is None
    assert zoo_float64.read(path, sums, row["compared_units"] + 1) is None
    assert zoo_float64.read(path.with_name("none"), sums, 1) is None


def test_only_float64_leaves_a_file_that_a_later_run_takes(tmp_path, monkeypatch):
    found = row_of(kept=str(tmp_path), only_float64=True)
    assert "failed" not in found
    assert left([DIGITS], Setup(kept=str(tmp_path), only_float64=True), None, retry=False) == []
    monkeypatch.setattr(zoo._Exam, "_in_float64", None)
    monkeypatch.setattr(zoo._Exam, "_prune", lambda *_: {})
    again = row_of(kept=str(tmp_path))
    assert again["rank"]["ifso"] > 0.999


def test_a_stage_that_fails_leaves_the_others(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("no room\nfor this")

    monkeypatch.setattr(zoo._Exam, "_times", full)
    monkeypatch.setattr(zoo._Exam, "_prune", lambda *_: {"pruned": {}})
    found = row_of(float64=False)
    assert found["failed"] == {"times": "out of memory: no room for this"}
    assert {"scored", "peak_bytes", "step", "pruned"} <= found.keys()


def test_a_lost_gpu_ends_an_examination(monkeypatch):
    def lost(*_):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(zoo._Exam, "_trace", lost)
    monkeypatch.setattr(zoo._Exam, "_rank", None)
    found = row_of()
    assert "device-side" in found["failed"]["trace"]
    assert found["stage"] == "trace"


def test_a_network_that_cannot_be_built_is_told_in_a_line():
    found = row_of(named(["ifso:resnet9000"])[0], float64=False)
    assert list(found["failed"]) == ["build"]
    assert "resnet9000" in found["failed"]["build"]


def test_a_hung_network_is_given_up():
    with Worker(hang, None) as worker:
        found = examined(worker, DIGITS, 0.3)
    assert found == ({"units": 7, "failed": {"score": "took more than 0.3 s"}}, False)


def test_a_network_that_takes_too_much_memory_is_given_up():
    with Worker(hang, None, gib=0.001) as worker:
        assert worker.ask(DIGITS, 30)[1] == "took more than 0.001 GiB"
        assert worker.peak_gib > 0.001


def test_a_dead_process_is_told_and_begun_anew():
    with Worker(die, None) as worker:
        assert examined(worker, DIGITS, 30) == ({"units": 7}, True)
        assert examined(worker, DIGITS, 30) == ({"failed": {"start": "the process ended with exit code 3"}}, True)
        assert examined(worker, DIGITS, 30) == ({"units": 7}, True)


class InProcess:
    """A worker without a process."""

    out_of_time = staticmethod(Worker.out_of_time)

    def __init__(self, serve, setup, stopped):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def ask(self, entry, limit):
        failed = {"failed": {"build": "no"}} if entry.name == "broken" else {}
        return {"units": len(entry.name), **failed, "about": {"device_name": "CPU"}}, ""


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(zoo_run, "Worker", InProcess)


def test_networks_in_the_record_are_not_run_again(quick, tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    command = ["zoo", "--models", "a:one", "a:broken", "a:three", "--out", str(out)]
    assert main([*command, "--only", "one", "broken"]) == 0
    with out.open("a") as file:
        file.write('{"network": "a:three", "uni')
    assert main(command) == 0
    assert "1 of 3 networks are left" in capsys.readouterr().err
    assert list(zoo_record.read([out])) == ["a:one", "a:broken", "a:three"]
    assert main([*command, "--retry"]) == 0
    assert "1 of 3 networks are left" in capsys.readouterr().err
    assert sum("broken" in line for line in out.read_text().splitlines()) == 2


def test_no_further_network_is_begun_when_time_is_up(quick, tmp_path, monkeypatch):
    clock = iter(range(0, 10_000, 40))
    monkeypatch.setattr(zoo_run.time, "monotonic", lambda: next(clock))
    done = zoo_run.run(named(["a:1", "a:2", "a:3"]), Setup(), tmp_path / "rows.jsonl", Limits(minutes=1), print)
    assert done == (1, 2)


def test_what_takes_little_comes_first():
    names = [entry.name for entry in by_cost(torchvision_entries())]
    assert names.index("resnet18") < names.index("resnet50") < names.index("densenet201") < names.index("vit_h_14")


class Together(InProcess):
    """Workers that are busy until as many as there are have a network; one with too little memory beside another."""

    all_busy = threading.Barrier(4)
    begun: ClassVar[list[str]] = []

    def ask(self, entry, limit):
        alone = entry.key in self.begun
        self.begun.append(entry.key)
        if len(self.begun) <= 4:
            self.all_busy.wait(10)
        full = {"failed": {"score": "out of memory: CUDA"}} if entry.name == "large" and not alone else {}
        return {"units": 1, **full}, ""


def test_processes_share_the_work_from_both_ends_and_crowded_networks_come_again(monkeypatch, tmp_path):
    monkeypatch.setattr(zoo_run, "Worker", Together)
    monkeypatch.setattr(zoo_run, "by_cost", list)
    out, said = tmp_path / "rows.jsonl", []
    entries = named([f"a:{name}" for name in ("1", "2", "3", "4", "5", "large")])
    assert zoo_run.run(entries, Setup(), out, Limits(jobs=4), said.append) == (6, 0)
    assert sorted(Together.begun[:4]) == ["a:1", "a:2", "a:3", "a:large"]
    assert Together.begun[-1] == "a:large"
    assert len(out.read_text().splitlines()) == 7
    assert "failed" not in zoo_record.read([out])["a:large"]
    assert "1 networks ran out of memory beside others: now each alone" in said


def test_networks_under_way_when_time_is_up_are_left(monkeypatch, tmp_path):
    class Slow(InProcess):
        def ask(self, entry, limit):
            assert limit < 10
            return {"stage": "score"}, self.out_of_time(limit)

    monkeypatch.setattr(zoo_run, "Worker", Slow)
    out = tmp_path / "rows.jsonl"
    assert zoo_run.run(named(["a:1"]), Setup(), out, Limits(seconds=60, minutes=0.1), print) == (0, 1)
    assert not out.exists()


def test_a_stop_ends_an_examination():
    stopped = threading.Event()
    threading.Timer(0.2, stopped.set).start()
    begun = time.monotonic()
    with Worker(hang, None, stopped=stopped) as worker:
        assert worker.ask(DIGITS, 50)[1] == "stopped"
    assert time.monotonic() - begun < 20


def test_the_zoo_holds_every_task_and_family():
    pytest.importorskip("torchvision")
    kinds = {entry.kind for entry in torchvision_entries()}
    assert kinds == {"classification", "segmentation", "detection"}
    assert len(timm_entries()) > 90
    assert {entry.kind for entry in matching(torchvision_entries(), ["detection"])} == {"detection"}
    with pytest.raises(IfsoError, match="fits none of"):
        matching(torchvision_entries(), ["resnet19"])


class Heads(nn.Module):
    """Logits of a class, and of every position."""

    def forward(self, images):
        return {"out": images[:, :, 0, 0], "aux": (images, None)}


def test_the_loss_adds_up_all_heads():
    numbers = torch.tensor([[[0.0, 0.4], [0.6, 0.9]]])
    images = torch.randn(1, 5, 2, 2)
    labels = torch.tensor([[[0, 2], [3, 4]]])
    wanted = nn.functional.cross_entropy(images[:, :, 0, 0], labels[:, 0, 0])
    wanted = wanted + nn.functional.cross_entropy(images, labels)
    assert logits_loss(Heads(), (images, numbers)) == pytest.approx(float(wanted))
    with pytest.raises(IfsoError, match="returns no tensor"):
        logits_loss(nn.Flatten(0), (images, numbers))


def test_a_still_network_leaves_nothing_out() -> None:
    class Head(nn.Module):
        drop_rate = 0.5

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x, self.drop_rate, self.training)

    model = still_(nn.Sequential(nn.Dropout(), Head()))
    assert model.training
    assert model(torch.ones(4, 64)).eq(1).all()


def test_nothing_is_drawn_by_lot_in_a_small_case():
    net = still_(nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))))
    assert [module.training for module in net.modules()] == [True, False, True, True, False]


def test_tensors_that_a_module_keeps_go_along():
    net = nn.Sequential(nn.Linear(2, 2))
    net[0].places = torch.zeros(2)
    assert moved_(net, "cpu", torch.float64)[0].places.dtype == torch.float64


def test_a_detector_has_what_it_wants_to_know():
    pytest.importorskip("torchvision")
    entry = Entry("torchvision", "detection", "ssdlite320_mobilenet_v3_large")
    case = native_case(entry, 2, torch.device("cpu"), small_case(entry, torch.device("cpu")).model)
    images, targets = on("cpu", case.feed(0), torch.float64)
    assert case.words == "2 of 3x320x320"
    assert images[0].dtype == targets[0]["boxes"].dtype == torch.float64
    assert all(bool((target["boxes"][:, 2:] > target["boxes"][:, :2]).all()) for target in targets)
    assert all(float(target["boxes"].max()) <= 320 for target in targets)


def test_few_units_of_every_group_are_compared():
    net = nn.Sequential(nn.Linear(3, 40), nn.ReLU(), nn.Linear(40, 5), nn.ReLU(), nn.Linear(5, 2))
    graph = trace(net, torch.zeros(1, 3))
    sample = Sample.of(graph)
    assert [sample.groups.count(number) for number in (0, 1)] == [16, 5]
    scores = {group.name: torch.arange(group.size).double() for group in graph.groups}
    assert sample.taken(graph, scores)[-5:].tolist() == [0, 1, 2, 3, 4]
    found = sample.taken(graph, scores)
    upside_down = torch.cat([found[:16], -found[16:]])
    assert sample.rank(found, found) == (1, 1)
    assert sample.rank(found, upside_down)[1] == pytest.approx((16 - 5) / 21)


def test_the_page_counts_what_is_in_the_rows(row, tmp_path, capsys):
    whole = {**row, "network": "timm:tiny", "kind": "tiny", "batch": 2, "about": zoo.about("cpu")}
    low = {**whole, "network": "torchvision:low", "rank_in_groups": {"ifso": 0.5, "group-fisher": 1.0}}
    failed = {"network": "torchvision:big", "kind": "classification", "batch": 2, "failed": {"build": "a | b"}}
    out = tmp_path / "rows.jsonl"
    for each in (whole, low, failed):
        zoo_record.add(out, each)
    assert main(["zoo", str(out), "--markdown"]) == 0
    page = capsys.readouterr().out
    assert "| scored at their own size | 2 of 3 | 2 of 3 |" in page
    assert "| rank within groups ≥ 0.99 | 1 of 2 (50 %) | 2 of 2 (100 %) |" in page
    assert "Failed: build of 1." in page
    assert "**build**: a \\| b" in page
    cells = {len(line.split(" | ")) for line in page.splitlines() if line.startswith(("| tiny", "| low", "| network"))}
    assert cells == {len(zoo_page.HEADINGS)}
    assert main(["zoo", str(out)]) == 0
    assert "2 of 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "give --out"),
        (["--markdown"], "--markdown needs"),
        (["--float64-only"], "--float64 FOLDER"),
        (["--float64-only", "--no-float64", "--float64", "f"], "exclude each other"),
        (["--out", "o.jsonl", "--limit", "0"], "--limit must be above 0, got 0"),
        (["--out", "o.jsonl", "--batch", "1"], "batch must be 2 or more, got 1"),
        (["--out", "o.jsonl", "--models", "resnet18"], "got 'resnet18'"),
    ],
)
def test_what_cannot_be_meant_is_refused(words, told, capsys):
    assert main(["zoo", *words]) == 2
    assert told in capsys.readouterr().err


def test_other_files_are_refused(tmp_path):
    path = Path(tmp_path / "other.json")
    path.write_text(json.dumps({"bench": "choose"}))
    with pytest.raises(IfsoError, match="must hold JSON lines"):
        zoo_record.read([path])


def test_the_page_of_the_zoo_is_what_its_results_say(tmp_path):
    root = Path(__file__).parents[2]
    (tmp_path / "zoo").mkdir()
    shutil.copy(root / "docs" / "zoo" / "results.json", tmp_path / "zoo")
    command = [sys.executable, root / "benchmarks" / "zoo" / "run.py", "table", "--out", tmp_path / "zoo"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert (tmp_path / "zoo.md").read_text() == (root / "docs" / "zoo.md").read_text()


@pytest.mark.slow
def test_a_network_of_the_zoo_is_checked_as_before(tmp_path):
    root = Path(__file__).parents[2]
    command = [sys.executable, root / "benchmarks" / "zoo" / "run.py", "--only", "torchvision:squeezenet1_1"]
    subprocess.run([*command, "--jobs", "1", "--out", tmp_path / "zoo"], check=True, stdout=subprocess.DEVNULL)
    found, known = (
        json.loads((folder / "results.json").read_text())["results"]["torchvision:squeezenet1_1"]
        for folder in (tmp_path / "zoo", root / "docs" / "zoo")
    )
    assert [found[name] for name in ("status", "groups", "units", "frozen")] == [
        known[name] for name in ("status", "groups", "units", "frozen")
    ]
