"""Parts of random networks that work on images [N, C, H, W], each a small module written as users write it.

A builder takes the shape that comes in and numbers to choose by; it returns a module and the shape that goes out, or
None where the part cannot be had (no divisor, too few positions). Every choice begins with its simplest option.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

T = TypeVar("T")


@dataclass(frozen=True)
class Map:
    """What passes between parts: ``channels`` on ``size`` × ``size`` positions."""

    channels: int
    size: int


class Numbers:
    """Choices by number: any integers choose something, zeros the simplest."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers: Iterator[int] = iter(numbers)

    def pick(self, *options: T) -> T:
        """One of the options."""
        return options[next(self._numbers, 0) % len(options)]

    def divisor(self, total: int, smallest: int = 2) -> int | None:
        """A number of equal blocks, of two or more each; None if there is none."""
        options = [count for count in range(smallest, total // 2 + 1) if total % count == 0]
        return self.pick(*options) if options else None


Made = tuple[nn.Module, Map] | None
Builder = Callable[[Map, Numbers], Made]
IMAGE_PARTS: dict[str, Builder] = {}

WIDTHS = (4, 6, 8, 3, 12, 5)
MOMENTUM = 1.0
"""After a step in train mode the running statistics are those of the batch, so they can be compared."""


def part(function: Builder) -> Builder:
    """Register a builder under its name."""
    IMAGE_PARTS[function.__name__] = function
    return function


class Lambda(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


# ---- convolutions ---------------------------------------------------------------------------------------------------


@part
def conv(shape: Map, numbers: Numbers) -> Made:
    width, kernel = numbers.pick(*WIDTHS), numbers.pick(1, 3)
    stride = numbers.pick(1, 1, 2) if shape.size >= 4 else 1
    layer = nn.Conv2d(shape.channels, width, kernel, stride, padding=kernel // 2, bias=numbers.pick(True, False))
    return layer, Map(width, -(-shape.size // stride))


@part
def grouped_conv(shape: Map, numbers: Numbers) -> Made:
    groups = numbers.divisor(shape.channels)
    if groups is None:
        return None
    width = groups * numbers.pick(2, 1, 3)
    return nn.Conv2d(shape.channels, width, numbers.pick(1, 3), padding="same", groups=groups), Map(width, shape.size)


@part
def depthwise_conv(shape: Map, numbers: Numbers) -> Made:
    width = shape.channels * numbers.pick(1, 1, 2)
    layer = nn.Conv2d(shape.channels, width, 3, padding=1, groups=shape.channels, bias=numbers.pick(True, False))
    return layer, Map(width, shape.size)


@part
def transposed_conv(shape: Map, numbers: Numbers) -> Made:
    width, stride = numbers.pick(*WIDTHS), numbers.pick(1, 2) if shape.size <= 4 else 1
    return nn.ConvTranspose2d(shape.channels, width, stride, stride), Map(width, shape.size * stride)


@part
def transposed_grouped_conv(shape: Map, numbers: Numbers) -> Made:
    groups = numbers.pick(numbers.divisor(shape.channels), shape.channels)
    if groups is None:
        return None
    width = groups * numbers.pick(2, 1, 3)
    return nn.ConvTranspose2d(shape.channels, width, 3, padding=1, groups=groups), Map(width, shape.size)


@part
def conv1d(shape: Map, numbers: Numbers) -> Made:
    width = numbers.pick(*WIDTHS)
    layers = (
        nn.Flatten(2),
        nn.Conv1d(shape.channels, width, 3, padding=1),
        nn.Unflatten(2, (shape.size, shape.size)),
    )
    return nn.Sequential(*layers), Map(width, shape.size)


@part
def conv3d(shape: Map, numbers: Numbers) -> Made:
    width = numbers.pick(*WIDTHS)
    unsqueeze, squeeze = Lambda(lambda x: x.unsqueeze(2)), Lambda(lambda x: x.squeeze(2))
    return nn.Sequential(unsqueeze, nn.Conv3d(shape.channels, width, 1), squeeze), Map(width, shape.size)


@part
def weight_norm_conv(shape: Map, numbers: Numbers) -> Made:
    width = numbers.pick(*WIDTHS)
    return nn.utils.parametrizations.weight_norm(nn.Conv2d(shape.channels, width, 1)), Map(width, shape.size)


class StandardisedConv(nn.Conv2d):
    """Each filter is brought to mean 0 and variance 1 before use."""

    def forward(self, x: Tensor) -> Tensor:
        mean = self.weight.mean((1, 2, 3), keepdim=True)
        deviation = self.weight.var((1, 2, 3), keepdim=True, unbiased=False).add(1e-3).sqrt()
        return F.conv2d(x, (self.weight - mean) / deviation, self.bias, self.stride, self.padding)


@part
def standardised_conv(shape: Map, numbers: Numbers) -> Made:
    width = numbers.pick(*WIDTHS)
    return StandardisedConv(shape.channels, width, 3, padding=1), Map(width, shape.size)


# ---- norms ----------------------------------------------------------------------------------------------------------


@part
def batch_norm(shape: Map, numbers: Numbers) -> Made:
    affine = numbers.pick(True, True, False)
    return nn.BatchNorm2d(shape.channels, momentum=MOMENTUM, affine=affine), shape


@part
def group_norm(shape: Map, numbers: Numbers) -> Made:
    groups = numbers.pick(numbers.divisor(shape.channels), 1, shape.channels if shape.size > 1 else 1)
    return None if groups is None else (nn.GroupNorm(groups, shape.channels, affine=numbers.pick(True, False)), shape)


@part
def instance_norm(shape: Map, numbers: Numbers) -> Made:
    if shape.size == 1:
        return None
    affine, running = numbers.pick(True, False), numbers.pick(False, True)
    norm = nn.InstanceNorm2d(shape.channels, affine=affine, track_running_stats=running, momentum=MOMENTUM)
    return norm, shape


class ChannelsLast(nn.Module):
    """A layer over the last axis, used on images."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@part
def layer_norm(shape: Map, numbers: Numbers) -> Made:
    if numbers.pick(False, True):
        return nn.LayerNorm([shape.channels, shape.size, shape.size]), shape
    return ChannelsLast(nn.LayerNorm(shape.channels, elementwise_affine=numbers.pick(True, False))), shape


@part
def rms_norm(shape: Map, numbers: Numbers) -> Made:
    return ChannelsLast(nn.RMSNorm(shape.channels, eps=1e-5)), shape


@part
def length_norm(shape: Map, numbers: Numbers) -> Made:
    return Lambda(lambda x: F.normalize(x, dim=1)), shape


@part
def response_norm(shape: Map, numbers: Numbers) -> Made:
    return nn.LocalResponseNorm(3), shape


@part
def centred(shape: Map, numbers: Numbers) -> Made:
    """The mean over channels is taken away, or all are made to compete in a softmax."""
    function = numbers.pick(lambda x: x - x.mean(1, keepdim=True), lambda x: x.softmax(1))
    return Lambda(function), shape


@part
def by_size(shape: Map, numbers: Numbers) -> Made:
    """Computes with the number of channels: no mask can follow that, so they must stay."""
    options = (lambda x: x * x.shape[1] ** -0.5, lambda x: x - x.sum(1, keepdim=True) / x.shape[1])
    return Lambda(numbers.pick(*options)), shape


@part
def argument_by_size(shape: Map, numbers: Numbers) -> Made:
    """Hands a number that depends on how many channels there are to a function, or makes a tensor of it."""
    options = (
        lambda x: torch.add(x, x.square(), alpha=1 / x.shape[1]),
        lambda x: F.leaky_relu(x, 1 / x.shape[1]),
        lambda x: x.clamp(-1 / x.shape[1], 1 / x.shape[1]),
        lambda x: F.group_norm(x, 1, eps=1 / x.shape[1]),
        lambda x: torch.lerp(x, x.square(), 1 / x.shape[1]),
        lambda x: torch.addcmul(x, x, x, value=1 / x.shape[1]),
        lambda x: F.hardshrink(x, 1 / x.shape[1]),
        lambda x: x * torch.tensor(1 / x.shape[1]),
        lambda x: x * torch.full((1,), 1 / x.shape[1], dtype=x.dtype),
        lambda x: x * torch.from_numpy(np.full(1, 1 / x.shape[1])),
        lambda x: x.masked_fill(x > 0, 1 / x.shape[1]),
        lambda x: x + x.roll(x.shape[1], 2),
    )
    return Lambda(numbers.pick(*options)), shape


@part
def slope_by_size(shape: Map, numbers: Numbers) -> Made:
    """Hands such a number to an activation, a norm or a product."""
    options = (
        lambda x: F.elu(x, 1 / x.shape[1]),
        lambda x: F.softplus(x, beta=x.shape[1] / 4),
        lambda x: F.threshold(x, 1 / x.shape[1], 0.1),
        lambda x: F.softshrink(x, 1 / x.shape[1]),
        lambda x: F.layer_norm(x, x.shape[1:], eps=1 / x.shape[1]),
        lambda x: F.batch_norm(x, None, None, training=True, eps=1 / x.shape[1]),
        lambda x: F.normalize(x, p=1 + 1 / x.shape[1], dim=2),
        lambda x: x.abs().add(0.1) ** (1 / x.shape[1]),
        lambda x: torch.rsub(x, x.square(), alpha=1 / x.shape[1]),
        lambda x: torch.addcdiv(x, x, x.abs() + 1, value=1 / x.shape[1]),
        lambda x: F.scaled_dot_product_attention(x, x, x, scale=1 / x.shape[1]),
        lambda x: torch.baddbmm(x.flatten(0, 1), x.flatten(0, 1), x.flatten(0, 1), beta=1 / x.shape[1]).view_as(x),
    )
    return Lambda(numbers.pick(*options)), shape


@part
def tensor_by_size(shape: Map, numbers: Numbers) -> Made:
    """Makes a tensor of such a number, and computes with that."""
    options = (
        lambda x: x * torch.tensor(x.shape[1]) ** -0.5,
        lambda x: x / torch.tensor([[x.shape[1]]]),
        lambda x: x * x.new_tensor(1 / x.shape[1]),
        lambda x: x * x.new_full((1,), 1 / x.shape[1]),
        lambda x: x * torch.as_tensor(1 / x.shape[1]),
        lambda x: x * torch.scalar_tensor(1 / x.shape[1]),
        lambda x: x * torch.linspace(0, 1 / x.shape[1], 3).sum(),
        lambda x: x * torch.arange(0, 1, 1 / x.shape[1]).mean(),
        lambda x: torch.where(x > 0, x, 1 / x.shape[1]),
        lambda x: x * torch.ones(x.shape[1]).sum().rsqrt(),
        lambda x: x * torch.from_numpy(np.linspace(0, 1, x.shape[1])).mean(),
        lambda x: x * torch.empty(1, dtype=x.dtype).fill_(1 / x.shape[1]),
    )
    return Lambda(numbers.pick(*options)), shape


@part
def leaves_torch(shape: Map, numbers: Numbers) -> Made:
    """Values go to numpy, to lists or to numbers, and what is made of them comes back."""
    options = (
        lambda x: x * float(x.detach().numpy().mean()),
        lambda x: x + statistics.mean(x[0, :, 0, 0].tolist()),
        lambda x: x * x.detach().numpy().size ** -0.25,
        lambda x: x / len(x[0].tolist()),
        lambda x: x * x.sigmoid().mean().item(),
        lambda x: x * torch.tensor(x[0, :, 0, 0].tolist(), dtype=x.dtype).std(unbiased=False),
        lambda x: x * torch.from_numpy(x.detach().numpy().std(axis=(0, 2, 3)))[:, None, None],
        lambda x: x + int(x.detach().numpy().sum((0, 2, 3)).argmax()) / 8,
        lambda x: x * float(np.asarray(x.detach()).max()),
        lambda x: x * max(map(abs, x.detach().flatten().tolist())),
    )
    return Lambda(numbers.pick(*options)), shape


# ---- element by element ---------------------------------------------------------------------------------------------


@part
def activation(shape: Map, numbers: Numbers) -> Made:
    options = (nn.ReLU(), nn.GELU(), nn.SiLU(), nn.LeakyReLU(0.1), nn.Hardswish(), nn.Sigmoid(), nn.Tanh())
    return numbers.pick(*options, nn.Softplus(), nn.ELU(), nn.ReLU6(), nn.Dropout(0.0)), shape


@part
def prelu(shape: Map, numbers: Numbers) -> Made:
    return nn.PReLU(numbers.pick(shape.channels, 1)), shape


class Scaled(nn.Module):
    """A learned gain and a fixed shift per channel, or per channel and position."""

    def __init__(self, channels: int, size: int, what: str):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(channels, 1, 1)) if "gain" in what else None
        self.place = nn.Parameter(torch.zeros(1, channels, size, size)) if "place" in what else None
        self.register_buffer("shift", torch.linspace(-1, 1, channels).view(-1, 1, 1) if "shift" in what else None)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.gain is None else x * self.gain
        x = x if self.shift is None else x + self.shift
        return x if self.place is None else x + self.place


@part
def per_channel(shape: Map, numbers: Numbers) -> Made:
    return Scaled(shape.channels, shape.size, numbers.pick("gain", "shift", "place", "gain shift")), shape


class InPlace(nn.Module):
    """Operators that write into their operand, or into a slice of it."""

    def __init__(self, sliced: bool):
        super().__init__()
        self.sliced = sliced

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        if self.sliced:
            x[:, :, :1] *= 2
        return x.mul_(1.5).add_(0.1)


@part
def in_place(shape: Map, numbers: Numbers) -> Made:
    return InPlace(numbers.pick(False, True)), shape


# ---- positions ------------------------------------------------------------------------------------------------------


@part
def pool(shape: Map, numbers: Numbers) -> Made:
    if shape.size < 4:
        return None
    half = shape.size // 2
    options = (nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(half), nn.AdaptiveMaxPool2d(half))
    return numbers.pick(*options, Lambda(lambda x: x[:, :, ::2, ::2][:, :, :half, :half])), replace(shape, size=half)


@part
def upsample(shape: Map, numbers: Numbers) -> Made:
    if shape.size > 4:
        return None
    mode = numbers.pick("nearest", "bilinear", "bicubic")
    return nn.Upsample(scale_factor=2, mode=mode), replace(shape, size=2 * shape.size)


@part
def pad(shape: Map, numbers: Numbers) -> Made:
    if shape.size > 6 or shape.size < 2:
        return None
    layer = numbers.pick(nn.ZeroPad2d, nn.ReflectionPad2d, nn.ReplicationPad2d, nn.CircularPad2d)(1)
    return layer, replace(shape, size=shape.size + 2)


# ---- gates ----------------------------------------------------------------------------------------------------------


class SqueezeExcite(nn.Module):
    """Channels weighted by what two layers say of their means."""

    def __init__(self, channels: int, hidden: int, linear: bool):
        super().__init__()
        self.linear = linear
        layer = nn.Linear if linear else (lambda a, b: nn.Conv2d(a, b, 1))
        self.down, self.up = layer(channels, hidden), layer(hidden, channels)

    def forward(self, x: Tensor) -> Tensor:
        means = x.mean((2, 3)) if self.linear else F.adaptive_avg_pool2d(x, 1)
        gate = self.up(F.relu(self.down(means))).sigmoid()
        return x * (gate[:, :, None, None] if self.linear else gate)


@part
def squeeze_excite(shape: Map, numbers: Numbers) -> Made:
    return SqueezeExcite(shape.channels, numbers.pick(3, 4, 1), numbers.pick(False, True)), shape


class SpatialGate(nn.Module):
    """Positions weighted by mean and maximum over channels."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.conv(torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)).sigmoid()


@part
def spatial_gate(shape: Map, numbers: Numbers) -> Made:
    return SpatialGate(), shape


class ChannelGate(nn.Module):
    """Channels weighted by a convolution that moves along them."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.conv(x.mean((2, 3)).unsqueeze(1)).sigmoid().transpose(1, 2).unsqueeze(-1)


@part
def channel_gate(shape: Map, numbers: Numbers) -> Made:
    return ChannelGate(), shape


class Selective(nn.Module):
    """Two branches stacked, weighted by a softmax over the branches, summed."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.left, self.right = nn.Conv2d(channels, width, 1), nn.Conv2d(channels, width, 3, padding=1)
        self.gate = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.stack([self.left(x), self.right(x)], 1)
        gate = self.gate(both.sum(1).mean((2, 3)))
        weights = gate.view(gate.shape[0], 2, -1).softmax(1)
        return (both * weights[..., None, None]).sum(1)


@part
def selective(shape: Map, numbers: Numbers) -> Made:
    width = numbers.pick(*WIDTHS)
    return Selective(shape.channels, width), Map(width, shape.size)
