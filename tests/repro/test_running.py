"""The runs of a study on a tiny network: what is made once, what is kept, what fails and what then goes on."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from tiny_rows import AtOnce, few_images, tiny_row

from ifso.common.files import write_tensors
from ifso.errors import DataError, IfsoError, TrainingError
from ifso_repro import runner as running
from ifso_repro import workspace
from ifso_repro.commands import Rank, _state, dealt
from ifso_repro.jobs import Job
from ifso_repro.provenance import made_from_pruning
from ifso_repro.results import Result, read, read_file, write
from ifso_repro.runner import Runner
from ifso_repro.schema import Base, Variant
from ifso_repro.workspace import Workspace

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def shop(tmp_path):
    return Workspace(tmp_path / "work", tmp_path / "results", {"cifar10": few_images(tmp_path)}, train={"epochs": 2})


def ran(shop, jobs, said=None):
    found = Runner(shop, jobs, lanes=2, workers=1, say=(said if said is not None else []).append)
    found.run()
    return found


def test_a_row_from_nothing_to_its_results(shop, tmp_path, at_once):
    row, said = tiny_row(tmp_path, criterion={"ifso": {"coupled": "layers"}}), []
    jobs = [Job(row, "ifso", recipe) for recipe in ("paper", "ours")]
    assert ran(shop, jobs, said).failures == []
    assert at_once == ["tiny-cifar10-40.ifso.0"]  # one pruning for both recipes
    assert len([line for line in said if line == "training tiny-cifar10 for 1 epochs"]) == 1
    results = {result.recipe: result for result in read(shop.results)}
    assert set(results) == {"paper", "ours"}
    for job in jobs:
        result = results[job.recipe]
        assert result.name == job.name
        assert result.epochs == len(result.history) == 2
        assert result.last_top1 == result.history[-1]["top1"]
        assert result.best_top1 == max(epoch["top1"] for epoch in result.history)
        assert 0.3 < result.macs_kept <= 0.6
        assert result.train == {**shop.settings(job).as_dict(), "epochs": 2}
        options = {"normalize": "sqrt-memory", "seed": 0, "criterion": {"coupled": "layers"}}
        assert result.prune == {**row.prune, **options}
    facts = json.loads((shop.work / "pruned" / "tiny-cifar10-40.ifso.0" / "summary.json").read_text())
    assert results["ours"].pruned_top1 == facts["measures"][-1]["accuracy"]
    assert results["ours"].prune_seconds == facts["seconds"]

    again = []
    assert ran(shop, jobs, again).failures == []
    assert again == ["runs: 0 to do, 2 done already"]


def test_the_networks_that_ours_is_held_against(shop, tmp_path, at_once):
    """The unpruned one starts as it is; the one from scratch has the shape of the default run, and other weights."""
    row = tiny_row(tmp_path)
    assert _state(shop, Job(row, "unpruned", "ours")) == "to do"
    ours, scratch, unpruned = (Job(row, criterion, "ours") for criterion in ("true-loss", "scratch", "unpruned"))
    assert ran(shop, [ours, scratch, unpruned]).failures == []
    assert at_once == ["tiny-cifar10-40.true-loss.0"]  # one pruning for both
    results = {result.criterion: result for result in read(shop.results)}
    assert results["scratch"].macs_kept == results["true-loss"].macs_kept < 0.61
    assert (results["unpruned"].macs_kept, results["unpruned"].params_kept, results["unpruned"].prune_seconds) == (
        1,
        1,
        0,
    )
    assert results["unpruned"].pruned_top1 == results["unpruned"].base_top1
    data = shop.open(row, 0)
    start, own, new = (shop.pruned(job, data).state_dict() for job in (ours, unpruned, scratch))
    assert {name: tensor.shape for name, tensor in new.items()} == {
        name: tensor.shape for name, tensor in start.items()
    }
    assert not any(torch.equal(new[name], start[name]) for name in new if name.endswith("conv1.weight"))
    base = shop.base(row, data).state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in base.items())
    again = shop.pruned(scratch, data).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in new.items())
    said = []
    assert ran(shop, [ours, scratch, unpruned], said).failures == []
    assert said == ["runs: 0 to do, 3 done already"]


def test_what_was_made_with_other_settings_is_not_taken_for_the_same(shop, tmp_path, at_once):
    jobs = [Job(tiny_row(tmp_path), "ifso", "paper")]
    ran(shop, jobs)
    place = next(shop.results.glob("*.json"))
    (longer,) = ran(replace(shop, train={"epochs": 3}), jobs).failures
    assert f"{place} is of other settings: epochs is 3 and was 2; give another --out" in longer
    (rougher,) = ran(replace(shop, prune={"units_per_step": 4}), jobs).failures
    assert "units_per_step is 4 and was 2" in rougher
    place.unlink()
    for changes, words in (
        ({"prune": {"units_per_step": 4}}, "units_per_step is 4 and was 2"),
        ({"prune": {"lr": 0.02}}, "lr is 0.02 and was 0.01"),
        ({"prune": {"batch": 4}}, "batch is 4 and was 8"),
        ({"prune": {"accumulation": "last"}}, "accumulation is 'last' and was not set"),
        ({"prune_precision": "bf16"}, "precision is 'bf16' and was 'float32'"),
    ):
        (failure,) = ran(replace(shop, **changes), jobs).failed
        assert f"was made otherwise: {words}; give another --out" in failure.reason
        assert failure.status == 2
    assert read(shop.results) == []


def edited(place, **changes):
    """The result with other settings of ``train`` and ``prune``; None takes one away."""
    document = json.loads(place.read_text())
    for part, settings in changes.items():
        kept = {**document[part], **settings}
        document[part] = {key: value for key, value in kept.items() if value is not None}
    place.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train": {"cutmix": 0.5}}, "cutmix is not set and was 0.5"),
        ({"train": {"warm_up_steps": 9}}, "warm_up_steps is not set and was 9"),
        ({"train": {"ema": None}}, "ema is 0.0 and was not set"),
        ({"prune": {"criterion": {"coupled": "shared"}}}, "criterion.coupled is 'layers' and was 'shared'"),
        ({"prune": {"criterion": {}}}, "criterion.coupled is 'layers' and was not set"),
        ({"prune": {"criterion": {"coupled": "layers", "weights": "all"}}}, "criterion.weights is not set and was 'a"),
        ({"prune": {"criterion": None}}, None),
        ({"train": {"cutmix": 0.0, "warm_up_steps": 0, "compile": True}}, None),
    ],
)
def test_only_a_result_of_the_same_settings_counts(shop, tmp_path, at_once, changes, words):
    job = Job(tiny_row(tmp_path, criterion={"ifso": {"coupled": "layers"}}), "ifso", "paper")
    place = write(made_up(job, shop), shop.results)
    edited(place, **changes)
    found = Runner(shop, [job], lanes=1, workers=1, say=lambda _: None).failures
    assert found == [] if words is None else f"{place} is of other settings: {words}" in found[0]


def made_up(job, shop):
    """What a run of ``job`` could have come to."""
    return Result(
        row=job.row.name, criterion=job.criterion, recipe=job.recipe, seed=job.seed, epochs=2, macs_kept=0.5,
        base_top1=1.0, last_top1=1.0, best_top1=1.0, history=[], seconds=1.0, hardware="abacus", torch="0.0",
        params_kept=0.5, pruned_top1=1.0, prune_seconds=1.0, ifso="0.0", train=shop.settings(job).as_dict(),
        prune=shop.prune_options(job),
    )  # fmt: skip


def test_seeds_may_share_a_pruning_but_chance_never_does(shop, tmp_path, at_once):
    row = tiny_row(tmp_path)
    jobs = [Job(row, criterion, "paper", seed) for seed in (0, 1) for criterion in ("ifso", "random")]
    ran(replace(shop, one_pruning=True), jobs)
    assert sorted(at_once) == ["tiny-cifar10-40.ifso.0", "tiny-cifar10-40.random.0", "tiny-cifar10-40.random.1"]
    pruned_with = {result.name: result.prune["seed"] for result in read(shop.results)}
    assert pruned_with == {job.name: 0 if job.criterion == "ifso" else job.seed for job in jobs}


def test_a_run_that_cannot_be_done_does_not_stop_the_others(shop, tmp_path, at_once):
    row = tiny_row(tmp_path)
    given = replace(tiny_row(tmp_path, removed=0.3), base=Base(weights="not-there.safetensors"))
    elsewhere = replace(tiny_row(tmp_path, removed=0.2), data="imagenet")
    wrong = Variant("wrong", {"normalize": "weight"})
    jobs = [Job(given, "ifso", "paper"), Job(elsewhere, "ifso", "ours"), Job(row, "ifso", "paper", 0, wrong),
            Job(row, "magnitude", "paper")]  # fmt: skip
    found = ran(shop, jobs)
    assert [failure.name for failure in found.failed] == [job.name for job in jobs[:3]]
    reasons = [failure.reason for failure in found.failed]
    assert "begins with the weights not-there.safetensors, which are not here; give their folder" in reasons[0]
    assert "needs imagenet; give --data imagenet:PATH, or --smoke" in reasons[1]
    assert "weight" in reasons[2]
    assert [result.name for result in read(shop.results)] == [jobs[3].name]


def test_an_unpruned_network_that_cannot_be_trained_fails_its_rows_only(shop, tmp_path, at_once):
    row = tiny_row(tmp_path, base=Base(recipe="paper", epochs=1, batch=49))  # more than there are images
    found = ran(shop, [Job(row, "ifso", "paper"), Job(row.at(0.3), "ifso", "paper")])
    assert len(found.failed) == 2
    assert {failure.status for failure in found.failed} == {2}
    assert not (shop.work / "base").exists()


def test_an_unpruned_network_is_trained_by_one_process_at_a_time(shop, tmp_path, at_once):
    said = []
    mine = Runner(shop, [Job(tiny_row(tmp_path), "ifso", "paper")], lanes=1, workers=1, say=said.append)
    lock = mine._locked(tiny_row(tmp_path))
    mine._train_base(tiny_row(tmp_path))
    assert said[-1] == "waiting for tiny-cifar10, which another process trains"
    assert mine._crew.size == 0
    lock.release()
    mine.run()
    assert len(read(shop.results)) == 1


def test_no_memory_left_is_one_line(shop, tmp_path, at_once, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(running, "batches_and_loss", full)
    with pytest.raises(TrainingError, match="fewer --lanes"):
        ran(shop, [Job(tiny_row(tmp_path), "ifso", "paper")])


def test_a_damaged_result_is_named(shop, tmp_path, at_once):
    job = Job(tiny_row(tmp_path), "ifso", "paper")
    ran(shop, [job])
    place = shop.results / f"{job.name}.json"
    place.write_text(place.read_text()[:-20])
    (failure,) = ran(shop, [job]).failures
    assert f"{place} is damaged" in failure


def test_a_process_that_dies_takes_only_its_own_pruning_with_it(shop, tmp_path):
    rows = [tiny_row(tmp_path, "deadly"), tiny_row(tmp_path)]
    for row in rows:
        shop.keep_base(row, shop.fresh(row, 10))
    jobs, said = [Job(row, "ifso", "paper") for row in rows], []
    found = ran(shop, jobs, said)
    (failure,) = found.failed
    assert failure.name == jobs[0].name
    assert "the process that pruned it has died (out of memory?)" in failure.reason
    assert read_file(shop.results / f"{jobs[1].name}.json").name == jobs[1].name
    assert "pruning tiny-cifar10-40.ifso.0" in said


def test_jobs_are_dealt_by_pruning(shop, tmp_path):
    row = tiny_row(tmp_path)
    jobs = [Job(row, criterion, recipe, seed) for seed in (0, 1) for criterion in ("ifso", "random")
            for recipe in ("paper", "ours")]  # fmt: skip
    hands = [dealt(jobs, lambda job: str(shop.pruned_folder(job)), Rank(rank, 3)) for rank in range(3)]
    assert sorted(job.name for hand in hands for job in hand) == sorted(job.name for job in jobs)
    folders = [{shop.pruned_folder(job) for job in hand} for hand in hands]
    assert sum(map(len, folders)) == len(set.union(*folders)) == 4
    assert max(map(len, hands)) <= 4


def test_an_error_of_two_lines_is_told_in_one(shop, tmp_path, at_once, monkeypatch):
    def broken(*_):
        raise IfsoError("in two\nlines")

    monkeypatch.setattr(AtOnce, "ask", broken)
    shop.keep_base(tiny_row(tmp_path), shop.fresh(tiny_row(tmp_path), 10))
    found = ran(shop, [Job(tiny_row(tmp_path), "ifso", "paper")])
    assert found.failures == ["tiny-cifar10-40.ifso.paper.0: in two lines"]


class TestAnotherTeacher:
    """The recipe ``taught``: the unpruned network of another row teaches."""

    @pytest.fixture
    def job(self, tmp_path):
        teacher = tiny_row(tmp_path, "other", base=Base(recipe="paper", epochs=2, batch=16))
        return Job(tiny_row(tmp_path, teacher=teacher), "ifso", "taught")

    def test_it_is_trained_first_and_asked(self, shop, job, at_once, monkeypatch):
        asked, original = [], running.batches_and_loss

        def listened(data, settings, teacher=None, **more):
            asked.append((settings.distill, teacher))
            return original(data, settings, teacher, **more)

        monkeypatch.setattr(running, "batches_and_loss", listened)
        said = []
        own = replace(job, recipe="patient")
        assert ran(shop, [job, own], said).failures == []
        assert [line for line in said if line.startswith("training")] == [
            "training tiny-cifar10 for 1 epochs",
            "training other-cifar10 for 2 epochs",
        ]
        assert at_once == ["tiny-cifar10-40.ifso.0"]
        of = {result.recipe: result for result in read(shop.results)}
        teachers = {recipe: network for recipe, (weight, network) in zip(("patient", "taught"), asked[-2:], strict=True)
                    if weight}  # fmt: skip
        for row, name in ((job.row, "patient"), (job.row.teacher, "taught")):
            kept = shop.base(row, shop.open(row, 0)).state_dict()
            found = teachers[name].state_dict()
            assert all(torch.equal(value, found[key]) for key, value in kept.items()), name
        worth = of["taught"].teacher.pop("top1")
        assert of["taught"].teacher == {"task": "other-cifar10", "base": job.teacher.base.made}
        assert 0 <= worth <= 100
        assert of["patient"].teacher == {}
        assert of["taught"].base_top1 == of["patient"].base_top1
        assert of["taught"].history != of["patient"].history
        again = []
        assert ran(shop, [job, own], again).failures == []
        assert again == ["runs: 0 to do, 2 done already"]

    def test_a_smoke_run_has_one_too_and_its_settings_are_its_own(self, shop, job, at_once):
        smoke = replace(shop, smoke=True, data={}, work=shop.work / "smoke")
        assert ran(smoke, [job]).failures == []
        result = read_file(shop.results / "smoke" / f"{job.name}.json")
        assert (result.smoke, result.epochs, result.teacher["task"]) == (True, 1, "other-cifar10")
        longer = replace(job.teacher, base=Base(recipe="paper", epochs=9, batch=16))
        assert ran(smoke, [replace(job, row=replace(job.row, teacher=longer))]).failures == []

    def test_one_that_cannot_be_trained_fails_only_those_who_need_it(self, shop, job, at_once):
        broken = replace(job.row.teacher, base=Base(recipe="paper", epochs=1, batch=49))
        taught = replace(job, row=replace(job.row, teacher=broken))
        found = ran(shop, [taught, replace(job, recipe="ours")])
        assert [failure.name for failure in found.failed] == [taught.name]
        assert [result.recipe for result in read(shop.results)] == ["ours"]

    def test_a_result_of_another_teacher_or_of_another_unpruned_network_does_not_count(self, shop, job):
        told = {"task": "other-cifar10", "base": job.teacher.base.made, "top1": 50.0}
        base = {**job.row.base.made, "note": "a note is no other network"}
        for change, words in (
            ({}, None),
            ({"teacher": {**told, "top1": 9.0}}, None),
            ({"teacher": {**told, "task": "third-cifar10"}}, "teacher.task is 'other-cifar10' and was 'third-cifar10'"),
            ({"teacher": {**told, "base": {**told["base"], "epochs": 7}}}, "teacher.epochs is 2 and was 7"),
            ({"teacher": {}}, "teacher.task is 'other-cifar10' and was not set"),
            ({"base": {**base, "epochs": 9}}, "base.epochs is 1 and was 9"),
            ({"base": {}}, None),
        ):
            place = write(replace(made_up(job, shop), **{"base": base, "teacher": told, **change}), shop.results)
            found = Runner(shop, [job], lanes=1, workers=1, say=lambda _: None).failures
            assert found == [] if words is None else f"{place} is of other settings: {words}" in found[0]


class TestTheUnprunedNetworkThatIsThere:
    def test_one_that_was_trained_otherwise_is_not_taken(self, shop, tmp_path, at_once):
        job = Job(tiny_row(tmp_path), "ifso", "paper")
        longer = replace(job.row, base=Base(recipe="paper", epochs=3, batch=16, train={"cutmix": 0.5}))
        teaches = Job(replace(tiny_row(tmp_path, "other"), teacher=longer), "ifso", "taught")
        shop.keep_base(job.row, shop.fresh(job.row, 10))
        for other in (replace(job, row=longer), teaches):
            said = []
            (failure,) = ran(shop, [other], said).failures
            assert said == ["runs: 0 to do, 1 that cannot be done"]
            place = shop.base_file(longer)
            assert f"{place} was trained otherwise: epochs is 3 and was 1; train is {{'cutmix': 0.5}}" in failure
        assert ran(shop, [job]).failures == []

    def test_an_older_file_is_taken_and_told(self, shop, tmp_path, at_once):
        job, said = Job(tiny_row(tmp_path), "ifso", "paper"), []
        place = shop.base_file(job.row)
        place.parent.mkdir(parents=True)
        write_tensors(place, shop.fresh(job.row, 10).state_dict(), {"made by": "ifso 0.0"})
        assert ran(shop, [job], said).failures == []
        assert f"{place} does not tell how it was trained; taken to be as the rows of tiny-cifar10 say" in said

    def test_what_was_pruned_from_another_is_not_fine_tuned(self, shop, tmp_path, at_once):
        job = Job(tiny_row(tmp_path), "ifso", "paper")
        ran(shop, [job])
        next(shop.results.glob("*.json")).unlink()
        shop.keep_base(job.row, shop.fresh(job.row, 10))
        (failure,) = ran(shop, [job]).failures
        assert f"{shop.pruned_folder(job)} was made of another unpruned network; give another --out" in failure


class TestOnePruningForAllBudgets:
    PATH = (0.1, 0.2, 0.3, 0.4)

    @pytest.mark.parametrize("criterion", ["true-loss", "ifso", "random"])
    def test_rows_take_the_networks_that_it_leaves_on_its_way(self, shop, tmp_path, at_once, criterion):
        jobs = [Job(tiny_row(tmp_path, removed=share), criterion, "brief", path=self.PATH) for share in (0.2, 0.3, 0.4)]
        assert ran(shop, jobs).failures == []
        folder = shop.work / "pruned" / f"tiny-cifar10-10-40.{criterion}.0"
        assert {shop.pruned_folder(job) for job in jobs} == {folder}
        assert [path.name for path in (shop.work / "pruned").iterdir()] == [folder.name]
        facts, results = json.loads((folder / "summary.json").read_text()), sorted(read(shop.results), key=_removed)
        assert [result.row for result in results] == [job.row.name for job in jobs]
        stages = {stage["network"]: stage for stage in facts["stages"] if "network" in stage}
        for result, name in zip(results, ("macs-0.8", "macs-0.7", "macs-0.6"), strict=True):
            assert result.prune["path"] == 0.1
            assert result.macs_kept == stages[name]["shares"]["macs"]
            assert 0.5 * float(name[5:]) < result.macs_kept <= float(name[5:])
        for result, name in zip(results[:2], ("macs-0.8", "macs-0.7"), strict=False):
            assert result.pruned_top1 == stages[name]["values"]["accuracy"]
            assert result.params_kept == stages[name]["shares"]["params"]
            assert result.prune_seconds == stages[name]["seconds"] < facts["seconds"]
        assert results[-1].pruned_top1 == facts["measures"][-1]["accuracy"]
        assert results[-1].prune_seconds == facts["seconds"]
        assert ran(shop, jobs).failures == []

    def test_the_default_run_leaves_the_network_of_a_run_to_that_budget(self, shop, tmp_path, at_once):
        row = tiny_row(tmp_path, removed=0.2)
        jobs = [Job(row, "true-loss", recipe, path=path) for recipe, path in (("brief", self.PATH), ("ours", ()))]
        assert ran(shop, jobs).failures == []
        data = shop.open(row, 0)
        one, other = (shop.pruned(job, data).state_dict() for job in jobs)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)

    def test_a_pruning_with_one_end_and_chance_beyond_the_schedule_have_their_own(self, shop, tmp_path):
        row = tiny_row(tmp_path)
        for job, folder in (
            (Job(row, "ifso", "brief", 1, path=self.PATH), "tiny-cifar10-10-40.ifso.1"),
            (Job(row, "scratch", "brief", path=self.PATH), "tiny-cifar10-10-40.true-loss.0"),
            (
                Job(row, "ifso", "brief", variant=Variant(options={"schedule": "one-shot"}), path=self.PATH),
                "tiny-cifar10-40.ifso+schedule=one-shot.0",
            ),
        ):
            assert shop.pruned_folder(job).name == folder
        assert shop.pruned_folder(replace(job, variant=Variant(), path=())).name == "tiny-cifar10-40.ifso.0"
        changed = replace(shop, prune={"schedule": "mixed:0.5"})
        assert changed.pruned_folder(Job(row, "ifso", "brief", path=self.PATH)).name == "tiny-cifar10-40.ifso.0"

    @pytest.mark.parametrize("criterion", ["true-loss", "ifso"])
    def test_one_that_fails_on_its_way_leaves_what_it_has_passed(self, shop, tmp_path, monkeypatch, at_once, criterion):
        jobs = [Job(tiny_row(tmp_path, removed=share), criterion, "brief", path=self.PATH) for share in (0.2, 0.3, 0.4)]
        made, passed = workspace._evaluation, shop.pruned_network(jobs[0])

        def failing(*args):
            def evaluate(network):
                if passed.is_dir():
                    raise DataError("no more images")
                return made(*args)(network)

            return evaluate

        monkeypatch.setattr(workspace, "_evaluation", failing)
        failures = ran(shop, jobs).failures
        assert [failure.partition(".")[0] for failure in failures] == ["tiny-cifar10-30", "tiny-cifar10-40"]
        (result,) = read(shop.results)
        assert (result.row, result.prune["path"]) == ("tiny-cifar10-20", 0.1)
        monkeypatch.undo()
        monkeypatch.setattr(running, "PrunePool", AtOnce)
        assert ran(shop, jobs).failures == []
        assert len(read(shop.results)) == 3

    def test_a_result_of_another_pruning_does_not_count(self, shop, tmp_path, at_once):
        job = Job(tiny_row(tmp_path), "ifso", "brief")
        assert ran(shop, [job]).failures == []
        (failure,) = ran(shop, [replace(job, path=self.PATH)]).failures
        assert "path" in failure

    def test_the_advice_names_the_trainings_of_all_rows(self, shop, tmp_path):
        job = Job(tiny_row(tmp_path), "ifso", "brief", path=self.PATH)
        folder, trainings = made_from_pruning(shop, job)
        assert folder == shop.pruned_folder(job)
        assert trainings == shop.trainings / "tiny-cifar10-*.ifso.brief.0"


def _removed(result):
    return -result.macs_kept
