"""Scalars of a pruning run for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ifso.errors import IfsoError
from ifso.pruning.events import Plan, Removal, Stage

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardListener:
    """Writes shares kept, loss, score and seconds at every removal into ``folder``, made when the run starts.

    What the stages of a staged run measured stands at the last removal of each.
    A resumed run hides what was written beyond the removal it goes on from.
    """

    def __init__(self, folder: Path | str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise IfsoError('--tensorboard needs a package: pip install "ifso[tensorboard]"') from error
        self._make, self._folder = SummaryWriter, Path(folder)
        self._writer: SummaryWriter | None = None
        self._removals = 0

    def started(self, plan: Plan) -> None:
        """Open the file, and write where the run starts."""
        self._writer = self._make(str(self._folder), purge_step=plan.removals + 1 if plan.removals else None)
        self._removals = plan.removals
        if not plan.removals:
            self._shares(plan.shares, step=0)

    def removed(self, removal: Removal) -> None:
        """One point on every curve."""
        assert self._writer is not None
        self._removals = removal.removal
        self._shares(removal.shares, removal.removal)
        for name, value in (("loss", removal.loss), ("score", removal.score), ("seconds", removal.seconds)):
            self._writer.add_scalar(name, value, removal.removal)

    def staged(self, stage: Stage) -> None:
        """The number of the stage, and one point for each measured value."""
        assert self._writer is not None
        self._writer.add_scalar("stage", stage.number, self._removals)
        for name, value in stage.values.items():
            self._writer.add_scalar(f"measure/{name}", value, self._removals)

    def said(self, line: str) -> None:
        """Nothing: words are no scalars."""

    def finished(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _shares(self, shares: Mapping[str, float], step: int) -> None:
        assert self._writer is not None
        for kind, share in shares.items():
            self._writer.add_scalar(f"share/{kind}", share, step)
