"""What sections say beside their templates: sentences, facts, rows of tables, commands, and runs side by side."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, NamedTuple

from ifso.pruning.result import LABELS
from ifso.report.results import STAGES, Quality, binding, costs_in_words, quality
from ifso.runs.arguments import FINETUNE, SPELLED
from ifso.runs.reading import RunRecord, TuningRecord
from ifso.runs.structure import layer_of
from ifso.runs.values import at, mapping, number, numbers, text, whole

LINKS = {
    "summary": "Summary", "accuracy": "Accuracy", "layers": "Layers", "order": "Order", "scores": "Scores",
    "progress": "Progress", "tuning": "Fine-tuning", "frozen": "Not prunable", "checks": "Checks", "setup": "Use",
}  # fmt: skip
"""The sections in order, each a macro of ``sections.html``, and the words of the links to them."""

OUTPUT = "is an output of the model"
EXPECTED = (OUTPUT, "ignored on request", "no layer of the model produces it as channels")
"""Reasons not to prune an axis that surprise nobody."""


class Table(NamedTuple):
    """``columns`` are headings, each with how its values are written (:func:`ifso.report.page.written`)."""

    columns: list[tuple[str, str]]
    rows: list[tuple[Any, ...]]


def status(run: RunRecord) -> str:
    """How far a run has come, in a few words."""
    if not run.config:
        return "a saved network"
    state, count = "finished" if run.finished else "not finished", len(run.resumes)
    return f"{state}, resumed {'once' if count == 1 else f'{count} times'}" if count else state


def lead(run: RunRecord) -> str | None:
    """The result in a sentence or two."""
    kept = {kind: share for kind, share in run.shares.items() if kind in ("macs", "params")}
    if not kept:
        return None
    found, hardest = quality(run), binding(run)
    before, after = found.by_stage.get("unpruned"), found.last
    words = f"{costs_in_words(kept, 1)} {'are' if run.finished else 'are still'} left"
    if before is not None and after is not None:
        stage = "after fine-tuning" if "fine-tuned" in found.by_stage else "before any fine-tuning"
        words += f"; {found.name} went from {found.number(before)} to {found.number(after)} {stage}"
    return f"{words}.{f' Of the budgets, that of {LABELS.get(hardest, hardest)} was binding.' if hardest else ''}"


def facts(run: RunRecord) -> Iterator[tuple[str, str]]:
    """Times, machine, data and files, where the folder has them."""
    if run.seconds is not None:
        yield "Pruning took", duration(run.seconds)
    if run.tuning is not None and run.tuning.epochs:
        yield "Fine-tuning took", duration(run.tuning.seconds)
    machines = (run.tuning.summary if run.tuning else None, run.evaluation)
    devices = (*(text(at(mapping(each), "hardware", "device")) for each in machines), text(run.arguments.get("device")))
    if any(devices):
        yield "Device", next(filter(None, devices))
    sizes = {
        "test samples": max(quality(run).samples.values(), default=0),
        "samples for scores": whole(run.settings.get("calibration")),
    }
    data = [*([run.data] if run.data else []), *(f"{count:,} {what}" for what, count in sizes.items() if count)]
    if data:
        yield "Data", ", ".join(data)
    size = (run.tuning and run.tuning.weights_bytes) or run.weights_bytes
    if size:
        yield "File with the weights", f"{size:,} bytes"


def measures(run: RunRecord) -> Table:
    """What was measured between the stages."""
    names = list(dict.fromkeys(name for _, values in run.measures for name in values))
    rows = [(stage, *(values.get(name) for name in names)) for stage, values in run.measures]
    return Table([("stage", "text"), *((name.replace("_", " "), "number") for name in names)], rows)


def stages(run: RunRecord) -> Table:
    """What each stage of a staged run left of the costs asked for, and of the measures."""
    costs = list(mapping(mapping(run.summary).get("targets"))) or ["macs"]
    worth = [numbers(stage.get("values")) for stage in run.stages]
    names = list(dict.fromkeys(name for values in worth for name in values))
    columns = [
        ("stage", "count"),
        *((f"{LABELS.get(cost, cost)} kept", "share") for cost in costs), ("units removed", "count"),
        *((name.replace("_", " "), "number") for name in names), ("seconds", "number"), ("folder in networks/", "text"),
    ]  # fmt: skip
    rows = []
    for stage, values in zip(run.stages, worth, strict=True):
        kept = map(numbers(stage.get("shares")).get, costs)
        which, units, seconds = (number(stage.get(name)) for name in ("stage", "units", "seconds"))
        rows.append((which, *kept, units, *map(values.get, names), seconds, text(stage.get("network")) or ""))
    if not any(row[-1] for row in rows):
        return Table(columns[:-1], [row[:-1] for row in rows])
    return Table(columns, rows)


def layers(run: RunRecord) -> Table:
    """Channels, parameters and MACs of the layers in the order of the network."""
    found = run.structure
    kinds = ["parameters", "MACs"] if any(layer.macs for layer in found.layers) else ["parameters"]
    columns = [
        ("layer", "text"), ("share kept", "share"), ("channels kept", "count"), ("of", "count"),
        *((f"{kind} {when}", "count") for kind in kinds for when in ("before", "after")),
        ("group", "text"), ("coupled", "text"),
    ]  # fmt: skip
    rows = []
    for layer in found.layers:
        work = (*layer.params, *(layer.macs or (None, None)))[: 2 * len(kinds)]
        groups = ", ".join(found.groups[each].name for each in layer.groups) or "not prunable"
        coupled = ", ".join(str(found.coupled[each]) for each in layer.groups if each in found.coupled)
        rows.append((layer.name, layer.kept / layer.channels, layer.kept, layer.channels, *work, groups, coupled))
    return Table(columns, rows)


def flags(run: RunRecord) -> list[tuple[str, int, list[str]]]:
    """Flags, how many groups have them, and their names."""
    by_flag: dict[str, list[str]] = {}
    for group in run.structure.groups:
        for flag in group.flags:
            by_flag.setdefault(flag, []).append(group.name)
    return [(flag, len(names), names) for flag, names in sorted(by_flag.items())]


def settings(run: RunRecord) -> dict[str, list[tuple[str, str]]]:
    """Versions, settings and machine, as tables of names and values."""
    tuning = mapping(run.tuning.config.get("settings")) if run.tuning else {}
    summary = mapping(run.tuning.summary) if run.tuning else {}
    machine: dict[str, Any] = {name: summary[name] for name in ("hardware", "torch", "ifso") if name in summary}
    found: dict[str, dict[str, Any]] = {
        "Versions": mapping(run.config.get("versions")), "Settings of the pruning": run.settings,
        "Settings of the fine-tuning": tuning, "Machine of the fine-tuning": machine,
    }  # fmt: skip
    return {name: list(flattened(values)) for name, values in found.items() if values}


def flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Settings within settings, with dotted names.

    >>> list(flattened({"budget": {"macs": 0.5}, "ignore": [], "round_to": None}))
    [('budget.macs', '0.5'), ('ignore', '–'), ('round_to', '–')]
    """
    for name, value in values.items():
        only = value[0] if isinstance(value, list) and len(value) == 1 else value
        if isinstance(only, dict):
            yield from flattened(only, f"{prefix}{name}.")
        elif isinstance(value, list):
            yield f"{prefix}{name}", ", ".join(map(str, value)) or "–"
        else:
            yield f"{prefix}{name}", "–" if value is None else str(value)


def duration(seconds: float) -> str:
    """As people say it.

    >>> duration(4.21), duration(200), duration(7400)
    ('4.2 s', '3 min 20 s', '2 h 3 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


REPEATED = ("criterion_option",)
"""Options that are given once for each value."""

JOINED = ("input",)
"""Options whose values stand behind commas."""


def prune_command(run: RunRecord) -> str | None:
    """The command that repeats a pruning; None if Python began it."""
    told = text(at(run.config, "about", "command"))
    if told is not None or not run.arguments:
        return told
    return shlex.join(["ifso", "prune", *options(run.arguments), "--out", str(run.folder)])


def resume_command(run: RunRecord) -> str | None:
    """The command that goes on with an unfinished pruning; None if only Python can."""
    return shlex.join(["ifso", "prune", "--resume", "--out", str(run.folder)]) if run.arguments else None


def finetune_command(run: RunRecord, tuning: TuningRecord) -> str | None:
    """The command that repeats a fine-tuning; None if Python began it."""
    told = text(at(tuning.config, "about", "command"))
    given = mapping(at(tuning.config, "about", "arguments"))
    if told is not None or not given:
        return told
    out = [] if tuning.folder == run.folder / FINETUNE else ["--out", str(tuning.folder)]
    return shlex.join(["ifso", "finetune", str(run.folder), *options(given, negatable=True), *out])


def load_command(run: RunRecord) -> str | None:
    """The Python that loads the network that was made last; None if there is none yet."""
    tuned = run.tuning is not None and run.tuning.weights_bytes is not None and run.tuning.summary is not None
    if not tuned and run.weights_bytes is None:
        return None
    folder = run.tuning.folder if tuned and run.tuning is not None else run.folder
    name = text(run.arguments.get("model")) or text(at(run.config, "about", "model"))
    if name is None:
        name = f"{run.model}(...)" if run.model.isidentifier() else "build_it()"
        return f"import ifso\n\nmodel = ifso.load({str(folder)!r}, {name})  # with the original, unpruned"
    heads = {layer_of(name) for each in run.structure.frozen if each.reason == OUTPUT for name in each.parameters}
    outputs = list({layer.channels for layer in run.structure.layers if layer.name in heads})
    known = name.startswith(("ifso:", "timm:", "torchvision:")) and "num_classes" not in name and len(outputs) == 1
    original = f"ifso.create_model({name!r}{f', num_classes={outputs[0]}' if known else ''})"
    return f"import ifso\n\nmodel = ifso.load({str(folder)!r}, {original})"


def options(arguments: Mapping[str, Any], *, negatable: bool = False) -> list[str]:
    """Stored arguments as they are typed; those of a training are ``negatable``, and a switch that is off is said so.

    >>> options({"model": "ifso:resnet32", "macs": 0.5, "channels_last": True, "criterion_option": ["a=1", "b=2"]})
    ['--model', 'ifso:resnet32', '--macs', '0.5', '--channels-last', '--criterion-option', 'a=1',
    '--criterion-option', 'b=2']
    >>> options({"input": [1, 3, 32, 32], "ignore": ["fc", "stem"], "compile": False}, negatable=True)
    ['--input', '1,3,32,32', '--ignore', 'fc', 'stem', '--no-compile']
    >>> options({"min_units": {"*": 4, "layer1.*": 16}})
    ['--min-units', '4', 'layer1.*=16']
    """
    found: list[str] = []
    for name, value in arguments.items():
        word = (SPELLED.get(name, name) if negatable else name).replace("_", "-")
        option = f"--{word}"
        if isinstance(value, bool):
            found += [option] if value else [f"--no-{word}"] if negatable else []
        elif isinstance(value, list) and name in REPEATED:
            found += [part for each in value for part in (option, str(each))]
        elif isinstance(value, list):
            words = list(map(str, value))
            found += [option, *([",".join(words)] if name in JOINED else words)]
        elif isinstance(value, dict):
            found += [option, *(str(each) if layer == "*" else f"{layer}={each}" for layer, each in value.items())]
        elif value is not None:
            found += [option, str(value)]
    return found


@dataclass(frozen=True)
class Comparison:
    """Runs with the names they have on the page."""

    runs: Sequence[RunRecord]
    names: Sequence[str]

    @property
    def qualities(self) -> list[Quality]:
        """Of each run."""
        return [quality(run) for run in self.runs]

    @property
    def label(self) -> str:
        """What was measured."""
        return " or ".join(dict.fromkeys(each.name for each in self.qualities if each.name)) or "accuracy"

    @property
    def is_fair(self) -> bool:
        """Whether all are of one network, one data set and one measure, as far as something was measured."""
        pairs = zip(self.runs, self.qualities, strict=True)
        return len({(run.model, run.data, each.name) for run, each in pairs if each.by_stage}) <= 1

    @property
    def has_same_layers(self) -> bool:
        """Whether all networks had the same layers."""
        layers = [[(layer.name, layer.channels) for layer in run.structure.layers] for run in self.runs]
        return bool(layers[0]) and all(each == layers[0] for each in layers)

    @property
    def groups(self) -> dict[str, dict[int, float]]:
        """The quality in the end of runs of the same criterion and budget, by the number of the run."""
        budgets = [costs_in_words(run.targets, 0) for run in self.runs]
        groups: dict[str, dict[int, float]] = {}
        for place, (run, each, budget) in enumerate(zip(self.runs, self.qualities, budgets, strict=True)):
            if each.last is not None:
                name = f"{run.criterion}, {budget}" if len(set(budgets)) > 1 and budget else run.criterion
                groups.setdefault(name, {})[place] = each.last
        return groups

    @property
    def means(self) -> list[tuple[str, int, float, float | None]]:
        """Of each group: name, number of runs, mean, and standard deviation if there are several."""
        groups = {name: list(values.values()) for name, values in self.groups.items()}
        return [(name, len(v), fmean(v), stdev(v) if len(v) > 1 else None) for name, v in groups.items()]

    @property
    def table(self) -> Table:
        """A row for each run."""
        stages = [stage for stage in STAGES if any(stage in each.by_stage for each in self.qualities)]
        costs = {"macs": "MACs kept", "params": "parameters kept", "activations": "activations kept"}
        columns = [("run", "text"), ("criterion", "text"), *((name, "share") for name in costs.values()),
                   *((stage, "text") for stage in stages), ("time", "text"), ("state", "text")]  # fmt: skip
        rows = []
        for run, name, each in zip(self.runs, self.names, self.qualities, strict=True):
            worth = (each.shown(stage) if stage in each.by_stage else None for stage in stages)
            time = None if run.seconds is None else duration(run.seconds)
            rows.append((name, run.criterion, *map(run.shares.get, costs), *worth, time, status(run)))
        return Table(columns, rows)

    @property
    def differing(self) -> list[tuple[Any, ...]]:
        """The settings in which the runs differ, with their values."""
        settings = [dict(flattened(run.settings)) for run in self.runs]
        names = dict.fromkeys(name for each in settings for name in each)
        rows = [(name, *(each.get(name, "–") for each in settings)) for name in names]
        return [row for row in rows if len(set(row[1:])) > 1]
