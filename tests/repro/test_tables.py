"""Results as files, what is claimed from them, and the tables made of them. All results here are made up."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
from rich.console import Console

from ifso.errors import IfsoError
from ifso_repro.config import find_row, studies, study
from ifso_repro.results import Result, path_of, read, read_file, write
from ifso_repro.statistics import Difference, Spread
from ifso_repro.tables import COMPARED, markdown, render, usual_options, write_markdown

ROW = "resnet32-cifar10-50"
HISTORY = [{"epoch": 1, "loss": 0.5, "top1": 12.5, "lr": 0.1}, {"epoch": 2, "loss": 0.4, "top1": None, "lr": 0.01}]
OF_THE_ISSUE = (
    "row", "criterion", "recipe", "seed", "epochs", "macs_kept", "base_top1", "last_top1", "best_top1", "history",
    "seconds", "hardware", "torch",
)  # fmt: skip


def made_up(criterion="ifso", recipe="paper", seed=0, last=12.5, **more):
    values = {
        "row": ROW, "epochs": 200, "macs_kept": 0.499, "base_top1": 20.0, "best_top1": last + 0.25, "history": HISTORY,
        "seconds": 3600.0, "hardware": "abacus", "torch": "0.0", "params_kept": 0.6, "pruned_top1": 9.0,
        "prune_seconds": 1800.0, "ifso": "0.0",
    }  # fmt: skip
    return Result(**{**values, "criterion": criterion, "recipe": recipe, "seed": seed, "last_top1": last, **more})


def lines_of(text, *words):
    """The lines of a table in which all of these words stand."""
    return [line for line in text.splitlines() if line.startswith("|") and all(word in line for word in words)]


def test_a_result_comes_back_as_it_was_written(tmp_path):
    result = made_up(
        variant={"normalize": "none"}, train={"lr": 0.1, "milestones": [0.6]}, base={"weights": "a.safetensors"}
    )
    place = write(result, tmp_path / "results")
    assert place.name == "resnet32-cifar10-50.ifso+normalize=none.paper.0.json"
    assert read(tmp_path / "results") == [result]
    assert set(OF_THE_ISSUE) < set(json.loads(place.read_text()))
    assert [path.name for path in place.parent.iterdir()] == [place.name]


def test_the_name_of_a_result_is_that_of_its_job(tmp_path):
    for job in (*study("inverse", seeds=1), *study("figure7", seeds=1)):
        result = made_up(row=job.row.name, variant=job.changes, recipe=job.recipe)
        assert result.name == job.name
        assert write(result, tmp_path) == path_of(job.name, tmp_path)


def test_a_smoke_result_lies_apart_and_is_never_shown(tmp_path):
    real = made_up()
    write(real, tmp_path)
    place = write(replace(real, smoke=True, last_top1=1.0), tmp_path)
    assert place.parent.name == "smoke"
    assert read(tmp_path) == [real]
    (tmp_path / place.name).write_bytes(place.read_bytes())
    assert read(tmp_path) == []
    assert markdown([replace(real, smoke=True)]) == markdown([])


def test_no_folder_holds_no_results(tmp_path):
    assert read(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "is damaged"),
        (lambda text: "[]", "must be a table, got []"),
        (lambda text: text.replace('"seconds": 3600.0', '"seconds": NaN'), "NaN is no number"),
        (lambda text: text.replace('"epochs"', '"epoch"'), "lacks epochs"),
        (lambda text: text.replace('"smoke"', '"note": "", "smoke"'), "unknown key 'note'"),
        (lambda text: text.replace('"seed": 0', '"seed": "0"'), "seed must be a whole number, got '0'"),
        (lambda text: text.replace('"seed": 0', '"seed": 1'), "holds the result of resnet32-cifar10-50.ifso.paper.1"),
        (lambda text: text.replace('"loss": 0.5', '"loss": null'), "history[0].loss must be a finite number, got None"),
        (
            lambda text: text.replace('"prune": {}', '"prune": {"criterion": 1}'),
            "prune.criterion must be a table",
        ),
        (lambda text: text.replace('"epoch": 2', '"number": 2'), "unknown key 'history[1].number'"),
    ],
)
def test_a_damaged_result_is_named(tmp_path, change, message):
    place = write(made_up(), tmp_path)
    place.write_text(change(place.read_text()))
    with pytest.raises(IfsoError) as caught:
        read(tmp_path)
    assert message in str(caught.value)
    assert str(place) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"last_top1": 100.5, "best_top1": 100.5}, "last_top1 must be in per cent, from 0 to 100, got 100.5"),
        ({"macs_kept": 50.1}, "macs_kept must be a share, above 0 and up to 1, got 50.1"),
        ({"best_top1": 12.0}, "best_top1 must not be below last_top1, 12.5, got 12.0"),
        ({"seconds": float("inf")}, "seconds must be a finite number, got inf"),
        ({"epochs": True}, "epochs must be a whole number, got True"),
    ],
)
def test_what_no_run_can_give_is_refused(changes, message):
    with pytest.raises(IfsoError) as caught:
        made_up(**changes)
    assert message in str(caught.value)


def test_spread_by_hand():
    # 1, 2, 6: mean 3, squares 4 + 1 + 9 over n − 1 = 2
    found = Spread.of([1.0, 2.0, 6.0])
    assert (found.mean, found.deviation, found.count) == (3.0, pytest.approx(7**0.5, rel=1e-12), 3)
    assert Spread.of([4.0]).deviation is None


@pytest.mark.parametrize(
    ("one", "other", "mean", "spread", "verdict"),
    [
        ([5.0, 7.0], [1.0, 3.0], 4.0, 2.0, "higher"),
        ([1.0, 3.0], [5.0, 7.0], -4.0, 2.0, "lower"),
        ([5.0, 7.0], [3.0, 5.0], 2.0, 2.0, "no claim: the spread is larger"),
        ([5.0, 7.0], [3.0], 3.0, None, "no claim: one seed has no spread"),
        ([5.0], [3.0], 2.0, None, "no claim: one seed has no spread"),
    ],
)
def test_only_a_difference_above_its_spread_is_claimed(one, other, mean, spread, verdict):
    found = Difference.of(Spread.of(one), Spread.of(other))
    assert found.mean == mean
    assert found.spread == (None if spread is None else pytest.approx(spread, rel=1e-12))
    assert found.verdict == verdict


def some_results():
    """IFSO with three seeds, Group Fisher with two, chance with one, all with the paper's recipe."""
    ifso = [made_up(seed=seed, last=last) for seed, last in enumerate((14.0, 14.5, 15.0))]
    fisher = [made_up("group-fisher", seed=seed, last=last) for seed, last in enumerate((11.0, 11.5))]
    return [*ifso, *fisher, made_up("random", last=14.5, epochs=200), made_up("random", seed=1, last=19.5, epochs=20)]


GOLDEN = """\
## resnet32-cifar10-50

| from | Method | MACs removed | base | pruned | drop | best epoch | runs |
|---|---|---:|---:|---:|---:|---:|---:|
| rival | PScratch | 50.0 % | 93.18 | 92.18 | 1.00 | – | – |
| rival | GAL | 50.0 % | 93.18 | 91.72 | 1.46 | – | – |
| paper | GFP-50 | 50.1 % | 93.51 | 92.64 | 0.87 | – | – |
| paper | IFSO-50 (best test epoch) | 50.1 % | 93.51 | 93.00 | 0.51 | 93.00 | – |
| paper | IFSO-50 (last epoch) | 50.1 % | 93.51 | 92.84 | 0.67 | – | – |
| ours | the default run, recipes “short”, “taught” | 50 % | not run | not run | not run | not run | 0 seeds |
| ours | IFSO, recipe “paper” | 50.1 % | 20.00 | 14.50 ± 0.50 | 5.50 | 14.75 ± 0.50 | 3 seeds |
| ours | IFSO, recipes “short”, “taught” | 50 % | not run | not run | not run | not run | 0 seeds |
| ours | Group Fisher, recipe “paper” | 50.1 % | 20.00 | 11.25 ± 0.35 | 8.75 | 11.50 ± 0.35 | 2 seeds |
| ours | Group Fisher, recipes “short”, “taught” | 50 % | not run | not run | not run | not run | 0 seeds |
| ours | random, recipe “paper” | 50.1 % | 20.00 | 14.50 | 5.50 | 14.75 | 1 seed |
| ours | random, recipe “paper”, 20 epochs | 50.1 % | 20.00 | 19.50 | 0.50 | 19.75 | 1 seed |

“taught”: “patient”, taught by the unpruned ResNet-56.

## resnet32-cifar10-50: IFSO against the others

| row | recipe | IFSO against | difference | spread | seeds | claim |
|---|---|---|---:|---:|---:|---:|
| resnet32-cifar10-50 | paper | Group Fisher | 3.25 | 0.61 | 3 and 2 | higher |
| resnet32-cifar10-50 | paper | random | 0.00 | – | 3 and 1 | no claim: one seed has no spread |

{compared}

## Where it was run

| hardware | torch | ifso | results | hours, added up |
|---|---|---|---:|---:|
| abacus | 0.0 | 0.0 | 7 | 10.5 |
"""


def test_a_row_as_markdown():
    page = markdown(some_results(), [ROW])
    assert page.startswith("# The paper's tables, run again\n\nWritten by `ifso repro --table` from the 7 results in")
    assert page[page.index("## ") :] == GOLDEN.format(compared=COMPARED)


USUAL = (
    "Where a line says nothing else, IFSO has a mask entry for each layer that reads a unit, as in the authors' program"
)


def test_the_page_says_once_which_options_the_rows_give():
    assert markdown([]).count(USUAL) == markdown([], ["table7"]).count(USUAL) == 1
    assert markdown([]).index(USUAL) < markdown([]).index("## ")
    fisher = [job for job in study(ROW) if job.criterion == "group-fisher"]
    assert usual_options(fisher) == ""
    other = replace(fisher[0].row, criterion={"group-fisher": {"weights": "all", "coupled": "shared"}})
    assert usual_options([replace(fisher[0], row=other)]) == (
        "Where a line says nothing else, Group Fisher has weights=all; "
        "Group Fisher has one mask entry for all layers that read a unit, as in Definition 1 (coupled=shared)."
    )


@pytest.mark.parametrize("name", ["table2", "figure5", "table7"])
def test_the_terminal_says_it_below_the_first_table(name):
    said = [str(table.caption).count(USUAL) for table in render(name, [])]
    assert said == [1] + [0] * (len(said) - 1)


def test_the_terminal_shows_the_same_cells():
    console = Console(width=200, record=True, file=None, quiet=True)
    with console.capture() as caught:
        console.quiet = False
        console.print(*render("table2", some_results()))
    text = caught.get()
    assert "Table 2: ResNet-32 on CIFAR-10" in text
    found = [[cell.strip() for cell in line.strip("│┃ ").split("│")] for line in text.splitlines()]
    assert [
        "ours",
        "IFSO, recipe “paper”",
        "50.1 %",
        "20.00",
        "14.50 ± 0.50",
        "5.50",
        "14.75 ± 0.50",
        "3 seeds",
    ] in found
    assert ["resnet32-cifar10-50", "paper", "Group Fisher", "3.25", "0.61", "3 and 2", "higher"] in found


def test_all_tables_without_results_have_every_cell_marked():
    page = markdown([])
    for number in range(1, 8):
        assert f"## Table {number}: " in page
    assert "Where it was run" not in page
    ours = [line for line in lines_of(page) if line.startswith("| ours |")]
    assert all(line.count("not run") >= 4 and "0 seeds" in line for line in ours)
    # a line for each row, criterion and variant, whatever its recipes
    expected = {
        (name, job.row.name, job.criterion, job.variant.label)
        for name, chosen in studies().items() if chosen.layout == "lines" for job in study(name, seeds=1)
    }  # fmt: skip
    assert len(ours) == len(expected) > 110
    assert len(lines_of(page, "| ours | IFSO, recipe “short” |")) == 10
    assert len(lines_of(page, "| ours | IFSO, recipes “short”, “taught”, “paper” |")) == 2
    assert len(lines_of(page, "| ours | IFSO, recipe “detection” |")) == 5
    assert len(lines_of(page, "magnitude-A, recipe “brief” | not run |")) == 2
    assert "against" not in page


def test_recipes_that_were_run_have_lines_of_their_own():
    """Also with the same numbers."""
    ours = [replace(run, recipe="ours", epochs=150) for run in some_results() if run.criterion != "random"]
    page = markdown([*some_results(), *ours], [ROW])
    found = [line.split(" | ")[1] for line in lines_of(page, "| ours | IFSO")]
    assert found == ["IFSO, recipe “paper”", "IFSO, recipe “ours”", "IFSO, recipes “short”, “taught”"]
    told = [line.strip("| ").split(" | ")[1:4] for line in lines_of(page, "| resnet32-cifar10-50 |")]
    assert told == [
        ["paper", "Group Fisher", "3.25"],
        ["paper", "random", "0.00"],
        ["ours", "Group Fisher", "3.25"],
    ]


def test_a_comparison_that_lacks_one_side_is_marked_and_one_that_lacks_both_is_left_out():
    page = markdown([made_up(recipe="taught", epochs=180)], [ROW])
    line = "not run | not run | {} | not run |"
    assert lines_of(page, "| resnet32-cifar10-50 |") == [
        f"| resnet32-cifar10-50 | taught | IFSO | {line.format('0 and 1')}",
        f"| resnet32-cifar10-50 | taught | Group Fisher | {line.format('1 and 0')}",
    ]


def test_what_was_run_beside_the_plan_is_shown_and_so_is_what_others_report_of_rows_without_runs():
    other = markdown([made_up("magnitude", recipe="patient", epochs=180)], ["table2", "coupling"])
    assert len(lines_of(other, "| ours | magnitude, recipe “patient” |", "| 1 seed |")) == 1
    page = markdown([], ["normalization"])
    assert lines_of(page, "| paper | Raw | 40.0 % | 93.34 |")
    assert "| ours | Raw, recipe “brief” | 40 % |" not in page[page.index(": vgg16-cifar10") :]


def test_other_options_of_the_criterion_are_in_the_line():
    other, usual, old = (
        made_up(seed=seed, prune=prune)
        for seed, prune in enumerate(({"criterion": {"coupled": "shared"}}, {"criterion": {"coupled": "layers"}}, {}))
    )
    page = markdown([other, usual, old], [ROW])
    assert lines_of(page, "| ours | IFSO, recipe “paper” |", "| 2 seeds |")
    assert lines_of(page, "| ours | IFSO, recipe “paper”, coupled=shared |", "| 1 seed |")


BASE = find_row(ROW).base.as_dict()
TEACHER = find_row(ROW).teacher


def test_another_unpruned_network_is_in_the_line_and_never_in_the_mean():
    usual, noted, other = (
        made_up(seed=seed, last=last, base=base)
        for seed, (last, base) in enumerate(
            ((12.0, BASE), (13.0, {**BASE, "note": "as before"}), (17.0, {"recipe": "scratch", "epochs": 9}))
        )
    )
    page = markdown([usual, noted, other, made_up("random", base=other.base)], [ROW])
    assert lines_of(page, "| ours | IFSO, recipe “paper” |", "| 12.50 ± 0.71 |", "| 2 seeds |")
    words = "another unpruned network: 9 epochs, recipe scratch, no weights"
    assert lines_of(page, f"| ours | IFSO, recipe “paper”, {words} |", "| 17.00 |", "| 1 seed |")
    assert lines_of(page, "| paper | random | not run |")
    alike = markdown([other, made_up("random", base=other.base)], [ROW])
    assert lines_of(alike, "| paper | random | 4.50 |", f"no claim: one seed has no spread, {words} |")
    assert f"| 17.00 (1, {words}) |" in markdown([replace(other, recipe="brief", epochs=30)], ["figure5"])


def test_who_taught_is_below_the_table_with_what_it_was_worth_and_another_in_the_line():
    told = {"task": "resnet56-cifar10", "base": TEACHER.base.made, "top1": 30.0}
    other = {**told, "base": {**told["base"], "epochs": 9}, "top1": 10.0}
    page = markdown([made_up(recipe="taught", epochs=180, teacher=told)], [ROW])
    assert "\n“taught”: “patient”, taught by the unpruned ResNet-56 (30.00 %).\n" in page
    assert lines_of(page, "| ours | IFSO, recipe “taught” |")
    page = markdown([made_up(recipe="taught", epochs=180, teacher=other)], [ROW])
    assert lines_of(page, "| ours | IFSO, recipe “taught”, another teacher: 9 epochs |")


@pytest.mark.parametrize(
    ("teacher", "words"),
    [
        ({"task": "a"}, "key 'teacher.base' is missing"),
        ({"task": 1, "base": {}, "top1": 1.0}, "teacher.task must be text, got 1"),
        ({"task": "a", "base": {}, "top1": 101.0}, "teacher.top1 must be in per cent, from 0 to 100, got 101.0"),
    ],
)
def test_a_teacher_that_cannot_have_been_is_refused(teacher, words):
    with pytest.raises(IfsoError) as caught:
        made_up(teacher=teacher)
    assert words in str(caught.value)


def test_an_older_file_tells_of_no_teacher(tmp_path):
    place = write(made_up(), tmp_path)
    document = json.loads(place.read_text())
    assert document.pop("teacher") == {}
    place.write_text(json.dumps(document))
    assert read_file(place) == made_up()


def test_a_drop_is_base_less_pruned_in_every_line_reported():
    told = [line.strip("| ").split(" | ") for line in lines_of(markdown([])) if line.startswith(("| rival", "| paper"))]
    assert len(told) > 80
    for cells in told:
        base, pruned, drop = cells[3:6]
        if base != "–":
            assert float(drop.replace("−", "-")) == pytest.approx(float(base) - float(pruned), abs=1e-9)


def test_variants_are_kept_apart_from_the_row():
    results = [made_up(last=12.0, recipe="brief"), made_up(last=17.0, recipe="brief", variant={"normalize": "none"})]
    page = markdown(results, ["normalization"])
    assert lines_of(page, "| ours | IFSO (√ΔMem), recipe “brief”", "| 12.00 |", "| 60.0 % |")
    assert lines_of(page, "| ours | Raw, recipe “brief”", "| 17.00 |")
    assert "17.00" not in markdown(results, ["table2"])


def test_seconds_and_shares_of_figures_7_and_5():
    short = {"recipe": "brief", "epochs": 30}
    results = [
        made_up(row="resnet32-cifar10-40", variant={"schedule": "mixed:0.75"}, **short),
        made_up(last=13.0, seed=4, **short),
    ]
    assert lines_of(markdown(results, ["figure7"]), "75 % incremental", "| 12.50 |", "| 1 seed | 1800 |")
    cells = ["not run"] * 4 + ["13.00 (1)"] + ["not run"] * 4
    assert f"| IFSO, recipe “brief” | {' | '.join(cells)} |" in markdown(results, ["figure5"])


def test_the_page_is_written_whole(tmp_path):
    place = tmp_path / "docs" / "tables.md"
    write_markdown(some_results(), place)
    assert place.read_text(encoding="utf-8") == markdown(some_results())
    (tmp_path / "file").write_text("")
    with pytest.raises(IfsoError, match="cannot be written"):
        write_markdown([], tmp_path / "file" / "tables.md")


def test_the_fields_that_the_issue_names_come_first():
    assert tuple(entry.name for entry in fields(Result))[: len(OF_THE_ISSUE)] == OF_THE_ISSUE


def test_reading_one_file(tmp_path):
    place = write(made_up(), tmp_path)
    assert read_file(place).history == HISTORY
    with pytest.raises(IfsoError, match="is damaged"):
        read_file(tmp_path / "none.json")
