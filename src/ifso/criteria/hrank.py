"""HRank: units whose feature maps have a high rank matter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ifso.common.torch_state import undisturbed
from ifso.criteria.base import Criterion, Task
from ifso.criteria.reader_hooks import ReadingLayers, in_rows
from ifso.curvature.weight_space import sum_by_unit
from ifso.errors import ScoreError


@dataclass(frozen=True)
class HRank(Criterion):
    """s_i = mean rank of the feature maps of unit i, over samples and over the layers that read it.

    "HRank: Filter Pruning using High-Rank Feature Map" (Lin et al., CVPR 2020). The maps are the inputs of the reading
    layers, so they have passed their norm and activation. A map of more than two dims is flattened to a matrix after
    its first. Where there are no positions (a linear layer behind a pooling) a map is one number: its rank is 1, or 0
    where the number is 0, and the score is the share of samples on which the unit is active.
    """

    name = "hrank"
    needs = "activations"

    @torch.no_grad()
    def units(self, task: Task, batch: Any) -> Tensor:
        """Scores [units]."""
        number = task.graph.num_units
        ranks, maps = torch.zeros(2, number, dtype=torch.float64, device=task.device)

        def visit(layers: ReadingLayers, x: Tensor, dim: int, owner: Tensor) -> Tensor:
            of_maps = _ranks(in_rows(x, dim), layers.reader.parameter)
            ranks.add_(sum_by_unit(of_maps.sum(0), owner, number))
            maps.add_(sum_by_unit(torch.full_like(of_maps[0], of_maps.shape[0]), owner, number))
            return x

        with undisturbed(task.model), ReadingLayers(task, visit, everywhere=False):
            task.loss_fn(task.model, batch)
        for group in task.graph.groups:
            if not bool(maps[group.units].all()):
                raise ScoreError(
                    f"criterion 'hrank' saw no feature map of group {group.name!r}: no conv or linear layer that ran "
                    "reads it; use ifso, taylor or magnitude, which allow for other layers"
                )
        return ranks / maps.clamp(min=1)


def _ranks(maps: Tensor, name: str) -> Tensor:
    """Rank of every map [rows, channels, …] as [rows, channels].

    >>> _ranks(torch.eye(3).expand(2, 1, 3, 3), "conv.weight").tolist()
    [[3.0], [3.0]]
    """
    if not bool(maps.isfinite().all()):
        raise ScoreError(f"criterion 'hrank': the features read by {name} are not finite; check the batch and weights")
    maps = maps.to(torch.promote_types(maps.dtype, torch.float32))
    matrices = maps[..., None, None] if maps.dim() == 2 else maps.unsqueeze(-1).flatten(3)
    if min(matrices.shape[2:]) == 1:
        return matrices.flatten(2).any(2).to(torch.float64)
    return torch.linalg.matrix_rank(matrices).to(torch.float64)
