"""FPGM: filters far from all others of their layer matter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ifso.criteria.base import Criterion, Task
from ifso.curvature.weight_space import Reader, sum_by_unit


@dataclass(frozen=True)
class Fpgm(Criterion):
    """s_i = Σ_j ‖F_i − F_j‖ over the filters of the layer that are still there, summed over the layers that make i.

    "Filter Pruning via Geometric Median" (He et al., CVPR 2019): the filters nearest to the geometric median of their
    layer can be replaced by the others. F_j runs over all filters of the layer, also those that cannot be pruned.
    """

    name = "fpgm"
    needs = "weights"

    def units(self, task: Task, batch: Any) -> Tensor:  # noqa: ARG002 (one protocol)
        """Scores [units]."""
        total = torch.zeros(task.graph.num_units, dtype=torch.float64, device=task.device)
        kept = task.kept.to(task.device)
        for maker in task.makers:
            filters, owner = _filters(task.weight(maker.parameter), maker)
            alive = filters[kept[owner]]
            distances = torch.cdist(filters, alive, compute_mode="donot_use_mm_for_euclid_dist")
            total += sum_by_unit(distances.sum(1, dtype=torch.float64), owner, task.graph.num_units)
        return total


def _filters(weight: Tensor, maker: Reader) -> tuple[Tensor, Tensor]:
    """The filters of a layer as rows, and the unit that each makes.

    A grouped transposed convolution has its outputs along dim 1, others for each group of its input rows.
    """
    if maker.owner.dim() == 1:
        return weight.movedim(maker.dim, 0).flatten(1), maker.owner
    some = maker.owner[(maker.owner >= 0).any(1)][0]
    rows = int((maker.owner == some).all(1).sum())
    by_group = weight.unflatten(0, (-1, rows)).transpose(1, 2)
    return by_group.flatten(0, 1).flatten(1), maker.owner[::rows].flatten()
