"""Sherman–Morrison(–Woodbury) on the empirical Fisher, in Gram form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ifso.curvature.objective import System
from ifso.curvature.solvers.protocol import Solution, checked_positive, checked_vector


@dataclass(frozen=True)
class ShermanMorrison:
    """Solve (λI + 1/N Σ g gᵀ) u = v exactly, by u = (v − Aᵀ (NλI + A Aᵀ)⁻¹ A v) / λ.

    The gradients g of the N samples are the rows of A. Only the N × N Gram matrix is ever inverted.

    Args:
        damping: λ.
        group_size: samples that make one row (batch norm in train mode needs ≥ 2).
        memory: bytes for rows to be held; those that do not fit are computed again, block against block.
    """

    damping: float = 1e-3
    group_size: int = 1
    memory: int = 2**30

    def __post_init__(self) -> None:
        checked_positive("sherman-morrison", damping=self.damping, group_size=self.group_size, memory=self.memory)

    def solve(self, system: System, v: Tensor) -> Solution:
        """u, with the residual in the empirical Fisher."""
        v = checked_vector(system, v)
        norm = float(v.norm())
        if norm == 0:
            return Solution(torch.zeros_like(v), 0.0, 0)
        rows = _Rows(lambda: system.sample_gradients(self.group_size), system.size * v.element_size(), self.memory)
        gram, projected = rows.gram(), rows.times(v)
        count = gram.shape[0]
        shifted = gram + count * self.damping * torch.eye(count, dtype=gram.dtype, device=gram.device)
        weights = torch.cholesky_solve(projected[:, None], torch.linalg.cholesky(shifted))[:, 0]
        u = (v - rows.combined(weights)) / self.damping
        back = self.damping * u + rows.combined(rows.times(u)) / count
        return Solution(u, float((v - back).norm()) / norm, count)


class _Rows:
    """The rows of A in blocks: held if all of them fit, made again each time if not."""

    def __init__(self, make: Callable[[], Iterator[Tensor]], row_bytes: int, memory: int) -> None:
        self._make, self._per_block = make, max(1, memory // (2 * row_bytes))
        self._held: list[Tensor] | None = None
        first = list(_take(self._blocks_anew(), 3))
        if len(first) <= 2:
            self._held = first

    def _blocks_anew(self) -> Iterator[Tensor]:
        block: list[Tensor] = []
        for row in self._make():
            block.append(row)
            if len(block) == self._per_block:
                yield torch.stack(block)
                block = []
        if block:
            yield torch.stack(block)

    def _blocks(self) -> Iterator[Tensor]:
        return iter(self._held) if self._held is not None else self._blocks_anew()

    def gram(self) -> Tensor:
        """A Aᵀ [N, N]."""
        return torch.cat([torch.cat([left @ right.t() for right in self._blocks()], 1) for left in self._blocks()])

    def times(self, vector: Tensor) -> Tensor:
        """A·vector [N]."""
        return torch.cat([block @ vector for block in self._blocks()])

    def combined(self, weights: Tensor) -> Tensor:
        """Aᵀ·weights."""
        total, start = None, 0
        for block in self._blocks():
            part = weights[start : start + len(block)] @ block
            total, start = part if total is None else total + part, start + len(block)
        assert total is not None
        return total


def _take(blocks: Iterator[Tensor], count: int) -> Iterator[Tensor]:
    for _, block in zip(range(count), blocks, strict=False):
        yield block
