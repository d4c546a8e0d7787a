"""The way of a pruning run from the unpruned network through every budget: what each network keeps and is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from ifso.pruning.result import PruneResult

NETWORKS = "networks"
"""Where a run folder has the networks for all budgets but the last, whose network is the run's own."""


@dataclass(frozen=True)
class Step:
    """One network: the shares asked for (none of the unpruned one), those kept, what was measured, and its folder.

    ``folder`` is relative to that of the run, and None for the unpruned network.
    """

    asked: Mapping[str, float]
    shares: Mapping[str, float]
    values: Mapping[str, float]
    folder: str | None

    def as_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def path_of(result: PruneResult) -> tuple[Step, ...]:
    """The unpruned network, one for each budget that was met on the way, and the one at the end."""
    first = Step({}, dict.fromkeys(result.shares, 1.0), dict(result.measures[0].values), None)
    between = [
        Step(stage["budget"], stage["shares"], stage["values"], f"{NETWORKS}/{stage['network']}")
        for stage in result.stages
        if "budget" in stage and dict(stage["budget"]) != dict(result.targets)
    ]
    return first, *between, Step(dict(result.targets), dict(result.shares), _at_the_end(result), ".")


def _at_the_end(result: PruneResult) -> dict[str, float]:
    """The last measure that was not of something that was undone."""
    undone = " ".join(note for note in result.notes if "undone: " in note)
    kept = [one for one in result.measures if not one.stage.endswith("(undone)") and one.stage not in undone]
    return dict(kept[-1].values)


def path_table(path: Sequence[Step]) -> Table:
    """One row for each network."""
    from rich.table import Table

    from ifso.pruning.result import LABELS

    asked, values = path[-1].asked, list(dict.fromkeys(name for step in path for name in step.values))
    costs = list(dict.fromkeys(("macs", *asked)))
    table = Table(title="a network for each budget", title_justify="left")
    table.add_column("folder")
    for heading in (*(f"{LABELS[cost]} kept" for cost in costs), "asked for", *values):
        table.add_column(heading, justify="right")
    for step in path:
        table.add_row(
            step.folder or "unpruned",
            *(f"{step.shares[cost]:.1%}" for cost in costs),
            ", ".join(f"{share:.1%}" for share in step.asked.values()),
            *(f"{step.values[name]:.4g}" if name in step.values else "" for name in values),
        )
    return table
