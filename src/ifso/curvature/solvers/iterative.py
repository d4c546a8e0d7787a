"""Solvers that do nothing but multiply: the identity, the Neumann series and conjugate gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ifso.curvature.objective import QuadraticModel, Solution, System, checked_positive, checked_vector, warn_note
from ifso.errors import ScoreError


@dataclass(frozen=True)
class Identity:
    """u = scale·v. The paper has scale 1; the authors' program 1/weight_decay, which leaves every ranking as it is.

    Args:
        scale: above 0.
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        checked_positive("identity", scale=self.scale)

    def solve(self, system: System, v: Tensor) -> Solution:
        """scale·v."""
        return Solution(checked_vector(system, v) * self.scale, None, 0)


@dataclass(frozen=True)
class Neumann:
    """u = γ Σ_{k=0..terms} V_k with V_0 = v, V_k = (I − γ(C + λI)) V_{k−1}.

    The paper's Neumann-1 and Neumann-2 are ``terms`` 1 and 2 without the factor γ, which changes no ranking; with it
    u tends to (C + λI)⁻¹v. The series converges for 0 < γ < 2/λ_max and C + λI positive definite.

    Args:
        terms: of the series, beyond the first.
        step: γ; by default 1/λ_max.
        damping: λ.
        power_iterations: products that estimate λ_max.
        measure: spend one more product on the residual, which is V_{terms+1}.
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
        checked_positive("neumann", or_zero=True, terms=self.terms, damping=self.damping)

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
                note = warn_note(
                    f"the Neumann series diverges: term {k} is {last / norm:.2g} times v at step {step:.3g}; "
                    "give a smaller step, or raise damping if the curvature is indefinite"
                )
                return Solution(total * step, last / norm, k, note)
            before = last
        return Solution(total * step, float(term.norm()) / norm if self.measure else None, self.terms)


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


@dataclass(frozen=True)
class ConjugateGradients:
    """Solve (C + λI) u = v until ‖v − (C + λI)u‖ ≤ tolerance·‖v‖, in at most ``iterations`` products.

    A direction d with dᵀ(C + λI)d ≤ 0 (negative curvature: C is indefinite and λ too small) ends it at the last u; both
    that and running out of iterations is in the note and a :class:`SolverWarning`.

    Args:
        damping: λ.
        tolerance: of the residual.
        iterations: products, at most.
        truncated: the first ``iterations`` steps are meant (Martens' Hessian-free training): running out is no news.
    """

    damping: float = 1e-3
    tolerance: float = 1e-6
    iterations: int = 200
    truncated: bool = False

    def __post_init__(self) -> None:
        checked_positive("cg", tolerance=self.tolerance, iterations=self.iterations)
        checked_positive("cg", or_zero=True, damping=self.damping)

    def solve(self, system: System, v: Tensor) -> Solution:
        """u and the residual reached."""
        v = checked_vector(system, v)
        norm = float(v.norm())
        u = torch.zeros_like(v)
        if norm == 0:
            return Solution(u, 0.0, 0)
        rest, direction = v.clone(), v.clone()
        square = float(rest @ rest)
        steps, negative = 0, False
        while steps < self.iterations and math.sqrt(square) > self.tolerance * norm:
            product = system.product(direction) + self.damping * direction
            curvature = float(direction @ product)
            steps += 1
            if curvature <= 0:
                negative = True
                break
            length = square / curvature
            u += length * direction
            rest -= length * product
            before, square = square, float(rest @ rest)
            direction = rest + (square / before) * direction
        residual = math.sqrt(square) / norm
        return Solution(u, residual, steps, self._note(residual, steps, negative))

    def _note(self, residual: float, steps: int, negative: bool) -> str:
        if negative:
            return warn_note(
                f"cg met negative curvature after {steps} iterations, relative residual {residual:.1e}; "
                f"raise damping ({self.damping:g}) or use curvature='gauss-newton'"
            )
        if residual > self.tolerance and not self.truncated:
            return warn_note(
                f"cg did not converge: relative residual {residual:.1e} after {steps} iterations, wanted "
                f"{self.tolerance:g}; raise iterations or damping ({self.damping:g})"
            )
        return ""


@dataclass(frozen=True)
class LanczosModel(QuadraticModel):
    """The curvature C on the subspace spanned by v, Cv, C²v, …: C ≈ Q T Qᵀ.

    ``basis`` Q is [k, n] with orthonormal rows, ``values`` and ``vectors`` are the eigenpairs of T [k, k], ``norm`` is
    ‖v‖ (v is the first row of Q times it).
    """

    basis: Tensor
    values: Tensor
    vectors: Tensor
    norm: float

    def solve(self, damping: float) -> Tensor:
        """The u that k conjugate-gradient steps would find for (C + λI)u = v, at no further product."""
        heads = self.vectors[0] / (self.values + damping)
        return self.norm * (self.vectors @ heads) @ self.basis

    def decrease(self, damping: float) -> float:
        """What ½uᵀCu − vᵀu falls by at u = :meth:`solve` (damping)."""
        heads = self.norm * self.vectors[0]
        moved = heads / (self.values + damping)
        return float(heads @ moved - 0.5 * (self.values * moved.square()).sum())

    def inverse(self, vector: Tensor, damping: float) -> Tensor:
        """(C + λI)⁻¹·vector, with C taken for its smallest positive value outside the subspace."""
        inside = self.basis @ vector
        values = self.values.abs()
        turned = self.vectors @ ((self.vectors.t() @ inside) / (values + damping))
        return turned @ self.basis + (vector - inside @ self.basis) / (float(values.min()) + damping)


def lanczos_model(system: System, v: Tensor, iterations: int) -> LanczosModel:
    """``iterations`` products with the curvature, starting from v, fully reorthogonalised."""
    norm = float(v.norm())
    rows = [v / norm]
    alphas: list[float] = []
    betas: list[float] = []
    for _ in range(iterations):
        product = system.product(rows[-1])
        alphas.append(float(product @ rows[-1]))
        basis = torch.stack(rows)
        for _ in range(2):
            product = product - (basis @ product) @ basis
        beta = float(product.norm())
        if beta <= 1e-10 * max(map(abs, alphas)) or len(alphas) == iterations:
            break
        betas.append(beta)
        rows.append(product / beta)
    matrix = torch.diag(torch.tensor(alphas, dtype=torch.float64))
    for index, beta in enumerate(betas):
        matrix[index, index + 1] = matrix[index + 1, index] = beta
    values, vectors = torch.linalg.eigh(matrix)
    return LanczosModel(torch.stack(rows), values.to(v), vectors.to(v), norm)
