"""Taylor: units whose mask entry moves the loss to first order matter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ifso.common.loss_fn import checked
from ifso.common.torch_state import differentiable, undisturbed
from ifso.criteria.base import Criterion, Task


@dataclass(frozen=True)
class Taylor(Criterion):
    """s_i = |∂L/∂m_i| = |Σ W_i · ∂L/∂W_i| over the slices that read unit i, on the loss of the whole batch.

    Layers coupled by the unit are added before the absolute value ("Pruning Convolutional Neural Networks for Resource
    Efficient Inference", Molchanov et al., ICLR 2017, with one gate for all of a unit's places).
    """

    name = "taylor"
    needs = "gradients"

    def units(self, task: Task, batch: Any) -> Tensor:
        """Scores [units]."""
        weights = {reader.parameter: task.tensors[reader.parameter] for reader in task.readers}
        with undisturbed(task.model), torch.enable_grad(), differentiable(weights.values()):
            loss = checked(task.loss_fn(task.model, batch))
            grads = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
        products = {
            name: torch.zeros_like(weights[name]) if grad is None else weights[name].detach() * grad
            for name, grad in zip(weights, grads, strict=True)
        }
        return task.add_slices((reader, products[reader.parameter]) for reader in task.readers).abs()
