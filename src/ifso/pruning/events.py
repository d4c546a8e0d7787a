"""What a pruning run tells while it goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ifso.pruning.result import Network


@dataclass(frozen=True)
class Plan:
    """What is about to be done. ``targets`` and ``shares`` are shares kept by the name of a cost, such as ``macs``.

    ``removals`` counts those already made, when a run is resumed. ``stages`` are planned in all; 0 if the run is not a
    staged one. ``costs`` are those of the whole network, ``smallest()`` the shares left when all is gone that may go.
    """

    model: str
    units: int
    targets: Mapping[str, float]
    shares: Mapping[str, float]
    removals: int
    folder: str | None
    stages: int = 0
    costs: Mapping[str, float] = field(default_factory=dict)
    smallest: Callable[[], Mapping[str, float]] = dict


@dataclass(frozen=True)
class Removal:
    """One removal: one line of ``metrics.jsonl``.

    ``units`` are their places within the groups, usually a single one. ``score`` is their mean score after
    normalisation. ``costs`` are what is left (``macs``, ``conv_macs``, ``params``, ``activations``, perhaps
    ``latency``) and ``shares`` the same as shares of the original network. ``loss`` is the mean loss over the batches
    of this step, ``seconds`` the time since the run began, earlier parts of a resumed run included.
    """

    removal: int
    step: int
    units: Mapping[str, tuple[int, ...]]
    score: float
    costs: Mapping[str, float]
    shares: Mapping[str, float]
    loss: float
    seconds: float

    def as_line(self) -> dict[str, Any]:
        """As plain JSON values."""
        plain = {**vars(self), "costs": dict(self.costs), "shares": dict(self.shares)}
        return {**plain, "units": {group: list(places) for group, places in self.units.items()}}


@dataclass(frozen=True)
class Stage:
    """One stage of a staged run, done: ``number`` of the ``stages`` that are planned.

    ``units`` went in it. ``shares`` are what is left of each cost, ``values`` what ``evaluate`` said of the network
    (empty where it was not asked), ``seconds`` the time since the run began, ``samples`` of how many an accuracy is.
    ``network`` is that of a budget on the way to the last one, where the stage has reached it.
    """

    number: int
    stages: int
    units: int
    shares: Mapping[str, float]
    values: Mapping[str, float]
    seconds: float
    samples: int | None = None
    network: Network | None = None


class Listener(Protocol):
    """Somebody who wants to see the progress of a run. Every call comes from the process that runs it."""

    def started(self, plan: Plan) -> None:
        """The run begins, or goes on."""

    def removed(self, removal: Removal) -> None:
        """Units went."""

    def staged(self, stage: Stage) -> None:
        """A stage of a staged run is done."""

    def said(self, line: str) -> None:
        """One line for a person: what happens now, what went otherwise than expected."""

    def finished(self) -> None:
        """The run has ended, well or not."""


class Silent:
    """Tells nobody."""

    def started(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    removed = staged = said = finished = started
