"""Layers on dual numbers: ``x + ε·ẋ`` goes in, ``y + ε·ẏ`` comes out; back come ``λ = ∂L/∂y`` and its derivative ``λ̇``.

PyTorch's forward mode over its backward pass would do the same with some forty kernels for a batch norm, with weight
gradients nobody asked for, and with four products where two are enough. Here each layer has its own formulas, and
what is wanted of it (a tangent of its weight's or its mask's gradient) leaves through a *tap*: an input that takes no
part in the arithmetic and whose "gradient" is that tangent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.forward_ad import make_dual, unpack_dual

aten = torch.ops.aten


@dataclass(frozen=True)
class ConvShape:
    """Everything about a convolution but its tensors, in the order of ``aten.convolution``."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int

    def _rest(self) -> tuple[Any, ...]:
        return self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``conv(x, weight) + bias``."""
        return aten.convolution(x, weight, bias, *self._rest())

    def to_input(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Gradient with respect to ``x`` (of which only the shape is looked at)."""
        return aten.convolution_backward(grad, x, weight, None, *self._rest(), [True, False, False])[0]

    def to_weight(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Gradient with respect to ``weight`` (of which only the shape is looked at)."""
        return aten.convolution_backward(grad, x, weight, None, *self._rest(), [False, True, False])[1]

    def channel_dim(self, x: Tensor) -> int:
        """Where the input channels of ``x`` are."""
        return x.dim() - len(self.stride) - 1


@dataclass(frozen=True)
class LinearShape:
    """A linear layer, with the same methods as a convolution."""

    groups = 1

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x Wᵀ + bias``."""
        return aten.linear(x, weight, bias)

    def to_input(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:  # noqa: ARG002 (one protocol)
        """Gradient with respect to ``x``."""
        return grad @ weight

    def to_weight(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:  # noqa: ARG002 (one protocol)
        """Gradient with respect to ``weight``."""
        return grad.flatten(0, -2).t() @ x.flatten(0, -2) if x.dim() > 1 else torch.outer(grad, x)

    def channel_dim(self, x: Tensor) -> int:
        """Where the input channels of ``x`` are."""
        return x.dim() - 1


class DualLayer(Function):
    """``y = W ∗ (m ⊙ x)`` for dual ``x``, ``W`` and ``m``, at ``m = 1``.

    ``weight_dot`` is Ẇ and ``mask_dot`` is ṁ: a factor broadcastable to ``x``, or the number 1. ``weight_tap`` collects
    the tangent of ∂L/∂W, ``mask_tap`` that of ∂L/∂m [input channels].
    """

    @staticmethod
    def forward(
        ctx: Any,
        shape: ConvShape | LinearShape,
        x: Tensor,
        x_dot: Tensor | None,
        weight: Tensor,
        weight_dot: Tensor | None,
        bias: Tensor | None,
        mask_dot: Tensor | float | None,
        weight_tap: Tensor | None,
        mask_tap: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """``y`` and ``ẏ = W ∗ (ẋ + ṁ ⊙ x) + Ẇ ∗ x``."""
        moved = x_dot
        if mask_dot is not None:
            scaled = x if isinstance(mask_dot, float) else x * mask_dot
            moved = scaled if x_dot is None else x_dot + scaled
        y = shape.apply(x, weight, bias)
        y_dot = None if moved is None else shape.apply(moved, weight)
        if weight_dot is not None:
            turned = shape.apply(x, weight_dot)
            y_dot = turned if y_dot is None else y_dot.add_(turned)
        ctx.shape, ctx.mask_dot = shape, mask_dot
        ctx.save_for_backward(x, x_dot, moved, weight, weight_dot)
        if y_dot is not None:
            ctx.mark_non_differentiable(y_dot)
        return y, y_dot

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        """``x̄ = Wᵀλ``, its tangent ``Wᵀλ̇ + Ẇᵀλ + ṁ ⊙ Wᵀλ``, and what the taps collect."""
        x, x_dot, moved, weight, weight_dot = ctx.saved_tensors
        shape, mask_dot = ctx.shape, ctx.mask_dot
        lam, lam_dot = unpack_dual(grad)
        to_x, to_weight, to_mask = (ctx.needs_input_grad[position] for position in (1, 7, 8))
        weight_tangent = mask_tangent = grad_x = None
        with torch.no_grad():
            if to_weight:
                weight_tangent = _sum(_to_weight(shape, lam_dot, x, weight), _to_weight(shape, lam, moved, weight))
            if to_x or to_mask:
                back = shape.to_input(lam, x, weight)
                straight = None if lam_dot is None else shape.to_input(lam_dot, x, weight)
                turned = None if weight_dot is None else shape.to_input(lam, x, weight_dot)
                back_dot = _sum(straight, turned)
                if to_mask:
                    mask_tangent = _sum(_per_channel(x, back_dot, shape), _per_channel(x_dot, back, shape))
                if mask_dot is not None:
                    back_dot = _sum(back_dot, back if isinstance(mask_dot, float) else back * mask_dot)
                grad_x = back if back_dot is None else make_dual(back, back_dot)
        return None, grad_x, None, None, None, None, None, weight_tangent, mask_tangent


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return first if second is None else second
    return first + second


def _to_weight(shape: ConvShape | LinearShape, grad: Tensor | None, x: Tensor | None, weight: Tensor) -> Tensor | None:
    return None if grad is None or x is None else shape.to_weight(grad, x, weight)


def _per_channel(x: Tensor | None, grad: Tensor | None, shape: ConvShape | LinearShape) -> Tensor | None:
    """Σ x·grad over everything but the input channels."""
    if x is None or grad is None:
        return None
    dim = shape.channel_dim(x)
    rest = [axis for axis in range(x.dim()) if axis != dim]
    product = x * grad
    return product.sum(rest, dtype=torch.promote_types(x.dtype, torch.float32)) if rest else product


class DualBatchNorm(Function):
    """Batch norm with the batch's own statistics.

    With ``x̂ = (x − mean) r`` and ``r = 1/√(var + eps)``, its derivative at x is the symmetric map
    ``B(t) = γ r (t − mean(t) − x̂ mean(x̂ t))``, so the kernel of the backward pass also computes the tangent ``ẏ = B(ẋ)``.
    Back comes ``x̄ = B(λ)``, and along ẋ ``B(λ̇) − r mean(x̂ ẋ) x̄ − γ r (mean(x̂ λ) x̂̇ + mean(λ x̂̇) x̂)``.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, x_dot: Tensor, gain: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """``y`` and ``ẏ``."""
        y, mean, rstd = aten.native_batch_norm(x, gain, bias, None, None, True, 0.0, eps)
        x_hat_dot, along, _ = _b(x_dot, x, None, mean, rstd, eps)
        y_dot = x_hat_dot if gain is None else x_hat_dot * _column(gain, x)
        ctx.eps = eps
        ctx.save_for_backward(x, x_hat_dot, gain, mean, rstd, along)
        ctx.mark_non_differentiable(y_dot)
        return y, y_dot

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        """``x̄`` and its tangent."""
        x, x_hat_dot, gain, mean, rstd, along = ctx.saved_tensors
        lam, lam_dot = unpack_dual(grad)
        n = x.numel() // x.shape[1]
        rest = [axis for axis in range(x.dim()) if axis != 1]
        with torch.no_grad():
            back, lam_hat, _ = _b(lam, x, gain, mean, rstd, ctx.eps)
            scale = (rstd if gain is None else rstd * gain) / n
            to_x = scale * rstd * (lam * x_hat_dot).sum(rest, dtype=mean.dtype)
            back_dot = torch.addcmul(_column(to_x * mean, x), x, _column(to_x, x), value=-1)
            back_dot.addcmul_(back, _column(rstd * along / n, x), value=-1)
            back_dot.addcmul_(x_hat_dot, _column(scale * lam_hat, x), value=-1)
            if lam_dot is not None:
                back_dot.add_(_b(lam_dot, x, gain, mean, rstd, ctx.eps)[0])
            return make_dual(back, back_dot.to(back.dtype)), None, None, None, None


def _b(
    grad: Tensor, x: Tensor, gain: Tensor | None, mean: Tensor, rstd: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``B(grad)``, ``Σ x̂·grad`` and ``Σ grad`` per channel."""
    return aten.native_batch_norm_backward(grad, x, gain, None, None, mean, rstd, True, eps, [True, True, True])


def _column(vector: Tensor, like: Tensor) -> Tensor:
    return vector.view(1, -1, *[1] * (like.dim() - 2))
