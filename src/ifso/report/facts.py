"""The headline of a run: costs and worth before and after, and where they are from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ifso.common.text import amount
from ifso.report.parts import capital
from ifso.runs.record import RunRecord
from ifso.runs.values import at, in_percent, mapping, number, numbers, objects, text

QUALITIES = {"accuracy": ("accuracy", "top1"), "mAP": ("map",)}
"""What tells how good a network is, in percent: how people call it, and its names in files."""

STAGES = ("unpruned", "pruned", "fine-tuned")


@dataclass(frozen=True)
class Fact:
    """One number before and after, as people read it; ``share`` is what is left, ``note`` where it is from.

    Where it is not known, ``after`` is None and ``note`` says how to get it.
    """

    label: str
    before: str | None
    after: str | None
    share: float | None = None
    target: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Worth:
    """How good the network is at each stage, as far as it is known.

    ``name`` is ``"accuracy"`` or ``"mAP"``, in percent, the first name that the user's own ``evaluate`` gave, or None.
    """

    name: str | None
    by_stage: Mapping[str, float]
    source: str = ""

    @property
    def in_percent(self) -> bool:
        """Is it one of those that are told in percent, and is it?"""
        return self.name in QUALITIES and max(map(abs, self.by_stage.values()), default=0) > 1

    def shown(self, value: float) -> str:
        """A value in its unit."""
        return in_percent(value) if self.in_percent else f"{value:.4g}"

    @property
    def last(self) -> float | None:
        """At the end of all that was done."""
        return self.by_stage.get("fine-tuned", self.by_stage.get("pruned"))


def worth(run: RunRecord) -> Worth:
    """By ``ifso eval`` if it was measured so, else by what pruning and fine-tuning wrote."""
    own = _own_name(run)
    if own is not None and run.evaluation is None and run.tuning is None:
        return Worth(own, _told(run, (own,)), "measured during the run")
    for name, keys in QUALITIES.items():
        measured, told = _evaluated(run, keys), _told(run, keys)
        if measured:
            split = text(mapping(run.evaluation).get("split")) or "test"
            return Worth(name, {**told, **measured}, f"ifso eval, {split} set")
        if told:
            split = "" if run.tuning is None else f", {run.tuning.split} set"
            return Worth(name, told, f"measured during the run{split}")
    return Worth(None, {})


def _own_name(run: RunRecord) -> str | None:
    """The first name under which the user's own ``evaluate`` gave a number; None where it is one that ifso gives."""
    first = next((name for _, values in run.measures for name in values), "loss")
    return None if first == "loss" or any(first in keys for keys in QUALITIES.values()) else first


def _evaluated(run: RunRecord, keys: tuple[str, ...]) -> dict[str, float]:
    networks = mapping(mapping(run.evaluation).get("networks"))
    values = {stage: _first(numbers(networks.get(stage)), keys) for stage in STAGES}
    return {stage: value for stage, value in values.items() if value is not None}


def _told(run: RunRecord, keys: tuple[str, ...]) -> dict[str, float]:
    found: dict[str, float] = {}
    for stage, values in run.measures:
        value = _first(values, keys)
        if value is not None and "undone" not in stage:
            found["unpruned" if stage == "unpruned" else "pruned"] = value
    if run.tuning is not None:
        tuned = [value for epoch in run.tuning.epochs if (value := _first(epoch, keys)) is not None]
        if tuned:
            found["fine-tuned"] = tuned[-1]
        if found:
            found = {**numbers(mapping(run.tuning.summary).get("before")), **found}
    return found


def _first(values: Mapping[str, float], keys: tuple[str, ...]) -> float | None:
    return next((values[key] for key in keys if key in values), None)


def facts(run: RunRecord) -> list[Fact]:
    """The cards of the headline."""
    return [
        _cost(run, "macs", "MACs"),
        _cost(run, "params", "Parameters"),
        _memory(run),
        _latency(run),
        _quality(run),
    ]


def _cost(run: RunRecord, kind: str, label: str) -> Fact:
    before, after = run.cost_before.get(kind), run.cost_after.get(kind)
    if before is None or after is None:
        return Fact(label, None, None, run.shares.get(kind), run.targets.get(kind), "the folder does not tell")
    share = run.shares.get(kind, after / before if before else None)
    return Fact(label, amount(before), amount(after), share, run.targets.get(kind))


def _networks(run: RunRecord) -> tuple[dict[str, Any], dict[str, Any]]:
    """What ``ifso eval`` measured of the unpruned network and of the last one."""
    networks = mapping(mapping(run.evaluation).get("networks"))
    return mapping(networks.get("unpruned")), mapping(networks.get("fine-tuned") or networks.get("pruned"))


def _memory(run: RunRecord) -> Fact:
    """Bytes of activations where they were measured, else how many numbers there are."""
    whole, smaller = _networks(run)
    before, after = number(whole.get("activation_bytes")), number(smaller.get("activation_bytes"))
    if not before or after is None:
        plain = _cost(run, "activations", "Memory")
        return plain if plain.after is None else replace(plain, note="activations of one input, in numbers")
    peaks = number(whole.get("training_peak_bytes")), number(smaller.get("training_peak_bytes"))
    training = ""
    if peaks[0] and peaks[1]:
        training = f"; a training step takes {amount(peaks[1])}B instead of {amount(peaks[0])}B"
    note, target = f"activations of one input{training}", run.targets.get("activations")
    return Fact("Memory", f"{amount(before)}B", f"{amount(after)}B", after / before, target, note)


def _latency(run: RunRecord) -> Fact:
    target, known = run.targets.get("latency"), numbers(mapping(run.summary).get("latency"))
    if known.get("before") and "after" in known:
        return _timed(known["before"], known["after"], target, "one forward pass, as the run measured it")
    whole, smaller = map(_timings, _networks(run))
    for batch, seconds in whole.items():
        if batch in smaller:
            hardware = text(at(mapping(run.evaluation), "hardware", "device")) or "an unnamed machine"
            return _timed(seconds, smaller[batch], target, f"batch of {batch:g} on {hardware}")
    how = "not measured: ifso eval RUN --out RUN/eval.json, then report again"
    return Fact("Latency", None, None, None, target, how)


def _timings(network: Mapping[str, Any]) -> dict[float, float]:
    """Seconds by the size of the batch."""
    pairs = ((number(each.get("batch")), number(each.get("seconds"))) for each in objects(network.get("latency")))
    return {batch: seconds for batch, seconds in pairs if batch is not None and seconds}


def _timed(before: float, after: float, target: float | None, note: str) -> Fact:
    return Fact("Latency", f"{before * 1e3:.3g} ms", f"{after * 1e3:.3g} ms", after / before, target, note)


def _quality(run: RunRecord) -> Fact:
    found = worth(run)
    if found.name is None or found.last is None:
        return _loss(run)
    before = found.by_stage.get("unpruned")
    stage = "after fine-tuning" if "fine-tuned" in found.by_stage else "not fine-tuned"
    between = found.by_stage.get("pruned")
    if "fine-tuned" in found.by_stage and between is not None:
        stage = f"{found.shown(between)} when pruned, then fine-tuned"
    note = f"{stage}; {found.source}"
    return Fact(
        capital(found.name), None if before is None else found.shown(before), found.shown(found.last), None, None, note
    )


def _loss(run: RunRecord) -> Fact:
    """Where no accuracy is known."""
    losses = [(stage, values["loss"]) for stage, values in run.measures if "loss" in values and "undone" not in stage]
    if len(losses) < 2:
        return Fact("Accuracy", None, None, None, None, "not measured")
    note = f"mean loss of a few training batches, {losses[-1][0]}; no accuracy was measured"
    return Fact("Loss", f"{losses[0][1]:.4g}", f"{losses[-1][1]:.4g}", None, None, note)
