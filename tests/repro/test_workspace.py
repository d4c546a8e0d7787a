"""The workshop: which settings reach pruning and training, which folders they have, and what is measured on what."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tiny_rows import few_images, tiny_row

from ifso.errors import DataError, IfsoError, RunError
from ifso.pruning.budget import Mixed
from ifso_repro.config import find_row, study
from ifso_repro.jobs import Job
from ifso_repro.provenance import refuse_other_pruning
from ifso_repro.schema import Variant
from ifso_repro.workspace import SMOKE_PRUNE, Workspace, prune_job


@pytest.fixture
def shop(tmp_path):
    return Workspace(tmp_path / "work", tmp_path / "results", {"cifar10": few_images(tmp_path)})


def test_changes_of_pruning_reach_prune(shop, tmp_path):
    changed = replace(shop, prune={"units_per_step": 5, "schedule": "mixed:0.25", "lr": 0.5, "normalize": "none"})
    job = Job(tiny_row(tmp_path), "ifso", "ours", 3)
    keywords = changed.prune_as(job).prune_keywords()
    assert (keywords["units_per_step"], keywords["schedule"], keywords["normalize"]) == (5, Mixed(0.25), "none")
    assert keywords["optimizer"].keywords == {"learning_rate": 0.5}
    assert keywords["seed"] == 3
    assert changed.prune_options(job) == {**tiny_row(tmp_path).prune, **changed.prune, "seed": 3, "criterion": {}}
    assert changed.pruned_folder(job) == shop.pruned_folder(job)


def test_a_smoke_run_leaves_a_variant_its_own_options(shop):
    smoke = replace(shop, smoke=True)
    plain, *_ = study("resnet32-cifar10-40", seeds=1)
    usual = smoke.prune_options(plain)
    assert usual.items() >= SMOKE_PRUNE.items()
    variants = {job.name: smoke.prune_as(job) for job in (*study("figure6", seeds=1), *study("figure7", seeds=1))}
    many = variants["resnet32-cifar10-40.ifso+batches_per_score=15.brief.0"].prune
    assert (many["batches_per_score"], many["accumulate"], many["batch"]) == (15, 1, SMOKE_PRUNE["batch"])
    mixed = variants["resnet32-cifar10-40.ifso+schedule=mixed-0.75.brief.0"].prune_keywords()
    assert (mixed["schedule"], mixed["batches_per_score"]) == (Mixed(0.75), 1)
    neumann = next(job for job in study("inverse", seeds=1) if "neumann" in job.name)
    assert smoke.prune_as(neumann).prune_keywords()["criterion"].inverse == "neumann"


def test_smoke_and_real_prunings_have_folders_of_their_own(shop, tmp_path):
    job = Job(tiny_row(tmp_path), "ifso", "paper")
    assert shop.pruned_folder(job) != replace(shop, smoke=True).pruned_folder(job)


def test_epochs_are_those_of_fine_tuning_only(shop, tmp_path):
    row, changed = tiny_row(tmp_path), replace(shop, train={"epochs": 7, "precision": "bf16"})
    assert changed.settings(Job(row, "ifso", "paper")).epochs == 7
    assert (changed.base_settings(row).epochs, changed.base_settings(row).precision) == (1, "bf16")


@pytest.mark.parametrize(
    ("changes", "row", "message"),
    [
        ({"data": {}}, {}, "tiny-cifar10-40 needs cifar10; give --data cifar10:PATH, or --smoke"),
        ({"data": {"cifar10": "nowhere.npz"}}, {}, "nowhere.npz"),
        ({"train": {"epochs": -1}}, {}, "epochs must be"),
        ({"prune": {"accumulation": "mean"}}, {}, "accumulation='mean' is unknown"),
        ({"prune": {"schedule": "mixed:many"}}, {}, "write mixed:SHARE"),
        ({"prune": {"units_per_step": 0}}, {}, "units_per_step must be a whole number from 1 up, got 0"),
    ],
)  # fmt: skip
def test_what_would_fail_later_is_refused_at_once(shop, tmp_path, changes, row, message):
    with pytest.raises(IfsoError) as caught:
        replace(shop, **changes).check(Job(tiny_row(tmp_path, **row), "ifso", "paper"))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_given_weights_that_are_not_there(tmp_path):
    row = find_row("resnet32-cifar10-50")
    with pytest.raises(DataError, match=rf"begins with the weights resnet32_\w+\.safetensors, which .* in {tmp_path};"):
        Workspace(tmp_path, tmp_path, weights=tmp_path).base_file(row)
    (tmp_path / "resnet32_cifar10_authors.safetensors").write_bytes(b"")
    assert Workspace(tmp_path, tmp_path, weights=tmp_path).base_file(row).parent == tmp_path


def test_an_interrupted_pruning_goes_on_and_choices_are_measured_on_images_held_out(shop, tmp_path):
    row = tiny_row(tmp_path)
    held_out, job = replace(shop, validation=16, work=tmp_path / "held out"), Job(row, "ifso", "paper")
    held_out.keep_base(row, held_out.fresh(row, 10))
    prune_job(held_out, job)
    facts = held_out.prune_facts(job)
    # accuracies are multiples of 1/16, which those of 20 test images are not, but for quarters
    assert all((measure["accuracy"] * 16 / 100).is_integer() for measure in facts["measures"])
    summary = held_out.pruned_folder(job) / "summary.json"
    written = summary.read_text()
    summary.unlink()
    assert held_out.prune_facts(job) == {}
    prune_job(held_out, job)
    assert json.loads(summary.read_text())["removals"] == json.loads(written)["removals"]


def test_a_pruning_with_other_options_of_the_criterion_is_not_taken_for_the_same(shop, tmp_path):
    before = Job(tiny_row(tmp_path), "ifso", "paper")
    now = Job(tiny_row(tmp_path, criterion={"ifso": {"coupled": "layers"}}), "ifso", "paper")
    shop.keep_base(before.row, shop.fresh(before.row, 10))
    prune_job(shop, before)
    refuse_other_pruning(shop, before)
    assert shop.pruned_folder(now) == shop.pruned_folder(before)
    with pytest.raises(RunError, match=r"was made otherwise: criterion\.coupled is 'layers' and was 'shared'"):
        refuse_other_pruning(shop, now)
    assert replace(shop, smoke=True).prune_as(now).prune_keywords()["criterion"].coupled == "layers"


def test_two_jobs_of_one_name_are_one_pruning(shop, tmp_path):
    same = Variant("k", {"units_per_step": 2})
    one, other = Job(tiny_row(tmp_path), "ifso", "paper"), Job(tiny_row(tmp_path), "ifso", "ours", 0, same)
    for place in (shop, replace(shop, smoke=True)):
        assert place.pruned_folder(one) == place.pruned_folder(other)
        assert place.prune_options(one) == place.prune_options(other)
