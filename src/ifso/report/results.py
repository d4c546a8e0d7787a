"""What a run came to: costs, latency and quality before and after, and what a reader must be warned of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ifso.common.text import amount, few, standard_error, with_error
from ifso.pruning.result import LABELS, UNDONE
from ifso.runs.arguments import FINETUNE
from ifso.runs.reading import RunRecord
from ifso.runs.values import at, in_percent, listing, mapping, number, numbers, objects, percent, text, whole

QUALITIES = {"accuracy": ("accuracy", "top1"), "mAP": ("map",)}
"""What ifso itself measures, in percent: how people call it, and its names in files."""

STAGES = ("unpruned", "pruned", "fine-tuned")


@dataclass(frozen=True)
class Quality:
    """How good the network is at each stage, as far as it is known; ``name`` is None if nothing was measured.

    ``samples`` are those of the test set where they are known, ``key`` is the name of the measure in files.
    """

    name: str | None
    by_stage: Mapping[str, float] = field(default_factory=dict)
    source: str = ""
    key: str = ""
    samples: Mapping[str, int] = field(default_factory=dict)
    is_percent: bool = True

    @property
    def last(self) -> float | None:
        """At the end of all that was done."""
        return self.by_stage.get("fine-tuned", self.by_stage.get("pruned"))

    def error(self, stage: str) -> float | None:
        """The standard error of an accuracy on n samples, √(p (1 − p) / n), in percent.

        >>> Quality("accuracy", {"pruned": 90.0}, samples={"pruned": 900}).error("pruned")
        1.0
        """
        value, count = self.by_stage.get(stage), self.samples.get(stage)
        if self.name != "accuracy" or not self.is_percent or not count or value is None or not 0 <= value <= 100:
            return None
        return standard_error(value, count)

    def number(self, value: float) -> str:
        """A value in its unit."""
        return in_percent(value) if self.is_percent else f"{value:.4g}"

    def shown(self, stage: str) -> str:
        """The value at a stage in its unit, with its standard error where it is known."""
        value = self.by_stage[stage]
        if self.error(stage) is None:
            return self.number(value)
        return f"{with_error(value, self.samples[stage])} %".replace(" ", "\u00a0")


def quality(run: RunRecord) -> Quality:
    """By ``ifso eval`` if it was measured so, else by what pruning and fine-tuning wrote.

    What the user's own function measured goes by the first name it gave, and is shown as it is.
    """
    own = next((name for _, values in run.measures for name in values), "loss")
    tuned = run.tuning is not None and bool(run.tuning.config)
    if own != "loss" and not any(own in keys for keys in QUALITIES.values()) and not (run.evaluation or tuned):
        return Quality(own.replace("_", " "), _recorded(run, (own,)), "measured during the run", own, is_percent=False)
    networks = mapping(mapping(run.evaluation).get("networks"))
    for name, keys in QUALITIES.items():
        found = {stage: _first(numbers(networks.get(stage)), keys) for stage in STAGES}
        evaluated = {stage: value for stage, value in found.items() if value is not None}
        recorded = _recorded(run, keys)
        key = next((key for key in keys if any(key in values for _, values in run.measures)), keys[0])
        if evaluated:
            split = text(mapping(run.evaluation).get("split")) or "test"
            counts = {stage: whole(mapping(networks.get(stage)).get("samples")) or 0 for stage in evaluated}
            return Quality(name, {**recorded, **evaluated}, f"ifso eval, {split} set", key, counts)
        if recorded:
            split = f", {run.tuning.split} set" if run.tuning is not None and tuned else ""
            is_percent = tuned or max(map(abs, recorded.values())) > 1
            counts = {stage: count for stage in recorded if (count := _samples(run, stage))}
            return Quality(name, recorded, f"measured during the run{split}", key, counts, is_percent=is_percent)
    return Quality(None)


def _samples(run: RunRecord, stage: str) -> int | None:
    """Of how many an accuracy is that pruning or fine-tuning measured."""
    source = run.summary if stage != "fine-tuned" else run.tuning and run.tuning.summary
    return whole(mapping(source).get("samples"))


def _recorded(run: RunRecord, keys: tuple[str, ...]) -> dict[str, float]:
    """What pruning and fine-tuning measured of each stage."""
    found: dict[str, float] = {}
    for stage, values in run.measures:
        value = _first(values, keys)
        if value is not None and not stage.endswith(UNDONE):
            found["unpruned" if stage == "unpruned" else "pruned"] = value
    if run.tuning is not None:
        tuned = [value for epoch in run.tuning.epochs if (value := _first(epoch, keys)) is not None]
        if tuned:
            found["fine-tuned"] = tuned[-1]
        if found:
            before = numbers(mapping(run.tuning.summary).get("before"))
            found = {**{stage: value for stage, value in before.items() if stage in STAGES}, **found}
    return found


def _first(values: Mapping[str, float], keys: tuple[str, ...]) -> float | None:
    return next((values[key] for key in keys if key in values), None)


@dataclass(frozen=True)
class Card:
    """One number before and after, as people read it; ``share`` is what is kept, ``note`` where it is from.

    Where it is not known, ``after`` is None and ``note`` says how to get it. ``binding``: of several budgets, the one
    that was the hardest to meet.
    """

    label: str
    before: str | None
    after: str | None
    share: float | None = None
    target: float | None = None
    note: str = ""
    binding: bool = False


def cards(run: RunRecord) -> list[Card]:
    """The numbers of the summary."""
    hardest = binding(run)
    found = {
        "macs": _cost(run, "macs", "MACs"),
        "params": _cost(run, "params", "Parameters"),
        "activations": _activations(run),
        "latency": _latency(run),
    }
    known = {kind: card for kind, card in found.items() if kind == "latency" or card.after or card.share is not None}
    return [*(replace(card, binding=kind == hardest) for kind, card in known.items()), _worth(run)]


def binding(run: RunRecord) -> str | None:
    """The cost whose budget was the hardest to meet, if there were several."""
    room = {kind: target - run.shares[kind] for kind, target in run.targets.items() if kind in run.shares}
    return min(room, key=room.__getitem__) if len(room) > 1 and run.finished else None


def _cost(run: RunRecord, kind: str, label: str) -> Card:
    before, after, target = run.cost_before.get(kind), run.cost_after.get(kind), run.targets.get(kind)
    if before is None or after is None:
        return Card(label, None, None, run.shares.get(kind), target)
    share = run.shares.get(kind, after / before if before else None)
    return Card(label, amount(before), amount(after), share, target)


def _networks(run: RunRecord) -> tuple[dict[str, Any], dict[str, Any]]:
    """What ``ifso eval`` measured of the unpruned network and of the last one."""
    networks = mapping(mapping(run.evaluation).get("networks"))
    return mapping(networks.get("unpruned")), mapping(networks.get("fine-tuned") or networks.get("pruned"))


def _activations(run: RunRecord) -> Card:
    """Bytes where they were measured, else how many numbers there are."""
    whole_network, smaller = _networks(run)
    before, after = number(whole_network.get("activation_bytes")), number(smaller.get("activation_bytes"))
    if not before or after is None:
        return replace(_cost(run, "activations", "Activations"), note="numbers that layers write for one input")
    note, peaks = "bytes for one input", [number(each.get("training_peak_bytes")) for each in (whole_network, smaller)]
    if peaks[0] and peaks[1]:
        note += f"; a training step takes {amount(peaks[1])}B instead of {amount(peaks[0])}B"
    target = run.targets.get("activations")
    return Card("Activations", f"{amount(before)}B", f"{amount(after)}B", after / before, target, note)


def _latency(run: RunRecord) -> Card:
    target, known = run.targets.get("latency"), numbers(mapping(run.summary).get("latency"))
    if known.get("before") and "after" in known:
        return _timed((known["before"], None), (known["after"], None), target, "one forward pass, timed by the run")
    unpruned, smaller = map(_timings, _networks(run))
    batch = next((batch for batch in unpruned if batch in smaller), None)
    if batch is None:
        how = "not measured: ifso eval RUN --out RUN/eval.json, then report again"
        return Card("Latency", None, None, None, target, how)
    hardware = text(at(mapping(run.evaluation), "hardware", "device")) or "an unnamed machine"
    runs = f", middle half of {unpruned[batch][2]:g} runs" if unpruned[batch][2] else ""
    return _timed(unpruned[batch][:2], smaller[batch][:2], target, f"batch of {batch:g} on {hardware}{runs}")


def _timings(network: Mapping[str, Any]) -> dict[float, tuple[float, float | None, float | None]]:
    """Seconds, half the width of the middle half, and number of runs, by the size of the batch."""
    found = {}
    for each in map(numbers, objects(network.get("latency"))):
        if "batch" in each and each.get("seconds"):
            spread = each.get("spread")
            found[each["batch"]] = (each["seconds"], None if spread is None else spread / 2, each.get("runs"))
    return found


def _timed(
    before: tuple[float, float | None], after: tuple[float, float | None], target: float | None, note: str
) -> Card:
    def shown(value: tuple[float, float | None]) -> str:
        seconds, spread = value
        return f"{seconds * 1e3:.3g}{f' ± {spread * 1e3:.2g}' if spread else ''} ms".replace(" ", "\u00a0")

    return Card("Latency", shown(before), shown(after), after[0] / before[0], target, note)


def _worth(run: RunRecord) -> Card:
    """Quality, or the loss where that is all that was measured."""
    found = quality(run)
    if found.name is None or found.last is None:
        return _loss(run)
    tuned = "fine-tuned" in found.by_stage
    stage = "after fine-tuning" if tuned else "not fine-tuned"
    if not tuned and run.tuning is not None and not run.tuning.config:
        where = "" if run.tuning.folder == run.folder / FINETUNE else f" --finetuned {run.tuning.folder}"
        stage = (
            f"of the pruned network; of the fine-tuned one: ifso eval RUN{where} --out RUN/eval.json, then report again"
        )
    if tuned and "pruned" in found.by_stage:
        stage = f"{found.shown('pruned')} when pruned, then fine-tuned"
    last = "fine-tuned" if tuned else "pruned"
    count = found.samples.get(last)
    note = f"{stage}; {found.source}{f', ± standard error of {count:,} samples' if found.error(last) else ''}"
    before = found.shown("unpruned") if "unpruned" in found.by_stage else None
    return Card(capital(found.name), before, found.shown(last), note=note)


def _loss(run: RunRecord) -> Card:
    losses = [
        (stage, values["loss"]) for stage, values in run.measures if "loss" in values and not stage.endswith(UNDONE)
    ]
    if len(losses) < 2:
        return Card("Accuracy", None, None, note="not measured")
    note = f"mean loss of a few training batches, {losses[-1][0]}; no accuracy was measured"
    return Card("Loss", f"{losses[0][1]:.4g}", f"{losses[-1][1]:.4g}", note=note)


def warnings(run: RunRecord) -> Iterator[str]:
    """What speaks against the result, each in a sentence or two."""
    yield from (f"A check failed: {name}: {detail}." for name, passed, detail in checks(run) if not passed)
    floors = [name for name in listing(mapping(run.summary).get("floors")) if isinstance(name, str)]
    if floors:
        what = "1 group is" if len(floors) == 1 else f"{len(floors)} groups are"
        yield (
            f"{what} at the floor, the fewest units that min_units and min_share allow, "
            f"and the others had to give more: {few(floors)}."
        )
    single = [layer.name for layer in run.structure.layers if layer.kept == 1 < layer.channels]
    if single:
        yield f"{'1 layer has' if len(single) == 1 else f'{len(single)} layers have'} one channel left: {few(single)}."
    tuned = listing(mapping(run.tuning and run.tuning.summary).get("notes"))
    yield from (f"Fine-tuning: {note}." for note in tuned if isinstance(note, str))
    measured, target = number(at(mapping(run.summary), "latency", "share")), run.targets.get("latency")
    if measured is not None and target is not None and measured > target:
        yield (
            f"The latency budget is missed: {percent(measured)} of the time is left as measured, "
            f"{percent(target)} was asked for."
        )


def checks(run: RunRecord) -> list[tuple[str, bool, str]]:
    """What was verified: name, whether it passed, and detail."""
    return [
        (text(each.get("name")) or "?", each.get("passed") is True, text(each.get("detail")) or "")
        for each in objects(mapping(run.summary).get("checks"))
    ]


def costs_in_words(shares: Mapping[str, float], digits: int) -> str:
    """Shares of costs as a list.

    >>> costs_in_words({"macs": 0.5, "params": 0.3}, 0).replace(chr(160), " ")
    '50 % of the MACs and 30 % of the parameters'
    """
    return " and ".join(f"{percent(share, digits)} of the {LABELS.get(kind, kind)}" for kind, share in shares.items())


def capital(word: str) -> str:
    """As a heading begins.

    >>> capital("accuracy"), capital("mAP")
    ('Accuracy', 'mAP')
    """
    return word if word[1:].lower() != word[1:] else word[:1].upper() + word[1:]
