"""What is drawn: numbers in the picture are those of the results, and what is missing is said in it."""

import json
import math
import statistics
from itertools import combinations
from xml.etree import ElementTree

import pytest
import torch
from made_up import job_of, result, seeds
from torch import nn

import ifso
from ifso.criteria import registry
from ifso_repro import curves, drawing
from ifso_repro.curves import plot
from ifso_repro.drawing import Source, draw_figure
from ifso_repro.figure1.networks import NETWORKS
from ifso_repro.figure1.summary import summarise
from ifso_repro.plots import DPI, LOOKS, PAGE, STYLE
from ifso_repro.results import write
from ifso_repro.statistics import Runs

matplotlib = pytest.importorskip("matplotlib", reason="figures need matplotlib")


def words(path):
    return [text for text in ElementTree.parse(path).getroot().itertext() if text.strip()]


def sheet():
    from matplotlib.figure import Figure

    return Figure(layout="constrained")


def source(tmp_path, results=(), **more):
    for each in results:
        write(each, tmp_path / "results")
    return Source(tmp_path, tmp_path, **more)


def test_points_and_bars_are_means_and_deviations():
    numbers = {10.0: (93.4, 93.0, 93.8), 20.0: (93.1, 92.7, 93.2)}
    found = [
        run
        for removed, values in numbers.items()
        for run in seeds(job_of("figure5", row=f"resnet32-cifar10-{removed:g}", criterion="ifso"), *values)
    ]
    far = result(job_of("figure5", row="resnet32-cifar10-90", criterion="ifso"), 80.0)
    figure = sheet()
    curves._lines(figure, plot("figure5", Runs([*found, far])))
    line, _, (bars,) = figure.axes[0].containers[1]  # the second line: the first is the default run
    drawn = dict(zip(*line.get_data(), strict=True))
    assert [place for place, value in drawn.items() if not math.isnan(value)] == [10.0, 20.0, 90.0]
    assert drawn[90.0] == 80.0
    for place, values in numbers.items():
        assert drawn[place] == pytest.approx(statistics.fmean(values))
        (segment,) = [part for part in bars.get_segments() if len(part) and part[0][0] == place]
        spread = statistics.stdev(values)
        assert segment[:, 1] == pytest.approx([drawn[place] - spread, drawn[place] + spread])


def test_every_line_has_a_colour_a_marker_and_dashes_of_its_own():
    assert len(LOOKS) == 6
    for one, other in combinations(LOOKS, 2):
        assert one.color != other.color
        assert one.marker != other.marker
        assert one.linestyle != other.linestyle


def test_both_files_with_text_as_text(tmp_path):
    job = job_of("figure5", row="resnet32-cifar10-50", criterion="ifso")
    drawn = draw_figure("figure5", source(tmp_path, seeds(job, 93.0, 92.0)))
    svg, png = drawn.files
    text = words(svg)
    for word in ("ResNet-32, CIFAR-10", "VGG-16, CIFAR-10", "IFSO", "magnitude-A", "53 of 54 points not run"):
        assert word in text
    assert text.count("not run") == 1
    assert any("recipe “brief”; 2 runs a point; bars: standard deviation" in each for each in text)
    assert drawn.missing[0] == "ResNet-32, CIFAR-10: 53 of 54 points not run"
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(png.read_bytes()[16:20]) == int(PAGE * DPI)
    assert STYLE["svg.fonttype"] == "none"


def test_the_same_data_give_the_same_files(tmp_path):
    place = source(tmp_path, seeds(job_of("figure7", schedule="one-shot"), 93.0, 92.0))
    first = [path.read_bytes() for path in draw_figure("figure7", place).files]
    assert [path.read_bytes() for path in draw_figure("figure7", place).files] == first


def test_seconds_and_the_hardware_of_figure_7(tmp_path):
    figure = sheet()
    found = seeds(job_of("figure7", schedule="incremental"), 93.0, 93.4, prune_seconds=330.0)
    curves._schedule(figure, plot("figure7", Runs(found)))
    above, below = figure.axes
    assert [y for _, y in above.containers[0][0].get_xydata() if not math.isnan(y)] == pytest.approx([93.2])
    assert [y for _, y in below.containers[0][0].get_xydata() if not math.isnan(y)] == [330.0]
    text = words(draw_figure("figure7", source(tmp_path, found)).files[0])
    assert any("Timed on abacus." in each for each in text)
    assert "4 of 5 points not run" in text


def test_figure_8_shows_every_run():
    summed, last = seeds(job_of("figure8", accumulate=5, accumulation=None), 93.0, 92.0, 94.0), [92.5]
    figure = sheet()
    results = [*summed, *seeds(job_of("figure8", accumulate=5, accumulation="last"), *last)]
    curves._boxes(figure, plot("figure8", Runs(results)))
    dots = [line for line in figure.axes[0].lines if line.get_marker() == "."]
    assert [list(line.get_ydata()) for line in dots] == [[93.0, 92.0, 94.0], [92.5]]
    assert dots[0].get_xdata()[0] < 1 < dots[1].get_xdata()[0]
    means = [line.get_ydata()[0] for line in figure.axes[0].lines if line.get_marker() in ("o", "s")]
    assert means == [93.0, 92.5]


def test_a_smoke_picture_says_so_and_lies_apart(tmp_path):
    job = job_of("figure6", row="vgg16-cifar10-50", batches_per_score=1)
    place = source(tmp_path, [result(job, 12.5, smoke=True, epochs=1)], smoke=True)
    svg, _ = draw_figure("figure6", place).files
    assert svg.parent == tmp_path / "figures" / "smoke"
    assert any(each.startswith("SMOKE RUN") for each in words(svg))
    assert "the paper's number" not in words(svg)


@pytest.fixture(scope="module")
def pruned(tmp_path_factory):
    """A small network with a coupled pair of layers, and its folder."""

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.inner, self.outer = (nn.Conv2d(i, o, 1) for i, o in ((3, 8), (8, 16), (16, 8)))
            self.head = nn.Linear(8, 2)

        def forward(self, x):
            x = self.stem(x)
            x = x + self.outer(torch.relu(self.inner(x)))
            return self.head(x.mean((2, 3)))

    torch.manual_seed(0)
    model, batch = Small(), torch.randn(4, 3, 4, 4)
    folder = tmp_path_factory.mktemp("runs") / "small"
    ifso.prune(
        model, [batch], lambda network, x: network(x).square().mean(), budget=ifso.Budget(macs=0.5),
        example_inputs=batch, criterion="magnitude", schedule="one-shot", recalibrate=0, out=folder,
    )  # fmt: skip
    return model, folder


def test_bars_are_the_layers_of_the_smaller_network(pruned):
    model, folder = pruned
    network = drawing.network_of(folder)
    now = {name: module.weight.shape[0] for name, module in model.named_modules() if hasattr(module, "weight")}
    assert {bar.name: bar.kept for bar in network.bars} == now
    assert [(bar.name, bar.channels) for bar in network.bars] == [("stem", 8), ("inner", 16), ("outer", 8), ("head", 2)]
    assert {bar.name for bar in network.bars if bar.coupled} == {"stem", "outer"}
    assert network.title.startswith("Small: kept ")
    figure = sheet()
    drawing._fill(figure, [network], "")
    outlines, *solid = figure.axes[0].containers
    assert [bar.get_height() for bar in outlines] == [8, 16, 8, 2]
    assert sorted(bar.get_height() for part in solid for bar in part) == sorted(now.values())


def test_many_layers_are_shown_in_per_cent_with_fewer_names(tmp_path):
    bars = tuple(drawing.LayerBar(f"l{number}", 64, 16 + number % 3, False) for number in range(300))
    figure = sheet()
    drawing._bars(figure.subplots(), bars, named=True)
    heights = [bar.get_height() for bar in figure.axes[0].containers[1]]
    assert heights[:3] == pytest.approx([25.0, 100 * 17 / 64, 100 * 18 / 64])
    assert len(heights) == 300
    assert len(figure.axes[0].get_xticklabels()) <= drawing.NAMED
    svg, _ = drawing.draw_layers([drawing.NetworkBars("deep", bars)], tmp_path / "deep", "deep")
    assert svg.stat().st_size < 500_000


def test_names_from_a_model_are_neither_markup_nor_formulas(tmp_path):
    names = ("a$\\frac$", "<script>x</script>")
    network = drawing.NetworkBars("$net$ & co", tuple(drawing.LayerBar(each, 4, 2, False) for each in names))
    svg, _ = drawing.draw_layers([network], tmp_path / "odd", "odd")
    assert {*names, "$net$ & co"} <= set(words(svg))


def test_figures_3_and_4_of_given_runs(pruned, tmp_path):
    drawn = draw_figure("figure3", source(tmp_path, runs=(pruned[1],)))
    text = words(drawn.files[0])
    assert {"stem", "inner", "outer", "head", "kept, the same channels as in other layers"} <= set(text)
    twice = words(draw_figure("figure4", source(tmp_path, runs=(pruned[1], pruned[1]))).files[0])
    assert twice.count("inner") == 1
    assert sum(each.startswith("Small: kept") for each in twice) == 2


def test_a_missing_network_has_a_panel_that_names_the_command(pruned, tmp_path):
    place = tmp_path / "work" / "pruned" / "resnet50-imagenet-50.ifso.0"
    place.parent.mkdir(parents=True)
    place.symlink_to(pruned[1])
    drawn = draw_figure("figure4", source(tmp_path))
    assert drawn.missing == ("retinanet-coco-50: not run",)
    assert any(each.startswith("not run") for each in words(drawn.files[0]))
    assert any(each.startswith("resnet50-imagenet-50: kept") for each in words(drawn.files[0]))


def loss_changes(truths):
    """A document of figure 1 with one network, whose estimates are twice the truth."""
    rows = [
        {
            "truth": truth, "existing": 3.0 + truth, "size": 1, "criteria": {}, "removed": {},
            "retraining": {"gradients": 100, "gradients_until_near": 50},
            "estimates": {step: {"true": 2 * truth, "gradients": 5} for step in ("1", "8")},
        }
        for truth in truths
    ]  # fmt: skip
    refused = dict.fromkeys(registry.names(), "not here")
    networks = [{"name": "tiny", "seed": 0, "scores": {}, "not_applicable": refused, "masks": rows}]
    return {
        "study": "figure1", "settings": {"smoke": False}, "default_path_steps": 8, "networks": networks,
        "summary": summarise(networks),
    }  # fmt: skip


@pytest.mark.parametrize("truths", [(0.001, 0.01, 0.05), (-0.02, 0.0, 0.001, 0.3)])
def test_figure_1_from_its_document(tmp_path, truths):
    (tmp_path / "figure1.json").write_text(json.dumps(loss_changes(truths)))
    drawn = draw_figure("figure1", source(tmp_path))
    svg, png = drawn.files
    assert drawn.missing == NETWORKS
    assert (svg, png) == (tmp_path / "figure1.svg", tmp_path / "figure1.png")
    text = words(svg)
    assert {"ΔL_ex, old weights", "estimate, path, K = 8", "equal to the truth", "K=1", "tiny"} <= set(text)
    assert "".join(text).count("Not run: convex") == 1
