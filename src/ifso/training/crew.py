"""Networks that are trained in turns: small ones, which cannot fill a GPU, share it."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator

from ifso.curvature.memory import let_go_of
from ifso.errors import IfsoError
from ifso.training.lane import Lane

Ending = Callable[[IfsoError | None], None]
"""Told when a network is trained, or with what it failed."""

PAUSE = 5e-5
"""Seconds to sleep when the GPU has enough to do for all networks."""


class Crew:
    """``add`` lanes and call ``turn`` until ``size`` is 0. On a GPU each lane has a stream of its own."""

    def __init__(self) -> None:
        self._running: list[tuple[Generator[bool], Ending]] = []

    @property
    def size(self) -> int:
        """Networks in training."""
        return len(self._running)

    def add(self, lane: Lane, ending: Ending) -> None:
        """One more network; ``ending`` is told when it is done."""
        self._running.append((lane.run(), ending))

    def turn(self) -> None:
        """A step of every network that does not wait for the GPU."""
        waiting = True
        for steps, ending in list(self._running):
            try:
                waiting &= not next(steps)
            except StopIteration:
                self._end(steps, ending, None)
            except IfsoError as error:
                self._end(steps, ending, error)
        if waiting:
            time.sleep(PAUSE)

    def close(self) -> None:
        """Stop all that are left where they are; modes of their modules are as before."""
        for steps, _ in self._running:
            steps.close()
        self._running.clear()

    def _end(self, steps: Generator[bool], ending: Ending, failure: IfsoError | None) -> None:
        """What failed must not keep the memory that the others could use."""
        self._running.remove((steps, ending))
        let_go_of(failure)
        ending(failure)
