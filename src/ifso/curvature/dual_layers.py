"""Layers on dual numbers: ``x + ε·ẋ`` goes in, ``y + ε·ẏ`` comes out; back come ``λ = ∂L/∂y`` and its derivative ``λ̇``.

PyTorch's forward mode over its backward pass would do the same with some forty kernels for a batch norm, with weight
gradients nobody asked for, and with four products where two are enough. Here each layer has its own formulas, and
what is wanted of it (a tangent of its weight's or its mask's gradient) leaves through a *tap*: an input that takes no
part in the arithmetic and whose "gradient" is that tangent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.forward_ad import make_dual, unpack_dual

from ifso.common.tensors import placed
from ifso.curvature.primal_cache import CachedCall, alias
from ifso.curvature.weight_space import sum_present

aten = torch.ops.aten


BESIDE = 2**24
"""Gradients of at most so many bytes are laid side by side: larger ones fill a GPU alone, and would only be copied."""


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
        """``x Wᵀ + bias``; no view, for the model may write into it."""
        y = aten.linear(x, weight, bias)
        return alias(y) if y._is_view() else y

    def to_input(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:  # noqa: ARG002 (one protocol)
        """Gradient with respect to ``x``."""
        return grad @ weight

    def to_weight(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:  # noqa: ARG002 (one protocol)
        """Gradient with respect to ``weight``."""
        return grad.flatten(0, -2).t() @ x.flatten(0, -2) if x.dim() > 1 else torch.outer(grad, x)

    def channel_dim(self, x: Tensor) -> int:
        """Where the input channels of ``x`` are."""
        return x.dim() - 1


class DualFunction(Function):
    """A function that brings the tangent of its output with it: the forward pass calls :func:`give_tangent`."""

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        """The tangent; nothing holds it any more."""
        tangent, ctx.tangent = ctx.tangent, None
        return tangent


def give_tangent(ctx: Any, tangent: Any) -> None:
    """In the forward pass of a :class:`DualFunction`: the tangent of its output, or those of its outputs."""
    ctx.set_materialize_grads(False)
    ctx.tangent = tangent


class DualLayer(DualFunction):
    """``y = W ∗ (m ⊙ x)`` for dual ``x``, ``W`` and ``m``, at ``m = 1``.

    ``weight_dot`` is Ẇ and ``mask_dot`` is ṁ: a factor broadcastable to ``x``, or the number 1. ``weight_tap`` collects
    the tangent of ∂L/∂W, ``mask_tap`` that of ∂L/∂m [input channels]. ``known`` holds what an earlier pass computed.
    """

    @staticmethod
    def forward(
        ctx: Any, shape: ConvShape | LinearShape, known: CachedCall, x: Tensor, x_dot: Tensor | None,
        weight: Tensor, weight_dot: Tensor | None, bias: Tensor | None, mask_dot: Tensor | float | None,
        weight_tap: Tensor | None, mask_tap: Tensor | None, dual_zero: Tensor,
    ) -> Tensor:  # fmt: skip
        """``y`` with the tangent ``ẏ = W ∗ (ẋ + ṁ ⊙ x) + Ẇ ∗ x``."""
        y = known.output()
        if y is None:
            with known.precision(x):
                y = shape.apply(x, weight, bias)
            known.keep_output(y)
        moved = sum_present(x_dot, x * mask_dot) if isinstance(mask_dot, Tensor) else x_dot
        y_dot = None if moved is None else shape.apply(moved, weight)
        if isinstance(mask_dot, float):
            plain = y if bias is None else y - placed(bias, shape.channel_dim(y), y.dim())
            y_dot = plain.clone() if y_dot is None else y_dot.add_(plain)
        if weight_dot is not None:
            turned = shape.apply(x, weight_dot)
            y_dot = turned if y_dot is None else y_dot.add_(turned)
        ctx.shape, ctx.known, ctx.mask_dot = shape, known, mask_dot
        ctx.save_for_backward(x, x_dot, moved, weight, weight_dot)
        # a zero tangent, too: what cannot carry one must say so here, and not lose one on the way back
        give_tangent(ctx, torch.zeros_like(y) if y_dot is None else y_dot)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """``x̄ = Wᵀλ``, its tangent ``Wᵀλ̇ + Ẇᵀλ + ṁ ⊙ Wᵀλ``, and what the taps collect."""
        x, x_dot, moved, weight, weight_dot = ctx.saved_tensors
        shape = ctx.shape
        to_x, to_weight, to_mask = (ctx.needs_input_grad[position] for position in (2, 8, 9))
        weight_tangent = mask_tangent = grad_x = None
        with torch.no_grad():
            # with ṁ = 1, λ̇ is close to −λ before a batch norm: they meet before anything is rounded again
            lam, lam_dot = unpack_dual(grad)
            if isinstance(ctx.mask_dot, float):
                lam, lam_dot = _met(lam, lam_dot, beside=not ctx.known.needs_care(lam))
            if to_weight:
                weight_tangent = sum_present(
                    _to_weight(shape, lam_dot, x, weight), _to_weight(shape, lam, moved, weight)
                )
            if to_x or to_mask:
                back, straight = _back(ctx, lam, lam_dot, x, weight)
                turned = None if weight_dot is None else shape.to_input(lam, x, weight_dot)
                back_dot = sum_present(straight, turned)
                if to_mask:
                    mask_tangent = _per_channel(shape, x, back_dot, x_dot, back)
                if isinstance(ctx.mask_dot, Tensor):
                    back_dot = sum_present(back_dot, back * ctx.mask_dot)
                grad_x = back if back_dot is None else make_dual(back, back_dot)
        return None, None, grad_x, None, None, None, None, None, weight_tangent, mask_tangent, None


def dual_zero() -> Tensor:
    """A dual number as an input for functions that bring a tangent of their own: torch asks them for it.

    ``make_dual`` would do without, but what it gives is a view. A model that writes into a view (``relu_``, ``+=``) has
    every gradient copied five times on the way back.
    """
    return make_dual(torch.zeros(()), torch.zeros(()))


def _met(lam: Tensor, lam_dot: Tensor | None, *, beside: bool) -> tuple[Tensor, Tensor]:
    """``λ`` and ``λ + λ̇``; ``beside`` each other in memory, if that helps."""
    if lam_dot is None:
        return lam, lam
    if not beside or not lam.is_cuda or lam.nbytes > BESIDE or not is_dense(lam):
        return lam, lam + lam_dot
    first, second = halves(lam)
    torch.add(lam, lam_dot, out=second)
    return first.copy_(lam), second


def _back(ctx: Any, lam: Tensor, lam_dot: Tensor | None, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """``Wᵀλ`` (from an earlier pass if it is known) and ``Wᵀλ̇``."""
    pair = None if ctx.known.back is not None or lam_dot is None else as_one_batch(lam, lam_dot)
    if pair is not None:
        back, straight = split_batch(ctx.shape.to_input(pair, empty_pair(x), weight))
        ctx.known.keep_back(back, half=True)
        return back, straight
    back = ctx.known.back
    if back is None:
        with ctx.known.precision(lam):
            back = ctx.shape.to_input(lam, x, weight)
        ctx.known.keep_back(back)
    return back, None if lam_dot is None else ctx.shape.to_input(lam_dot, x, weight)


def _to_weight(shape: ConvShape | LinearShape, grad: Tensor | None, x: Tensor | None, weight: Tensor) -> Tensor | None:
    return None if grad is None or x is None else shape.to_weight(grad, x, weight)


def _per_channel(
    shape: ConvShape | LinearShape, x: Tensor, back_dot: Tensor | None, x_dot: Tensor | None, back: Tensor
) -> Tensor | None:
    """The tangent of Σ x·x̄ over everything but the input channels: ``Σ x·x̄̇ + ẋ·x̄``."""
    pairs = [(left, right) for left, right in ((x, back_dot), (x_dot, back)) if left is not None and right is not None]
    if not pairs:
        return None
    flat = [tensor for pair in pairs for tensor in pair]
    if shape.channel_dim(x) == 1 and fits_kernels(*flat):
        return load_kernels().channel_dots(*flat)
    rest = [axis for axis in range(x.dim()) if axis != shape.channel_dim(x)]
    wide = torch.promote_types(x.dtype, torch.float32)
    parts = [(left * right).sum(rest, dtype=wide) if rest else left * right for left, right in pairs]
    return sum_present(*parts)


def halves(like: Tensor) -> tuple[Tensor, Tensor]:
    """Two new tensors of the shape and strides of ``like`` (which must be dense), one behind the other in memory.

    They are no views of a third, of which forward mode would have to keep a tangent, too.
    """
    both = torch.empty(2 * like.numel(), dtype=like.dtype, device=like.device)
    first, second = (torch.empty(0, dtype=like.dtype, device=like.device) for _ in range(2))
    first.set_(both.untyped_storage(), 0, like.shape, like.stride())
    second.set_(both.untyped_storage(), like.numel(), like.shape, like.stride())
    return first, second


def split_batch(pair: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the second half of a batch [2N, …], on its memory."""
    shape = (pair.shape[0] // 2, *pair.shape[1:])
    return alias(pair, 0, shape), alias(pair, shape[0] * pair.stride(0), shape)


def empty_pair(x: Tensor) -> Tensor:
    """An empty batch of twice the size, for functions that look at its shape only."""
    shape = (2 * x.shape[0], *x.shape[1:])
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=dense_format(x))


def as_one_batch(first: Tensor, second: Tensor) -> Tensor | None:
    """Both as one batch [2N, …] without copying, or None if they do not lie side by side.

    >>> first, second = halves(torch.zeros(2, 3))
    >>> as_one_batch(first, second).shape, as_one_batch(second, first)
    (torch.Size([4, 3]), None)
    """
    beside = (
        first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and second.storage_offset() == first.storage_offset() + first.numel()
        and first.shape == second.shape
        and first.stride() == second.stride()
        and first.dim() > 1
        and first.stride(0) * first.shape[0] == first.numel()
    )
    if not beside:
        return None
    return first.as_strided((2 * first.shape[0], *first.shape[1:]), first.stride(), first.storage_offset())


def is_dense(x: Tensor) -> bool:
    """Return whether it is contiguous, channels first or last."""
    return x.is_contiguous() or (x.dim() > 2 and x.movedim(1, -1).is_contiguous())


def dense_format(x: Tensor) -> torch.memory_format:
    """Its memory format."""
    if x.is_contiguous() or x.dim() not in (4, 5):
        return torch.contiguous_format
    return torch.channels_last if x.dim() == 4 else torch.channels_last_3d


def laid_out_as(tensor: Tensor, x: Tensor) -> Tensor:
    """The tensor, in memory as ``x`` is.

    >>> laid_out_as(torch.zeros(2, 3, 4), torch.zeros(2, 4, 3).mT).stride()
    (12, 1, 3)
    """
    return tensor if tensor.stride() == x.stride() else torch.empty_like(x, dtype=tensor.dtype).copy_(tensor)


def fits_kernels(*tensors: Tensor) -> bool:
    """Return whether :mod:`ifso.curvature.kernels` takes these: [N, C, …] on the current GPU, dense, no float64."""
    first = tensors[0]
    return (
        first.dim() in (3, 4, 5)
        and first.is_cuda
        and first.device.index == torch.cuda.current_device()  # where Triton would put them
        and is_dense(first)
        and all(
            tensor.dtype != torch.float64 and tensor.stride() == first.stride() and tensor.shape == first.shape
            for tensor in tensors
        )
        and _has_triton()
    )


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def load_kernels() -> Any:
    """The module with the kernels; only for tensors of :func:`fits_kernels`."""
    return import_module("ifso.curvature.kernels")
