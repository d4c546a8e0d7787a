"""Corollaries 1 and 2: how wrong Proposition 1 can be. A diagnostic for small networks, with dense matrices.

The corollaries assume L strongly convex in W with a constant λ and its Hessian Lipschitz with a constant C_H, in a
region that holds W* and both estimated and true optimum. Here λ is the smallest eigenvalue found in that region, and
C_H and max|∂³L| the largest third derivative found: on the way from W* along the Newton step, and at random points as
far away. C_L and C_a are those along this masked. Constants that are sampled are lower estimates of the real ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ifso.common.loss_fn import LossFn
from ifso.curvature.continuation import MaskedModel
from ifso.curvature.objective import Objective
from ifso.curvature.products import Products
from ifso.errors import ScoreError
from ifso.graph.channel_graph import ChannelGraph, Keep

MOST_WEIGHTS = 3000
_ON_THE_WAY = 3


@dataclass(frozen=True)
class ErrorBounds:
    """The constants, and the bounds they give on |estimated − true| loss change of a masked.

    ``gradient`` C_l = ‖∂L(W*, M̂)/∂W‖ · ``convexity`` λ · ``smallest`` σ_min of the Hessian at (W*, M̂) ·
    ``hessian_change`` C_H · ``third`` max|∂³L/∂W³| · ``mask_change`` C_L · ``mixed`` C_a · ``mask_norm`` ‖ΔM‖.
    The bounds are infinite where λ is not positive: there the corollaries say nothing.
    """

    gradient: float
    convexity: float
    smallest: float
    hessian_change: float
    third: float
    mask_change: float
    mixed: float
    mask_norm: float

    @property
    def update(self) -> float:
        """‖ΔW‖ ≤ C_l/λ + C_H C_l²/(2 σ_min² λ) (Corollary 1)."""
        return self._update(self.gradient, self.gradient**2)

    @property
    def update_by_mask(self) -> float:
        """K = C_L‖ΔM‖/λ + C_H C_a²‖ΔM‖²/(2 σ_min² λ), without its o(‖ΔM‖²) (Corollary 2)."""
        return self._update(self.mask_change * self.mask_norm, (self.mixed * self.mask_norm) ** 2)

    def _update(self, first: float, second: float) -> float:
        if self.convexity <= 0 or self.smallest <= 0:
            return math.inf
        return first / self.convexity + self.hessian_change * second / (2 * self.smallest**2 * self.convexity)

    @property
    def corollary_1(self) -> float:
        """E ≤ ‖ΔW‖³/6 · max|∂³L/∂W³|."""
        return self.update**3 / 6 * self.third

    @property
    def corollary_2(self) -> float:
        """E ≤ K³/6 · max|∂³L/∂W³|."""
        return self.update_by_mask**3 / 6 * self.third

    def __str__(self) -> str:
        return (
            f"C_l {self.gradient:.3g} · λ {self.convexity:.3g} · σ_min {self.smallest:.3g} · "
            f"C_H {self.hessian_change:.3g} · max|∂³L| {self.third:.3g} · C_L {self.mask_change:.3g} · "
            f"C_a {self.mixed:.3g} · ‖ΔM‖ {self.mask_norm:.3g}\n"
            f"Corollary 1: ‖ΔW‖ ≤ {self.update:.3g}, error ≤ {self.corollary_1:.3g}\n"
            f"Corollary 2: K = {self.update_by_mask:.3g}, error ≤ {self.corollary_2:.3g}"
        )


def error_bounds(
    model: nn.Module,
    graph: ChannelGraph,
    keep: Keep,
    loss_fn: LossFn,
    batches: Iterable[Any],
    *,
    weights: str = "all",
    samples: int = 8,
    seed: int = 0,
) -> ErrorBounds:
    """The constants of Corollaries 1 and 2 for a removal, from dense Hessians at (W*, M̂) and ``samples`` points near.

    Refuses networks of more than 3000 weights.
    """
    products = Products(model, graph, loss_fn, weights=weights)
    if products.space.size > MOST_WEIGHTS:
        raise ScoreError(
            f"error_bounds builds dense Hessians: {products.space.size} weights are more than {MOST_WEIGHTS}; "
            "use a smaller network, or weights='layers'"
        )
    masked = MaskedModel(products, graph, keep)
    region = _Region(Objective(products, batches), masked)
    units = masked.removed**0.5
    try:
        mixed = [region.mixed(mask) for mask in (1.0, 0.5, 1e-6)] if units else [0.0]
        with masked.at(0.0):
            return region.constants(mixed[0] / max(units, 1), max(mixed) / max(units, 1), units, samples, seed)
    finally:
        masked.restore()


class _Region:
    """The loss of the surviving weights near W*."""

    def __init__(self, objective: Objective, masked: MaskedModel) -> None:
        self._objective, self._masked = objective, masked
        self._places = masked.support.nonzero()[:, 0]
        self._start = masked.start()

    def mixed(self, mask: float) -> float:
        """‖∂²L/∂W∂m‖ at W*, all removed units together, where their mask has that value."""
        with self._masked.at(mask):
            return float(self._objective.hessian(self._masked.direction())[self._places].norm())

    def hessian(self, offset: Tensor | None = None) -> Tensor:
        """Dense, over the surviving weights, at W* + offset."""
        self._masked.assign_(self._start if offset is None else self._start + self._spread(offset))
        rows = [self._objective.hessian(self._spread(row)) for row in torch.eye(len(self._places)).to(self._start)]
        matrix = torch.stack(rows)[:, self._places]
        return (matrix + matrix.t()) / 2

    def _spread(self, vector: Tensor) -> Tensor:
        return torch.zeros_like(self._start).index_copy_(0, self._places, vector)

    def constants(self, mixed: float, mask_change: float, mask_norm: float, samples: int, seed: int) -> ErrorBounds:
        """All of them; the units must be gone."""
        self._masked.assign_(self._start)
        gradient = self._objective.gradient()[1][self._places]
        here = self.hessian()
        step = -torch.linalg.lstsq(here, gradient[:, None]).solution[:, 0]
        random = torch.Generator().manual_seed(seed)
        lowest, third = [float(torch.linalg.eigvalsh(here)[0])], [0.0]
        for index in range(samples):
            along = step if index < _ON_THE_WAY else torch.randn(len(step), generator=random).to(step) * step.norm()
            direction = along / along.norm().clamp_min(1e-30)
            place = along * (index % _ON_THE_WAY) / (_ON_THE_WAY - 1) / (1 if index < _ON_THE_WAY else len(step) ** 0.5)
            width = 1e-4 * max(1.0, float(self._start.norm()))
            ahead, behind = self.hessian(place + width * direction), self.hessian(place - width * direction)
            third.append(float(torch.linalg.eigvalsh((ahead - behind) / (2 * width)).abs().max()))
            lowest.append(float(torch.linalg.eigvalsh((ahead + behind) / 2)[0]))
        return ErrorBounds(
            gradient=float(gradient.norm()),
            convexity=min(lowest),
            smallest=max(0.0, lowest[0]),
            hessian_change=max(third),
            third=max(third),
            mask_change=max(mask_change, float(gradient.norm()) / max(mask_norm, 1)),
            mixed=mixed,
            mask_norm=mask_norm,
        )
