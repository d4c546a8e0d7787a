"""A quadratic model of the loss around a point, L(W − u) ≈ L − gᵀu + ½uᵀCu, that can be minimised at any damping.

Three ways to hold C: the rows of the Gauss-Newton matrix, a Krylov subspace (conjugate gradients), or any solver.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Protocol

from torch import Tensor

from ifso.curvature.krylov import lanczos
from ifso.curvature.objective import System
from ifso.curvature.solvers import ConjugateGradients, Identity, JacobianRows, Solver
from ifso.curvature.solvers.jacobian import Factors


class Quadratic(Protocol):
    """The model at one point, for one gradient."""

    def solve(self, damping: float) -> Tensor:
        """u = (C + λI)⁻¹g."""
        ...

    def decrease(self, damping: float) -> float:
        """gᵀu − ½uᵀCu at that u: by how much the model says the loss falls."""
        ...

    def inverse(self, vector: Tensor, damping: float) -> Tensor:
        """(C + λI)⁻¹·vector for any vector, as well as the model knows C."""
        ...

    def with_gradient(self, gradient: Tensor) -> Quadratic | None:
        """The same C with another g; None if C is not known well enough for that."""
        ...


def quadratic(solver: Solver, system: System, gradient: Tensor) -> Quadratic:
    """The model that fits the solver."""
    if isinstance(solver, JacobianRows):
        return RowsModel(solver.factors(system), gradient)
    if isinstance(solver, ConjugateGradients):
        return lanczos(system, gradient, solver.iterations)
    return SolverModel(solver, system, gradient)


class RowsModel:
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

    def with_gradient(self, gradient: Tensor) -> Quadratic:
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


class SolverModel:
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

    def with_gradient(self, gradient: Tensor) -> None:
        """The solver asks the network anew."""
        del gradient
