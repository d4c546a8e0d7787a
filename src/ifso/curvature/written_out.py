"""Functions spelt out in simpler ones, where PyTorch's forward mode lacks or fails the derivative of their gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def silu(input: Tensor, inplace: bool = False) -> Tensor:
    """x σ(x)."""
    return _given(input, lambda z: z * z.sigmoid(), inplace)


def mish(input: Tensor, inplace: bool = False) -> Tensor:
    """x tanh(softplus(x))."""
    return _given(input, lambda z: z * F.softplus(z).tanh(), inplace)


def hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    """A line between 0 and 1."""
    return _given(input, lambda z: ((z + 3) / 6).clamp(0, 1), inplace)


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Statistics over the channels of a group."""
    parts = input.reshape(input.shape[0], num_groups, -1)
    variance, mean = torch.var_mean(parts, -1, correction=0, keepdim=True)
    y = ((parts - mean) * (variance + eps).rsqrt()).view(input.shape)
    column = (1, -1, *[1] * (input.dim() - 2))
    y = y if weight is None else y * weight.view(column)
    return y if bias is None else y + bias.view(column)


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """g · v / ‖v‖, the norm over all dims but one (or over all, dim −1)."""
    rest = [axis for axis in range(v.dim()) if axis != dim]
    return v * (g / v.square().sum(rest, keepdim=True).sqrt())


def attention(*args: Any, **kwargs: Any) -> Tensor:
    """Scaled dot products in plain matrix products, whichever kernel the model asks for."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


def in_plain_kernels(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function without cuDNN and oneDNN: a recurrent layer runs step by step, not in one kernel for all steps."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _switched_off(torch.backends.cudnn), _switched_off(torch.backends.mkldnn):
            return function(*args, **kwargs)

    return run


@contextlib.contextmanager
def _switched_off(backend: Any) -> Iterator[None]:
    before, backend.enabled = backend.enabled, False
    try:
        yield
    finally:
        backend.enabled = before


def mse_loss(
    input: Tensor, target: Tensor, size_average: Any = None, reduce: Any = None, reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """(input − target)²."""
    square = (input - target) ** 2
    if weight is not None:
        square = square * weight
    mean = square.mean() if weight is None else square.sum() / weight.expand_as(square).sum()
    return _reduced(square, mean, _old_name(size_average, reduce, reduction))


def huber_loss(
    input: Tensor, target: Tensor, reduction: str = "mean", delta: float = 1.0, weight: Tensor | None = None
) -> Tensor:
    """A parabola, then a line."""
    error = (input - target).abs()
    loss = torch.where(error < delta, 0.5 * (input - target) ** 2, delta * (error - 0.5 * delta))
    if weight is not None:
        loss = loss * weight
    mean = loss.mean() if weight is None else loss.sum() / weight.expand_as(loss).sum()
    return _reduced(loss, mean, reduction)


def soft_margin_loss(
    input: Tensor, target: Tensor, size_average: Any = None, reduce: Any = None, reduction: str = "mean"
) -> Tensor:
    """log(1 + exp(−target · input))."""
    loss = F.softplus(-target * input)
    return _reduced(loss, loss.mean(), _old_name(size_average, reduce, reduction))


def _given(x: Tensor, function: Callable[[Tensor], Tensor], inplace: bool) -> Tensor:
    return x.copy_(function(x.clone())) if inplace else function(x)


def _old_name(size_average: Any, reduce: Any, reduction: str) -> str:
    if size_average is None and reduce is None:
        return reduction
    if reduce is False:
        return "none"
    return "sum" if size_average is False else "mean"


def _reduced(loss: Tensor, mean: Tensor, reduction: str) -> Tensor:
    return {"mean": mean, "sum": loss.sum(), "none": loss}[reduction]


WRITTEN_OUT: dict[Any, Callable[..., Any]] = {
    F.silu: silu,
    F.mish: mish,
    F.hardsigmoid: hardsigmoid,
    F.group_norm: group_norm,
    torch._weight_norm: weight_norm,
    F.scaled_dot_product_attention: attention,
    **{
        function: in_plain_kernels(function)
        for function in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu, F.grid_sample)
    },
    F.mse_loss: mse_loss,
    F.huber_loss: huber_loss,
    F.soft_margin_loss: soft_margin_loss,
}
