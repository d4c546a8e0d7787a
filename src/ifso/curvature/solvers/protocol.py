"""What every solver takes and gives."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ifso.curvature.objective import System, finite
from ifso.errors import ScoreError


class SolverWarning(UserWarning):
    """A solver did not reach what it was asked for; the message has the residual."""


@dataclass(frozen=True)
class Solution:
    """u ≈ (C + λI)⁻¹ v.

    Attributes:
        u: the solution.
        residual: ‖v − (C + λI)u‖/‖v‖ for the matrix the solver inverts, None where it was not measured.
        iterations: how many it took.
        note: what went wrong, empty if nothing did.
    """

    u: Tensor
    residual: float | None
    iterations: int
    note: str = ""


class Solver(Protocol):
    """Anything with ``solve``."""

    def solve(self, system: System, v: Tensor) -> Solution:
        """u ≈ C⁻¹v."""
        ...


def checked_vector(system: System, v: Tensor) -> Tensor:
    """v restricted to the weights that may move, if its shape and numbers are right."""
    if v.shape != (system.size,):
        raise ScoreError(f"v has shape {tuple(v.shape)}; the system has {system.size} weights")
    return system.restrict(finite(v, "the vector v to solve for"))


def warn_note(note: str) -> str:
    """Warn, and give the note back."""
    warnings.warn(note, SolverWarning, stacklevel=3)
    return note


def checked_positive(solver: str, *, or_zero: bool = False, **values: float) -> None:
    """Refuse options that are not above zero, or not zero."""
    for name, value in values.items():
        if not (value > 0 or (or_zero and value == 0)):
            raise ScoreError(f"solver {solver!r}: {name} must be {'0 or more' if or_zero else 'above 0'}, got {value}")
