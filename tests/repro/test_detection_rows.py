"""Rows of detectors: what is read, run, kept and shown, on a tiny RetinaNet; the score's benchmark on it, too."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from small_detectors import boxes, retina, write_coco

from ifso.bench.score import ScoreBench, ScoreSetup, measure
from ifso.cli.bench import size_of
from ifso.cli.main import main
from ifso.curvature.weight_space import weight_space
from ifso.errors import DataError, IfsoError, RunError
from ifso.training.average_precision import evaluate_detector
from ifso_repro import outcomes
from ifso_repro.config import find_row, find_study, read_row, study
from ifso_repro.jobs import Job
from ifso_repro.results import DetectionResult, Result, read, read_file, write
from ifso_repro.runner import Runner
from ifso_repro.schema import Base, Row
from ifso_repro.tables import LAYERS, markdown, render
from ifso_repro.workspace import Workspace, smoke_settings

NETWORK = """
from small_detectors import retina


def small(num_classes=4):
    return retina(num_classes)
"""


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def shop(tmp_path):
    folder = write_coco(tmp_path / "cells", boxes(train=8, test=4))
    return Workspace(tmp_path / "work", tmp_path / "results", {"bccd": str(folder)})


def small_row(folder, **changes) -> Row:
    file = folder / "nets.py"
    file.write_text(NETWORK)
    values = {
        "name": "small-bccd-40", "network": f"{file}:small", "data": "bccd", "removed": 0.4,
        "criteria": ("ifso", "group-fisher"), "recipes": ("detection", "distilled"), "seeds": 1,
        "base": Base(recipe="detection", epochs=2, batch=4, train={"warm_up_steps": 0, "lr": 0.01}),
        "normalize": {"ifso": "sqrt-memory", "group-fisher": "memory"},
        "prune": {"accumulate": 1, "batches_per_score": 1, "units_per_step": 4, "recalibrate": 1, "lr": 0.001,
                  "batch": 2},
        "finetune": {"epochs": 2, "batch": 4, "lr": 0.01, "warm_up_steps": 0},
    }  # fmt: skip
    return Row(**{**values, **changes})


def ran(shop, jobs, said=None):
    found = Runner(shop, jobs, lanes=2, workers=1, say=(said if said is not None else []).append)
    found.run()
    return found


def test_a_row_from_nothing_to_its_results(shop, tmp_path, at_once):
    row = small_row(tmp_path)
    jobs = [Job(row, "ifso", recipe) for recipe in row.recipes]
    assert ran(shop, jobs).failures == []
    assert at_once == ["small-bccd-40.ifso.0"]  # one pruning for both recipes
    results = {result.recipe: result for result in read(shop.results)}
    data = shop.open(row, 0)
    base, pruned = shop.base(row, data), shop.pruned(jobs[0], data)
    for job in jobs:
        result = results[job.recipe]
        assert (type(result), result.name) == (DetectionResult, job.name)
        assert result.train == shop.settings(job).as_dict()
        assert result.base_map == result.before["map"] == evaluate_detector(base, data.test_batches()).map
        assert result.pruned_map == evaluate_detector(pruned, data.test_batches()).map
        assert result.last_map == result.after["map"] == result.history[-1]["map"]
        assert {"map", "map50", "map75"} <= result.before.keys() & result.after.keys()
        assert result.memory["pruned"] < result.memory["unpruned"]
        read_now = {name: layer.in_channels for name, layer in pruned.named_modules() if hasattr(layer, "in_channels")}
        assert {name: channels[1] for name, channels in result.channels.items()} == read_now
        assert result.channels["head.classification_head.conv.1.0"][::2] == [8, 8]
        assert any(channels[3] < channels[2] for channels in result.channels.values())
    assert results["detection"].train["distill"] == 0
    assert results["distilled"].train["distill"] == 0.5
    assert results["detection"].history[0]["loss"] != results["distilled"].history[0]["loss"]

    again = []
    assert ran(shop, jobs, again).failures == []
    assert again == ["runs: 0 to do, 2 done already"]


def test_a_network_trained_where_nothing_can_be_measured_is_measured_elsewhere(shop, tmp_path, at_once, monkeypatch):
    def missing():
        raise IfsoError("there is no faster-coco-eval")

    job = Job(small_row(tmp_path), "group-fisher", "detection")
    with monkeypatch.context() as without:
        without.setattr(outcomes, "check_evaluator", missing)
        (failure,) = ran(shop, [job]).failures
    kept = shop.training_folder(job)
    assert f"no faster-coco-eval; the fine-tuned network is kept in {kept}: the same command" in failure
    assert read(shop.results) == []
    place = kept / outcomes.MEMORY
    place.write_text(json.dumps({**json.loads(place.read_text()), "hardware": "a GPU", "torch": "2.0"}))
    trained = {path: path.stat().st_mtime_ns for path in (shop.base_file(job.row), *kept.iterdir())}

    assert ran(shop, [job]).failures == []
    (result,) = read(shop.results)
    assert {path: path.stat().st_mtime_ns for path in trained} == trained
    assert (result.hardware, result.torch, result.memory["hardware"]) == ("a GPU", "2.0", "a GPU")
    assert [epoch["map"] for epoch in result.history] == [None, result.last_map]
    assert at_once == ["small-bccd-40.group-fisher.0"]


def test_memory_that_was_damaged_is_named(tmp_path):
    place = tmp_path / outcomes.MEMORY
    place.write_text("{")
    data = boxes(train=2, test=1)
    with pytest.raises(RunError) as caught:
        outcomes.memory_of_training(tmp_path, retina(), retina(), data, smoke_settings(small_row(tmp_path)))
    assert str(caught.value) == f"{place} is damaged; remove it and give the same command again"


def test_images_without_boxes_cannot_be_measured():
    data = boxes(train=2, test=2)
    nothing = data.test.annotations.labels[:0]
    annotations = replace(
        data.test.annotations, boxes=data.test.annotations.boxes[:0], labels=nothing, areas=nothing.double(),
        crowd=nothing.bool(), first=torch.zeros(3, dtype=torch.int64),
    )  # fmt: skip
    empty = replace(data, test=replace(data.test, annotations=annotations))
    with pytest.raises(DataError, match="there is no box to find"):
        outcomes.averages(empty, empty.test_batches(), "float32")(retina())


@pytest.mark.slow
def test_a_smoke_row_in_about_a_minute(tmp_path, capsys):
    asked = ["--criteria", "group-fisher", "--recipes", "distilled", "--smoke", "--json", "--out", str(tmp_path)]
    assert main(["repro", "retinanet-coco-60", *asked]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["smoke"]
    assert 0.3 < run["macs_kept"] <= 0.4
    assert run["memory"]["pruned"] < run["memory"]["unpruned"]


# ------------------------------------------------------------------------------------------------- what is shipped


def test_labels_of_coco_are_its_ids_and_those_of_other_sets_are_not(tmp_path):
    folder = str(write_coco(tmp_path / "cells", boxes(train=2, test=1)))
    for path in (tmp_path / "cells").glob("*.json"):
        path.write_text(path.read_text().replace('"id": 3, "name"', '"id": 9, "name"').replace(
            '"category_id": 3', '"category_id": 9'))  # fmt: skip
    shop = Workspace(tmp_path, tmp_path, {"coco": folder, "bccd": folder})
    assert shop.open(find_row("retinanet-coco-50"), 0).num_classes == 10
    assert shop.open(find_row("retinanet-bccd-50"), 0).num_classes == 4


def test_the_networks_of_the_rows():
    shop = Workspace("work", "results")
    published = shop.fresh(find_row("retinanet-coco-60"), 91)
    assert not [module for module in published.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    for name, channels in LAYERS.values():
        assert published.get_submodule(name).in_channels == channels
    row = find_row("retinanet-bccd-60")
    from_scratch = shop.fresh(row, 4)
    assert from_scratch.transform.min_size == row.options["min_size"]
    assert from_scratch.transform.min_size[-1] == 480  # of evaluation
    assert from_scratch.backbone.body.bn1.training


@pytest.mark.parametrize("row", ["retinanet-bccd-50", "retinanet-bccd-60", "retinanet-coco-50", "retinanet-coco-60"])
def test_every_job_is_one_that_training_takes(row):
    assert {job.recipe for job in study(row)} == {"detection"}
    jobs = study(row, recipes=["distilled", "detection"])
    assert [(job.criterion, job.recipe) for job in jobs] == [
        (criterion, recipe) for criterion in ("ifso", "group-fisher") for recipe in ("detection", "distilled")
    ]
    for job in jobs:
        settings = job.train_settings()
        assert (settings.epochs, settings.batch) == (job.row.finetune["epochs"], job.row.finetune["batch"])
        assert settings.distill == (0.5 if job.recipe == "distilled" else 0)
        job.prune_keywords()
        if job.row.base.recipe:
            assert job.row.base.train_settings().lr == job.row.base.train["lr"]


TOML = """
row = "retinanet-coco-30"
tables = []
network = "torchvision:retinanet_resnet50_fpn"
data = "coco"
removed = 0.3
criteria = ["ifso"]
recipes = ["detection"]
seeds = 1
prune.batch = 2
base.weights = "some.pth"
finetune.epochs = 1
normalize = {ifso = "none", group-fisher = "none", magnitude = "none", magnitude-average = "none", random = "none"}
"""


def test_weights_that_are_given_are_not_trained_otherwise(tmp_path):
    path = tmp_path / "retinanet-coco-30.toml"
    path.write_text(TOML)
    assert read_row(path).base.as_dict() == {"weights": "some.pth"}
    path.write_text(TOML.replace("finetune", "base.train.lr = 0.1\nfinetune"))
    with pytest.raises(IfsoError, match=r"base needs either weights, or recipe, epochs and batch"):
        read_row(path)


# ------------------------------------------------------------------------------------------------------------ tables


def made_up(row="retinanet-coco-50", criterion="ifso", last=12.0, **changes):
    values = {
        "row": row, "criterion": criterion, "recipe": "detection", "seed": 0, "epochs": 12, "macs_kept": 0.499,
        "base_map": 12.5, "last_map": last, "best_map": last, "history": [], "seconds": 60.0, "hardware": "abacus",
        "torch": "0.0", "params_kept": 0.6, "pruned_map": 1.0, "prune_seconds": 30.0, "ifso": "0.0",
        "before": {"map": 12.5}, "after": {"map": last, "map50": 20.0, "map75": 10.25},
        "memory": {"unpruned": 8_000_000_000, "pruned": 5_500_000_000},
        "channels": {"head.classification_head.conv.1.0": [256, 64, 256, 32]},
    }  # fmt: skip
    return DetectionResult(**{**values, **changes})


def test_table_7_as_markdown():
    page = markdown([made_up(), made_up(criterion="group-fisher", last=11.0)], ["table7"])
    lines = page.splitlines()
    assert "| paper | IFSO-50 | 50.0 % | 36.10 | 36.30 | −0.20 | 55.60 | 38.70 | 6.0 | – |" in lines
    assert "| paper | GFP-60 | 60.0 % | 36.10 | 35.30 | 0.80 | 54.60 | 37.40 | 6.1 | – |" in lines
    ours = "| ours | IFSO, recipe “detection” | 50.1 % | 12.50 | 12.00 | 0.50 | 20.00 | 10.25 | 5.5 (8.0) | 1 seed |"
    assert ours in lines
    assert f"| ours | IFSO, recipe “detection” | 60 % |{' not run |' * 6} 0 seeds |" in lines
    assert "| layer | channels | paper, IFSO-50 | IFSO-50 | Group Fisher-50 |" in lines
    assert "| head cls-1 | 256 | 136 (46.9 %) | 64 (75.0 %) | 64 (75.0 %) |" in lines
    assert "| neck lateral-0 | 512 | 471 (8.0 %) | – | – |" in lines
    assert (
        "| retinanet-coco-50 | detection | Group Fisher | 1.00 | – | 1 and 1 | no claim: one seed has no spread |"
        in (lines)
    )


def test_nothing_is_said_of_a_structure_that_nobody_knows():
    assert "neck and head" not in markdown([], ["retinanet-bccd"])
    assert "neck and head" in markdown([made_up("retinanet-bccd-60", epochs=80)], ["retinanet-bccd"])


def test_variants_have_a_column_each_in_the_structure():
    results = [
        made_up("retinanet-bccd-50", epochs=80, variant={"min_units": 16}),
        made_up(
            "retinanet-bccd-50", epochs=80, variant={"coupled": "shared", "min_units": 16},
            channels={"head.classification_head.conv.1.0": [256, 128, 256, 32]},
        ),
    ]  # fmt: skip
    lines = markdown(results, ["coupling-bccd"]).splitlines()
    each, shared = (f"{variant.label}, 50 %" for variant in find_study("coupling-bccd").variants)
    assert f"| layer | channels | {each} | {shared} |" in lines
    assert "| head cls-1 | 256 | 64 (75.0 %) | 128 (50.0 %) |" in lines


def test_the_terminal_explains_map_and_not_top1():
    console = Console(width=200)
    with console.capture() as caught:
        console.print(*render("table7", [made_up()]))
    assert "Average precision on the test set" in caught.get()
    assert "Top-1" not in caught.get()


def test_a_detection_result_comes_back_and_a_slip_is_named(tmp_path):
    result = made_up(history=[{"epoch": 1, "loss": 0.5, "map": None, "lr": 0.1}])
    place = write(result, tmp_path)
    assert read_file(place) == result
    place.write_text(place.read_text().replace('"before"', '"after all"'))
    with pytest.raises(IfsoError, match="lacks before"):
        read_file(place)
    with pytest.raises(IfsoError, match=r"best_map must not be below last_map, 12\.0, got 11\.0"):
        made_up(best_map=11.0)
    with pytest.raises(IfsoError, match="unknown key 'history"):
        made_up(history=[{"epoch": 1, "loss": 0.5, "top1": None, "lr": 0.1}])
    assert Result.measure != DetectionResult.measure


# --------------------------------------------------------------------------------------------------------- benchmark


def test_the_score_of_a_detector_is_the_double_backward_one(tmp_path):
    (tmp_path / "nets.py").write_text(NETWORK)
    bench = ScoreBench(ScoreSetup(f"{tmp_path / 'nets.py'}:small", batch=2, size=(48, 64)))
    bench.model.double()
    bench.batch = [image.double() for image in bench.batch[0]], bench.batch[1]
    bench._space = weight_space(bench.model, bench.graph)
    methods = bench.methods()
    slow = torch.stack(methods["double backward"]()).sum(0)[:-1].abs().double()  # its masks are float32
    assert slow.max() > 0
    torch.testing.assert_close(methods["ifso"](), slow, rtol=1e-5, atol=1e-6 * float(slow.max()))


def test_bench_score_measures_a_detector(tmp_path):
    (tmp_path / "nets.py").write_text(NETWORK)
    setup = ScoreSetup(f"{tmp_path / 'nets.py'}:small", batch=2, size=(48, 64))
    found = measure(setup, 1, lambda _: None, ["ifso", "group-fisher"])
    assert set(found["methods"]) == {"gradient", "ifso", "group-fisher"}
    assert all(row["seconds"] > 0 and row["peak_bytes"] > 0 for row in found["methods"].values())
    with pytest.raises(IfsoError, match="--images are for classifiers"):
        ScoreBench(replace(setup, images="some.npz"))
    with pytest.raises(IfsoError, match="one-stage detectors; torchvision:fasterrcnn_mobilenet_v3_large_320_fpn is"):
        ScoreBench(ScoreSetup("torchvision:fasterrcnn_mobilenet_v3_large_320_fpn"))
    with pytest.raises(IfsoError, match=r"--size 480x is no size; write 224, or 480x640"):
        size_of("480x")
    assert (size_of(None), size_of("32"), size_of("480x640")) == (None, 32, (480, 640))
