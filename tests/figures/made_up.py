"""Results that nobody measured, for tests of the figures."""

from __future__ import annotations

from dataclasses import replace

from ifso_repro.config import study
from ifso_repro.jobs import Job
from ifso_repro.results import Result
from ifso_repro.statistics import usual_epochs


def result(job: Job, top1: float, **changes: object) -> Result:
    """A run of ``job`` that came to ``top1``."""
    values = {
        "row": job.row.name, "criterion": job.criterion, "recipe": job.recipe, "seed": job.seed,
        "epochs": usual_epochs(job), "macs_kept": 1 - job.row.removed, "base_top1": 93.5, "last_top1": top1,
        "best_top1": top1, "history": [], "seconds": 60.0, "hardware": "abacus", "torch": "0.0", "params_kept": 0.6,
        "pruned_top1": 9.0, "prune_seconds": 18.0, "ifso": "0.0", "variant": job.changes,
        "prune": {**job.prune, "seed": job.seed},
    }  # fmt: skip
    return Result(**{**values, **changes})


def job_of(name: str, **wanted: object) -> Job:
    """The one job with seed 0 of a study whose row, criterion or options are as wanted."""
    found = [job for job in study(name, seeds=1) if all(_of(job, key) == value for key, value in wanted.items())]
    assert len(found) == 1, [job.name for job in found]
    return found[0]


def seeds(job: Job, *top1: float, **changes: object) -> list[Result]:
    """One run for each number, with seeds from 0."""
    return [result(replace(job, seed=seed), value, **changes) for seed, value in enumerate(top1)]


def _of(job: Job, key: str) -> object:
    return {"row": job.row.name, "criterion": job.criterion}.get(key, job.variant.options.get(key))
