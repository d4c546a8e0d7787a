"""The paper's sensitivity score: ``ifso``, computed exactly, and ``authors``, as the authors' program computes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ifso.common.batches import micro_batches
from ifso.criteria.base import Criterion, Needs, Task
from ifso.curvature.objective import Objective, System
from ifso.curvature.primal_cache import PrimalCache
from ifso.curvature.products import Products
from ifso.curvature.solvers import create_solver
from ifso.curvature.submodule_capture import CapturedSubmodules
from ifso.errors import ScoreError


@dataclass(frozen=True)
class Ifso(Criterion):
    """S = |1ᵀ · ∂²L/∂W∂M · H⁻¹ · ∂²L/∂M∂W| (Definition 1), the mean of it over the batches.

    Args:
        inverse: what stands for H⁻¹: ``"identity"`` (the paper's choice), ``"neumann"``, ``"sherman-morrison"``,
            ``"cg"`` or ``"kfac"`` (see :mod:`ifso.curvature.solvers`).
        coupled: a unit that several layers read has one mask entry, ``"shared"`` (the paper: contributions add up
            before the absolute value), or one in each of these ``"layers"`` (the authors' program: absolute values add
            up).
        weights: W is the kernels and matrices of the ``"layers"``, or ``"all"`` trainable parameters.
        curvature: H where the solver multiplies by it: the ``"hessian"`` itself or the ``"gauss-newton"`` matrix.
        inverse_options: those of the solver.
        micro_batch: differentiate so many samples at a time and add up, to fit into less memory. Exact for losses that
            are means over samples; batch norm in train mode then takes its statistics over each part. What both passes
            have in common is then computed twice rather than kept.
        careful: compute the network itself in full float32 even where TF32 is allowed; tangents may be rounded. None
            does so for layers of at most 64 channels, where it costs next to nothing.

    Batch norm is in train or eval mode as the model is. Layers that draw random numbers draw the same in all passes
    over a batch. What forward mode cannot differentiate is scored another way (:mod:`ifso.curvature.fallbacks`), which
    :meth:`note` tells.
    """

    name: ClassVar[str] = "ifso"
    needs: ClassVar[Needs] = "curvature"

    inverse: Literal["identity", "neumann", "sherman-morrison", "cg", "kfac"] = "identity"
    coupled: Literal["shared", "layers"] = "shared"
    weights: Literal["layers", "all"] = "layers"
    curvature: Literal["hessian", "gauss-newton"] = "hessian"
    inverse_options: Mapping[str, Any] | None = None
    micro_batch: int | None = None
    careful: bool | None = None

    def __post_init__(self) -> None:
        """Check the options of the solver and the size of micro-batches."""
        super().__post_init__()
        create_solver(self.inverse, **(self.inverse_options or {}))
        if self.micro_batch is not None and self.micro_batch < 1:
            raise ScoreError(f"criterion 'ifso': micro_batch must be 1 or more, or None; got {self.micro_batch}")

    def units(self, task: Task, batch: Any) -> Tensor:
        """|S| of every unit."""
        signed = self.signed(task, batch)
        return signed.sum(0).abs() if self.coupled == "shared" else signed.abs().sum(0)

    def signed(self, task: Task, batch: Any) -> Tensor:
        """1ᵀ ∂²L/∂W∂M H⁻¹ ∂²L/∂M∂W [readers, units], before absolute values are taken."""
        products = self.products(task)
        parts = list(micro_batches(batch, self.micro_batch))
        primal = PrimalCache() if self.micro_batch is None else None
        v = _mean((products.mixed(part, primal), share) for part, share in parts)
        u = self._solve(products, [part for part, _ in parts], v)
        return _mean((products.sensitivity(part, u, primal), share) for part, share in parts)

    def products(self, task: Task) -> Products:
        """What is multiplied with, the same for all batches of a task.

        Where a task shrinks, removed weights are zero and need no mask: all units count as kept, and ``surviving``,
        which is narrowed when units go, says which weights are left.
        """

        def make() -> Products:
            kept = None if task.shrinks else task.kept
            products = Products(
                task.model, task.graph, task.loss_fn, kept=kept, weights=self.weights, careful=self.careful
            )
            if task.shrinks:
                products.surviving = torch.ones_like(products.space.current())
            return products

        return task.memo(("products", self.weights, self.careful), make)

    def survivors(self, task: Task) -> Mapping[str, Tensor]:
        """The parts, by parameter, of the vector that says which weights are left."""
        products = self.products(task)
        assert products.surviving is not None
        return products.space.split(products.surviving)

    def micro_batched(self, size: int) -> Ifso:
        """Batches are cut inside, which is exact: v is that of the whole batch."""
        return replace(self, micro_batch=size)

    def replayed_parts(self, task: Task) -> CapturedSubmodules | None:
        """The submodules of a detector that the passes replay."""
        return self.products(task).captured

    def note(self, task: Task) -> str:
        """Why, and how, scores were not computed on dual numbers."""
        return self.products(task).note

    def _solve(self, products: Products, parts: list[Any], v: Tensor) -> Tensor:
        """u = H⁻¹v."""
        if self.inverse == "identity" and not self.inverse_options:
            return v
        solver = create_solver(self.inverse, **(self.inverse_options or {}))
        return solver.solve(System(Objective(products, parts), self.curvature, products.surviving), v).u


def _mean(parts: Iterable[tuple[Tensor, float]]) -> Tensor:
    """Σ share · part, in the memory of the first: vectors over all weights are large."""
    total = None
    for part, share in parts:
        part = part if share == 1 else part.mul_(share)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


@dataclass(frozen=True)
class Authors(Criterion):
    """Central finite differences in place of exact products, four gradients a batch.

    Differs from :class:`Ifso` as the program at github.com/hrcheng1066/IFSO does: ``step``/‖·‖ as
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
