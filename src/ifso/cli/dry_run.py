"""``ifso prune --dry-run``: what a run would come to, from its first stage; nothing is written."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from ifso.common.text import amount, roughly
from ifso.pruning.events import Plan, Removal, Silent, Stage

REMOVALS = 3
"""Removals one by one that are enough to see how long all of them take."""


@dataclass(frozen=True)
class DryRun:
    """What is known of a run before it is made.

    ``stages`` are planned (0: units go one by one), ``smallest`` the shares that are left when all is gone that may go.
    ``seconds`` is an estimate from the first stage or removals, ``first``, without the last step and the checks.
    """

    model: str
    units: int
    before: Mapping[str, float]
    asked: Mapping[str, float]
    smallest: Mapping[str, float]
    stages: int
    first: float
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"dry_run": True, **asdict(self)}

    def __str__(self) -> str:
        costs = f"{amount(self.before['macs'])} MACs, {amount(self.before['params'])} parameters"
        first = f"the first took {self.first:.1f} s"
        return "\n".join(
            [
                "dry run: nothing was written",
                f"network    {self.model}: {self.units} units, {costs}",
                f"asked for  {_shares(self.asked)}",
                f"smallest   {_shares(self.smallest)}",
                f"stages     {f'{self.stages}; {first}' if self.stages else 'none: units go one by one'}",
                f"time       about {roughly(self.seconds)}; the last step and the checks come on top",
            ]
        )


def _shares(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in shares.items())


class _EnoughError(Exception):
    """The run has shown what was to be seen."""


class _Watching(Silent):
    """Ends a run after its first stage, or the first removals of one without stages."""

    def __init__(self, say: Callable[[str], None], *, at_once: bool) -> None:
        self._say, self._at_once, self._count = say, at_once, 0
        self.plan: Plan | None = None
        self.smallest: Mapping[str, float] = {}
        self.begun = self.since = time.monotonic()
        self.share_done = 1.0

    def said(self, line: str) -> None:
        """Pass it on."""
        self._say(line)

    def started(self, plan: Plan) -> None:
        """What came before happens only once."""
        self.plan, self.smallest = plan, plan.smallest()
        self.since = time.monotonic()

    def staged(self, stage: Stage) -> None:
        """One of all stages is enough."""
        self.share_done = stage.number / stage.stages
        raise _EnoughError

    def removed(self, removal: Removal) -> None:
        """Some removals are enough, where there are no stages."""
        assert self.plan is not None
        self._count += 1
        if self.plan.stages or (self._count < REMOVALS and not self._at_once):
            return
        if not self._at_once:
            targets = self.plan.targets.items()
            self.share_done = min((1 - removal.shares[name]) / max(1 - target, 1e-9) for name, target in targets)
        raise _EnoughError


def dry_run(call: Mapping[str, Any]) -> DryRun:
    """Begin the run that ``ifso.prune(**call)`` would be, in memory.

    Raises:
        UnreachableBudget: as the run would.
    """
    from ifso.pruning.prune import prune

    watching = _Watching(call["listener"].said, at_once=call.get("schedule") == "one-shot")
    with suppress(_EnoughError):
        prune(**{**call, "listener": watching})
    now, plan = time.monotonic(), watching.plan
    assert plan is not None
    first = now - watching.since
    whole = first / max(watching.share_done, 1e-9)
    return DryRun(
        plan.model, plan.units, plan.costs, dict(plan.targets), watching.smallest, plan.stages, first,
        watching.since - watching.begun + whole,
    )  # fmt: skip
