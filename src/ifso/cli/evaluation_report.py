"""What ``ifso eval`` shows: a table with a column for each network, and the same as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ifso.cli.console import table
from ifso.common.text import amount, with_error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from ifso.training.evaluation import Evaluation
    from ifso.training.profiling import Profile

STAGES = ("unpruned", "pruned", "fine-tuned")
COSTS = {"macs": "MACs", "params": "parameters"}
AVERAGES = {
    "map": "mAP",
    "map50": "mAP50",
    "map75": "mAP75",
    "map_small": "mAP, small boxes",
    "map_medium": "mAP, medium boxes",
    "map_large": "mAP, large boxes",
}
SHARES = ("macs", "conv_macs", "params", "activations")
NOT_THERE = "—"


@dataclass(frozen=True)
class Report:
    """What was measured, by the name of the network; ``about`` says on what and how, ``notes`` what is left out."""

    measured: dict[str, Profile]
    about: dict[str, Any]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """As plain values."""
        from ifso.common.serialization import finite

        networks = {name: {**network.as_dict(), **self.shares(network)} for name, network in self.measured.items()}
        return finite({**self.about, "networks": networks, "notes": list(self.notes)})

    def shares(self, network: Profile) -> dict[str, float]:
        """What is left of the costs of the unpruned network, if that was measured."""
        whole = self.measured.get(STAGES[0])
        if whole is None:
            return {}
        return {f"{kind}_share": getattr(network.cost, kind) / max(getattr(whole.cost, kind), 1) for kind in SHARES}


def report_parts(report: Report) -> list[RenderableType]:
    """What is printed: a title, a table with one row for each number, and remarks."""
    about, some = report.about, next(iter(report.measured.values()))
    title = f"{about['model']} on {some.quality.samples:,} {about['split']} images of {about['data']}"
    rows = [(label, *cells) for label, cells in _rows(report)]
    return [title, table(("", *report.measured), rows), *_remarks(report)]


def _rows(report: Report) -> Iterator[tuple[str, list[str]]]:
    networks = list(report.measured.values())
    yield from _qualities([network.quality for network in networks])
    for kind, label in COSTS.items():
        yield label, [amount(getattr(network.cost, kind)) + _share(report, network, kind) for network in networks]
    memory = [_bytes(network.activation_bytes) + _share(report, network, "activations") for network in networks]
    yield "activations of one image", memory
    for index, timing in enumerate(networks[0].timings):
        timings = [network.timings[index] for network in networks]
        times = [f"{each.latency.median * 1e3:.2f} ms ± {each.latency.spread * 5e2:.2f}" for each in timings]
        yield f"latency, batch {timing.batch}", times
        if timing.batch > 1:
            speeds = [_speed(timing.throughput) for timing in timings]
            yield f"throughput, batch {timing.batch}", speeds
    label = f"peak of a training step, batch {report.about['train_batch']}"
    yield label, [_bytes(network.training_peak) for network in networks]


def _qualities(qualities: list[Evaluation]) -> Iterator[tuple[str, list[str]]]:
    """Accuracies and losses of classifiers; of detectors average precision, whole, by area and by category."""
    detected = [quality.detection for quality in qualities if quality.detection is not None]
    if not detected:
        yield "top-1", [accuracy(quality.top1, quality.samples) for quality in qualities]
        if any(quality.top5 is not None for quality in qualities):
            yield "top-5", [accuracy(quality.top5, quality.samples) for quality in qualities]
        yield "loss", [NOT_THERE if quality.loss is None else f"{quality.loss:.4f}" for quality in qualities]
        return
    for name, label in AVERAGES.items():
        yield label, [_percent(getattr(each, name)) for each in detected]
    for category in detected[0].by_category:
        yield f"mAP of {category}", [_percent(each.by_category.get(category)) for each in detected]


def _remarks(report: Report) -> list[str]:
    """How it was measured, and what is missing."""
    from ifso.training.profiling import CPU_PEAK, GPU_PEAK

    about, hardware = report.about, report.about["hardware"]
    on_gpu = hardware["device"] != hardware["cpu"]
    threads = "" if on_gpu else f", {hardware['threads']} thread{'' if hardware['threads'] == 1 else 's'}"
    layout = ", channels-last" if about["channels_last"] else ""
    counts = sorted({len(timing.latency.samples) for network in report.measured.values() for timing in network.timings})
    runs = " or ".join(map(str, counts))
    has_accuracy = any(network.quality.top1 is not None for network in report.measured.values())
    return [
        f"Measured on {hardware['device']}{threads}, with torch {about['torch']}, {about['precision']}{layout}.",
        f"Costs and latency: of inputs {about['counted_on']}.",
        *(["Accuracy: ± its standard error."] if has_accuracy else []),
        f"Latency: median of {runs} warm runs ± half the width of their middle half.",
        f"Peak of a training step: {GPU_PEAK if on_gpu else CPU_PEAK}.",
        *report.notes,
    ]


def accuracy(share: float | None, samples: int | None) -> str:
    """With its standard error, if it is known on how many samples.

    >>> accuracy(90.0, 900), accuracy(90.0, None)
    ('90.00 ± 1.00 %', '90.00 %')
    """
    return NOT_THERE if share is None else f"{with_error(share, samples)} %"


def _percent(share: float | None) -> str:
    return accuracy(share, None)


def _share(report: Report, network: Profile, kind: str) -> str:
    shares = report.shares(network)
    return f" ({shares[f'{kind}_share']:.1%})" if shares and len(report.measured) > 1 else ""


def _bytes(count: int) -> str:
    return f"{amount(count)}B" if count >= 1000 else f"{count} B"


def _speed(throughput: float) -> str:
    """Images a second.

    >>> _speed(12345.6), _speed(2.345)
    ('12,346 images/s', '2.3 images/s')
    """
    return f"{throughput:,.0f} images/s" if throughput >= 10 else f"{throughput:.1f} images/s"
