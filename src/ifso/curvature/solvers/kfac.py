"""K-FAC and EK-FAC: one Kronecker product per layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ifso.curvature.kronecker import Block, collect, diagonal
from ifso.curvature.objective import System
from ifso.curvature.solvers.protocol import Solution, checked_positive, checked_vector


@dataclass(frozen=True)
class Kfac:
    """Solve with the empirical Fisher as blocks G ⊗ A + λI, one for each conv or linear layer.

    A = E[a aᵀ] over the layer's inputs (patches for a convolution), G = E[g gᵀ] over the gradients at its outputs; the
    damping is exact, in the eigenbasis Q_G ⊗ Q_A. ``corrected=True`` is EK-FAC: the eigenvalues are replaced by the
    second moments of the samples' gradients in that basis. Weights of other layers (norms, grouped and transposed
    convolutions) have a diagonal Fisher from the gradients of whole batches.
    """

    damping: float = 1e-3
    corrected: bool = False

    def __post_init__(self) -> None:
        checked_positive("kfac", damping=self.damping)

    def solve(self, system: System, v: Tensor) -> Solution:
        """u block by block."""
        v = checked_vector(system, v)
        space = system.objective.space
        parts = space.split(v)
        keeps = space.split(torch.ones_like(v) if system.support is None else system.support)
        blocks = collect(system.objective, keeps, self.corrected)
        found: dict[str, Tensor | None] = {}
        for block in blocks:
            found.update(self._by_block(block, parts))
        rest = [name for name in space.tensors if name not in found]
        if rest:
            squares = diagonal(system.objective)
            found.update({name: parts[name] / (squares[name] + self.damping) for name in rest})
        return Solution(system.restrict(space.flat(found)), None, len(blocks))

    def _by_block(self, block: Block, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        return block.split(block.solve(block.joined(parts), self.damping))
