"""While the mode is on, a model computes on dual numbers: parameters get tangents, masks their derivatives.

PyTorch's forward mode carries the tangents through whatever the model, the loss and the backward pass do. The layers
that cost the time are taken out of its hands and given to :mod:`ifso.curvature.dual_layers`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.forward_ad import _set_fwd_grad_enabled, unpack_dual
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._pytree import tree_map

from ifso.common.tensors import placed
from ifso.common.torch_state import undisturbed, without_checkpoints
from ifso.curvature.decompositions import DECOMPOSITIONS, call_linear, is_linear_in_input
from ifso.curvature.dual_functions import (
    RELU,
    DualActivation,
    DualActivationInPlace,
    DualAddInPlace,
    DualAttention,
    DualBatchNorm,
    DualClamp,
    DualClampInPlace,
    DualLayerNorm,
    DualSoftmax,
)
from ifso.curvature.dual_layers import ConvShape, DualLayer, LinearShape, dual_zero
from ifso.curvature.primal_cache import CachedCall, PrimalCache, is_careful


@dataclass(eq=False)
class ParameterPlan:
    """What one parameter of the model does wherever it is used.

    As the weight of a layer it has the tangent ``dot``, its input channels are scaled by a mask with the tangent
    ``mask_dot(groups)``, and ``weight_tap()`` and ``mask_tap(groups)`` collect. In any other use it is replaced by
    ``stand_in()``, a dual number.
    """

    dot: Tensor | None = None
    mask_dot: Callable[[int], Tensor | float] | None = None
    weight_tap: Callable[[], Tensor] | None = None
    mask_tap: Callable[[int], Tensor] | None = None
    stand_in: Callable[[], Tensor] | None = None
    in_layers: bool = True


@dataclass(frozen=True)
class PassOptions:
    """How a pass computes; the first two as for :class:`ifso.curvature.products.Products`.

    ``cache`` is what passes over the same batch share, None if they share nothing.
    """

    fused: bool = True
    careful: bool | None = None
    cache: PrimalCache | None = None

    def next_call(self, key: Any, weight: Tensor) -> CachedCall:
        """What the cache has of the next call of a layer."""
        careful = is_careful(self.careful, weight)
        return CachedCall(key, careful) if self.cache is None else self.cache.next_call(key, careful)


class DualMode(TorchFunctionMode):
    """Run layers on dual numbers; ``plans`` maps ``id(parameter)`` to its :class:`ParameterPlan`."""

    def __init__(self, plans: Mapping[int, ParameterPlan], options: PassOptions) -> None:
        super().__init__()
        self._plans, self._options = plans, options
        if options.cache is not None:
            options.cache.start()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One call of a torch function."""
        kwargs = kwargs or {}
        if not torch.is_grad_enabled():
            with _set_fwd_grad_enabled(False):
                return func(*args, **kwargs)
        if self._options.fused and func in _DUAL_LAYERS:
            result = _DUAL_LAYERS[func](self, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if func is F.multi_head_attention_forward:
            with self:
                return seen_inside(func)(*args, **kwargs)
        args, kwargs = self._with_stand_ins(args), self._with_stand_ins(kwargs)
        if is_linear_in_input(func):
            return call_linear(func, *args, **kwargs)
        return DECOMPOSITIONS.get(func, func)(*args, **kwargs)

    def _with_stand_ins(self, value: Any) -> Any:
        """Arguments of a call, nested as they may be; ``tree_map`` takes longer than most calls on small tensors."""
        kind = type(value)
        if kind is tuple or kind is list:
            return kind([self._with_stand_ins(item) for item in value])
        if kind is dict:
            return {key: self._with_stand_ins(item) for key, item in value.items()}
        return tree_map(self.stand_in, value) if isinstance(value, (tuple, list, dict)) else self.stand_in(value)

    @cached_property
    def dual_zero(self) -> Tensor:
        """What makes torch ask layers for their tangents."""
        return dual_zero()

    def watches(self, *tensors: Tensor | None) -> bool:
        """Whether one of the tensors has a plan."""
        return any(id(tensor) in self._plans for tensor in tensors if tensor is not None)

    def moves(self, *tensors: Tensor | None) -> bool:
        """Whether one of the tensors has a plan, or was computed from something that moves or is differentiated."""
        return self.watches(*tensors) or any(map(_derived, tensors))

    def stand_in(self, value: Any) -> Any:
        """A parameter as the dual number it stands for; anything else as it is."""
        plan = self._plans.get(id(value)) if isinstance(value, Tensor) else None
        return value if plan is None or plan.stand_in is None else plan.stand_in()

    def layer(self, shape: ConvShape | LinearShape, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        """A convolution or linear layer by :class:`DualLayer`."""
        plan = self._plans.get(id(weight), ParameterPlan())
        x, x_dot = _primal_and_dot(self.stand_in(x))
        if not plan.in_layers or _derived(weight):
            return NotImplemented
        mask_dot = plan.mask_dot(shape.groups) if plan.mask_dot else None
        weight_tap = plan.weight_tap() if plan.weight_tap else None
        mask_tap = plan.mask_tap(shape.groups) if plan.mask_tap else None
        if isinstance(mask_dot, Tensor):
            mask_dot = placed(mask_dot.to(x.dtype), shape.channel_dim(x), x.dim())
        late = bias if self.moves(bias) else None
        early = None if late is not None else bias
        x, x_dot, cast, dot, early = _as_autocast(x, x_dot, weight.detach(), plan.dot, early)
        known = self._options.next_call((shape, id(weight), x.shape), weight)
        result = DualLayer.apply(
            shape, known, x, x_dot, cast, dot, early, mask_dot, weight_tap, mask_tap, self.dual_zero
        )
        if late is not None:
            result = result + placed(self.stand_in(late).to(result.dtype), shape.channel_dim(x), result.dim())
        return result


def seen_inside(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of ``torch.nn.functional`` that does not hand itself to a mode: so the mode sees what it calls."""
    names = {**function.__globals__, "has_torch_function": lambda _: False}
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


@contextlib.contextmanager
def twice_differentiable(model: nn.Module) -> Iterator[None]:
    """Within it a loss can be differentiated twice: plain attention, no checkpoints. The model is left as it was."""
    with undisturbed(model), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), without_checkpoints():
        yield


@contextlib.contextmanager
def below_other_modes(mode: TorchFunctionMode) -> Iterator[None]:
    """Switch the mode on as the last to see a call: those that are on already see it whole, as the model made it."""
    others = _get_current_function_mode_stack()
    with contextlib.ExitStack() as stack:
        for _ in others:
            _pop_mode()
        stack.callback(lambda: [_push_mode(other) for other in others])
        stack.enter_context(mode)
        for other in others:
            _push_mode(other)
        stack.callback(lambda: [_pop_mode() for _ in others])
        yield


def _as_autocast(x: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """What autocast does before a convolution or a matrix product."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x, *others
    dtype = torch.get_autocast_dtype(device)
    return tuple(None if tensor is None else tensor.to(dtype) for tensor in (x, *others))


def _conv(dims: int) -> Callable[..., Any]:
    def convolve(
        mode: DualMode, input: Tensor, weight: Tensor, bias: Tensor | None = None,
        stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
    ) -> Any:  # fmt: skip
        if isinstance(padding, str) or input.dim() != dims + 2:
            return NotImplemented
        shape = ConvShape(
            per_dim(stride, dims), per_dim(padding, dims), per_dim(dilation, dims), False, [0] * dims, groups
        )
        return mode.layer(shape, input, weight, bias)

    return convolve


def per_dim(value: Any, dims: int) -> list[int]:
    """A setting of a convolution for each of its dims."""
    return [value] * dims if isinstance(value, int) else list(value) * (dims if len(value) == 1 else 1)


def _linear(mode: DualMode, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    return mode.layer(LinearShape(), input, weight, bias)


def _batch_norm(
    mode: DualMode, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    weight: Tensor | None = None, bias: Tensor | None = None, training: bool = False,
    momentum: float = 0.1, eps: float = 1e-5,
) -> Any:  # fmt: skip
    del momentum
    x, x_dot = _primal_and_dot(input)
    if mode.moves(weight, bias):
        return NotImplemented
    if training:
        if x_dot is None:
            return NotImplemented
        return DualBatchNorm.apply(x, x_dot, weight, bias, eps, mode.dual_zero)
    assert running_mean is not None
    assert running_var is not None
    scale = (running_var + eps).rsqrt()
    scale = scale if weight is None else scale * weight.detach()
    shift = -running_mean * scale if bias is None else bias.detach() - running_mean * scale
    return input * placed(scale, 1, input.dim()).to(input.dtype) + placed(shift, 1, input.dim()).to(input.dtype)


def _primal_and_dot(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Both halves; the tangent without a graph of its own."""
    primal, tangent = unpack_dual(x)
    return primal, None if tangent is None else tangent.detach()


def _derived(tensor: Tensor | None) -> bool:
    """Whether it was computed from something that moves or is differentiated."""
    return tensor is not None and (
        (tensor.requires_grad and not tensor.is_leaf) or unpack_dual(tensor).tangent is not None
    )


def _layer_norm(
    mode: DualMode, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None,
    bias: Tensor | None = None, eps: float = 1e-5,
) -> Any:  # fmt: skip
    x, x_dot = _primal_and_dot(input)
    if x_dot is None or mode.moves(weight, bias) or _autocasts(x):
        return NotImplemented
    gain, shift = (None if tensor is None else tensor.detach() for tensor in (weight, bias))
    return DualLayerNorm.apply(x, x_dot, list(normalized_shape), gain, shift, eps, mode.dual_zero)


def _gelu(mode: DualMode, input: Tensor, approximate: str = "none") -> Any:
    return _elementwise(mode, DualActivation, input, "gelu" if approximate == "none" else "gelu_tanh")


def _silu(mode: DualMode, input: Tensor, inplace: bool = False) -> Any:
    return _elementwise(mode, DualActivationInPlace if inplace else DualActivation, input, "silu", inplace=inplace)


def _softmax(mode: DualMode, input: Tensor, dim: Any = None, _stacklevel: Any = 3, dtype: Any = None) -> Any:
    x, x_dot = _primal_and_dot(input)
    plain = isinstance(dim, int) and isinstance(_stacklevel, int) and dtype is None  # no name, no other dtype
    if x_dot is None or not plain or x.dtype in (torch.float16, torch.bfloat16) or _autocasts(x):
        return NotImplemented
    return DualSoftmax.apply(dim, x, x_dot, mode.dual_zero)


def _elementwise(mode: DualMode, kind: Any, input: Tensor, *settings: Any, inplace: bool = False) -> Any:
    x, x_dot = _primal_and_dot(input)
    if x_dot is None or (inplace and not _can_be_written(input)):
        return NotImplemented
    return kind.apply(*settings, input if inplace else x, x_dot, mode.dual_zero)


def _clamp(low: float, high: float) -> Callable[..., Any]:
    def clamp(mode: DualMode, input: Tensor, inplace: bool = False) -> Any:
        return _elementwise(mode, DualClampInPlace if inplace else DualClamp, input, low, high, inplace=inplace)

    return clamp


def _hardtanh(mode: DualMode, input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Any:
    return _clamp(min_val, max_val)(mode, input, inplace)


_RELU = _clamp(*RELU)


def _add_(mode: DualMode, input: Tensor, other: Any, *, alpha: float = 1) -> Any:  # noqa: ARG001 (one protocol)
    x, x_dot = _primal_and_dot(input)
    if alpha != 1 or not isinstance(other, Tensor) or x_dot is None or not _can_be_written(input):
        return NotImplemented
    z, z_dot = _primal_and_dot(other)
    if z_dot is None or z.shape != x.shape or z.dtype != x.dtype:
        return NotImplemented
    return DualAddInPlace.apply(input, x_dot, z, z_dot)


def _can_be_written(input: Tensor) -> bool:
    """Whether a function of ours may write over it and its tangent: what another function gave, and no part of it."""
    return not input.is_leaf and not input._is_view()


def _attention(
    mode: DualMode, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    pairs = [_primal_and_dot(tensor) for tensor in (query, key, value)]
    q, k, _ = (primal for primal, _ in pairs)
    known = all(dot is not None for _, dot in pairs) and not (mode.watches(attn_mask) or _moves(attn_mask))
    if not known or dropout_p or is_causal or enable_gqa or q.dtype in (torch.float16, torch.bfloat16) or _autocasts(q):
        return NotImplemented
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(~attn_mask, -math.inf)
    if not q.shape[:-2] == k.shape[:-2] == value.shape[:-2]:
        return NotImplemented
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return DualAttention.apply(factor, attn_mask, *(part for pair in pairs for part in pair), mode.dual_zero)


def _autocasts(x: Tensor) -> bool:
    """Whether torch would change the precision of a function of ``x``."""
    return torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64


def _moves(tensor: Tensor | None) -> bool:
    """Whether it is differentiated, or has a tangent."""
    return tensor is not None and (tensor.requires_grad or unpack_dual(tensor).tangent is not None)


_DUAL_LAYERS: dict[Any, Callable[..., Any]] = {
    torch.conv1d: _conv(1),
    torch.conv2d: _conv(2),
    torch.conv3d: _conv(3),
    F.linear: _linear,
    F.batch_norm: _batch_norm,
    F.layer_norm: _layer_norm,
    F.gelu: _gelu,
    F.silu: _silu,
    F.hardtanh: _hardtanh,
    F.relu6: _clamp(0, 6),
    **dict.fromkeys((F.relu, torch.relu, Tensor.relu), _RELU),
    **dict.fromkeys((torch.relu_, Tensor.relu_), partial(_RELU, inplace=True)),
    **dict.fromkeys((Tensor.add_, Tensor.__iadd__), _add_),
    **dict.fromkeys((F.softmax, torch.softmax, Tensor.softmax), _softmax),
    F.scaled_dot_product_attention: _attention,
}
