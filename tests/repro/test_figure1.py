"""The study behind Fig. 1: its statistics, its convex part against retraining, its command and its files."""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from ifso.bench.correlation import pearson, ranks, spearman, spearman_at_equal_size
from ifso.cli.main import main
from ifso.criteria import registry
from ifso_repro.figure1.estimates import DEFAULT_STEPS, draw_masks, evaluations_until, keep, measure, size, train_
from ifso_repro.figure1.networks import SMOKE, Stop, choose, create
from ifso_repro.figure1.study import figure1
from ifso_repro.figure1.summary import EXISTING, path_name

TINY = replace(SMOKE, masks=3, images=30, features=4, path_steps=(2,), first_order_steps=20)


def tiny(out, *more):
    return ["repro", "figure1", "--smoke", "--out", str(out), "--workers", "1", *more]


def test_spearman_by_hand_with_ties():
    # ranks 1, 2.5, 2.5, 4 and 2, 1, 3.5, 3.5, less 2.5: products add up to 0.75 + 1.5, squares to 4.5 and 4.5
    assert ranks([10, 20, 20, 30]).tolist() == [1, 2.5, 2.5, 4]
    assert spearman([10, 20, 20, 30], [5, 1, 9, 9]) == pytest.approx(2.25 / 4.5, rel=1e-12)


def test_spearman_is_one_minus_six_d_squared_without_ties():
    random = np.random.default_rng(3)
    x, y = random.permutation(25), random.permutation(25)
    expected = 1 - 6 * float(((x - y) ** 2).sum()) / (25 * (25**2 - 1))
    assert spearman(np.exp(x).tolist(), (y**3).tolist()) == pytest.approx(expected, rel=1e-12)


def test_pearson_of_numbers_whose_squares_overflow():
    assert pearson([1e200, 2e200, 4e200], [1.0, 2.0, 4.0]) == pytest.approx(1.0)
    assert pearson([1.0, 1.0], [1.0, 2.0]) is None


def test_equal_size_takes_away_what_size_alone_explains():
    sizes = [1] * 4 + [2] * 4
    truth = [1.0, 1.1, 1.2, 1.3, 2.0, 2.1, 2.2, 2.3]
    guess = [1.1, 1.3, 1.0, 1.2, 2.2, 2.0, 2.3, 2.1]
    # among equals: ranks 2 4 1 3 (Σd² = 10, ρ = 0) and 3 1 4 2 (Σd² = 10, ρ = 0); over all Σd² = 20, ρ = 1 − 120/504
    assert spearman_at_equal_size(guess, truth, sizes) == pytest.approx(0.0, abs=1e-12)
    assert spearman(guess, truth) == pytest.approx(1 - 120 / 504, rel=1e-12)


def test_masks_are_different_and_leave_something_of_every_group():
    problem = create("digits-relu", 0, SMOKE, None)
    drawn = draw_masks(problem.graph, 20, (2, 4), seed=1)
    kept = [keep(problem.graph, removed) for removed in drawn]
    assert len({json.dumps(removed) for removed in drawn}) == 20
    assert all(bool(values.any()) for keep in kept for values in keep.values())
    assert [size(removed) for removed in drawn] == [1] * 7 + [2, 4] * 6 + [2]


@pytest.mark.parametrize("seed", [0, 1])
def test_convex_estimates_are_within_five_per_cent_of_retraining(seed):
    settings = replace(SMOKE, features=6, images=60)
    problem = create("convex", seed, settings, None)
    trained = train_(problem)
    assert trained["converged"]
    assert trained["largest_gradient"] <= 1e-8
    for removed in draw_masks(problem.graph, problem.settings.masks, problem.settings.subset_sizes, seed):
        row = measure(problem, removed, trained["loss"], first_order=False)
        assert row["retraining"]["converged"]
        assert row["existing"] > row["truth"] > 0
        assert row["estimates"][str(DEFAULT_STEPS)]["true"] == pytest.approx(row["truth"], rel=0.05)


def test_measuring_leaves_the_trained_weights_as_they_were():
    problem = create("digits-relu", 0, replace(TINY, train=Stop(1e-3, 1e-3, 50, 50)), None)
    loss = train_(problem)["loss"]
    before = {name: value.clone() for name, value in problem.model.state_dict().items()}
    removed = draw_masks(problem.graph, 3, (), 0)[1]
    row = measure(problem, removed, loss, first_order=True)
    assert row["retraining"]["adam"]["gradients"] == 21
    assert all(torch.equal(value, before[name]) for name, value in problem.model.state_dict().items())


def test_evaluations_until():
    assert evaluations_until([5.0, 3.0, 4.0, 1.0], 3.5) == 2
    assert evaluations_until([5.0], 3.5) is None


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    out = tmp_path_factory.mktemp("figure1")
    assert main(tiny(out, "--networks", "convex", "digits-gelu", "--masks", "4")) == 0
    return out


def numbers_in(document):
    if isinstance(document, dict):
        document = list(document.values())
    if isinstance(document, list):
        return [number for item in document for number in numbers_in(item)]
    return [document] if isinstance(document, (int, float)) else []


def test_the_document_is_complete_and_finite(smoke):
    document = json.loads((smoke / "figure1.json").read_text())
    assert all(math.isfinite(number) for number in numbers_in(document))
    assert document["command"] == "ifso repro figure1 --smoke --masks 4 --networks convex digits-gelu"
    assert document["settings"]["seeds"] == 1
    assert set(document["versions"]) >= {"ifso", "torch", "numpy", "python"}
    for network in document["networks"]:
        assert len(network["masks"]) == 4
        assert set(network["scores"]) | set(network["not_applicable"]) >= set(registry.names())
        assert "no norm layer" in network["not_applicable"]["bn-scale"]
        for row in network["masks"]:
            ((group, units),) = row["removed"].items()
            assert row["criteria"]["magnitude"] == sum(network["scores"]["magnitude"][group][unit] for unit in units)
            assert {"1", str(DEFAULT_STEPS)} <= set(row["estimates"])
    methods = [row["method"] for row in document["summary"] if row["network"] == "convex"]
    assert methods.count(EXISTING) == 1
    assert {path_name(1), path_name(DEFAULT_STEPS), *registry.names()} <= set(methods)
    best = next(row for row in document["summary"] if row["method"] == path_name(DEFAULT_STEPS))
    assert best["spearman"]["mean"] == pytest.approx(1.0)
    assert best["share"]["mean"] > 0


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="the plot needs matplotlib")
def test_the_picture_is_svg_with_a_panel_for_each_network(smoke):
    root = ElementTree.parse(smoke / "figure1.svg").getroot()
    assert root.tag.endswith("svg")
    words = "".join(root.itertext())
    assert all(word in words for word in ("convex", "digits-gelu", "ΔL_ex", "K=1"))


def test_without_matplotlib_one_line_says_what_is_missing(smoke, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    (smoke / "figure1.json").unlink()
    assert main(tiny(smoke, "--networks", "convex", "digits-gelu", "--masks", "4", "--resume")) == 0
    assert 'pip install "ifso[figures]"' in capsys.readouterr().err
    assert (smoke / "figure1.json").exists()


def without_times(document):
    for network in document["networks"]:
        for row in network["masks"]:
            for estimate in row["estimates"].values():
                estimate.pop("cpu_seconds", None)
    return document


def test_a_resumed_study_gives_the_same_result(tmp_path):
    settings = replace(TINY, networks=("convex",))
    whole = figure1(settings, None, tmp_path / "whole", resume=False, workers=1)
    part = tmp_path / "part"
    figure1(settings, None, part, resume=False, workers=1)
    lines = (part / "convex-seed0.jsonl").read_text().splitlines(keepends=True)
    (part / "convex-seed0.jsonl").write_text("".join(lines[:3]) + lines[3][:40])
    again = figure1(settings, None, part, resume=True, workers=1)
    assert len((part / "convex-seed0.jsonl").read_text().splitlines()) == len(lines)
    assert without_times(again) == without_times(whole)


def test_renewed_estimates_keep_the_truths(tmp_path):
    settings = replace(TINY, networks=("convex",))
    whole = figure1(settings, None, tmp_path, resume=False, workers=1)
    path = tmp_path / "convex-seed0.jsonl"
    base, *rows = map(json.loads, path.read_text().splitlines())
    rows[1] |= {"truth": 7.0, "estimates": {}}
    path.write_text("".join(json.dumps(line) + "\n" for line in (base | {"scores": {}}, *rows)))
    (network,) = without_times(figure1(settings, None, tmp_path, resume=False, workers=1, renew=True))["networks"]
    (expected,) = without_times(whole)["networks"]
    assert network["masks"][1]["truth"] == 7.0
    assert network["masks"][1]["estimates"] == expected["masks"][1]["estimates"]
    assert network["scores"] == expected["scores"]


def test_two_processes_give_what_one_gives(tmp_path):
    settings = replace(TINY, networks=("convex",), seeds=2, masks=2)
    one = figure1(settings, None, tmp_path / "one", resume=False, workers=1)
    two = figure1(settings, None, tmp_path / "two", resume=False, workers=2)
    assert without_times(one) == without_times(two)


def test_other_settings_are_refused_with_the_difference(smoke, capsys):
    assert main(tiny(smoke, "--networks", "convex", "digits-gelu", "--masks", "5", "--resume")) == 2
    assert "masks is 5 and was 4" in one_line(capsys)
    assert main(tiny(smoke)) == 2
    assert "--resume" in one_line(capsys)
    assert choose(smoke=True, seeds=None, networks=None, masks=None, data=None) == SMOKE


def one_line(capsys):
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.strip().splitlines()
    assert line.startswith("ifso: error: ")
    return line


def broken(tmp_path, what):
    path = tmp_path / f"{what}.npz"
    if what == "empty":
        path.write_bytes(b"")
    if what == "text":
        path.write_text("no arrays here")
    if what == "other":
        np.savez(path, images=np.zeros(3))
    if what == "small":
        np.savez(path, x_train=np.zeros((200, 8, 8, 3), np.uint8), y_train=np.zeros(200, np.int64))
    if what == "few":
        np.savez(path, x_train=np.zeros((3, 32, 32, 3), np.uint8), y_train=np.zeros(3, np.int64))
    return f"cifar10:{path}"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("missing", "there is no file"),
        ("empty", "cannot be read as .npz"),
        ("text", "cannot be read as .npz"),
        ("other", "holds no x_train and no y_train; it has images"),
        ("small", "32×32"),
        ("few", "3 images"),
    ],
)
def test_bad_data(tmp_path, capsys, what, words):
    more = ["--data", broken(tmp_path, what), "--networks", "cifar-resnet"]
    assert main(tiny(tmp_path / "out", *more)) == 2
    assert words in one_line(capsys)
    assert not list(tmp_path.glob("out/*.jsonl"))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--data", "imagenet:here"], "cifar10:PATH.npz"),
        (["--networks", "vgg"], "no network 'vgg'"),
        (["--networks", "cifar-resnet"], "give --data"),
        (["--seeds", "0"], "0 seeds"),
    ],
)
def test_bad_options(tmp_path, capsys, more, words):
    assert main([*tiny(tmp_path / "out"), *more]) == 2
    assert words in one_line(capsys)


def test_an_unknown_study_and_a_place_that_cannot_be_written(tmp_path, capsys):
    assert main(["repro", "figure9"]) == 2
    assert "no table, figure or row 'figure9'; choose table1" in one_line(capsys)
    (tmp_path / "file").write_text("")
    assert main(tiny(tmp_path / "file")) == 2
    assert "cannot be used" in one_line(capsys)


@pytest.mark.slow
def test_cifar_images_go_through_the_whole_study(tmp_path):
    random = np.random.default_rng(0)
    path = tmp_path / "images.npz"
    np.savez(path, x_train=random.integers(0, 256, (64, 32, 32, 3), np.uint8), y_train=random.integers(0, 10, 64))
    settings = replace(
        SMOKE, networks=("cifar-resnet",), data="images", cifar_images=16, cifar_masks=2, cifar_train=6,
        cifar_retrain=3, adam_steps=3, cifar_path_steps=(2,), first_order_steps=2,
    )  # fmt: skip
    (network,) = figure1(settings, path, tmp_path / "out", resume=False, workers=1)["networks"]
    assert network["weights"] > 4000
    assert "bn-scale" in network["scores"]
    assert len(network["masks"]) == 2
