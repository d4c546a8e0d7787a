"""Exact products with second derivatives of the loss: mixed (weights and masks) and plain (weights alone).

With U = M ⊙ W, and everything at M = 1:

======================  =======================  ==========================================
:meth:`mixed`           v = 1ᵀ ∂²L/∂M∂W          tangent of ∂L/∂W as all masks move
:meth:`sensitivity`     ∂/∂M ⟨u, ∂L/∂W⟩          tangent of ∂L/∂M as the weights move along u
:meth:`hessian`         H u = ∂²L/∂W∂W u         tangent of ∂L/∂W as the weights move along u
======================  =======================  ==========================================

Each is one forward and one backward pass on dual numbers. A loss that forward mode cannot differentiate goes another
way (:mod:`ifso.curvature.fallbacks`), from then on, and ``note`` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ifso.common.devices import out_of_memory
from ifso.common.loss_fn import LossFn, checked
from ifso.common.torch_state import undisturbed
from ifso.curvature.dual_mode import PassOptions
from ifso.curvature.fallbacks import Fallback, MaskedLoss, can_fall_back
from ifso.curvature.primal_cache import PrimalCache
from ifso.curvature.submodule_capture import capture_submodules
from ifso.curvature.taps import GradientTaps, ProductPass, dual_pass
from ifso.curvature.weight_space import Reader, readers, sum_by_unit, sum_present, survivors, weight_space
from ifso.errors import ScoreError
from ifso.graph.channel_graph import STAYS, ChannelGraph


class Products:
    """Products with the second derivatives of ``loss_fn(model, batch)``.

    ``kept`` (from :meth:`ChannelGraph.kept`) says which units are still in ``M``. ``weights`` names what ``W`` is.
    ``careful`` computes the network itself (not the tangents) in full float32 even where TF32 is allowed; None does
    so for narrow layers, where it costs next to nothing.
    ``fused=False`` leaves every operation to PyTorch's forward mode: slower, for comparison.
    ``cut`` says which parts of the network are replayed as CUDA graphs (:class:`ifso.curvature.submodule_capture.CapturedSubmodules`).
    """

    def __init__(
        self,
        model: nn.Module,
        graph: ChannelGraph,
        loss_fn: LossFn,
        *,
        kept: Tensor | None = None,
        weights: str = "layers",
        fused: bool = True,
        careful: bool | None = None,
    ) -> None:
        self.model, self.loss_fn = model, loss_fn
        self._fused, self._careful = fused, careful
        self.num_units = graph.num_units
        self.space = weight_space(model, graph, weights)
        some = next(iter(self.space.tensors.values()))
        self.device = some.device
        named = dict(model.named_parameters())
        self.readers = readers(graph, some.device)
        _refuse_buffers(self.readers, named)
        self._moving = (graph.kept(None) if kept is None else kept.clone()).to(some.device, some.dtype)
        self._moving[STAYS] = 0
        self.surviving = self._surviving(graph, kept)
        self._masks: dict[str, list[Reader]] = {}
        for reader in self.readers:
            self._masks.setdefault(reader.parameter, []).append(reader)
        self._tensors = {**self.space.tensors, **{name: named[name] for name in self._masks}}
        self._channels: dict[tuple[str, int], Tensor] = {}
        self._mask_dots: dict[tuple[str, int], Tensor | float] = {}
        self._whole, self._factors = self._where_all_move(), self._all_factors()
        self.cut = capture_submodules(model, graph, set(self._tensors))
        self._way: Fallback | None = None

    @property
    def note(self) -> str:
        """Which way is taken where forward mode cannot be, why, and how exact it is; empty in general."""
        return "" if self._way is None else self._way.note

    def gradient(self, batch: Any) -> tuple[Tensor, Tensor]:
        """The loss and its gradient over ``W``."""
        with undisturbed(self.model), torch.enable_grad():
            loss = checked(self.loss_fn(self.model, batch))
            grads = torch.autograd.grad(loss, list(self.space.tensors.values()), allow_unused=True)
        return loss.detach(), self.space.flat(dict(zip(self.space.tensors, grads, strict=True)))

    def mixed(self, batch: Any, primal: PrimalCache | None = None) -> Tensor:
        """v = 1ᵀ ∂²L/∂M∂W, a vector over ``W``. Passes over one batch may share a ``primal``."""
        v = self._found(lambda: self._mixed(batch, primal), lambda way: way.mixed(batch))
        return v if self.surviving is None else v * self.surviving

    def hessian(self, batch: Any, vector: Tensor, primal: PrimalCache | None = None) -> Tensor:
        """H·vector over ``W``."""
        return self._found(lambda: self._hessian(batch, vector, primal), lambda way: way.hessian(batch, vector))

    def sensitivity(self, batch: Any, vector: Tensor, primal: PrimalCache | None = None) -> Tensor:
        """∂/∂M ⟨vector, ∂L/∂W⟩ [readers, units], signed: their sum over readers is the derivative for shared masks."""
        return self._found(lambda: self._sensitivity(batch, vector, primal), lambda way: way.sensitivity(batch, vector))

    def _found(self, pass_: Callable[[], Tensor], otherwise: Callable[[Fallback], Tensor]) -> Tensor:
        """What the pass gives, or another way if it fails and that does not."""
        if self._way is not None:
            return otherwise(self._way)
        try:
            return pass_()
        except Exception as error:
            found = self._around(error, otherwise) if can_fall_back(error) else None
            if found is None:
                raise
            return found

    def _around(self, error: Exception, otherwise: Callable[[Fallback], Tensor]) -> Tensor | None:
        """The same another way, which is taken from then on; None if the loss has no gradient either."""
        moving = self._moving[:STAYS]
        masked = MaskedLoss(self.model, self.loss_fn, self._tensors, self.space, self.readers, moving)
        way = Fallback(masked, error)
        try:
            found = otherwise(way)
        except Exception as other:
            if out_of_memory(other):
                raise
            return None
        self._way = way
        return found

    def _mixed(self, batch: Any, primal: PrimalCache | None) -> Tensor:
        taps = self._collect(ProductPass("mixed", self._plan_mixed), batch, primal)
        parts = {}
        for name in self.space.tensors:
            elsewhere, factor = taps.elsewhere(name), self._factors.get(name)
            scaled = elsewhere.grad * factor if elsewhere.grad is not None and factor is not None else None
            parts[name] = sum_present(taps.weight_tangent(name), elsewhere.tangent, scaled)
        return self.space.flat(parts)

    def _hessian(self, batch: Any, vector: Tensor, primal: PrimalCache | None) -> Tensor:
        taps = self._collect(ProductPass("hessian", self._plan_hessian, vector), batch, primal)
        return self.space.flat(
            {name: sum_present(taps.weight_tangent(name), taps.elsewhere(name).tangent) for name in self.space.tensors}
        )

    def _sensitivity(self, batch: Any, vector: Tensor, primal: PrimalCache | None) -> Tensor:
        taps = self._collect(ProductPass("sensitivity", self._plan_sensitivity, vector), batch, primal)
        dots = self.space.split(vector)
        total = vector.new_zeros(len(self.readers), self.num_units)
        for row, reader in zip(total, self.readers, strict=True):
            name = reader.parameter
            for groups, tangent in taps.mask_tangents(name):
                row += sum_by_unit(tangent.to(total.dtype), self._owner(name, groups), self.num_units)
            elsewhere = taps.elsewhere(name)
            moved = elsewhere.grad * dots[name] if elsewhere.grad is not None and name in dots else None
            turned = None if elsewhere.tangent is None else elsewhere.tangent * self._tensors[name].detach()
            both = sum_present(moved, turned)
            if both is not None:
                row += reader.gather(both, self.num_units)
        return total * self._moving[:STAYS]

    def _collect(self, course: ProductPass, batch: Any, primal: PrimalCache | None) -> GradientTaps:
        """What a pass over the batch collects; once more without recorded parts, if they leave too little memory."""
        try:
            return self._pass(course, batch, primal)
        except (RuntimeError, ScoreError) as error:
            if not out_of_memory(error) or not self.cut.let_go():
                raise
        if primal is not None:
            primal.forget()
        return self._pass(course, batch, primal)

    def _pass(self, course: ProductPass, batch: Any, primal: PrimalCache | None) -> GradientTaps:
        manner, taps = PassOptions(self._fused, self._careful, primal), GradientTaps(self._fused)
        course.plan(taps, course.vector)
        dual_pass(self.model, self.loss_fn, batch, taps, manner, self.cut.within(course, taps, manner))
        return taps

    def _plan_mixed(self, taps: GradientTaps, _: Tensor | None) -> None:
        for name, tensor in self._tensors.items():
            factor = self._factors.get(name)
            plan = taps.plan(name, tensor, None if factor is None else partial(torch.mul, tensor.detach(), factor))
            if name in self.space.tensors:
                plan.weight_tap = partial(taps.weight_tap, name)
            if factor is not None:
                plan.in_layers = self._direct(name) is not None
                plan.mask_dot = self._mask_dot(name)

    def _plan_hessian(self, taps: GradientTaps, vector: Tensor | None) -> None:
        assert vector is not None
        for name, dot in self.space.split(vector).items():
            plan = taps.plan(name, self.space.tensors[name], dot)
            plan.dot, plan.weight_tap = dot, partial(taps.weight_tap, name)

    def _plan_sensitivity(self, taps: GradientTaps, vector: Tensor | None) -> None:
        assert vector is not None
        dots = self.space.split(vector)
        for name, tensor in self._tensors.items():
            plan = taps.plan(name, tensor, dots.get(name))
            plan.dot = dots.get(name)
            if name in self._masks:
                plan.in_layers = self._direct(name) is not None
                plan.mask_tap = lambda groups, name=name: taps.mask_tap(name, groups, self._owner(name, groups).numel())

    def _all_factors(self) -> dict[str, Any]:
        """What scales each masked parameter as all masks move, broadcastable to it."""
        return {
            name: sum(reader.spread(self._moving, self._tensors[name].shape) for reader in masks)
            for name, masks in self._masks.items()
        }

    def _surviving(self, graph: ChannelGraph, kept: Tensor | None) -> Tensor | None:
        """1 for the weights that are still there, 0 for those of removed units; None if all are there."""
        if kept is None or bool(kept.all()):
            return None
        alive = survivors(self.space, graph, kept)
        return self.space.flat({name: part.to(self.space.tensors[name].dtype) for name, part in alive.items()})

    def _direct(self, name: str) -> Reader | None:
        """The mask of a parameter, if it can act on the input channels of a layer instead of on its weight."""
        masks = self._masks[name]
        return masks[0] if len(masks) == 1 and masks[0].dim == 1 else None

    def _owner(self, name: str, groups: int) -> Tensor:
        if (name, groups) not in self._channels:
            reader = self._direct(name)
            assert reader is not None
            self._channels[name, groups] = reader.channels(groups)
        return self._channels[name, groups]

    def _where_all_move(self) -> set[str]:
        """Parameters of which every slice is scaled by a mask; the device is asked once for all of them."""
        if not self.readers:
            return set()
        found = torch.stack([(self._moving[reader.owner] == 1).all() for reader in self.readers]).tolist()
        return {reader.parameter for reader, whole in zip(self.readers, found, strict=True) if whole}

    def _mask_dot(self, name: str) -> Callable[[int], Tensor | float]:
        def along(groups: int) -> Tensor | float:
            if (name, groups) not in self._mask_dots:
                whole = name in self._whole
                self._mask_dots[name, groups] = 1.0 if whole else self._moving[self._owner(name, groups)]
            return self._mask_dots[name, groups]

        return along


def _refuse_buffers(masks: list[Reader], parameters: Mapping[str, Tensor]) -> None:
    """ScoreError where a layer reads units through a buffer, by which nothing can be differentiated."""
    for reader in masks:
        if reader.parameter not in parameters:
            raise ScoreError(
                f"units are read through {reader.parameter}, which is no parameter; make masks of torch.nn.utils.prune "
                "permanent with its remove(module, name), or use a criterion of first derivatives, such as taylor"
            )
