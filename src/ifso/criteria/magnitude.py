"""Magnitude: large weights matter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from ifso.criteria.base import Criterion, Task


@dataclass(frozen=True)
class Magnitude(Criterion):
    """s_i = Σ |W(:, i)|^p over the slices that read unit i, of all layers that read it.

    The paper's magnitude baseline, p = 1. A unit that no weight reads is measured where it is made.

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
