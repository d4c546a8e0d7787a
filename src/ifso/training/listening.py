"""What trainings tell while they go on."""

from __future__ import annotations

from typing import Protocol

from ifso.training.lane import Epoch


class Listener(Protocol):
    """Somebody who wants to see trainings go on, each under its name."""

    def started(self, name: str, epoch: int, epochs: int) -> None:
        """It begins, or goes on after ``epoch`` epochs."""

    def stepped(self, name: str, done: float) -> None:
        """So many epochs are done, the present one in part."""

    def ended(self, name: str, epoch: Epoch) -> None:
        """An epoch is over."""

    def said(self, line: str) -> None:
        """One line for a person."""


class Silent:
    """Tells nobody."""

    def started(self, name: str, epoch: int, epochs: int) -> None:
        """Nothing."""

    def stepped(self, name: str, done: float) -> None:
        """Nothing."""

    def ended(self, name: str, epoch: Epoch) -> None:
        """Nothing."""

    def said(self, line: str) -> None:
        """Nothing."""
