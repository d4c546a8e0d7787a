"""Tables of detectors: average precision and memory as in Table 7 of the paper, and what is left of neck and head."""

from __future__ import annotations

from collections.abc import Sequence

from ifso_repro.config import find_row
from ifso_repro.jobs import Job
from ifso_repro.results import DetectionResult
from ifso_repro.schema import Reported, Row
from ifso_repro.statistics import Spread
from ifso_repro.table_lines import (
    NAMES,
    PAPER_NAMES,
    UNKNOWN,
    Grid,
    Line,
    Runs,
    by_method,
    named,
    not_run,
    noted,
    otherwise,
    seeds_of,
    signed,
)

HEADINGS = ("from", "Method", "MACs removed", "base mAP", "pruned", "drop", "mAP50", "mAP75", "memory, GB", "runs")
NOTE = (
    "Average precision on the test set in per cent: mAP over overlaps from 0.5 to 0.95, mAP50 and mAP75 at one. "
    "Numbers of the paper and of others are as they report them; ours are of the last epoch, mean ± standard "
    "deviation over the seeds. “Memory” is that of a step of fine-tuning at its peak in 10⁹ bytes, without a teacher; "
    "of ours it is that of the pruned network, and in brackets that of the unpruned one. “Not run” is a cell that no "
    "run has filled."
)
STRUCTURE_NOTE = "Channels that a layer reads: before, and kept, with the per cent that is removed in brackets."
GIGA = 1e9
LAYERS = {
    **{f"neck lateral-{level}": (f"backbone.fpn.inner_blocks.{level}.0", 512 * 2**level) for level in range(3)},
    **{f"neck fpn-{level}": (f"backbone.fpn.layer_blocks.{level}.0", 256) for level in range(3)},
    "neck fpn-3": ("backbone.fpn.extra_blocks.p6", 256),
    "neck fpn-4": ("backbone.fpn.extra_blocks.p7", 256),
    **{f"head cls-{depth}": (f"head.classification_head.conv.{depth}.0", 256) for depth in range(4)},
    **{f"head reg-{depth}": (f"head.regression_head.conv.{depth}.0", 256) for depth in range(4)},
    "head retina-cls": ("head.classification_head.cls_logits", 256),
    "head retina-reg": ("head.regression_head.bbox_reg", 256),
}
"""Layers of RetinaNet on a ResNet-50 by the paper's names: torchvision's name, and the channels that they read."""


def detection_table(title: str, jobs: Sequence[Job], runs: Runs, notes: Sequence[str] = ()) -> Grid:
    """A section for each budget."""
    sections = []
    for name in dict.fromkeys(job.row.name for job in jobs):
        methods = by_method(job for job in jobs if job.row.name == name)
        done = [line for method in methods for line in _ours(method, runs)]
        sections.append((*_reported(find_row(name)), *done))
    return Grid(title, HEADINGS, tuple(sections), (NOTE, *notes), words=2)


def _reported(row: Row) -> list[Line]:
    """What others and the paper report, IFSO last."""
    found = [_line("rival", noted(rival.method, rival.note), rival) for rival in row.rivals]
    for criterion in sorted(row.paper, key=lambda name: name == "ifso"):
        line = row.paper[criterion]
        name = f"{PAPER_NAMES.get(criterion, criterion)}-{row.removed * 100:.10g}"
        found.append(_line("paper", noted(name, line.note), line))
    return found


def _line(whose: str, name: str, line: Reported) -> Line:
    drop = UNKNOWN if line.base is None else signed(line.base - line.pruned)
    memory = UNKNOWN if line.memory is None else f"{line.memory:.1f}"
    base, *at_one = (_known(number) for number in (line.base, line.map50, line.map75))
    return whose, name, f"{line.removed:.1f} %", base, f"{line.pruned:.2f}", drop, *at_one, memory, UNKNOWN


def _known(number: float | None) -> str:
    return UNKNOWN if number is None else f"{number:.2f}"


def _ours(jobs: Sequence[Job], runs: Runs) -> list[Line]:
    """Of one method: a line for each way that was run, and one for all recipes that were not."""
    found = [
        ("ours", ", ".join((named([job]), *otherwise(job, group[0]))), *_numbers(group))
        for job in jobs
        for group in _groups(job, runs)
    ]
    return [*found, *not_run([job for job in jobs if not _groups(job, runs)], 6)]


def _groups(job: Job, runs: Runs) -> list[list[DetectionResult]]:
    found = [[result for result in group if isinstance(result, DetectionResult)] for group in runs.of(job)]
    return [group for group in found if group]


def _numbers(group: Sequence[DetectionResult]) -> Line:
    pruned, unpruned = (Spread.of([run.memory[name] / GIGA for run in group]).mean for name in ("pruned", "unpruned"))
    after = [Spread.of([run.after[name] for run in group]) for name in ("map", "map50", "map75")]
    return (
        f"{Spread.of([100 * (1 - run.macs_kept) for run in group]).mean:.1f} %",
        f"{Spread.of([run.base_map for run in group]).mean:.2f}",
        str(after[0]),
        signed(Spread.of([run.base_map - run.last_map for run in group]).mean),
        str(after[1]),
        str(after[2]),
        f"{pruned:.1f} ({unpruned:.1f})",
        seeds_of(group),
    )


def structure_table(title: str, jobs: Sequence[Job], runs: Runs) -> Grid | None:
    """Channels kept in the neck and in each layer of the head: of the paper, and of the first seed of our prunings.

    None where nobody has said or run anything.
    """
    kept: dict[str, dict[str, int]] = {}
    for row in (find_row(name) for name in dict.fromkeys(job.row.name for job in jobs)):
        budget = f"{row.removed * 100:.10g}"
        for criterion, line in row.paper.items():
            if line.structure:
                kept[f"paper, {PAPER_NAMES[criterion]}-{budget}"] = dict(line.structure)
        for job in (job for job in jobs if job.row.name == row.name):
            groups = _groups(job, runs)
            if groups:
                name = f"{job.variant.label}, {budget} %" if job.variant.label else f"{NAMES[job.criterion]}-{budget}"
                kept.setdefault(name, _read(groups[0][0]))
    lines = tuple(
        (layer, str(channels), *(_share(found.get(layer), channels) for found in kept.values()))
        for layer, (_, channels) in LAYERS.items()
    )
    return Grid(title, ("layer", "channels", *kept), (lines,), (STRUCTURE_NOTE,)) if kept else None


def _read(run: DetectionResult) -> dict[str, int]:
    """Channels that layers read, by the paper's names."""
    return {layer: run.channels[name][1] for layer, (name, _) in LAYERS.items() if name in run.channels}


def _share(kept: int | None, channels: int) -> str:
    """What is kept, and the per cent that is not.

    >>> _share(136, 256), _share(None, 256)
    ('136 (46.9 %)', '–')
    """
    return UNKNOWN if kept is None else f"{kept} ({100 * (1 - kept / channels):.1f} %)"
