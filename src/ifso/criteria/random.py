"""Random: what any other criterion must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ifso.criteria.base import Criterion, Task


@dataclass(frozen=True)
class Random(Criterion):
    """Uniform numbers in [0, 1), the same for the same ``seed``: in every call, on every device and rank.

    Args:
        seed: of the numbers.
    """

    name = "random"
    needs = "nothing"

    seed: int = 0

    def units(self, task: Task, batch: Any) -> Tensor:  # noqa: ARG002 (one protocol)
        """Scores [units]."""
        generator = torch.Generator("cpu").manual_seed(self.seed)
        return torch.rand(task.graph.num_units, generator=generator, dtype=torch.float64, device="cpu")
