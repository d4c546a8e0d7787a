"""Magnitude-A: units made by filters of large weights matter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ifso.criteria.base import Criterion, Task
from ifso.curvature.weights import Reader
from ifso.graph.layouts import surviving


@dataclass(frozen=True)
class MagnitudeAverage(Criterion):
    """s_i = Σ over the layers that make unit i of the mean |weight| of their filters for it.

    The mean runs over the weights that are still there: inputs already pruned do not count.
    Of a layer whose unit owns several filters (heads, gates) it is the mean over all of them.
    """

    name = "magnitude-average"
    needs = "weights"

    def units(self, task: Task, batch: Any) -> Tensor:  # noqa: ARG002 (one protocol)
        """Scores [units]."""
        total = torch.zeros(task.graph.num_units, dtype=torch.float64, device=task.device)
        for maker in task.makers:
            alive = _alive(task, maker)
            sums = task.add_slices([(maker, task.weight(maker.parameter).abs() * alive)])
            total += sums / task.add_slices([(maker, alive)]).clamp(min=1)
        return total


def _alive(task: Task, maker: Reader) -> Tensor:
    """1 for the weights of a parameter that are still there, 0 for the others."""
    layout = task.graph.layouts[maker.parameter]
    return surviving(layout, task.kept).expand(layout.shape).to(task.device, torch.float64)
