"""Layers that take kernels of ours in training: convolutions of few channels, and batch norms."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from ifso.common.cuda_graphs import captures_go_to


@cache
def available() -> bool:
    """Return whether there is a Triton to compile the kernel with."""
    return importlib.util.find_spec("triton") is not None


def triton_layers(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """:class:`TritonLayers` where they can be had: in bfloat16, on the current GPU, with Triton."""
    fits = precision == "bf16" and captures_go_to(device) and available()
    return TritonLayers() if fits else nullcontext()


class TritonLayers(TorchFunctionMode):
    """Within it, narrow convolutions and batch norms in training take our kernels, under bfloat16 autocast on a GPU.

    The result of every layer is the same; gradients of weights are summed in another order, and stay in float32.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Only ``conv2d`` and ``batch_norm`` are looked at."""
        if func is F.conv2d and not kwargs and len(args) == 7 and _suits(args[0], args[1], *args[3:]):
            x, weight, bias, stride, padding, _, _ = args
            y = _Convolution.apply(x.to(torch.bfloat16), weight, stride[0], padding[0])
            return y if bias is None else y + bias.to(y.dtype).view(1, -1, 1, 1)
        if func is F.batch_norm and (norm := _Norm(*args, **(kwargs or {}))).suits():
            return _BatchNorm.apply(norm.x, norm.weight, norm.bias, norm.mean, norm.var, norm.momentum, norm.eps)
        return func(*args, **(kwargs or {}))


def _bfloat16() -> bool:
    return torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16


def _suits(x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> bool:
    from ifso.training.kernels import WIDEST

    square = all(isinstance(pair, tuple) and len(set(pair)) == 1 for pair in (stride, padding, dilation))
    return (
        x.is_cuda
        and _bfloat16()
        and square
        and groups == 1
        and dilation[0] == 1
        and weight.shape[2] == weight.shape[3]
        and max(weight.shape[:2]) <= WIDEST
        and weight.requires_grad
        and torch.float64 not in (x.dtype, weight.dtype)
        and x.dim() == 4
        and 0 < x.shape[0] * x.shape[2] * x.shape[3] * WIDEST < 2**30
    )


class _Norm(NamedTuple):
    """The arguments of ``F.batch_norm``."""

    x: Tensor
    mean: Tensor | None
    var: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float | None = 0.1
    eps: float = 1e-5

    def suits(self) -> bool:
        """Return whether our kernels can take it."""
        x, tensors = self.x, (self.weight, self.bias, self.mean, self.var)
        return (
            x.is_cuda
            and _bfloat16()
            and self.training
            and self.momentum is not None
            and all(tensor is not None and tensor.dtype == torch.float32 for tensor in tensors)
            and x.dtype == torch.bfloat16
            and x.dim() == 4
            and x.is_contiguous(memory_format=torch.channels_last)
            and x.numel() // x.shape[1] > 1
            and x.numel() < 2**31
        )


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, momentum: float, eps: float
    ) -> Tensor:
        from ifso.training.kernels import batch_norm

        y, stats = batch_norm(x, weight, bias, mean, var, momentum, eps)
        ctx.save_for_backward(x, weight, stats)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from ifso.training.kernels import batch_norm_gradients

        x, weight, stats = ctx.saved_tensors
        dy = dy.to(x.dtype).contiguous(memory_format=torch.channels_last)
        return *batch_norm_gradients(x, dy, weight, stats), None, None, None, None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
        from ifso.training.kernels import convolution

        x = x.contiguous(memory_format=torch.channels_last)
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding = stride, padding
        return convolution(x, weight, stride, padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        from ifso.training.kernels import input_gradient, weight_gradient

        x, weight = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        dx = None
        if ctx.needs_input_grad[0] and ctx.stride == 1:
            dx = input_gradient(dy, weight, ctx.padding)
        elif ctx.needs_input_grad[0]:
            geometry = [ctx.stride] * 2, [ctx.padding] * 2, [1, 1], False, [0, 0], 1
            narrow = weight.to(dy.dtype)
            dx = torch.ops.aten.convolution_backward(dy, x, narrow, None, *geometry, [True, False, False])[0]
        return dx, weight_gradient(x, dy, weight.shape[2], ctx.stride, ctx.padding), None, None
