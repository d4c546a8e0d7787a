"""What was made of something that is made anew, and damaged files: one line that names all that must go."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_rows import few_images, tiny_row

from ifso.common.files import write_tensors
from ifso.errors import RunError
from ifso.training.checkpoint import FILE
from ifso.training.padded_finetune import padded_
from ifso_repro.jobs import Job
from ifso_repro.provenance import facts_of
from ifso_repro.prune_pool import PrunePool, PruningFailed
from ifso_repro.results import read
from ifso_repro.runner import Runner
from ifso_repro.schema import Base
from ifso_repro.workspace import Workspace, prune_job

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def shop(tmp_path):
    return Workspace(tmp_path / "work", tmp_path / "results", {"cifar10": few_images(tmp_path)}, train={"epochs": 1})


def failed(shop, *jobs):
    found = Runner(shop, jobs, lanes=1, workers=1, say=lambda _: None)
    found.run()
    return found.failed


def follow(reason):
    """Remove whatever the advice in a reason names."""
    for place in map(Path, reason.rpartition("or remove ")[2].replace(" and ", ", ").split(", ")):
        found = list(place.parent.glob(place.name))
        assert found, place
        for path in found:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_the_fine_tuning_of_a_former_pruning_is_not_taken(shop, tmp_path, at_once):
    job = Job(tiny_row(tmp_path), "ifso", "paper")
    assert failed(shop, job) == []
    (before,) = read(shop.results)
    (shop.results / f"{job.name}.json").unlink()
    folder, training = shop.pruned_folder(job), shop.training_folder(job)
    rougher = replace(shop, prune={"units_per_step": 3})
    (failure,) = failed(rougher, job)
    assert failure.reason.startswith(f"{folder} was made otherwise: units_per_step is 3 and was 2; ")
    assert failure.reason.endswith(f"or remove {folder} and {training.parent / 'tiny-cifar10-40.ifso.*.0'}")
    shutil.rmtree(folder)
    (failure,) = failed(rougher, job)
    advice = "give another --out, or remove that folder"
    assert failure.reason == f"the training in {training} began with another network; {advice}"
    assert (training / FILE).exists()
    assert read(shop.results) == []
    shutil.rmtree(training)
    assert failed(rougher, job) == []
    (after,) = read(shop.results)
    assert after.history != before.history


def test_nor_is_one_whose_shape_fits(shop, tmp_path, at_once, monkeypatch):
    """As on a GPU, where networks are fine-tuned in their former shape."""

    def in_its_former_shape(shop, job, pruned, data):
        wide = shop.fresh(job.row, data.num_classes)
        padded_(wide, pruned, data)
        return wide

    monkeypatch.setattr(Workspace, "trainable", in_its_former_shape)
    job = Job(tiny_row(tmp_path), "ifso", "paper")
    assert failed(shop, job) == []
    (shop.results / f"{job.name}.json").unlink()
    assert failed(shop, job) == []
    (shop.results / f"{job.name}.json").unlink()
    shutil.rmtree(shop.pruned_folder(job))
    (failure,) = failed(replace(shop, prune={"units_per_step": 3}), job)
    assert failure.reason.startswith(f"the training in {shop.training_folder(job)} began with another network; ")


def test_a_teacher_that_was_trained_anew(shop, tmp_path, at_once):
    job = Job(tiny_row(tmp_path, teacher=tiny_row(tmp_path, "other")), "ifso", "taught")
    assert failed(shop, job) == []
    (shop.results / f"{job.name}.json").unlink()
    shop.keep_base(job.teacher, shop.fresh(job.teacher, 10))
    (failure,) = failed(shop, job)
    assert failure.reason.startswith(f"the training in {shop.training_folder(job)} began with another teacher; ")


def test_who_follows_the_advice_about_an_unpruned_network_meets_no_second_refusal(shop, tmp_path, at_once):
    job = Job(tiny_row(tmp_path), "ifso", "paper")
    assert failed(shop, job) == []
    (shop.results / f"{job.name}.json").unlink()
    longer = replace(job, row=replace(job.row, base=Base(recipe="paper", epochs=2, batch=16)))
    (failure,) = failed(shop, longer)
    assert "was trained otherwise: epochs is 2 and was 1; give another --out, or remove " in failure.reason
    follow(failure.reason)
    assert failed(shop, longer) == []


@pytest.mark.parametrize("given", [False, True])
def test_who_follows_the_advice_about_a_result_of_other_data_meets_no_second_refusal(shop, tmp_path, at_once, given):
    job = Job(tiny_row(tmp_path), "ifso", "paper")
    if given:
        job = replace(job, row=replace(job.row, base=Base(weights="given.safetensors")))
        write_tensors(tmp_path / "given.safetensors", shop.fresh(job.row, 10).state_dict(), {})
        shop = replace(shop, weights=tmp_path)
    assert failed(shop, job) == []
    smaller = tmp_path / "smaller"
    smaller.mkdir()
    arrays = dict(np.load(shop.data["cifar10"]))
    np.savez(smaller / "few.npz", **{name: array[:-2] for name, array in arrays.items()})
    changed = replace(shop, data={"cifar10": str(smaller / "few.npz")})
    (failure,) = failed(changed, job)
    follow(failure.reason)
    assert failed(changed, job) == []


def test_fine_tuning_with_other_settings_says_which_folder_must_go(shop, tmp_path, at_once):
    job = Job(tiny_row(tmp_path), "ifso", "paper")
    assert failed(shop, job) == []
    (failure,) = failed(replace(shop, train={"epochs": 2}), job)
    follow(failure.reason)
    assert failed(replace(shop, train={"epochs": 2}), job) == []
    (shop.results / f"{job.name}.json").unlink()
    (failure,) = failed(shop, job)
    where, words = shop.training_folder(job), "epochs is 1 and was 2; give another --out, or remove that folder"
    assert failure.reason == f"the training in {where} has other settings: {words}"


@pytest.mark.parametrize(
    ("text", "why"),
    [(b"{}", "no shares"), (b"[]", "no shares"), (b"3", "not iterable"), (b"\xff", "codec"), (b'"shares', "string")],
)
def test_a_damaged_summary_is_one_line(tmp_path, text, why):
    summary = tmp_path / "summary.json"
    assert facts_of(summary) == {}
    summary.write_bytes(text)
    with pytest.raises(RunError, match=rf"summary\.json is damaged \(.*{why}") as caught:
        facts_of(summary)
    assert "\n" not in str(caught.value)


def test_a_damaged_summary_of_a_pruning_fails_its_runs_only(shop, tmp_path, at_once):
    row = tiny_row(tmp_path)
    bad, good = Job(row, "ifso", "paper"), Job(row, "magnitude", "paper")
    shop.keep_base(row, shop.fresh(row, 10))
    prune_job(shop, bad)
    summary = shop.pruned_folder(bad) / "summary.json"
    whole = json.loads(summary.read_text())
    summary.write_text(summary.read_text()[:-20])
    (failure,) = failed(shop, bad, good)
    assert (failure.name, failure.status) == (bad.name, 2)
    assert failure.reason.startswith(f"{summary} is damaged (")
    assert failure.reason.endswith("); remove that file and give the same command again, which writes it")
    assert [result.name for result in read(shop.results)] == [good.name]
    assert not shop.training_folder(bad).exists()
    summary.unlink()
    assert failed(shop, bad, good) == []
    assert json.loads(summary.read_text())["removals"] == whole["removals"]


def test_a_summary_that_is_damaged_as_soon_as_it_is_written_stops_no_other_pruning(shop, tmp_path):
    job, said = Job(tiny_row(tmp_path), "ifso", "paper"), []
    folder = shop.pruned_folder(job)
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text("{")
    prunings = PrunePool(shop, 1, 1, said.append)
    prunings._end(job, None)
    assert said == []
    with pytest.raises(PruningFailed, match=r"summary\.json is damaged"):
        prunings.ask(job)
