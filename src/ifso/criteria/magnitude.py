"""Magnitude: large weights matter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ifso.criteria.base import Criterion, Task
from ifso.curvature.weight_space import Reader
from ifso.graph.layouts import surviving


@dataclass(frozen=True)
class Magnitude(Criterion):
    """s_i = Σ |W(:, i)|^p over the slices that read unit i, of all layers that read it.

    The paper's magnitude baseline, p = 1. A unit that no weight reads is measured where it is made.

    Args:
        p: the power, 1 or 2.

    >>> import torch
    >>> from ifso import trace
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2))
    >>> net[2].weight.data = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
    >>> graph = trace(net, torch.zeros(1, 2))
    >>> Magnitude().units(Task(net, graph, None, graph.kept(None)), None)
    tensor([4., 6.], dtype=torch.float64)
    """

    name = "magnitude"
    needs = "weights"

    p: Literal[1, 2] = 1

    def units(self, task: Task, batch: Any) -> Tensor:  # noqa: ARG002 (one protocol)
        """Scores [units]."""
        return task.add_slices((reader, task.weight(reader.parameter).abs() ** self.p) for reader in task.readers)


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
            weights, alive = _filters(task, maker)
            total += task.add_slices([(maker, weights)]) / task.add_slices([(maker, alive)]).clamp(min=1)
        return total


def _filters(task: Task, maker: Reader) -> tuple[Tensor, Tensor]:
    """|weight| of a parameter, and 1 for what is left of it; of a weight norm's gain the filters' means."""
    name, _ = task.graph.gains.get(maker.parameter, (maker.parameter, 0))
    layout = task.graph.layouts[name]
    alive = surviving(layout, task.kept).expand(layout.shape).to(task.device, torch.float64)
    weights = task.weight(name).abs() * alive
    if name == maker.parameter:
        return weights, alive
    shape = task.tensors[maker.parameter].shape
    alive, weights = alive.sum_to_size(shape), weights.sum_to_size(shape)
    return weights / alive.clamp(min=1), torch.ones_like(alive)
