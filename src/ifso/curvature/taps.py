"""What a dual pass does with every parameter, and what it collects of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.forward_ad import make_dual, unpack_dual

from ifso.curvature.dual_mode import ParameterPlan
from ifso.curvature.weight_space import sum_present

TapKey = tuple[str, str, int]
"""What is collected ("weight", "mask" or "other" uses), of which parameter, and the groups of the layer."""

_UNCOLLECTED: TapKey = ("uncollected", "", 0)


@dataclass(frozen=True)
class DualGradient:
    """A gradient and its tangent."""

    grad: Tensor | None = None
    tangent: Tensor | None = None


class GradientTaps:
    """Inputs of a pass whose "gradients" are what is asked for: give every parameter its plan, run, then read."""

    def __init__(self, fused: bool = True) -> None:
        self.plans: dict[int, ParameterPlan] = {}
        self.inputs: dict[TapKey, Tensor] = {}
        """What the pass is to be differentiated by: those of the parameters that it has met."""
        self._fused = fused
        self._tensors: dict[str, Tensor] = {}
        self._collected: dict[TapKey, DualGradient] = {}

    def plan(self, name: str, tensor: Tensor, dot: Callable[[], Tensor] | Tensor | None) -> ParameterPlan:
        """The plan of a parameter; ``dot`` is its tangent where it is used other than as a layer's weight.

        Few are, so that a tangent which takes memory of its own is given as what computes it.
        """
        self._tensors[name] = tensor
        plan = ParameterPlan(stand_in=lambda: self._stand_in(name, dot), in_layers=self._fused)
        self.plans[id(tensor)] = plan
        return plan

    def weight_tap(self, name: str) -> Tensor:
        """An input that collects the tangent of ∂L/∂W."""
        return self._tap(("weight", name, 0), name, self._tensors[name].shape)

    def mask_tap(self, name: str, groups: int, channels: int) -> Tensor:
        """An input that collects the tangent of ∂L/∂m per input channel."""
        return self._tap(("mask", name, groups), name, torch.Size([channels]))

    def uncollected(self) -> Tensor:
        """An input that collects nothing: with it a function is differentiated which collects by itself."""
        if _UNCOLLECTED not in self.inputs:
            self.inputs[_UNCOLLECTED] = torch.zeros((), device="cpu").requires_grad_()
        return self.inputs[_UNCOLLECTED]

    def _tap(self, key: TapKey, name: str, shape: torch.Size) -> Tensor:
        if key not in self.inputs:
            like = self._tensors[name]
            tap = torch.zeros((), dtype=like.dtype, device=like.device).expand(shape)
            self.inputs[key] = tap.requires_grad_()
        return self.inputs[key]

    def _stand_in(self, name: str, dot: Callable[[], Tensor] | Tensor | None) -> Tensor:
        key = ("other", name, 0)
        if key not in self.inputs:
            leaf = self._tensors[name].detach().requires_grad_()
            tangent = dot() if callable(dot) else dot
            self.inputs[key] = leaf if tangent is None else make_dual(leaf, tangent)
        return self.inputs[key]

    def differentiate(self, loss: Tensor) -> None:
        """Collect the gradients of a loss on dual numbers."""
        grads = torch.autograd.grad(loss, list(self.inputs.values()), allow_unused=True) if self.inputs else ()
        for key, grad in zip(self.inputs, grads, strict=True):
            if grad is not None:
                self.collect(key, *(unpack_dual(grad) if key[0] == "other" else (grad, None)))

    def collect(self, key: TapKey, grad: Tensor | None, tangent: Tensor | None = None) -> None:
        """Add a gradient and its tangent to what was collected there."""
        before = self._collected.get(key, DualGradient())
        self._collected[key] = DualGradient(sum_present(before.grad, grad), sum_present(before.tangent, tangent))

    def weight_tangent(self, name: str) -> Tensor | None:
        """What the weight tap collected."""
        return self._collected.get(("weight", name, 0), DualGradient()).grad

    def mask_tangents(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """(groups, tangent per input channel) of every mask tap of a parameter."""
        for (kind, owner, groups), collected in self._collected.items():
            if kind == "mask" and owner == name and collected.grad is not None:
                yield groups, collected.grad

    def other_uses(self, name: str) -> DualGradient:
        """The gradient of a parameter from its uses other than as a layer's weight."""
        return self._collected.get(("other", name, 0), DualGradient())


@dataclass(frozen=True, eq=False)
class ProductPass:
    """Passes of one kind: ``plan(taps, vector)`` gives every parameter its plan."""

    name: str
    plan: Callable[[GradientTaps, Tensor | None], None]
    vector: Tensor | None = None
