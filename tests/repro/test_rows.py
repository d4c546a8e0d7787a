"""The rows and studies in ``repro/``: read strictly, complete, and turned into runs with stable names."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from ifso.errors import IfsoError
from ifso.models.registry import OWN
from ifso.pruning.budget import Mixed
from ifso.pruning.settings import Settings
from ifso.training.settings import RECIPES
from ifso_repro.config import CHECKOUT, PACKAGED, config_folder, find_row, find_study, rows, studies, study
from ifso_repro.jobs import Job
from ifso_repro.schema import DEFAULT_RUN, SCRATCH, UNPRUNED, Variant

ROOT = Path(__file__).parents[2]
ROW, TEACHER = "resnet32-cifar10-50", "resnet56-cifar10-50"
EXPECTED = {
    "vgg16-cifar10": (40, 50, 70, 80),
    "resnet32-cifar10": (40, 50),
    "resnet56-cifar10": (40, 50),
    "vgg16-cifar100": (40, 50),
    "resnet56-cifar100": (40, 50),
    "resnet50-imagenet": (40, 50),
    "retinanet-coco": (50, 60),
}


@pytest.fixture
def folder(tmp_path):
    """One row with that of its teacher, and one study, to be spoilt."""
    for name in (ROW, TEACHER, "figure8"):
        shutil.copy(config_folder() / f"{name}.toml", tmp_path)
    return tmp_path


def spoil(folder, old, new, name=ROW):
    path = folder / f"{name}.toml"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    return path


def test_every_row_of_the_tables_has_a_file():
    named = {f"{task}-{percent}" for task, percents in EXPECTED.items() for percent in percents}
    assert {name for name, row in rows().items() if row.tables} == named
    tables = {task: {table for row in rows().values() if row.task == task for table in row.tables} for task in EXPECTED}
    assert list(tables.values()) == [{"table1"}, {"table2"}, {"table3"}, {"table4"}, {"table6"}, {"table5"}, {"table7"}]


def test_every_study_is_there_and_none_is_empty():
    assert set(studies()) == {
        *(f"table{number}" for number in range(1, 8)),
        *("retinanet-bccd", "coupling-bccd", "min-units-bccd"),
        *("default-run", "default-run-bccd", "quick", "normalization", "inverse", "coupling"),
        *("figure5", "figure6", "figure7", "figure8"),
    }
    for name in studies():
        names = [job.name for job in study(name)]
        assert names
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", [*studies()])
def test_every_shipped_job_is_one_that_prune_and_training_take(name):
    for job in study(name, seeds=2):
        row = job.row
        own_or_not = row.network.removeprefix("ifso:") in OWN
        assert own_or_not or row.network in ("torchvision:resnet50", "torchvision:retinanet_resnet50_fpn")
        settings = job.train_settings()
        own = RECIPES["detection" if row.detects else "patient" if job.recipe == "taught" else job.recipe]
        epochs = row.finetune["epochs"] if job.recipe == "paper" or row.detects else own.epochs
        batch = row.finetune.get("batch", own.batch)
        assert (settings.epochs, settings.batch, settings.seed) == (epochs, batch, job.seed)
        if job.criterion in (UNPRUNED, SCRATCH):
            continue
        keywords = job.prune_keywords()
        if job.criterion == DEFAULT_RUN:
            staged = Settings(**keywords)
            assert (staged.schedule, staged.update, staged.min_share) == ("staged", True, 0.1)
            assert bool(job.passes) == (DEFAULT_RUN in find_study(name).path)
            continue
        assert keywords.pop("optimizer").keywords == {"learning_rate": job.prune["lr"]}
        assert (keywords.pop("preset"), keywords["schedule"] != "staged") == ("paper", True)
        checked = Settings(**keywords)
        assert (checked.update, checked.min_share, checked.stop, checked.recover) == (False, 0, None, 0)
        kept = checked.budget.macs if job.passes else (checked.budget.macs,)
        assert pytest.approx(1 - row.removed) in kept
        assert bool(job.passes) == (job.criterion in find_study(name).path and checked.schedule == "incremental")
        assert checked.criterion.name == job.criterion


def test_fewer_seeds_of_some_rows_than_a_study_has():
    counted = Counter(job.row.name for job in study("figure6") if job.variant.label == "1 batch")
    assert counted == {"resnet32-cifar10-40": 2, ROW: 2, "vgg16-cifar10-50": 1, "resnet56-cifar10-50": 1}
    assert {job.row.name for job in study("figure6", seeds=9)} == set(counted)
    assert len(study("figure6", seeds=3)) == 4 * 4 * 3


def test_one_pruning_for_all_budgets_of_a_study():
    paths = {(job.criterion, job.row.task): job.passes for job in study("figure5")}
    assert set(paths.values()) == {tuple(round(0.1 * step, 1) for step in range(1, 10))}
    assert {job.passes for job in study("table1")} == {()}
    assert [job.passes for job in study("figure7", seeds=1)] == [*[()] * 4, (0.1, 0.2, 0.3, 0.4)]
    assert Job(find_row(ROW), "unpruned", "brief", path=(0.1, 0.5)).passes == ()
    assert Job(find_row(ROW), "ifso", "brief", path=(0.1, 0.5)).prune["path"] == 0.1


def test_a_row_takes_more_than_is_planned():
    (job,) = study("table1", seeds=1, criteria=["magnitude"], recipes=["patient"])[:1]
    assert job.name == "vgg16-cifar10-40.magnitude.patient.0"


def test_names_of_jobs():
    assert [job.name for job in study(ROW, seeds=2, recipes=["ours"], criteria=["random", "ifso"])] == [
        "resnet32-cifar10-50.ifso.ours.0",
        "resnet32-cifar10-50.random.ours.0",
        "resnet32-cifar10-50.ifso.ours.1",
        "resnet32-cifar10-50.random.ours.1",
    ]
    names = [job.name for job in study("normalization", seeds=1) if job.row.name == ROW]
    assert names == [
        "resnet32-cifar10-50.ifso.brief.0",
        "resnet32-cifar10-50.ifso+normalize=memory.brief.0",
        "resnet32-cifar10-50.ifso+normalize=none.brief.0",
    ]


def test_a_variant_that_says_what_the_row_says_is_the_row_itself():
    plain, same = (
        Job(find_row(ROW), "ifso", "paper"),
        Job(find_row(ROW), "ifso", "paper", 0, Variant("k", {"accumulate": 10})),
    )
    assert same.name == plain.name
    assert Job(find_row(ROW), "group-fisher", "paper", 0, Variant("n", {"normalize": "memory"})).changes == {}
    assert Job(find_row(ROW), "ifso", "paper", 0, Variant("n", {"normalize": "memory"})).prune["normalize"] == "memory"


def test_options_reach_prune():
    jobs = {
        job.name: job for job in (*study("figure7", seeds=1), *study("inverse", seeds=1), *study("figure6", seeds=1))
    }
    mixed = jobs["resnet32-cifar10-40.ifso+schedule=mixed-0.75.brief.0"].prune_keywords()
    assert mixed["schedule"] == Mixed(0.75)
    neumann = jobs["resnet32-cifar10-40.ifso+inverse=neumann+terms=2.brief.0"].prune_keywords()
    assert (neumann["criterion"].inverse, neumann["criterion"].inverse_options) == ("neumann", {"terms": 2})
    assert jobs["vgg16-cifar10-50.ifso+batches_per_score=15.brief.0"].prune_keywords()["batches_per_score"] == 15


def test_chance_depends_on_the_seed_of_the_run():
    seeds = [job.prune_keywords()["criterion"].seed for job in study(ROW, criteria=["random"], recipes=["paper"])]
    assert seeds == [0, 1, 2]


def test_every_row_has_a_mask_entry_for_each_layer_as_the_authors_program():
    for row in rows().values():
        assert row.criterion == {"ifso": {"coupled": "layers"}}, row.name
        assert Job(row, "ifso", "paper").prune_keywords()["criterion"].coupled == "layers"
        Job(row, "group-fisher", "paper").prune_keywords()  # takes no such option, and gets none


def test_options_of_a_criterion_come_from_the_row_and_the_variant():
    row = replace(find_row(ROW), criterion={"ifso": {"coupled": "layers", "weights": "all"}})
    same, other, more = (
        Job(row, "ifso", "paper", 0, Variant("v", options))
        for options in ({"coupled": "layers"}, {"coupled": "shared"}, {"lr": 0.1, "inverse": "neumann"})
    )
    assert (same.changes, same.criterion_options) == ({}, {"coupled": "layers", "weights": "all"})
    assert (other.changes, other.criterion_options) == ({"coupled": "shared"}, {"coupled": "shared", "weights": "all"})
    assert other.name == f"{ROW}.ifso+coupled=shared.paper.0"
    assert more.criterion_options == {"coupled": "layers", "weights": "all", "inverse": "neumann"}
    assert more.name == f"{ROW}.ifso+lr=0.1+inverse=neumann.paper.0"
    assert other.prune == same.prune == Job(row, "ifso", "paper").prune
    assert Job(row, "random", "paper", 2).criterion_options == {}
    assert Job(row, "group-fisher", "paper", 0, Variant("v", {"coupled": "layers"})).changes == {"coupled": "layers"}


def test_an_option_that_a_criterion_has_not_is_refused():
    row = replace(find_row(ROW), criterion={"random": {"coupled": "layers"}, "group-fisher": {"coupled": "layers"}})
    for criterion in row.criterion:
        with pytest.raises(IfsoError, match=f"criterion '{criterion}' has no option 'coupled'"):
            Job(row, criterion, "paper").prune_keywords()


def test_a_budget_without_a_file_has_no_numbers_of_the_paper():
    row = find_row("resnet32-cifar10-30")
    assert (row.name, row.removed, row.paper, row.rivals) == ("resnet32-cifar10-30", 0.3, {}, ())
    assert row.criterion == find_row(ROW).criterion != {}
    assert find_study("resnet32-cifar10-30").rows == (row.name,)


def test_the_unpruned_network_is_given_or_trained_without_a_teacher():
    settings = find_row("vgg16-cifar10-50").base.train_settings()
    assert (settings.epochs, settings.schedule, settings.distill) == (120, "one-cycle", 0.0)
    with pytest.raises(IfsoError, match="weights are given, resnet32_cifar10_authors"):
        find_row(ROW).base.train_settings()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[finetune]\nepochs", "[finetune]\nepoch", "unknown key 'finetune.epoch'; known here: epochs, batch, lr"),
        ("lr = 0.01", "lr = 0.01\nlearning_rate = 1", "unknown key 'prune.learning_rate'"),
        ("accumulate = 10", 'accumulate = "10"', "prune.accumulate must be a whole number, got '10'"),
        ("seeds = 3", "seeds = true", "seeds must be a whole number, got True"),
        ("seeds = 3", "seeds = 0", "seeds must be 1 or more, got 0"),
        ("removed = 0.5", "removed = 50", "removed must be a share between 0 and 1, got 50"),
        ("removed = 0.5", "removed = 0.6", "row must be 'resnet32-cifar10-60'"),
        ('"group-fisher"]', '"rnadom"]', "criteria[2] must be one of true-loss, ifso, group-fisher, "),
        ('"group-fisher"]', '"ifso"]', "criteria must be a list without repetition"),
        ('data = "cifar10"', 'data = "cifar11"', "data must be one of cifar10, cifar100, "),
        ("[base]", '[base]\nrecipe = "paper"', "base needs either weights, or recipe, epochs and batch"),
        ("pruned = 92.18", 'pruned = "92"', "rivals[0].pruned must be a finite number, got '92'"),
        ("tables = ", "tables ", "is no TOML"),
        ('coupled = "layers"', 'coupeld = "layers"', "unknown key 'criterion.ifso.coupeld'; known here: inverse, "),
        ('coupled = "layers"', "coupled = 1", "criterion.ifso.coupled must be text, got 1"),
        ("[criterion.ifso]", "[criterion.isfo]", "unknown key 'criterion.isfo'; known here: true-loss, ifso, "),
        ("[criterion.ifso]\ncoupled", "[criterion]\nifso", "criterion.ifso must be a table, got 'layers'"),
        ('[teacher]\ntask = "resnet56-cifar10"', "", "recipes: 'taught' needs a teacher; give [teacher] with task"),
        ('task = "resnet56-cifar10"', 'task = "resnet56-cifar10"\nepochs = 9', "unknown key 'teacher.epochs'"),
        ('task = "resnet56-cifar10"', 'tusk = "resnet56-cifar10"', "unknown key 'teacher.tusk'"),
        ('"resnet56-cifar10"', '"resnet57-cifar10"', "teacher.task must be another task on cifar10, "),
        ('"resnet56-cifar10"', '"resnet32-cifar10"', "resnet56-cifar10, got 'resnet32-cifar10'"),
    ],
)  # fmt: skip
def test_a_slip_in_a_row_is_named(folder, old, new, message):
    path = spoil(folder, old, new)
    with pytest.raises(IfsoError) as caught:
        rows(folder)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('study = "figure8"', 'study = "figure9"', "study must be 'figure8', the name of the file, got 'figure9'"),
        ('study = "figure8"', 'name = "figure8"', "must have one of the keys 'row' and 'study'"),
        ('tasks = ["resnet32-cifar10"]', 'tasks = ["resnet33-cifar10"]', "tasks: 'resnet33-cifar10' has no row"),
        ("accumulate = 1 ", "acumulate = 1 ", "unknown key 'variants[0].options.acumulate'"),
        ("seeds = 2", "seeds = 2\nfewer.some-60 = 0", "fewer: 'some-60' is no row of the study"),
        ("seeds = 2", "seeds = 2\nfewer.resnet32-cifar10-50 = -1", "fewer.resnet32-cifar10-50 must be 0 or more"),
        ("[0.5]", "[0.55]", "path: the shares removed must be multiples of 0.1, which resnet32-cifar10-55 is not"),
        ('"k = 1, added up"', '"k"\npaper.some-60 = {removed = 60, pruned = 9}', "'some-60' is no row of the study"),
    ],
)  # fmt: skip
def test_a_slip_in_a_study_is_named(folder, old, new, message):
    path = spoil(folder, old, new, "figure8")
    with pytest.raises(IfsoError) as caught:
        studies(folder)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_teacher_is_for_classifiers_on_the_same_data_and_a_study_cannot_do_without(folder):
    shutil.copy(config_folder() / "resnet56-cifar100-50.toml", folder)
    path = spoil(folder, "resnet56-cifar10", "resnet56-cifar100")
    with pytest.raises(IfsoError, match=rf"{path}: teacher\.task must be another task on cifar10, .* got 'resnet56-c"):
        rows(folder)
    spoil(folder, "resnet56-cifar100", "resnet56-cifar10")
    spoil(folder, 'tasks = ["resnet32-cifar10"]', 'tasks = ["resnet56-cifar10"]', "figure8")
    path = spoil(folder, 'recipes = ["brief"]', 'recipes = ["taught"]', "figure8")
    with pytest.raises(IfsoError, match=rf"{path}: recipes: 'taught' needs rows with \[teacher\], which resnet56-c"):
        studies(folder)
    shutil.copy(config_folder() / "retinanet-bccd-50.toml", folder)
    path = spoil(folder, "[prune]", '[teacher]\ntask = "resnet56-cifar10"\n\n[prune]', "retinanet-bccd-50")
    with pytest.raises(IfsoError, match=rf"{path}: \[teacher\]: detectors have no recipe 'taught'"):
        rows(folder)


def test_rows_of_a_task_tell_the_same_of_their_unpruned_network(folder):
    shutil.copy(config_folder() / "resnet56-cifar10-40.toml", folder)
    path = spoil(folder, "cutmix = 0.5", "cutmix = 0.25", TEACHER)
    with pytest.raises(IfsoError, match=rf"{path}: \[base\] is another than in resnet56-cifar10-40\.toml"):
        rows(folder)


def test_the_teacher_of_a_job_is_another_only_where_the_recipe_says_so():
    row = find_row(ROW)
    taught = Job(row, "ifso", "taught")
    assert taught.teacher is row.teacher
    assert (row.teacher.task, row.teacher.title, row.at(0.3).teacher) == ("resnet56-cifar10", "ResNet-56", row.teacher)
    assert taught.train_settings() == Job(row, "ifso", "patient").train_settings()
    assert {Job(row, "ifso", recipe).teacher for recipe in ("paper", "ours", "patient")} == {None}
    with pytest.raises(IfsoError, match="resnet56-cifar10-50 has no teacher of its own; take another recipe"):
        _ = Job(find_row(TEACHER), "ifso", "taught").teacher


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: study("table9"), "no table, figure or row 'table9'; choose table1, table2"),
        (lambda: find_row("resnet32-cifar10-500"), "no row 'resnet32-cifar10-500'"),
        (lambda: find_row("resnet33-cifar10-50"), "did you mean resnet32-cifar10-50"),
        (lambda: study(ROW, criteria=["taylor"]), f"{ROW} has no criterion 'taylor'; it has true-loss, ifso, "),
        (lambda: study("figure8", criteria=["random"]), "figure8 has no criterion 'random'; it has ifso"),
        (lambda: study(TEACHER, recipes=["taught"]), f"{TEACHER} has no recipe 'taught'; it has paper, brief, "),
        (lambda: study(ROW, recipes=["detection"]), f"{ROW} has no recipe 'detection'; it has paper, "),
        (lambda: study(ROW, seeds=0), "0 seeds: give 1 or more"),
        (lambda: study("figure5", recipes=["ours"]), "figure5 has no recipe 'ours'; it has brief"),
    ],
)
def test_what_there_is_not_is_refused(call, message):
    with pytest.raises(IfsoError) as caught:
        call()
    assert message in str(caught.value)


def test_files_are_found_beside_the_code_or_in_a_checkout(folder, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    assert config_folder(packaged=folder, checkout=empty) == folder
    assert config_folder(packaged=empty / "not there", checkout=folder) == folder
    with pytest.raises(IfsoError, match="no rows of the paper found"):
        config_folder(packaged=empty, checkout=empty)


def test_the_installed_package_has_all_files_of_the_checkout():
    used = config_folder()
    assert used in (PACKAGED, CHECKOUT)
    here = {path.name: path.read_bytes() for path in (ROOT / "repro").glob("*.toml")}
    assert {path.name: path.read_bytes() for path in used.glob("*.toml")} == here


def test_reading_rows_takes_no_torch():
    code = "import sys; from ifso_repro.config import studies, study; study('figure5'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
