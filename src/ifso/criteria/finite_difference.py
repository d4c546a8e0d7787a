"""``authors``: the score as the authors' program computes it, for comparison with the paper's numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ifso.criteria.base import Criterion, Needs, Task
from ifso.curvature.products import Products
from ifso.errors import ScoreError


@dataclass(frozen=True)
class Authors(Criterion):
    """Central finite differences in place of exact products, four gradients a batch.

    Differs from :class:`~ifso.criteria.ifso.Ifso` as the program at github.com/hrcheng1066/IFSO does: ``step``/‖·‖ as
    the step of both differences, H⁻¹ = I/``weight_decay``, batch norm always in train mode, a mask of its own in every
    layer that reads a unit (absolute values add up), and an all-ones vector that also moves the image's channels and
    the units that are already removed.

    Args:
        step: that of both differences.
        weight_decay: of the training; H⁻¹ is its inverse.
    """

    name: ClassVar[str] = "authors"
    needs: ClassVar[Needs] = "gradients"
    masks_itself: ClassVar[bool] = True

    step: float = 1e-2
    weight_decay: float = 1e-4

    def __post_init__(self) -> None:
        """Refuse steps that are none."""
        super().__post_init__()
        for option in ("step", "weight_decay"):
            if not getattr(self, option) > 0:
                raise ScoreError(f"criterion 'authors': {option}={getattr(self, option)} must be above 0")

    def units(self, task: Task, batch: Any) -> Tensor:
        """Σ over reading layers of |∂/∂M ⟨u, ∂L/∂W⟩|, with u = v/weight_decay."""
        task.model.train()
        run = task.memo("differences", lambda: _Differences(task))
        run.start(batch)
        width = math.sqrt(run.num_entries)
        v = run.difference(lambda amount: run.weight_gradient(1 + amount, amount), self.step / width)
        u = v / self.weight_decay
        rows = run.difference(lambda amount: run.mask_gradients(amount * u), self.step / u.norm())
        return rows.abs().sum(0)


class _Differences:
    """Gradients of the loss of one batch at moved masks or weights."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._products = Products(task.model, task.graph, task.loss_fn)
        self._space = self._products.space
        self._kept = task.kept.to(self._products.device)

    def start(self, batch: Any) -> None:
        """From now on the loss is that of this batch, and the weights are put back to what they are now."""
        self._batch = batch
        self._weights = self._space.current()

    @property
    def num_entries(self) -> int:
        """Mask entries of the program: the input channels of all layers."""
        groups = {
            name: module.groups
            for prefix, module in self._task.model.named_modules()
            if isinstance(module, nn.modules.conv._ConvNd)
            for name in (f"{prefix}.weight" if prefix else "weight",)
        }
        return sum(tensor.shape[1] * groups.get(name, 1) for name, tensor in self._space.tensors.items())

    def difference(self, function: Callable[[Any], Tensor], step: float | Tensor) -> Tensor:
        """[f(step) − f(−step)] / 2 step; the weights are put back exactly."""
        try:
            return (function(step) - function(-step)) / (2 * step)
        finally:
            self._space.assign_(self._weights)

    def weight_gradient(self, kept: float, removed: float) -> Tensor:
        """∂L/∂W = M ⊙ ∇L(M ⊙ W), with one mask entry for all units in the network and one for all removed."""
        masks = self._masks(kept, removed)
        self._space.assign_(self._weights * masks)
        return masks * self._products.gradient(self._batch)[1]

    def mask_gradients(self, move: Tensor) -> Tensor:
        """∂L/∂M [readers, units] at W + move."""
        moved = self._weights + move
        self._space.assign_(moved * self._masks(1.0, 0.0))
        parts = self._space.split(moved * self._products.gradient(self._batch)[1])
        units = self._task.graph.num_units
        masks = [reader for reader in self._products.readers if reader.parameter in parts]
        return torch.stack([reader.gather(parts[reader.parameter], units) for reader in masks])

    def _masks(self, kept: float, removed: float) -> Tensor:
        entries = self._kept.to(self._weights.dtype) * (kept - removed) + removed
        factors = {name: torch.full_like(tensor, kept) for name, tensor in self._space.tensors.items()}
        for reader in self._products.readers:
            if reader.parameter in factors:
                shape = factors[reader.parameter].shape
                factors[reader.parameter] = reader.spread(entries, shape).expand(shape)
        return self._space.flat(factors)
