"""Quadratic models of the loss around a point that can be solved for every damping at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, is_dataclass, replace

import torch
from torch import Tensor

from ifso.curvature.objective import System
from ifso.curvature.solvers import ConjugateGradients, Identity, JacobianRows, Solver
from ifso.curvature.solvers.jacobian import Factors


class QuadraticModel(ABC):
    """The model at one point, for one gradient g and curvature C."""

    @abstractmethod
    def solve(self, damping: float) -> Tensor:
        """u = (C + λI)⁻¹g."""

    @abstractmethod
    def decrease(self, damping: float) -> float:
        """gᵀu − ½uᵀCu at that u, without damping: by how much the model says the loss falls."""

    @abstractmethod
    def inverse(self, vector: Tensor, damping: float) -> Tensor:
        """(C + λI)⁻¹·vector for any vector, as well as the model knows C."""

    def with_gradient(self, gradient: Tensor) -> QuadraticModel | None:  # noqa: ARG002 (most know C along g only)
        """The same C with another g; None if C is not known well enough for that."""
        return None


def quadratic_model(solver: Solver, system: System, gradient: Tensor) -> QuadraticModel:
    """The model that fits the solver."""
    if isinstance(solver, JacobianRows):
        return RowsModel(solver.factors(system), gradient)
    if isinstance(solver, ConjugateGradients):
        return lanczos_model(system, gradient, solver.iterations)
    return SolverModel(solver, system, gradient)


class RowsModel(QuadraticModel):
    """C = RᵀR + diag(D)."""

    def __init__(self, factors: Factors, gradient: Tensor) -> None:
        self._factors, self._gradient = factors, gradient

    def solve(self, damping: float) -> Tensor:
        """(RᵀR + D + λI)⁻¹g."""
        return self._factors.solve(self._gradient, damping)

    def decrease(self, damping: float) -> float:
        """Of the model without damping."""
        u = self.solve(damping)
        return float(self._gradient @ u - 0.5 * u @ self._factors.times(u))

    def inverse(self, vector: Tensor, damping: float) -> Tensor:
        """(RᵀR + D + λI)⁻¹·vector."""
        return self._factors.solve(vector, damping)

    def with_gradient(self, gradient: Tensor) -> QuadraticModel:
        """All of C is there."""
        return RowsModel(self._factors, gradient)


def with_damping(solver: Solver, damping: float) -> Solver:
    """The solver with another λ; the identity, I/scale + λI, becomes smaller.

    >>> with_damping(Identity(scale=2.0), 0.5)
    Identity(scale=1.0)
    """
    if isinstance(solver, Identity):
        return Identity(solver.scale / (1 + damping * solver.scale))
    if is_dataclass(solver) and "damping" in {field.name for field in fields(solver)}:
        return replace(solver, damping=damping)
    return solver


class SolverModel(QuadraticModel):
    """Any solver: its own damping is replaced. Every damping that is asked for is solved anew."""

    def __init__(self, solver: Solver, system: System, gradient: Tensor) -> None:
        self._solver, self._system, self._gradient = solver, system, gradient
        self._solved: dict[float, Tensor] = {}

    def solve(self, damping: float) -> Tensor:
        """The solver's u."""
        if damping not in self._solved:
            self._solved[damping] = with_damping(self._solver, damping).solve(self._system, self._gradient).u
        return self._solved[damping]

    def decrease(self, damping: float) -> float:
        """With one product."""
        u = self.solve(damping)
        return float(self._gradient @ u - 0.5 * u @ self._system.product(u))

    def inverse(self, vector: Tensor, damping: float) -> Tensor:
        """The solver once more."""
        return with_damping(self._solver, damping).solve(self._system, vector).u


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
