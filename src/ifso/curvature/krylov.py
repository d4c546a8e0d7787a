"""Lanczos: one run of products serves every damping."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ifso.curvature.objective import System


@dataclass(frozen=True)
class Krylov:
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

    def with_gradient(self, gradient: Tensor) -> None:
        """The subspace was made for one gradient only."""
        del gradient


def lanczos(system: System, v: Tensor, iterations: int) -> Krylov:
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
    return Krylov(torch.stack(rows), values.to(v), vectors.to(v), norm)
