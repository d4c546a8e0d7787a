"""What lies in ``repro/results``: runs of shipped studies, shown in ``docs/tables.md`` and ``docs/results.md``."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ifso_repro.config import find_row, studies
from ifso_repro.jobs import method_name
from ifso_repro.results import read
from ifso_repro.runner import Runner
from ifso_repro.schema import DEFAULT_RUN, PRUNE_OPTIONS, UNPRUNED
from ifso_repro.statistics import Runs, Spread, of_other_networks
from ifso_repro.tables import markdown, shown
from ifso_repro.workspace import Workspace

ROOT = Path(__file__).parents[2]
TABLE = re.compile("<!-- table2:begin -->\n(.*?)<!-- table2:end -->", re.DOTALL)
OF_FORMER_NETWORKS = ("resnet56-cifar10-50.ifso+coupled=shared.ours.0",)
"""Results whose unpruned network was trained otherwise than the rows say now."""

UNPRUNED_RESNET32 = "93.51"
"""As ``ifso eval`` measures it; in some results it was rounded in TF32."""


@pytest.fixture(scope="module")
def results():
    return read(ROOT / "repro" / "results")


def jobs_of(results):
    """The runs of all tables with these results, planned or not."""
    found = [job for name in studies() for job in shown(name, Runs(results))]
    return {each.name: each for job in found for each in (replace(job, seed=seed) for seed in range(3))}


def test_every_result_is_in_a_table(results):
    assert {result.name for result in results} <= jobs_of(results).keys()


def test_a_result_was_pruned_as_its_name_says(results):
    for result in results:
        named = {key: value for key, value in result.variant.items() if key in PRUNE_OPTIONS}
        assert {key: result.prune[key] for key in named} == named, result.name


def test_a_result_had_the_options_that_its_row_and_its_name_give_to_the_criterion(results):
    jobs = jobs_of(results)
    for result in results:
        assert result.prune["criterion"] == jobs[result.name].criterion_options, result.name


def test_they_count_as_done(results):
    """The command that made them finds nothing to do."""
    jobs, said = jobs_of(results), []
    made_with = {"precision": "bf16", "channels_last": True}
    rows_now = [result for result in results if result.name not in OF_FORMER_NETWORKS]
    own = [result for result in rows_now if result.criterion in (DEFAULT_RUN, UNPRUNED)]
    for one_pruning, made in ((False, own), (True, [result for result in rows_now if result not in own])):
        shop = Workspace(ROOT / "repro/work", ROOT / "repro/results", train=made_with, one_pruning=one_pruning)
        found = Runner(shop, [jobs[result.name] for result in made], lanes=1, workers=1, say=said.append)
        assert (found.failures, said.pop()) == ([], f"runs: 0 to do, {len(made)} done already")


def test_those_of_an_unpruned_network_that_is_trained_otherwise_now_are_marked_and_not_taken(results):
    jobs = jobs_of(results)
    former = [result for result in results if of_other_networks(jobs[result.name], result)]
    assert tuple(result.name for result in former) == OF_FORMER_NETWORKS
    page = (ROOT / "docs" / "tables.md").read_text(encoding="utf-8")
    shop = Workspace(ROOT / "repro" / "work", ROOT / "repro" / "results", one_pruning=True)
    for result in former:
        (words,) = of_other_networks(jobs[result.name], result)
        assert words.startswith(f"another unpruned network: {result.base['epochs']} epochs")
        lines = [line for line in page.splitlines() if f"| {result.base_top1:.2f} | {result.last_top1:.2f} |" in line]
        assert lines
        assert all(words in line for line in lines)
        (failure,) = Runner(shop, [jobs[result.name]], lanes=1, workers=1, say=lambda _: None).failures
        assert f"base.epochs is {jobs[result.name].row.base.epochs} and was {result.base['epochs']}" in failure


def test_what_the_row_says_is_in_no_name(results):
    """So that a result is found by the name of its job."""
    for result in results:
        row = find_row(result.row)
        usual = {**row.prune, **row.criterion.get(result.criterion, {})}
        assert not usual.items() & result.variant.items(), result.name


def test_the_page_of_tables_is_made_of_the_results(results):
    """ifso repro --table --markdown docs/tables.md"""
    assert (ROOT / "docs" / "tables.md").read_text(encoding="utf-8") == markdown(results)


def ours_and_the_papers():
    """Lines of the table in docs/results.md, each with its row: the network is named once, the budget is in each."""
    (table,) = TABLE.findall((ROOT / "docs" / "results.md").read_text(encoding="utf-8"))
    network, found = "", []
    for line in table.splitlines()[2:]:
        label, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        network = next((name for name in ("ResNet-32", "ResNet-56") if name in label), network)
        percent = round(float(cells[0].removesuffix(" %")), -1)
        found.append((f"{network.replace('-', '').lower()}-cifar10-{percent:.0f}", label, cells))
    return found


def test_ours_on_the_page_of_results_are_the_results(results):
    told = [(row, re.findall("`([^`]+)`", label), cells) for row, label, cells in ours_and_the_papers() if "`" in label]
    assert len(told) > 5
    for row, (method, recipe), cells in told:
        group = [
            result for result in Runs(results).all
            if (result.row, method_name(result.criterion, result.variant), result.recipe) == (row, method, recipe)
        ]  # fmt: skip
        assert group, (row, method, recipe)
        means = [Spread.of([100 * value for value in values]).mean for values in (
            [1 - result.macs_kept for result in group], [result.params_kept for result in group])]  # fmt: skip
        base = UNPRUNED_RESNET32 if "resnet32" in row else f"{group[0].base_top1:.2f}"
        spreads = (str(Spread.of([result.worth(stage) for result in group])) for stage in ("last", "best"))
        assert cells[:5] == [*(f"{mean:.1f} %" for mean in means), base, *spreads], (row, method, recipe)
        assert cells[5].removesuffix(" seeds").removeprefix("one pruning, ") == str(len(group))
        assert ("one pruning" in cells[5]) == (len({result.prune["seed"] for result in group}) < len(group))


def test_the_papers_on_the_page_of_results_are_those_of_the_rows():
    told = [(row, cells) for row, label, cells in ours_and_the_papers() if label.startswith("the paper's IFSO")]
    assert len(told) == 3
    for row, cells in told:
        paper = find_row(row).paper["ifso"]
        last = "–" if paper.last is None else f"{paper.last:.2f}"
        kept = "–" if paper.params_kept is None else f"{paper.params_kept:.1f} %"
        assert cells[:5] == [f"{paper.removed:.1f} %", kept, f"{paper.base:.2f}", last, f"{paper.pruned:.2f}"], row
