"""From results to points: nothing is lost, moved or made up."""

import statistics
from dataclasses import replace

import pytest
from made_up import job_of, result, seeds

from ifso.errors import IfsoError
from ifso_repro.config import study
from ifso_repro.curves import load, plot
from ifso_repro.results import write
from ifso_repro.statistics import Runs


def places(panel):
    return {(series.label, point.x): [r.last_top1 for r in point.results] for series in panel.series
            for point in series.points}  # fmt: skip


def test_each_result_of_figure_5_has_its_place():
    ifso = job_of("figure5", row="resnet32-cifar10-50", criterion="ifso")
    other = job_of("figure5", row="vgg16-cifar10-90", criterion="magnitude-average")
    found = plot("figure5", Runs([*seeds(ifso, 93.0, 92.0, 92.5), result(other, 60.0)]))
    assert [panel.title for panel in found.panels] == ["ResNet-32, CIFAR-10", "VGG-16, CIFAR-10"]
    first, last = map(places, found.panels)
    assert {place: values for place, values in first.items() if values} == {("IFSO", 50.0): [93.0, 92.0, 92.5]}
    assert {place: values for place, values in last.items() if values} == {("magnitude-A", 90.0): [60.0]}
    assert [panel.missing for panel in found.panels] == ["53 of 54 points not run"] * 2
    (point,) = found.panels[0].run
    assert point.top1.mean == pytest.approx(92.5)
    assert point.top1.deviation == pytest.approx(statistics.stdev([93.0, 92.0, 92.5]))
    assert [panel.base for panel in found.panels] == [93.5, 93.5]
    assert found.seeds == [1, 3]


def test_what_the_paper_reports_is_its_last_epoch_where_known():
    found = plot("figure5", Runs([]))
    ifso = next(series for series in found.panels[0].series if series.label == "IFSO")
    assert {point.x: point.paper for point in ifso.points if point.paper} == {40.0: 93.02, 50.0: 92.84}
    (mixed,) = plot("figure7", Runs([])).panels[0].series
    assert [point.paper for point in mixed.points] == [92.48, None, None, None, 93.23]


def test_figures_6_7_and_8_are_told_apart_by_their_options():
    batches = job_of("figure6", row="resnet56-cifar10-50", batches_per_score=10)
    found = plot("figure6", Runs([result(batches, 93.0)]))
    assert places(found.panels[1])["50 % of the MACs removed", 10] == [93.0]
    mixed = job_of("figure7", schedule="mixed:0.75")
    found = plot("figure7", Runs(seeds(mixed, 93.0, 93.2, prune_seconds=40.0)))
    assert places(found.panels[0])["IFSO", 75.0] == [93.0, 93.2]
    assert found.panels[0].run[0].seconds.mean == 40.0
    last = job_of("figure8", accumulate=5, accumulation="last")
    summed = job_of("figure8", accumulate=5, accumulation=None)
    found = plot("figure8", Runs([result(last, 92.0), result(summed, 93.0)]))
    assert places(found.panels[0])["only the k-th", 5] == [92.0]
    assert places(found.panels[0])["k scores added up", 5] == [93.0]
    assert found.panels[0].missing == "7 of 9 points not run"


def test_runs_of_another_length_are_left_out_and_other_settings_are_said():
    job = job_of("figure7", schedule="one-shot")
    short = plot("figure7", Runs([result(job, 93.0, epochs=7)]))
    assert not short.panels[0].run
    changed = plot("figure7", Runs([result(job, 93.0, prune={**job.prune, "units_per_step": 4})]))
    assert changed.changed == ("units_per_step=4",)
    assert len(changed.panels[0].run) == 1


def test_another_recipe_and_fewer_criteria():
    job = replace(job_of("figure5", row="resnet32-cifar10-50", criterion="random"), recipe="ours")
    runs = Runs([result(job, 92.0)])
    assert not any(panel.run for panel in plot("figure5", runs).panels)
    found = plot("figure5", runs, recipe="ours", criteria=["random"])
    assert found.recipe == "ours"
    assert places(found.panels[0])["random", 50.0] == [92.0]
    assert [series.label for series in found.panels[0].series] == ["random"]
    with pytest.raises(IfsoError, match="no recipe 'theirs'; choose from paper"):
        plot("figure5", runs, recipe="theirs")
    with pytest.raises(IfsoError, match="figure5 has no criterion 'taylor'"):
        plot("figure5", runs, criteria=["taylor"])


def test_smoke_results_are_read_only_when_asked_for(tmp_path):
    job = study("figure7", seeds=1)[0]
    write(result(job, 12.5, smoke=True, epochs=1), tmp_path)
    assert not plot("figure7", load(tmp_path, smoke=False)).panels[0].run
    assert len(plot("figure7", load(tmp_path, smoke=True), smoke=True).panels[0].run) == 1
