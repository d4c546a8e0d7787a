"""The Neumann series, cut off after n terms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ifso.curvature.objective import System
from ifso.curvature.solvers.protocol import Solution, checked_positive, checked_vector, warn_note
from ifso.errors import ScoreError


@dataclass(frozen=True)
class Neumann:
    """u = γ Σ_{k=0..terms} V_k with V_0 = v, V_k = (I − γ(C + λI)) V_{k−1}.

    The paper's Neumann-1 and Neumann-2 are ``terms`` 1 and 2 without the factor γ, which changes no ranking; with it
    u tends to (C + λI)⁻¹v. The series converges for 0 < γ < 2/λ_max and C + λI positive definite. Without ``step``,
    γ = 1/λ_max, estimated by ``power_iterations`` products. ``measure=True`` spends one more product on the residual,
    which is V_{terms+1}.
    """

    terms: int = 2
    step: float | None = None
    damping: float = 0.0
    power_iterations: int = 10
    measure: bool = False

    def __post_init__(self) -> None:
        checked_positive("neumann", power_iterations=self.power_iterations)
        if self.step is not None:
            checked_positive("neumann", step=self.step)
        if self.terms < 0 or not self.damping >= 0:
            raise ScoreError(f"solver 'neumann': terms={self.terms} and damping={self.damping} must not be negative")

    def solve(self, system: System, v: Tensor) -> Solution:
        """The partial sum."""
        v = checked_vector(system, v)
        norm = float(v.norm())
        if norm == 0:
            return Solution(torch.zeros_like(v), 0.0, 0)
        step = self.step or 1 / largest_eigenvalue(system, self.damping, self.power_iterations)
        term, total = v, v.clone()
        steepest, before = 0.0, norm
        for k in range(1, self.terms + 1 + self.measure):
            if before == 0:
                break
            product = system.product(term) + self.damping * term
            steepest = max(steepest, float(term @ product) / float(term @ term))
            term = term - step * product
            if k <= self.terms:
                total += term
            last = float(term.norm())
            if last > before * (1 + 1e-9) or steepest > 2 / step:
                return self._diverges(total * step, last / norm, k, step)
            before = last
        return Solution(total * step, float(term.norm()) / norm if self.measure else None, self.terms)

    def _diverges(self, u: Tensor, growth: float, k: int, step: float) -> Solution:
        note = warn_note(
            f"the Neumann series diverges: term {k} is {growth:.2g} times v at step {step:.3g}; "
            "give a smaller step, or raise damping if the curvature is indefinite"
        )
        return Solution(u, growth, k, note)


def largest_eigenvalue(system: System, damping: float = 0.0, iterations: int = 10) -> float:
    """Largest absolute eigenvalue of P C P + λI by power iteration from a fixed random start: a lower estimate."""
    random = torch.Generator().manual_seed(0)
    like = next(iter(system.objective.space.tensors.values()))
    start = torch.randn(system.size, generator=random, dtype=torch.float64)
    vector = system.restrict(start.to(like.device, like.dtype))
    value = 0.0
    for _ in range(iterations):
        vector = vector / vector.norm()
        vector = system.product(vector) + damping * vector
        value = float(vector.norm())
        if value == 0:
            raise ScoreError("the curvature is zero, so it has no inverse; check the loss, or use solver='identity'")
    return value
