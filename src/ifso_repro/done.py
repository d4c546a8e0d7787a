"""Is a result that is there one of the run that is asked for now?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ifso.errors import RunError
from ifso.runs.folder import differences
from ifso.training.settings import LATER
from ifso_repro import remains
from ifso_repro.jobs import Job
from ifso_repro.provenance import other_networks
from ifso_repro.results import AnyResult
from ifso_repro.workspace import Workshop

OF_THE_MACHINE = ("precision", "channels_last", "compile")
"""Settings of a training that may be others than those of a result that is there."""


def refuse_other_result(shop: Workshop, job: Job, result: AnyResult, place: Path) -> None:
    """RunError if ``result`` was made with other settings, networks or data than ``job`` has now.

    An older one does not say what data it had, nor what options its criterion had; it is taken to have had these.
    """
    if shop.has_data(job.row) and result.data not in ("", shop.data_of(job.row)):
        what = remains.advice(*remains.of_result(shop, job, place, data=True))
        raise RunError(f"{place} was made with other data; {what}")
    now = shop.prune_options(job)
    found = differences(_training(shop.settings(job).as_dict()), _training(result.train))
    found += differences(now, {"criterion": now["criterion"], **result.prune})
    for part, network, before in () if result.smoke else other_networks(job, result):
        found += differences({part: network}, {part: before})
    if found:
        what = remains.advice(*remains.of_result(shop, job, place, data=False))
        raise RunError(f"{place} is of other settings: {'; '.join(found)}; {what}")


def _training(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What sets one training apart from another; a setting of later times that is not used was always there.

    >>> _training({"epochs": 2, "compile": True, "cutmix": 0.0})
    {'epochs': 2}
    """
    apart = {key: value for key, value in settings.items() if key not in OF_THE_MACHINE}
    return {key: value for key, value in apart.items() if value or key not in LATER}
