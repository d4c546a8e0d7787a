"""Results grouped by how they were made, means and spreads over seeds, and what may be claimed from them."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ifso_repro.jobs import Job, method_name
from ifso_repro.results import AnyResult, DetectionResult, other_networks
from ifso_repro.schema import Row

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

    Only results made with other data than most of their data set keep their ``data``.
    """

    def __init__(self, results: Iterable[AnyResult]) -> None:
        self.all = _without_usual_data([result for result in results if not result.smoke])
        self._by_run: dict[tuple[str, str, str], list[AnyResult]] = {}
        for result in self.all:
            key = (result.row, method_name(result.criterion, result.variant), result.recipe)
            self._by_run.setdefault(key, []).append(result)

    def of(self, job: Job) -> list[list[Any]]:
        """The results of a job and its other seeds, those made alike together, those made as the row says first.

        They are all :class:`Result`, or of a detector ``DetectionResult``.
        """
        groups: dict[tuple[str, ...], list[AnyResult]] = {}
        for result in self._by_run.get((job.row.name, method_name(job.criterion, job.changes), job.recipe), []):
            if isinstance(result, DetectionResult) == job.row.detects:
                groups.setdefault(otherwise(job, result), []).append(result)
        return [groups[words] for words in sorted(groups, key=lambda words: (len(words), words))]

    def of_row(self, row: Row) -> list[AnyResult]:
        """The results of a row, whatever its criterion, options and recipe."""
        return [result for result in self.all if result.row == row.name]

    def whole(self, job: Job, pruned: tuple[str, ...] | None = None) -> list[Any]:
        """The group fine-tuned for as long as the recipe says and, if ``pruned`` is given, different in just that."""
        for group in self.of(job):
            if group[0].epochs == usual_epochs(job) and pruned in (None, otherwise(job, group[0])):
                return group
        return []


def _without_usual_data(results: Sequence[AnyResult]) -> list[AnyResult]:
    """Blank the digest that most results of a data set have, so that only the others are labelled."""
    digests: dict[str, Counter[str]] = {}
    for result in results:
        digests.setdefault(_data_set(result), Counter()).update([result.data] if result.data else [])
    usual = {name: [digest for digest, _ in counted.most_common(1)] for name, counted in digests.items()}
    return [replace(result, data="") if result.data in usual[_data_set(result)] else result for result in results]


def _data_set(result: AnyResult) -> str:
    """The name of the data: a row is called by network, data and per cent."""
    return result.row.rsplit("-", 2)[-2] if result.row.count("-") > 1 else ""


def usual_epochs(job: Job) -> int:
    """For how long the recipe of a job fine-tunes."""
    return job.row.finetune["epochs"] if job.recipe == "paper" else job.train_settings().epochs


def otherwise(job: Job, result: AnyResult) -> tuple[str, ...]:
    """In what a result of :class:`Runs` was not made as its row and recipe say, or as most others, in words."""
    epochs = [] if result.epochs == usual_epochs(job) else [f"{result.epochs} epochs"]
    options, usual = result.prune.get("criterion"), job.criterion_options
    usual_prune = {**job.prune, "seed": result.prune.get("seed"), "criterion": options}
    changed = [f"{key}={value}" for key, value in result.prune.items() if usual_prune.get(key) != value]
    if options is not None:  # an older result does not say it
        given = [f"{key}={value}" for key, value in sorted(options.items()) if usual.get(key) != value]
        criterion = [*given, *(f"no {key}" for key in sorted(usual.keys() - options.keys()))]
    else:
        criterion = []
    data = [f"other data ({result.data})"] if result.data else []
    return (*epochs, *sorted(changed), *criterion, *of_other_networks(job, result), *data)


def of_other_networks(job: Job, result: AnyResult) -> list[str]:
    """In what the unpruned network or the teacher of a result differ from those of the rows now, in words."""
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
    return ", ".join(words.get(key, f"{key} {{}}").format(other[key]) if key in other else f"no {key}" for key in keys)


def last_top1(group: Sequence[AnyResult]) -> Spread:
    """The spread of the last epoch of a group of runs, in top-1 or, of detectors, in mAP."""
    return Spread.of([result.worth("last") for result in group])
