"""While the mode is on, a model computes on dual numbers: parameters get tangents, masks their derivatives.

PyTorch's forward mode carries the tangents through whatever the model, the loss and the backward pass do. The layers
that cost the time are taken out of its hands and given to :mod:`ifso.curvature.dual_layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.forward_ad import make_dual, unpack_dual
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ifso.curvature.dual_layers import ConvShape, DualBatchNorm, DualLayer, LinearShape


@dataclass(eq=False)
class Plan:
    """What happens to one parameter of the model wherever it is used.

    As the weight of a layer it has the tangent ``dot``, its input channels are scaled by a mask with the tangent
    ``mask_dot(groups)``, and ``weight_tap`` and ``mask_tap(groups)`` collect. In any other use it is replaced by
    ``stand_in()``, a dual number.
    """

    dot: Tensor | None = None
    mask_dot: Callable[[int], Tensor | float] | None = None
    weight_tap: Tensor | None = None
    mask_tap: Callable[[int], Tensor] | None = None
    stand_in: Callable[[], Tensor] | None = None
    in_layers: bool = True


class DualMode(TorchFunctionMode):
    """Runs layers on dual numbers; ``plans`` maps ``id(parameter)`` to its :class:`Plan`."""

    def __init__(self, plans: Mapping[int, Plan], fused: bool = True) -> None:
        super().__init__()
        self._plans = plans
        self._fused = fused

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One call of a torch function."""
        kwargs = kwargs or {}
        if func in _BY_HAND and (self._fused or func in _ALWAYS):
            result = _BY_HAND[func](self, *args, **kwargs)
            if result is not NotImplemented:
                return result
        args, kwargs = tree_map(self.stand_in, (args, kwargs))
        return func(*args, **kwargs)

    def watches(self, *tensors: Tensor | None) -> bool:
        """Has one of the tensors a plan?"""
        return any(id(tensor) in self._plans for tensor in tensors if tensor is not None)

    def stand_in(self, value: Any) -> Any:
        """A parameter as the dual number it stands for; anything else as it is."""
        plan = self._plans.get(id(value)) if isinstance(value, Tensor) else None
        return value if plan is None or plan.stand_in is None else plan.stand_in()

    def layer(self, shape: ConvShape | LinearShape, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        """A convolution or linear layer by :class:`DualLayer`."""
        plan = self._plans.get(id(weight), Plan())
        x = self.stand_in(x)
        x, x_dot = unpack_dual(x)
        if not plan.in_layers or unpack_dual(weight).tangent is not None or weight.requires_grad != weight.is_leaf:
            return NotImplemented
        mask_dot = plan.mask_dot(shape.groups) if plan.mask_dot else None
        mask_tap = plan.mask_tap(shape.groups) if plan.mask_tap else None
        if isinstance(mask_dot, Tensor):
            mask_dot = _along(mask_dot.to(x.dtype), shape.channel_dim(x), x)
        late = bias if self.watches(bias) else None
        early = None if late is not None else bias
        x, x_dot, cast, dot, early = _as_autocast(x, x_dot, weight.detach(), plan.dot, early)
        y, y_dot = DualLayer.apply(shape, x, x_dot, cast, dot, early, mask_dot, plan.weight_tap, mask_tap)
        result = y if y_dot is None else make_dual(y, y_dot)
        if late is not None:
            result = result + _along(self.stand_in(late).to(result.dtype), shape.channel_dim(x), result)
        return result


def _along(vector: Tensor, dim: int, like: Tensor) -> Tensor:
    """A vector as a factor along one dim of ``like``."""
    sizes = [1] * like.dim()
    sizes[dim] = -1
    return vector.view(sizes)


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
        shape = ConvShape(_each(stride, dims), _each(padding, dims), _each(dilation, dims), False, [0] * dims, groups)
        return mode.layer(shape, input, weight, bias)

    return convolve


def _each(value: Any, dims: int) -> list[int]:
    return [value] * dims if isinstance(value, int) else list(value) * (dims if len(value) == 1 else 1)


def _linear(mode: DualMode, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    return mode.layer(LinearShape(), input, weight, bias)


def _batch_norm(
    mode: DualMode, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    weight: Tensor | None = None, bias: Tensor | None = None, training: bool = False,
    momentum: float = 0.1, eps: float = 1e-5,
) -> Any:  # fmt: skip
    del momentum
    x, x_dot = unpack_dual(input)
    if mode.watches(weight, bias):
        return NotImplemented
    if training:
        if x_dot is None:
            return NotImplemented
        y, y_dot = DualBatchNorm.apply(x, x_dot, weight, bias, eps)
        return make_dual(y, y_dot)
    assert running_mean is not None
    assert running_var is not None
    scale = (running_var + eps).rsqrt()
    scale = scale if weight is None else scale * weight.detach()
    shift = -running_mean * scale if bias is None else bias.detach() - running_mean * scale
    return input * _along(scale, 1, input).to(input.dtype) + _along(shift, 1, input).to(input.dtype)


def _mse_loss(mode: DualMode, input: Tensor, target: Tensor, *_: Any, reduction: str = "mean", **__: Any) -> Any:
    """PyTorch's forward mode stumbles over its own zero tensors here."""
    square = (mode.stand_in(input) - mode.stand_in(target)) ** 2
    return {"mean": square.mean, "sum": square.sum}.get(reduction, lambda: square)()


_BY_HAND: dict[Any, Callable[..., Any]] = {
    torch.conv1d: _conv(1),
    torch.conv2d: _conv(2),
    torch.conv3d: _conv(3),
    F.linear: _linear,
    F.batch_norm: _batch_norm,
    F.mse_loss: _mse_loss,
}
_ALWAYS = {F.mse_loss}
