"""The networks that a result began with, beside those that its row names now."""

from __future__ import annotations

from typing import Any, NamedTuple

from ifso_repro.jobs import Job
from ifso_repro.results import AnyResult, Result
from ifso_repro.schema import made


class Network(NamedTuple):
    """The unpruned network (``"base"``) or the ``"teacher"``: what decides on it, ``now`` and ``before``."""

    part: str
    now: dict[str, Any]
    before: dict[str, Any]


def other_networks(job: Job, result: AnyResult) -> list[Network]:
    """Those that are others than the rows say now. An older result does not tell of its unpruned network."""
    found = [Network("base", job.row.base.made, made(result.base))] if result.base else []
    teacher = result.teacher if isinstance(result, Result) else {}
    if teacher or job.teacher is not None:
        now = {} if job.teacher is None else {"task": job.teacher.task, **job.teacher.base.made}
        before = {"task": teacher["task"], **made(teacher["base"])} if teacher else {}
        found.append(Network("teacher", now, before))
    return [network for network in found if network.now != network.before]
