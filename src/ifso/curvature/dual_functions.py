"""Norms, activations and attention on dual numbers, as :mod:`ifso.curvature.dual_layers` has layers with weights.

Forward mode over PyTorch's backward passes takes some thirty kernels for each of them, reading and writing activations
again and again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.forward_ad import make_dual, unpack_dual
from torch.autograd.graph import increment_version

from ifso.common.tensors import placed
from ifso.curvature.dual_layers import DualFunction, fits_kernels, give_tangent, laid_out_as, load_kernels

aten = torch.ops.aten

RELU = (0, math.inf)
"""The bounds of a ReLU."""


def _gelu_bend(x: Tensor) -> Tensor:
    """The second derivative φ(x)(2 − x²) of x Φ(x), with the density φ and the distribution function Φ of a normal."""
    square = x * x
    return (square * -0.5).exp_().mul_(2 - square).mul_(1 / math.sqrt(2 * math.pi))


def _gelu_tanh_bend(x: Tensor) -> Tensor:
    """The second derivative of x (1 + tanh u) / 2 with u = √(2/π) (x + 0.044715 x³)."""
    factor = math.sqrt(2 / math.pi)
    t = (factor * (x + 0.044715 * x**3)).tanh()
    first, second = factor * (1 + 3 * 0.044715 * x * x), factor * 6 * 0.044715 * x
    return (1 - t * t) * (first + 0.5 * x * (second - 2 * t * first * first))


def _silu_bend(x: Tensor) -> Tensor:
    """The second derivative s (1 − s) (2 + x (1 − 2s)) of x s with s = 1 / (1 + e⁻ˣ)."""
    s = x.sigmoid()
    return (1 - 2 * s).mul_(x).add_(2).mul_(s).mul_(1 - s)


ACTIVATIONS: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "gelu": (F.gelu, aten.gelu_backward, _gelu_bend),
    "gelu_tanh": (
        lambda x: F.gelu(x, approximate="tanh"),
        lambda grad, x: aten.gelu_backward(grad, x, approximate="tanh"),
        _gelu_tanh_bend,
    ),
    "silu": (aten.silu, aten.silu_backward, _silu_bend),
}
"""f(x), f'(x)·grad and f''(x), by name."""


class DualActivation(DualFunction):
    """``y = f(x)`` with ``ẏ = f'(x) ẋ``; back come ``f'(x) λ`` and ``f'(x) λ̇ + f''(x) ẋ λ``."""

    @staticmethod
    def forward(ctx: Any, name: str, x: Tensor, x_dot: Tensor, dual_zero: Tensor) -> Tensor:
        """``y`` with the tangent ``ẏ``."""
        ctx.name, ctx.quick = name, fits_kernels(x, x_dot)
        ctx.save_for_backward(x, x_dot)
        if ctx.quick:
            y, y_dot = torch.empty_like(x), torch.empty_like(x)
            load_kernels().activation_forward(name, x, x_dot, y, y_dot)
        else:
            function, slope, _ = ACTIVATIONS[name]
            y, y_dot = function(x), slope(x_dot, x)
        give_tangent(ctx, y_dot)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """``x̄`` and its tangent."""
        x, x_dot = ctx.saved_tensors
        lam, lam_dot = unpack_dual(grad)
        with torch.no_grad():
            if ctx.quick:
                moved = None if lam_dot is None else laid_out_as(lam_dot, x)
                back, back_dot = load_kernels().activation_backward(ctx.name, laid_out_as(lam, x), moved, x, x_dot)
            else:
                _, slope, bend = ACTIVATIONS[ctx.name]
                wide = torch.promote_types(x.dtype, torch.float32)
                back, back_dot = slope(lam, x), (bend(x.to(wide)) * x_dot).mul_(lam).to(x.dtype)
                if lam_dot is not None:
                    back_dot += slope(lam_dot, x)
        return None, make_dual(back, back_dot), None, None


class _InPlace(DualFunction):
    """A function that writes over its input ``x`` and, in its forward pass, over the tangent that comes behind it."""

    @staticmethod
    def jvp(ctx: Any, *dots: Any) -> Tensor:
        """The tangent, which torch shall know to be another."""
        dot: Tensor = next(dot for dot in dots if dot is not None)
        increment_version(dot)
        return dot


class DualActivationInPlace(_InPlace, DualActivation):
    """The same, written over ``x`` and its tangent, of which copies are kept."""

    @staticmethod
    def forward(ctx: Any, name: str, x: Tensor, x_dot: Tensor, dual_zero: Tensor) -> Tensor:
        """``y`` in the memory of ``x``, with the tangent in that of ``x_dot``."""
        ctx.name, ctx.quick = name, fits_kernels(x, x_dot)
        before, before_dot = x.clone(), x_dot.clone()
        if ctx.quick:
            load_kernels().activation_forward(name, before, before_dot, x, x_dot)
        else:
            function, slope, _ = ACTIVATIONS[name]
            x.copy_(function(before))
            x_dot.copy_(slope(before_dot, before))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(before, before_dot)
        ctx.mark_dirty(x)
        return x


class DualClamp(DualFunction):
    """``x`` between two bounds and the nearer bound elsewhere, as of a ReLU: the slope is 1 or 0."""

    @staticmethod
    def forward(ctx: Any, low: float, high: float, x: Tensor, x_dot: Tensor, dual_zero: Tensor) -> Tensor:
        """``y`` with its tangent."""
        y = torch.relu(x) if (low, high) == RELU else aten.hardtanh(x, low, high)
        ctx.bounds = low, high
        ctx.save_for_backward(y if ctx.bounds == RELU else x)  # as torch does: a model may write into the other
        give_tangent(ctx, _inside(x_dot, y, ctx.bounds))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """``x̄`` and its tangent."""
        place, _ = unpack_dual(ctx.saved_tensors[0])
        lam, lam_dot = unpack_dual(grad)
        with torch.no_grad():
            back = _inside(lam, place, ctx.bounds)
            if lam_dot is not None:
                back = make_dual(back, _inside(lam_dot, place, ctx.bounds))
        return None, None, back, None, None


class DualClampInPlace(_InPlace, DualClamp):
    """The same, written over ``x`` and its tangent."""

    @staticmethod
    def forward(ctx: Any, low: float, high: float, x: Tensor, x_dot: Tensor, dual_zero: Tensor) -> Tensor:
        """``y`` in the memory of ``x``, with the tangent in that of ``x_dot``."""
        _ = torch.relu_(x) if (low, high) == RELU else aten.hardtanh_(x, low, high)
        ctx.bounds = low, high
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        _inside(x_dot, x, ctx.bounds, out=x_dot)
        return x


class DualAddInPlace(_InPlace):
    """``x + z`` of the same shape, written over ``x`` and its tangent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, x_dot: Tensor, z: Tensor, z_dot: Tensor) -> Tensor:
        """The sum in the memory of ``x``, its tangent in that of ``x_dot``."""
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(x)
        x_dot.add_(z_dot)
        return x.add_(z)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """The same for both."""
        return grad, None, grad, None


def _inside(t: Tensor, place: Tensor, bounds: tuple[float, float], out: Tensor | None = None) -> Tensor:
    """``t`` where ``place``, ``x`` or ``y``, lies between the bounds, 0 elsewhere."""
    out = torch.empty_like(t) if out is None else out
    if bounds == RELU:
        return aten.threshold_backward.grad_input(t, place, 0, grad_input=out)
    return aten.hardtanh_backward.grad_input(t, place, *bounds, grad_input=out)


class DualBatchNorm(DualFunction):
    """Batch norm with the batch's own statistics.

    With ``x̂ = (x − mean) r`` and ``r = 1/√(var + eps)``, its derivative at x is the symmetric map
    ``B(t) = γ r (t − mean(t) − x̂ mean(x̂ t))``: the kernel of the backward pass also computes the tangent ``ẏ = B(ẋ)``.
    Back comes ``x̄ = B(λ)``, and along ẋ ``B(λ̇) − r (mean(x̂ ẋ) x̄ + mean(x̂ λ) ẏ + mean(λ ẏ) x̂)``.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, x_dot: Tensor, gain: Tensor | None, bias: Tensor | None, eps: float, dual_zero: Tensor
    ) -> Tensor:
        """``y`` with the tangent ``ẏ``."""
        if gain is None:
            gain = torch.ones(x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        ctx.eps, ctx.quick = eps, fits_kernels(x, x_dot)
        if ctx.quick:
            y, y_dot, *stats = load_kernels().batch_norm_forward(x, x_dot, gain, bias, eps)
        else:
            y, mean, rstd = aten.native_batch_norm(x, gain, bias, None, None, True, 0.0, eps)
            y_dot, x_dot_hat, x_dot_sum = _b(x_dot, x, gain, mean, rstd, eps)
            stats = [mean, rstd, x_dot_hat, x_dot_sum]
        ctx.save_for_backward(x, x_dot, gain, *stats)
        give_tangent(ctx, y_dot)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """``x̄`` and its tangent."""
        x, x_dot, gain, *stats = ctx.saved_tensors
        lam, lam_dot = unpack_dual(grad)
        with torch.no_grad():
            if ctx.quick:
                lam = laid_out_as(lam, x)
                lam_dot = torch.zeros_like(lam) if lam_dot is None else laid_out_as(lam_dot, x)
                back, back_dot = load_kernels().batch_norm_backward(lam, lam_dot, x, x_dot, gain, stats[0])
            else:
                back, back_dot = _batch_norm_backward(lam, lam_dot, x, x_dot, gain, stats, ctx.eps)
        return make_dual(back, back_dot), None, None, None, None, None


def _batch_norm_backward(
    lam: Tensor, lam_dot: Tensor | None, x: Tensor, x_dot: Tensor, gain: Tensor, stats: Sequence[Tensor], eps: float
) -> tuple[Tensor, Tensor]:
    """``x̄`` and its tangent, with ``ẏ = γ r (ẋ − mean(ẋ) − x̂ mean(x̂ẋ))`` and ``x̂`` multiplied out."""
    mean, rstd, *sums = stats
    n = x.numel() // x.shape[1]
    back, lam_hat, lam_mean = _b(lam, x, gain, mean, rstd, eps)
    x_dot_hat, x_dot_mean, lam_hat, lam_mean = (part / n for part in (*sums, lam_hat, lam_mean))
    scale = gain * rstd
    lam_x_dot = (lam * x_dot).sum([axis for axis in range(x.dim()) if axis != 1], dtype=mean.dtype) / n
    lam_y_dot = scale * (lam_x_dot - x_dot_mean * lam_mean - x_dot_hat * lam_hat)
    to_x_dot = scale * rstd * lam_hat
    to_x = rstd * (rstd * lam_y_dot - to_x_dot * x_dot_hat)
    back_dot = torch.addcmul(
        placed(to_x * mean + to_x_dot * x_dot_mean, 1, x.dim()), x, placed(to_x, 1, x.dim()), value=-1
    )
    back_dot.addcmul_(back, placed(rstd * x_dot_hat, 1, x.dim()), value=-1)
    back_dot.addcmul_(x_dot, placed(to_x_dot, 1, x.dim()), value=-1)
    if lam_dot is not None:
        back_dot.add_(_b(lam_dot, x, gain, mean, rstd, eps)[0])
    return back, back_dot.to(back.dtype)


def _b(grad: Tensor, x: Tensor, gain: Tensor, mean: Tensor, rstd: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """``B(grad)``, ``Σ x̂·grad`` and ``Σ grad`` per channel."""
    return aten.native_batch_norm_backward(grad, x, gain, None, None, mean, rstd, True, eps, [True, True, True])


class DualLayerNorm(DualFunction):
    """Layer norm over the last dims.

    With ``x̂ = (x − mean) r`` the symmetric map ``A(t) = r (t − mean(t) − x̂ mean(x̂ t))`` is the derivative of x̂:
    ``ẏ = γ A(ẋ)`` and ``x̄ = A(γλ)``, of which the tangent is
    ``A(γλ̇) − r (mean(x̂ẋ) x̄ + mean(x̂γλ) A(ẋ) + mean(A(ẋ)γλ) x̂)``.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, x_dot: Tensor, shape: Sequence[int], gain: Tensor | None, bias: Tensor | None,
        eps: float, dual_zero: Tensor,
    ) -> Tensor:  # fmt: skip
        """``y`` with the tangent ``ẏ``."""
        x, x_dot = x.contiguous(), x_dot.contiguous()
        y, mean, rstd = aten.native_layer_norm(x, shape, gain, bias, eps)
        y_dot = _a(x_dot, x, shape, mean, rstd)
        ctx.shape = shape
        ctx.save_for_backward(x, x_dot, gain, mean, rstd)
        give_tangent(ctx, y_dot if gain is None else y_dot * gain)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """``x̄`` and its tangent."""
        x, x_dot, gain, mean, rstd = ctx.saved_tensors
        lam, lam_dot = unpack_dual(grad)
        last = tuple(range(-len(ctx.shape), 0))
        with torch.no_grad():
            scaled = lam if gain is None else lam * gain
            back, hat_dot = _a(scaled, x, ctx.shape, mean, rstd), _a(x_dot, x, ctx.shape, mean, rstd)
            hat = ((x - mean) * rstd).to(x.dtype)
            back_dot = back * (hat * x_dot).mean(last, keepdim=True)
            back_dot += hat_dot * (hat * scaled).mean(last, keepdim=True)
            back_dot += hat * (hat_dot * scaled).mean(last, keepdim=True)
            back_dot *= -rstd.to(x.dtype)
            if lam_dot is not None:
                back_dot += _a(lam_dot if gain is None else lam_dot * gain, x, ctx.shape, mean, rstd)
        return make_dual(back, back_dot), None, None, None, None, None, None


def _a(t: Tensor, x: Tensor, shape: Sequence[int], mean: Tensor, rstd: Tensor) -> Tensor:
    """``A(t)``."""
    return aten.native_layer_norm_backward(t, x, shape, mean, rstd, None, None, [True, False, False])[0]


class DualSoftmax(DualFunction):
    """A softmax ``P``: ``Ṗ = J(ẋ)`` with ``J(t) = P ⊙ (t − Σ P ⊙ t)``; back come ``J(λ)`` and its tangent.

    Forward mode would keep four tensors of that size, where P and Ṗ do.
    """

    @staticmethod
    def forward(ctx: Any, dim: int, x: Tensor, x_dot: Tensor, dual_zero: Tensor) -> Tensor:
        """``P`` with the tangent ``Ṗ``."""
        p = x.softmax(dim)
        ctx.dim = dim
        ctx.save_for_backward(p)
        give_tangent(ctx, _j(p, x_dot.clone(), dim))
        return p

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """``x̄`` and its tangent."""
        p, p_dot = unpack_dual(ctx.saved_tensors[0])
        lam, lam_dot = unpack_dual(grad)
        with torch.no_grad():
            lam_dot = torch.zeros_like(lam) if lam_dot is None else lam_dot.clone()
            back = make_dual(*_softmax_backward(p, p_dot, lam.clone(), lam_dot, ctx.dim))
        return None, back, None, None


class DualAttention(DualFunction):
    """``y = P v`` with ``P = softmax(s q kᵀ + mask)`` for dual q, k and v.

    ``Ṗ = J(s (q̇kᵀ + qk̇ᵀ))`` with ``J(t) = P ⊙ (t − Σ P ⊙ t)``, sums along rows, and ``ẏ = Ṗv + Pv̇``. With ``p̄ = λvᵀ``
    and ``S̄ = J(p̄)`` back come ``s S̄k``, ``s S̄ᵀq`` and ``Pᵀλ``, and their tangents by the product rule.
    """

    @staticmethod
    def forward(
        ctx: Any, scale: float, mask: Tensor | None, q: Tensor, q_dot: Tensor, k: Tensor, k_dot: Tensor,
        v: Tensor, v_dot: Tensor, dual_zero: Tensor,
    ) -> Tensor:  # fmt: skip
        """``y`` with the tangent ``ẏ``."""
        q, q_dot = q * scale, q_dot * scale
        p, p_dot = _attention(q, q_dot, k, k_dot, mask)
        ctx.scale = scale
        ctx.save_for_backward(mask, q, q_dot, k, k_dot, v, v_dot)  # not P and Ṗ: they are larger than all others
        give_tangent(ctx, (p_dot @ v).add_(p @ v_dot))
        return p @ v

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """``q̄``, ``k̄`` and ``v̄`` with their tangents."""
        mask, q, q_dot, k, k_dot, v, v_dot = ctx.saved_tensors
        lam, lam_dot = unpack_dual(grad)
        with torch.no_grad():
            p, p_dot = _attention(q, q_dot, k, k_dot, mask)
            lam_dot = torch.zeros_like(lam) if lam_dot is None else lam_dot
            v_bar, v_bar_dot = p.mT @ lam, (p_dot.mT @ lam).add_(p.mT @ lam_dot)
            p_bar_dot = (lam_dot @ v.mT).add_(lam @ v_dot.mT)
            s_bar, s_bar_dot = _softmax_backward(p, p_dot, lam @ v.mT, p_bar_dot, -1)
            q_bar, q_bar_dot = s_bar @ k, (s_bar_dot @ k).add_(s_bar @ k_dot)
            k_bar, k_bar_dot = s_bar.mT @ q, (s_bar_dot.mT @ q).add_(s_bar.mT @ q_dot)
            q_bar.mul_(ctx.scale)
            q_bar_dot.mul_(ctx.scale)
        back = make_dual(q_bar, q_bar_dot), make_dual(k_bar, k_bar_dot), make_dual(v_bar, v_bar_dot)
        return None, None, back[0], None, back[1], None, back[2], None, None


def _attention(q: Tensor, q_dot: Tensor, k: Tensor, k_dot: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """``P`` and ``Ṗ``, of ``q`` that is scaled."""
    scores = q @ k.mT
    p = scores.softmax(-1) if mask is None else aten._safe_softmax(scores + mask, -1)
    return p, _j(p, (q_dot @ k.mT).add_(q @ k_dot.mT))


def _j(p: Tensor, t: Tensor, dim: int = -1) -> Tensor:
    """``P ⊙ (t − Σ P ⊙ t)``, in the memory of ``t``."""
    return t.sub_((p * t).sum(dim, keepdim=True)).mul_(p)


def _softmax_backward(p: Tensor, p_dot: Tensor, lam: Tensor, lam_dot: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """``J(λ)`` and its tangent, in the memory of ``λ`` and in new memory."""
    inner_dot = (p_dot * lam).addcmul_(p, lam_dot).sum(dim, keepdim=True)
    away = lam.sub_((p * lam).sum(dim, keepdim=True))
    back_dot = (p_dot * away).addcmul_(p, lam_dot.sub_(inner_dot))
    return away.mul_(p), back_dot
