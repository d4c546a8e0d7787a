"""H⁻¹ ≈ c·I: the paper's default (the "Hessian-free trick")."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ifso.curvature.objective import System
from ifso.curvature.solvers.protocol import Solution, checked_positive, checked_vector


@dataclass(frozen=True)
class Identity:
    """u = scale·v. The paper has scale 1; the authors' program 1/weight_decay, which leaves every ranking as it is."""

    scale: float = 1.0

    def __post_init__(self) -> None:
        checked_positive("identity", scale=self.scale)

    def solve(self, system: System, v: Tensor) -> Solution:
        """scale·v."""
        return Solution(checked_vector(system, v) * self.scale, None, 0)
