"""Functions written in simpler ones, where forward mode lacks them, fails or has no second derivative.

:data:`DECOMPOSITIONS` are torch functions, which :class:`ifso.curvature.dual_mode.DualMode` exchanges when they are
called. :data:`RULES` are ATen operators met in the backward pass and inside other functions: dropout on a GPU, also
that of attention, and sampling at a grid. PyTorch keeps a table of such forms, which it looks into where it would
otherwise refuse; nothing else in the process changes.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import import_module
from itertools import product
from typing import Any, get_type_hints

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverloadPacket
from torch.autograd import Function
from torch.autograd.forward_ad import make_dual, unpack_dual
from torch.autograd.function import once_differentiable
from torch.nn._reduction import legacy_get_string
from torch.nn.attention import SDPBackend, sdpa_kernel

aten = torch.ops.aten

_NEAREST, _CUBIC = 1, 2
_BORDER, _REFLECTION = 1, 2


def _elementwise(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """An activation with the arguments of PyTorch's."""

    def activation(input: Tensor, inplace: bool = False) -> Tensor:
        return input.copy_(function(input.clone())) if inplace else function(input)

    return activation


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
    return _reduced((input - target) ** 2, _reduction_of(size_average, reduce, reduction), weight)


def huber_loss(
    input: Tensor, target: Tensor, reduction: str = "mean", delta: float = 1.0, weight: Tensor | None = None
) -> Tensor:
    """A parabola, then a line."""
    error = (input - target).abs()
    loss = torch.where(error < delta, 0.5 * (input - target) ** 2, delta * (error - 0.5 * delta))
    return _reduced(loss, reduction, weight)


def soft_margin_loss(
    input: Tensor, target: Tensor, size_average: Any = None, reduce: Any = None, reduction: str = "mean"
) -> Tensor:
    """log(1 + exp(−target · input))."""
    return _reduced(F.softplus(-target * input), _reduction_of(size_average, reduce, reduction))


def _reduction_of(size_average: Any, reduce: Any, reduction: str) -> str:
    """The reduction, which older code gives in two other arguments."""
    return reduction if size_average is None and reduce is None else legacy_get_string(size_average, reduce, False)


def _reduced(loss: Tensor, reduction: str, weight: Tensor | None = None) -> Tensor:
    loss = loss if weight is None else loss * weight
    if reduction == "mean":
        return loss.mean() if weight is None else loss.sum() / weight.expand_as(loss).sum()
    return {"sum": loss.sum(), "none": loss}[reduction]


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    F.silu: _elementwise(lambda x: x * x.sigmoid()),
    F.mish: _elementwise(lambda x: x * F.softplus(x).tanh()),
    F.hardsigmoid: _elementwise(lambda x: ((x + 3) / 6).clamp(0, 1)),
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

LINEAR_IN_INPUT = frozenset({"torchvision.roi_align", "torchvision.ps_roi_align"})
"""Names of operators that are linear in their first argument; they have no gradient for the others (boxes)."""


def is_linear_in_input(func: Any) -> bool:
    """Return whether the function is one of :data:`LINEAR_IN_INPUT`."""
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


@cache
def load_forward_mode() -> None:
    """Let torch load its formulas, and take ours; it warns of deprecated functions that it calls itself in doing so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table: Any = import_module("torch._decomp.decompositions_for_jvp")
        for operator, rule in RULES.items():
            rule.__annotations__ = get_type_hints(rule)
            table.register_decomposition_for_jvp(operator)(rule)
            table._register_jit_decomposition_for_jvp(operator, use_python=True)


def native_dropout_backward(grad_output: Tensor, mask: Tensor, scale: float) -> Tensor:
    """λ times the mask that was drawn."""
    return grad_output * (mask * scale)


def grid_sampler_backward(
    grad_output: Tensor,
    input: Tensor,
    grid: Tensor,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: list[bool],
) -> tuple[Tensor, Tensor]:
    """Gradients of the image and of the points where it is sampled."""
    with torch.enable_grad():
        image, points = leaves = [
            _leaf(tensor, asked) for tensor, asked in zip((input, grid), output_mask, strict=True)
        ]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        sampled = grid_sample(image, points, interpolation_mode, padding_mode, align_corners)
        grads = iter(torch.autograd.grad(sampled, wanted, grad_output, allow_unused=True) if wanted else ())
    found = [next(grads) if leaf.requires_grad else None for leaf in leaves]
    first, second = (
        torch.zeros_like(leaf) if one is None else one for one, leaf in zip(found, (input, grid), strict=True)
    )
    return first, second


def _leaf(tensor: Tensor, wanted: bool) -> Tensor:
    number, dot = unpack_dual(tensor)
    leaf = number.detach().requires_grad_(wanted)
    return leaf if dot is None else make_dual(leaf, dot.detach())


def grid_sample(image: Tensor, grid: Tensor, interpolation: int, padding: int, align_corners: bool) -> Tensor:
    """``F.grid_sample`` of an image [N, C, (D,) H, W] at a grid [N, (d,) h, w, 2 or 3], by plain indexing.

    The numbers of ``interpolation`` (linear, nearest, cubic) and ``padding`` (zeros, border, reflection) are ATen's.
    """
    sides = image.shape[2:]
    points = [
        ((one + 1) * (side - 1) / 2) if align_corners else (((one + 1) * side - 1) / 2)
        for one, side in zip(grid.unbind(-1)[::-1], sides, strict=True)
    ]
    if interpolation != _CUBIC:
        points = [_inside(point, side, padding, align_corners) for point, side in zip(points, sides, strict=True)]
    corners = [_corners(point, interpolation) for point in points]
    total = torch.zeros((), dtype=image.dtype, device=image.device)
    for corner in product(*corners):
        weight = torch.ones_like(points[0])
        index = []
        for (at, share), side in zip(corner, sides, strict=True):
            at = at if interpolation != _CUBIC else _inside(at, side, padding, align_corners).detach()
            weight = weight * share * ((at >= 0) & (at < side))
            index.append(at.clamp(0, side - 1).nan_to_num().long())
        total = total + _picked(image, index) * weight.unsqueeze(1)
    return total


def _picked(image: Tensor, index: Sequence[Tensor]) -> Tensor:
    """The pixels [N, C, …] at whole numbers [N, …]."""
    flat = torch.zeros_like(index[0])
    for one, side in zip(index, image.shape[2:], strict=True):
        flat = flat * side + one
    flat = flat.unsqueeze(1).expand(-1, image.shape[1], *flat.shape[1:])
    return image.flatten(2).gather(2, flat.flatten(2)).view(flat.shape)


def _corners(point: Tensor, interpolation: int) -> list[tuple[Tensor, Tensor]]:
    """Whole numbers around a point along one side, each with its share of the result."""
    number = point.detach()
    if interpolation == _NEAREST:
        return [(number.round(), torch.ones_like(number))]
    low = number.floor()
    part = point - low
    if interpolation != _CUBIC:
        return [(low, 1 - part), (low + 1, part)]
    shares = (_far(part + 1), _near(part), _near(1 - part), _far(2 - part))
    return [(low + shift, share) for shift, share in zip((-1, 0, 1, 2), shares, strict=True)]


def _near(x: Tensor, a: float = -0.75) -> Tensor:
    """Keys' cubic, up to 1 away."""
    return ((a + 2) * x - (a + 3)) * x * x + 1


def _far(x: Tensor, a: float = -0.75) -> Tensor:
    """Keys' cubic, from 1 to 2 away."""
    return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a


def _inside(point: Tensor, side: int, padding: int, align_corners: bool) -> Tensor:
    """A point outside of the image led back to its border, or mirrored at it."""
    if padding == _REFLECTION:
        low, span = (0.0, side - 1.0) if align_corners else (-0.5, float(side))
        if not span:
            return torch.zeros_like(point)
        beyond = (point - low).abs()
        turns = (beyond.detach() / span).floor()
        rest = beyond - turns * span
        point = torch.where(turns % 2 == 0, rest + low, span + low - rest)
    return point.clamp(0, side - 1) if padding in (_BORDER, _REFLECTION) else point


RULES: dict[Any, Callable[..., Any]] = {
    aten.native_dropout_backward.default: native_dropout_backward,
    aten.grid_sampler_2d_backward.default: grid_sampler_backward,
    aten.grid_sampler_3d_backward.default: grid_sampler_backward,
}
