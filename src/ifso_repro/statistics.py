"""Means and spreads over seeds, and what may be claimed from them."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ifso_repro.jobs import Job, method_name
from ifso_repro.provenance import other_networks
from ifso_repro.results import AnyResult

NO_CLAIM = "no claim"


@dataclass(frozen=True)
class Spread:
    """The mean of ``count`` numbers and their standard deviation, which one number does not have.

    >>> print(Spread.of([93.0, 93.5, 94.0]), Spread.of([93.0]))
    93.50 ± 0.50 93.00
    """

    mean: float
    deviation: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of one or more numbers; the deviation is that of a sample (n − 1)."""
        deviation = statistics.stdev(values) if len(values) > 1 else None
        return cls(statistics.fmean(values), deviation, len(values))

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + ("" if self.deviation is None else f" ± {self.deviation:.2f}")


@dataclass(frozen=True)
class Difference:
    """One mean less another, and the ``spread`` of that difference of single runs, √(s₁² + s₂²), where both are known.

    >>> Difference.of(Spread.of([93.0, 93.4]), Spread.of([92.9, 93.1])).verdict
    'no claim: the spread is larger'
    >>> Difference.of(Spread.of([93.0, 93.1]), Spread.of([92.1, 92.2])).verdict
    'higher'
    """

    mean: float
    spread: float | None
    runs: tuple[int, int]

    @classmethod
    def of(cls, one: Spread, other: Spread) -> Difference:
        """``one`` less ``other``."""
        known = one.deviation is not None and other.deviation is not None
        spread = math.hypot(one.deviation or 0.0, other.deviation or 0.0) if known else None
        return cls(one.mean - other.mean, spread, (one.count, other.count))

    @property
    def verdict(self) -> str:
        """Only a difference larger than its spread is claimed."""
        if self.spread is None:
            return f"{NO_CLAIM}: one seed has no spread"
        if abs(self.mean) <= self.spread:
            return f"{NO_CLAIM}: the spread is larger"
        return "higher" if self.mean > 0 else "lower"


class Runs:
    """Results by what they have in common but for the seed; those of smoke runs are left out.

    Of a data set only those that were made with other data than most tell their ``data``.
    """

    def __init__(self, results: Iterable[AnyResult]) -> None:
        self.all = _of_other_data_marked([result for result in results if not result.smoke])
        self._found: dict[tuple[str, str, str], list[AnyResult]] = {}
        for result in self.all:
            key = (result.row, method_name(result.criterion, result.variant), result.recipe)
            self._found.setdefault(key, []).append(result)

    def of(self, job: Job) -> list[list[Any]]:
        """The results of a job and its other seeds, those made alike together, those made as the row says first.

        They are of one kind: :class:`Result`, or of a detector ``DetectionResult``.
        """
        groups: dict[tuple[str, ...], list[AnyResult]] = {}
        for result in self._found.get((job.row.name, method_name(job.criterion, job.changes), job.recipe), []):
            groups.setdefault(otherwise(job, result), []).append(result)
        return [groups[words] for words in sorted(groups, key=lambda words: (len(words), words))]

    def whole(self, job: Job, pruned: tuple[str, ...] | None = None) -> list[Any]:
        """Those fine-tuned for as long as the recipe says; if ``pruned`` is given, pruned otherwise in just that."""
        for group in self.of(job):
            if group[0].epochs == usual_epochs(job) and pruned in (None, otherwise(job, group[0])):
                return group
        return []


def _of_other_data_marked(results: Sequence[AnyResult]) -> list[AnyResult]:
    """Those made with what most of them were made with, or an older ifso, do not tell their data any more."""
    told: dict[str, Counter[str]] = {}
    for result in results:
        told.setdefault(_data_set(result), Counter()).update([result.data] if result.data else [])
    usual = {name: [digest for digest, _ in counted.most_common(1)] for name, counted in told.items()}
    return [replace(result, data="") if result.data in usual[_data_set(result)] else result for result in results]


def _data_set(result: AnyResult) -> str:
    """The name of its data: a row is called by network, data and per cent."""
    return result.row.rsplit("-", 2)[-2] if result.row.count("-") > 1 else ""


def usual_epochs(job: Job) -> int:
    """For how long the recipe of a job fine-tunes."""
    return job.row.finetune["epochs"] if job.recipe == "paper" else job.train_settings().epochs


def otherwise(job: Job, result: AnyResult) -> tuple[str, ...]:
    """In what a result of :class:`Runs` was not made as its row and recipe say, or as most others, in words."""
    epochs = [] if result.epochs == usual_epochs(job) else [f"{result.epochs} epochs"]
    options = result.prune.get("criterion")
    usual = {**job.prune, "seed": result.prune.get("seed"), "criterion": options}
    changed = [f"{key}={value}" for key, value in result.prune.items() if usual.get(key) != value]
    networks = of_other_networks(job, result)
    data = [f"other data ({result.data})"] if result.data else []
    return (*epochs, *sorted(changed), *_other_options(job.criterion_options, options), *networks, *data)


def of_other_networks(job: Job, result: AnyResult) -> list[str]:
    """Were the unpruned network or the teacher of a result others than those of the rows now? In words."""
    names = {"base": "unpruned network", "teacher": "teacher"}
    return [f"another {names[part]}: {_apart(now, before)}" for part, now, before in other_networks(job, result)]


def _apart(now: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """In what a network was made otherwise.

    >>> _apart({"epochs": 200, "batch": 256, "train": {"cutmix": 0.5}}, {"epochs": 120, "batch": 256})
    '120 epochs, no cutmix'
    """
    flat, other = ({**each, **each.get("train", {})} for each in (now, before))
    keys = [key for key in {"epochs": 0, **other, **flat} if key != "train" and flat.get(key) != other.get(key)]
    words = {"epochs": "{} epochs", "task": "{}", "weights": "{}"}
    said = [words.get(key, f"{key} {{}}").format(other[key]) if key in other else f"no {key}" for key in keys]
    return ", ".join(said)


def _other_options(usual: Mapping[str, Any], options: Mapping[str, Any] | None) -> list[str]:
    """In what the options of a criterion differ; an older result does not say what it had.

    >>> _other_options({"coupled": "layers"}, {"weights": "all"}), _other_options({"coupled": "layers"}, None)
    (['weights=all', 'no coupled'], [])
    """
    if options is None:
        return []
    given = [f"{key}={value}" for key, value in sorted(options.items()) if usual.get(key) != value]
    return [*given, *(f"no {key}" for key in sorted(usual.keys() - options.keys()))]


def last_top1(group: Sequence[AnyResult]) -> Spread:
    """What counts of a group of runs; of detectors it is mAP."""
    return Spread.of([result.worth("last") for result in group])
