"""Functions that are linear in their input, where PyTorch has neither forward mode nor a second derivative for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverloadPacket
from torch.autograd import Function
from torch.autograd.forward_ad import make_dual, unpack_dual
from torch.autograd.function import once_differentiable

LINEAR_IN_INPUT = frozenset({"torchvision.roi_align", "torchvision.ps_roi_align"})
"""Names of operators that are linear in their first argument; they have no gradient for the others (boxes)."""


def is_linear_in_input(func: Any) -> bool:
    """Is the function one of these operators?"""
    return isinstance(func, OpOverloadPacket) and str(func) in LINEAR_IN_INPUT


def call_linear(func: Callable[..., Tensor], x: Tensor, *rest: Any, **options: Any) -> Tensor:
    """``func(x, …)`` for dual ``x``."""
    primal, tangent = unpack_dual(x)
    rest = tuple(unpack_dual(value).primal.detach() if isinstance(value, Tensor) else value for value in rest)
    y, y_dot = _DualLinear.apply(
        lambda value: func(value, *rest, **options), primal, None if tangent is None else tangent.detach()
    )
    return y if y_dot is None else make_dual(y, y_dot)


class _DualLinear(Function):
    """``y = A x`` and ``ẏ = A ẋ``; back come ``Aᵀλ`` and ``Aᵀλ̇``."""

    @staticmethod
    def forward(
        ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor, x_dot: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """``y`` and ``ẏ``."""
        ctx.function = function
        ctx.save_for_backward(x)
        y_dot = None if x_dot is None else function(x_dot)
        if y_dot is not None:
            ctx.mark_non_differentiable(y_dot)
        return function(x), y_dot

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        """``Aᵀλ`` and its tangent."""
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return None, _Transposed.apply(ctx.function, x, grad), None
        lam, lam_dot = unpack_dual(grad)
        back, *more = _pulled_back(ctx.function, x, [one for one in (lam, lam_dot) if one is not None])
        return None, make_dual(back, more[0]) if more else back, None


class _Transposed(Function):
    """``Aᵀλ`` for double backward: its own derivative is ``A``."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor, lam: Tensor) -> Tensor:
        """``Aᵀλ``; of ``x`` only the shape is looked at."""
        ctx.function = function
        return _pulled_back(function, x, [lam])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """``A`` times what comes back."""
        return None, None, ctx.function(grad)


def _pulled_back(function: Callable[[Tensor], Tensor], x: Tensor, lams: Sequence[Tensor]) -> list[Tensor]:
    """``Aᵀλ`` of every ``λ``."""
    with torch.enable_grad():
        leaf = torch.zeros_like(x).requires_grad_()
        y = function(leaf)
    return [torch.autograd.grad(y, leaf, lam, retain_graph=True)[0] for lam in lams]
