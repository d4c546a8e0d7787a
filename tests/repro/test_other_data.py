"""Which data something was made with: what counts as other data, and that nothing of it is taken for the same."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_rows import few_images, tiny_row

from ifso.common.files import write_tensors
from ifso.common.serialization import read_tensor_file, write_tensor_file
from ifso.data.decoding import ImageFiles
from ifso.data.generated import generated_boxes, generated_images
from ifso.data.image_folder import ImageFolderData
from ifso.training.checkpoint import FILE
from ifso_repro.config import find_row
from ifso_repro.jobs import Job
from ifso_repro.provenance import header_of, identity
from ifso_repro.results import Result, read
from ifso_repro.runner import Runner
from ifso_repro.statistics import Runs, otherwise
from ifso_repro.workspace import Workspace

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def shop(tmp_path):
    return Workspace(tmp_path / "work", tmp_path / "results", {"cifar10": few_images(tmp_path)}, train={"epochs": 1})


@pytest.fixture
def other(shop, tmp_path):
    """The same workshop with one pixel of one training image changed."""
    arrays = dict(np.load(shop.data["cifar10"]))
    arrays["x_train"][7, 3, 3, 0] ^= 1
    (tmp_path / "elsewhere").mkdir()
    np.savez(tmp_path / "elsewhere" / "few.npz", **arrays)
    return replace(shop, data={"cifar10": str(tmp_path / "elsewhere" / "few.npz")})


@pytest.fixture
def job(tmp_path):
    return Job(tiny_row(tmp_path), "ifso", "ours")


def failures(shop, job):
    found = Runner(shop, [job], lanes=1, workers=1, say=lambda _: None)
    found.run()
    return [failure.reason for failure in found.failed]


class TestIdentity:
    def test_of_images_is_that_of_their_pixels_and_labels_in_every_part(self):
        data = generated_images("cifar10")
        assert identity(data) == identity(generated_images("cifar10", seed=3))
        for name in ("train", "test"):
            part = getattr(data, name)
            labels, pixels = part.labels.clone(), part.pixels.clone()
            labels[5] = (labels[5] + 1) % 10
            pixels[-1, 2, 31, 31] ^= 1
            for changed in (replace(part, labels=labels), replace(part, pixels=pixels), part.part(slice(1, None))):
                assert identity(replace(data, **{name: changed})) != identity(data)
        held_out = replace(data, train=data.train.part(slice(8, None)), validation=data.train.part(slice(8)))
        assert identity(held_out) != identity(replace(held_out, train=replace(held_out.train), validation=None))
        assert identity(data) != identity(generated_images("cifar100"))

    def test_of_images_in_files_is_that_of_names_and_labels_wherever_they_lie(self):
        def images(folder="a", name=b"x/2.png", label=1):
            files = ImageFiles(Path(folder), np.array([b"x/1.png", name]), torch.tensor([0, label]))
            return ImageFolderData("imagenet:x", ("x", "y"), files, None, files, 0, None, None)

        assert identity(images()) == identity(images("b"))
        assert len({identity(images()), identity(images(name=b"x/3.png")), identity(images(label=0))}) == 3

    def test_of_images_with_boxes_is_that_of_boxes_and_of_pixels_or_names(self):
        data = generated_boxes(train=3, test=2, size=(16, 24))
        assert identity(data) == identity(generated_boxes(train=3, test=2, size=(16, 24), seed=9))
        boxes, pixels = data.test.annotations.boxes.clone(), torch.stack(data.test.pixels)
        boxes[0, 0] += 1
        pixels[0, 0, 0, 0] ^= 1
        moved = replace(data.test, annotations=replace(data.test.annotations, boxes=boxes))
        found = {identity(data)}
        for part in (moved, replace(data.test, pixels=pixels.unbind())):
            found.add(identity(replace(data, train=replace(data.train), test=part)))
        assert len(found) == 3
        names = ImageFiles(Path(), np.array([b"1.png", b"2.png", b"3.png"]), torch.arange(3))
        in_files = [replace(data.train, files=names, pixels=held) for held in (None, data.train.pixels)]
        one, same = (identity(replace(data, train=part)) for part in in_files)
        assert one == same  # whether they are held depends on the memory of a GPU
        assert one not in found


def test_nothing_made_with_other_data_is_taken_for_the_same(shop, other, job, at_once):
    assert failures(shop, job) == []
    (result,) = read(shop.results)
    assert result.data == shop.data_of(job.row) != other.data_of(job.row)
    assert failures(replace(shop, data={}), job) == []  # nobody can tell
    place, base = shop.results / f"{job.name}.json", shop.base_file(job.row)
    pruned, training = shop.pruned_folder(job), shop.training_folder(job)
    (reason,) = failures(other, job)
    assert reason.startswith(f"{place} was made with other data; give another --out, or remove {place}, ")
    made_of_it = (f"{shop.work}/{part}" for part in ("training/tiny-cifar10", "pruned/tiny-cifar10-*"))
    assert reason.partition("or remove ")[2] == (
        f"{place}, {base}, {', '.join(made_of_it)} and {shop.work}/training/tiny-cifar10-*"
    )
    place.unlink()
    (reason,) = failures(other, job)
    assert reason.startswith(f"{base} was made with other data; give another --out, or remove {base}, ")
    shutil.copy(base, base.parent / "kept")
    told_nothing(base)
    (reason,) = failures(other, job)
    assert reason.startswith(f"{pruned} was made with other data; give another --out, or remove {pruned} and ")
    edited(pruned / "config.json")
    (reason,) = failures(other, job)
    advice = "give another --out, or remove that folder"
    assert reason == f"the training in {training} began with other data; {advice}"
    base.unlink()
    (reason,) = failures(other, job)
    assert reason == f"the training in {shop.work / 'training' / job.row.task} began with other data; {advice}"
    (base.parent / "kept").rename(base)
    assert failures(shop, job) == []


def told_nothing(base):
    """An unpruned network as an older ifso wrote it."""
    write_tensors(base, load_file(base), {key: value for key, value in header_of(base).items() if key != "data"})


def edited(config):
    """A pruning as an older ifso wrote it."""
    document = json.loads(config.read_text())
    assert document["about"].pop("data")
    config.write_text(json.dumps(document))


def test_what_an_older_version_made_is_taken(shop, job, at_once, other):
    assert failures(shop, job) == []
    (place,) = shop.results.glob("*.json")
    document = json.loads(place.read_text())
    place.write_text(json.dumps({key: value for key, value in document.items() if key != "data"}))
    assert failures(other, job) == []
    place.unlink()
    told_nothing(shop.base_file(job.row))
    edited(shop.pruned_folder(job) / "config.json")
    checkpoint = shop.training_folder(job) / FILE
    tensors, facts = read_tensor_file(checkpoint)
    assert set(facts.pop("origin")) == {"start", "teacher", "data"}
    write_tensor_file(checkpoint, tensors, facts)
    assert failures(other, job) == []
    assert json.loads(place.read_text())["history"] == document["history"]


def test_results_of_other_data_are_in_no_mean_with_others_and_compared_with_none():
    def result(criterion, seed, data):
        return Result(
            row="resnet32-cifar10-50", criterion=criterion, recipe="paper", seed=seed, epochs=200, macs_kept=0.5,
            base_top1=9.0, last_top1=8.0, best_top1=8.0, history=[], seconds=1.0, hardware="abacus", torch="0.0",
            params_kept=0.5, pruned_top1=1.0, prune_seconds=1.0, ifso="0.0", data=data,
        )  # fmt: skip

    told = [("ifso", 0, ""), ("ifso", 1, "aa"), ("ifso", 2, "aa"), ("ifso", 3, "bb"), ("random", 0, "bb")]
    runs = Runs([result(*each) for each in told])
    ifso, chance = (Job(find_row("resnet32-cifar10-50"), criterion, "paper") for criterion in ("ifso", "random"))
    assert [[each.seed for each in group] for group in runs.of(ifso)] == [[0, 1, 2], [3]]
    assert otherwise(ifso, runs.of(ifso)[1][0])[-1] == "other data (bb)"
    assert runs.whole(chance, otherwise(ifso, runs.whole(ifso)[0])) == []


@pytest.mark.parametrize("changes", [{"smoke": True, "data": {}}, {"validation": 16}])
def test_smoke_runs_and_choices_know_their_data_too(shop, job, at_once, changes):
    changed = replace(shop, **changes)
    assert failures(changed, job) == []
    place = changed.results / ("smoke" if changed.smoke else "") / f"{job.name}.json"
    document = json.loads(place.read_text())
    assert document["data"] == header_of(changed.base_file(job.row))["data"] == changed.data_of(job.row)
    assert document["data"] != shop.data_of(job.row)
    place.write_text(json.dumps({**document, "data": "0" * 16}))
    (reason,) = failures(changed, job)
    assert reason.startswith(f"{place} was made with other data; ")
