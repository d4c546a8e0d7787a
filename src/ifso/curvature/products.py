"""Exact products with second derivatives of the loss: mixed (weights and masks) and plain (weights alone).

With U = M ⊙ W, and everything at M = 1:

======================  =======================  ==========================================
:meth:`mixed`           v = 1ᵀ ∂²L/∂M∂W          tangent of ∂L/∂W as all masks move
:meth:`sensitivity`     ∂/∂M ⟨u, ∂L/∂W⟩          tangent of ∂L/∂M as the weights move along u
:meth:`hessian`         H u = ∂²L/∂W∂W u         tangent of ∂L/∂W as the weights move along u
======================  =======================  ==========================================

Each is one forward and one backward pass on dual numbers ``x + ε·ẋ``, made of these parts:

============================  ===================================================================================
``ParameterPlan``             what one parameter does in a pass: its tangent, its mask's tangent, what is collected
``GradientTaps``              the plans of all parameters, and what a pass has collected by them
``ProductPass``               a kind of product: the function that fills in the plans, and the vector u
``PassOptions``               how a pass computes: by formulas of ours, in which precision, with which cache
``PrimalCache``               outputs and gradients of the layers on one batch, computed by its first pass
``DualMode``                  the torch function mode that runs layers on dual numbers by their plans
``CapturedSubmodules``        submodules that passes replay as CUDA graphs; None where there are none
``Fallback``                  the same products by double backward or by differences of gradients
============================  ===================================================================================

A loss that forward mode cannot differentiate takes the fallback from then on, and ``note`` says so.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ifso.common.devices import out_of_memory
from ifso.common.loss_fn import LossFn, checked
from ifso.common.torch_state import ALONE, undisturbed
from ifso.curvature.decompositions import load_forward_mode
from ifso.curvature.dual_mode import DualMode, PassOptions, below_other_modes, twice_differentiable
from ifso.curvature.fallbacks import Fallback, MaskedLoss, can_fall_back, was_interrupted
from ifso.curvature.primal_cache import PrimalCache
from ifso.curvature.submodule_capture import capture_submodules
from ifso.curvature.taps import GradientTaps, ProductPass
from ifso.curvature.weight_space import Reader, readers, sum_by_unit, sum_present, survivors, weight_space
from ifso.errors import ScoreError
from ifso.graph.channel_graph import STAYS, ChannelGraph


class Products:
    """Products with the second derivatives of ``loss_fn(model, batch)``.

    ``kept`` (from :meth:`ChannelGraph.kept`) says which units are still in ``M``. ``weights`` names what ``W`` is.
    ``careful`` computes the network itself (not the tangents) in full float32 even where TF32 is allowed; None does
    so for narrow layers, where it costs next to nothing.
    ``fused=False`` leaves every operation to PyTorch's forward mode: slower, for comparison.
    ``captured`` are the submodules that are replayed as CUDA graphs, if any.
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
        self._masks: dict[str, list[Reader]] = {}
        for reader in self.readers:
            if reader.parameter not in named:
                raise ScoreError(
                    f"units are read through {reader.parameter}, which is no parameter; make masks of "
                    "torch.nn.utils.prune permanent with its remove(module, name), or use a criterion of first "
                    "derivatives, such as taylor"
                )
            self._masks.setdefault(reader.parameter, []).append(reader)
        self._tensors = {**self.space.tensors, **{name: named[name] for name in self._masks}}
        self._moving = (graph.kept(None) if kept is None else kept.clone()).to(some.device, some.dtype)
        self._moving[STAYS] = 0
        self.surviving: Tensor | None = None
        if kept is not None and not bool(kept.all()):
            alive = survivors(self.space, graph, kept)
            self.surviving = self.space.flat({name: part.to(some.dtype) for name, part in alive.items()})
        self._channels: dict[tuple[str, int], Tensor] = {}
        self._mask_dots: dict[tuple[str, int], Tensor | float] = {}
        self._whole = self._where_all_move()
        self._factors: dict[str, Any] = {
            name: sum(reader.spread(self._moving, self._tensors[name].shape) for reader in masks)
            for name, masks in self._masks.items()
        }
        self.captured = capture_submodules(model, graph, set(self._tensors))
        self._fallback: Fallback | None = None

    @property
    def note(self) -> str:
        """Which fallback is used, why, and how exact it is; empty as long as forward mode works."""
        return "" if self._fallback is None else self._fallback.note

    def gradient(self, batch: Any) -> tuple[Tensor, Tensor]:
        """The loss and its gradient over ``W``."""
        with undisturbed(self.model), torch.enable_grad():
            loss = checked(self.loss_fn(self.model, batch))
            grads = torch.autograd.grad(loss, list(self.space.tensors.values()), allow_unused=True)
        return loss.detach(), self.space.flat(dict(zip(self.space.tensors, grads, strict=True)))

    def mixed(self, batch: Any, cache: PrimalCache | None = None) -> Tensor:
        """v = 1ᵀ ∂²L/∂M∂W, a vector over ``W``. Passes over one batch may share a ``cache``."""
        v = self._product(ProductPass("mixed", self._plan_mixed), batch, cache, self._mixed_of)
        return v if self.surviving is None else v * self.surviving

    def hessian(self, batch: Any, vector: Tensor, cache: PrimalCache | None = None) -> Tensor:
        """H·vector over ``W``."""
        return self._product(ProductPass("hessian", self._plan_hessian, vector), batch, cache, self._hessian_of)

    def sensitivity(self, batch: Any, vector: Tensor, cache: PrimalCache | None = None) -> Tensor:
        """∂/∂M ⟨vector, ∂L/∂W⟩ [readers, units], signed: their sum over readers is the derivative for shared masks."""
        kind = ProductPass("sensitivity", self._plan_sensitivity, vector)
        return self._product(kind, batch, cache, lambda taps: self._sensitivity_of(taps, vector))

    def _product(
        self, kind: ProductPass, batch: Any, cache: PrimalCache | None, result_of: Callable[[GradientTaps], Tensor]
    ) -> Tensor:
        """The product by dual numbers, or by the fallback if that works where they fail."""
        if self._fallback is not None:
            return self._fallback.product(kind.name, batch, kind.vector)
        try:
            return result_of(self._collect(kind, batch, cache))
        except Exception as error:
            if was_interrupted(error):
                raise KeyboardInterrupt from error
            product = self._fall_back(error, kind, batch) if can_fall_back(error) else None
            if product is None:
                raise
            return product

    def _fall_back(self, error: Exception, kind: ProductPass, batch: Any) -> Tensor | None:
        """The product by a fallback, which is used from then on; None if the loss has no gradient either."""
        moving = self._moving[:STAYS]
        masked = MaskedLoss(self.model, self.loss_fn, self._tensors, self.space, self.readers, moving)
        fallback = Fallback(masked, error)
        try:
            product = fallback.product(kind.name, batch, kind.vector)
        except Exception as other:
            if out_of_memory(other):
                raise
            return None
        self._fallback = fallback
        return product

    def _collect(self, kind: ProductPass, batch: Any, cache: PrimalCache | None) -> GradientTaps:
        """What a pass over the batch collects; once more without captured parts, if they leave too little memory."""
        try:
            return self._run(kind, batch, cache)
        except (RuntimeError, ScoreError) as error:
            if not out_of_memory(error) or self.captured is None or not self.captured.free():
                raise
        if cache is not None:
            cache.clear()
        return self._run(kind, batch, cache)

    def _run(self, kind: ProductPass, batch: Any, cache: PrimalCache | None) -> GradientTaps:
        options, taps = PassOptions(self._fused, self._careful, cache), GradientTaps(self._fused)
        kind.plan(taps, kind.vector)
        replaying = nullcontext() if self.captured is None else self.captured.within(kind, taps, options)
        load_forward_mode()
        with twice_differentiable(self.model), ALONE, forward_ad.dual_level(), replaying:
            with below_other_modes(DualMode(taps.plans, options)):
                loss = checked(self.loss_fn(self.model, batch))
            taps.differentiate(loss)
        taps.plans.clear()  # they hold the taps, and with them all activations, until garbage is collected
        return taps

    def _mixed_of(self, taps: GradientTaps) -> Tensor:
        parts = {}
        for name in self.space.tensors:
            other, factor = taps.other_uses(name), self._factors.get(name)
            scaled = other.grad * factor if other.grad is not None and factor is not None else None
            parts[name] = sum_present(taps.weight_tangent(name), other.tangent, scaled)
        return self.space.flat(parts)

    def _hessian_of(self, taps: GradientTaps) -> Tensor:
        names = self.space.tensors
        return self.space.flat(
            {name: sum_present(taps.weight_tangent(name), taps.other_uses(name).tangent) for name in names}
        )

    def _sensitivity_of(self, taps: GradientTaps, vector: Tensor) -> Tensor:
        dots = self.space.split(vector)
        total = vector.new_zeros(len(self.readers), self.num_units)
        for row, reader in zip(total, self.readers, strict=True):
            name = reader.parameter
            for groups, tangent in taps.mask_tangents(name):
                row += sum_by_unit(tangent.to(total.dtype), self._owner(name, groups), self.num_units)
            other = taps.other_uses(name)
            moved = other.grad * dots[name] if other.grad is not None and name in dots else None
            turned = None if other.tangent is None else other.tangent * self._tensors[name].detach()
            both = sum_present(moved, turned)
            if both is not None:
                row += reader.gather(both, self.num_units)
        return total * self._moving[:STAYS]

    def _plan_mixed(self, taps: GradientTaps, _: Tensor | None) -> None:
        for name, tensor in self._tensors.items():
            factor = self._factors.get(name)
            plan = taps.plan(name, tensor, None if factor is None else partial(torch.mul, tensor.detach(), factor))
            if name in self.space.tensors:
                plan.weight_tap = partial(taps.weight_tap, name)
            if factor is not None:
                plan.in_layers = self._direct(name) is not None
                plan.mask_dot = partial(self._mask_dot, name)

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
        whole = torch.stack([(self._moving[reader.owner] == 1).all() for reader in self.readers]).tolist()
        return {reader.parameter for reader, all_move in zip(self.readers, whole, strict=True) if all_move}

    def _mask_dot(self, name: str, groups: int) -> Tensor | float:
        if (name, groups) not in self._mask_dots:
            dot = 1.0 if name in self._whole else self._moving[self._owner(name, groups)]
            self._mask_dots[name, groups] = dot
        return self._mask_dots[name, groups]
