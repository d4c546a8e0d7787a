"""Scalars of a pruning run for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ifso.errors import IfsoError
from ifso.pruning.events import Plan, Removal

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardListener:
    """Writes shares kept, loss, score and seconds at every removal into ``folder``, made when the run starts.

    A resumed run hides what was written beyond the removal it goes on from.
    """

    def __init__(self, folder: Path | str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise IfsoError('--tensorboard needs a package: pip install "ifso[tensorboard]"') from error
        self._make, self._folder = SummaryWriter, Path(folder)
        self._writer: SummaryWriter | None = None

    def started(self, plan: Plan) -> None:
        """Open the file, and write where the run starts."""
        self._writer = self._make(str(self._folder), purge_step=plan.removals + 1 if plan.removals else None)
        if not plan.removals:
            self._shares(plan.shares, step=0)

    def removed(self, removal: Removal) -> None:
        """One point on every curve."""
        assert self._writer is not None
        self._shares(removal.shares, removal.removal)
        for name, value in (("loss", removal.loss), ("score", removal.score), ("seconds", removal.seconds)):
            self._writer.add_scalar(name, value, removal.removal)

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
