"""Parts of random networks that cut, join, reorder, repeat or regroup the channels of an image [N, C, H, W]."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from random_parts import WIDTHS, Lambda, Made, Map, Numbers, part
from torch import Tensor, nn


class Shuffle(nn.Module):
    """Channel shuffle as ShuffleNet writes it."""

    def __init__(self, groups: int):
        super().__init__()
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        x = x.view(batch, self.groups, channels // self.groups, height, width)
        return x.transpose(1, 2).contiguous().view(batch, channels, height, width)


@part
def shuffle(shape: Map, numbers: Numbers) -> Made:
    groups = numbers.divisor(shape.channels)
    return None if groups is None else (numbers.pick(Shuffle, nn.ChannelShuffle)(groups), shape)


@part
def pixel_shuffle(shape: Map, numbers: Numbers) -> Made:
    if shape.size > 4:
        return None
    width = numbers.pick(2, 3, 4)
    layers = (nn.Conv2d(shape.channels, 4 * width, 1), nn.PixelShuffle(2))
    return nn.Sequential(*layers), Map(width, 2 * shape.size)


@part
def pixel_unshuffle(shape: Map, numbers: Numbers) -> Made:
    if shape.size % 2 or shape.size < 4 or shape.channels > 12:
        return None
    return nn.PixelUnshuffle(2), Map(4 * shape.channels, shape.size // 2)


class Unfolded(nn.Module):
    """A convolution written as im2col and a product with a matrix."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.unfold, self.mix = nn.Unfold(3, padding=1), nn.Linear(9 * channels, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.unfold(x).transpose(1, 2)).transpose(1, 2).unflatten(2, x.shape[-2:])


@part
def unfolded(shape: Map, numbers: Numbers) -> Made:
    width = numbers.pick(*WIDTHS)
    return Unfolded(shape.channels, width), Map(width, shape.size)


class ChannelPad(nn.Module):
    """Zero channels on either side, how many in attributes."""

    def __init__(self, front: int, back: int):
        super().__init__()
        self.front, self.back = front, back

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, 0, self.front, self.back))


@part
def channel_pad(shape: Map, numbers: Numbers) -> Made:
    front, back = numbers.pick(1, 2, 0), numbers.pick(2, 1, 0)
    return ChannelPad(front, back), replace(shape, channels=shape.channels + front + back)


class Halves(nn.Module):
    """Two halves, one of them worked on, put together again in one order or the other."""

    def __init__(self, half: int, cut: str, swapped: bool):
        super().__init__()
        self.half, self.cut, self.swapped = half, cut, swapped
        self.conv = nn.Conv2d(half, half, 1)

    def _cut(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.cut == "chunk":
            return x.chunk(2, 1)
        if self.cut == "split":
            return torch.split(x, self.half, 1)
        if self.cut == "shape":
            return x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]
        return x[:, : self.half], x[:, self.half :]

    def forward(self, x: Tensor) -> Tensor:
        first, second = self._cut(x)
        worked = self.conv(second)
        return torch.cat([worked, first] if self.swapped else [first, worked], 1)


@part
def halves(shape: Map, numbers: Numbers) -> Made:
    if shape.channels % 2 or shape.channels < 4:
        return None
    cut = numbers.pick("chunk", "split", "shape", "slice")
    return Halves(shape.channels // 2, cut, numbers.pick(False, True)), shape


class Unequal(nn.Module):
    """Two parts of different size, by a list of sizes, by slices or by ``narrow``; their layers' results are added."""

    def __init__(self, sizes: list[int], width: int, cut: str):
        super().__init__()
        self.sizes, self.cut = sizes, cut
        self.small, self.large = nn.Conv2d(sizes[0], width, 1), nn.Conv2d(sizes[1], width, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.cut == "split":
            small, large = x.split(self.sizes, 1)
        elif self.cut == "slice":
            small, large = x[:, : self.sizes[0]], x[:, self.sizes[0] :]
        else:
            small, large = x.narrow(1, 0, self.sizes[0]), x.narrow(1, self.sizes[0], self.sizes[1])
        return self.small(small) + self.large(large)


@part
def unequal_split(shape: Map, numbers: Numbers) -> Made:
    if shape.channels < 4:
        return None
    small, width = numbers.pick(2, 1, 3), numbers.pick(*WIDTHS)
    cut = numbers.pick("split", "slice", "narrow")
    return Unequal([small, shape.channels - small], width, cut), Map(width, shape.size)


class Reversible(nn.Module):
    """y₁ = x₁ + f(x₂), y₂ = x₂ + g(y₁)."""

    def __init__(self, half: int):
        super().__init__()
        self.f, self.g = nn.Conv2d(half, half, 1), nn.Conv2d(half, half, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, 1)
        first = first + self.f(second)
        return torch.cat([first, second + self.g(first)], 1)


@part
def reversible(shape: Map, numbers: Numbers) -> Made:
    return None if shape.channels % 2 or shape.channels < 4 else (Reversible(shape.channels // 2), shape)


@part
def sliced(shape: Map, numbers: Numbers) -> Made:
    """Some of the channels, by numbers in the code."""
    count = shape.channels
    if count < 4:
        return None
    options = (
        (lambda x: x[:, :3], 3),
        (lambda x: x[:, 1:], count - 1),
        (lambda x: x[:, ::2], -(-count // 2)),
        (lambda x: x[:, [2, 0]], 2),
        (lambda x: x[:, :-1], count - 1),
    )
    function, left = numbers.pick(*options)
    return Lambda(function), replace(shape, channels=left)


@part
def reordered(shape: Map, numbers: Numbers) -> Made:
    function = numbers.pick(lambda x: x.flip(1), lambda x: x.roll(1, 1), lambda x: x.flip(1, 2))
    return Lambda(function), shape


@part
def repeated(shape: Map, numbers: Numbers) -> Made:
    if shape.channels > 8:
        return None
    options = (lambda x: x.repeat(1, 2, 1, 1), lambda x: x.repeat_interleave(2, 1), lambda x: torch.cat([x, x], 1))
    return Lambda(numbers.pick(*options)), replace(shape, channels=2 * shape.channels)


class Grouped(nn.Module):
    """The channels in groups by a view: one of each group, or of each place in the groups, goes on."""

    def __init__(self, groups: int, dim: int, how: str):
        super().__init__()
        self.groups, self.dim, self.how = groups, dim, how

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(x.shape[0], self.groups, x.shape[1] // self.groups, *x.shape[2:])
        return x.amax(self.dim) if self.how == "max" else x.sum(self.dim)


@part
def regrouped(shape: Map, numbers: Numbers) -> Made:
    groups = numbers.divisor(shape.channels)
    if groups is None:
        return None
    dim, how = numbers.pick(1, 2), numbers.pick("max", "sum")
    return Grouped(groups, dim, how), replace(shape, channels=shape.channels // groups if dim == 1 else groups)


@part
def glu(shape: Map, numbers: Numbers) -> Made:
    if shape.channels % 2 or shape.channels < 4:
        return None
    return nn.GLU(1), replace(shape, channels=shape.channels // 2)


class Gated(nn.Module):
    """Two branches multiplied: as two layers, or as the halves of one."""

    def __init__(self, channels: int, width: int, one: bool):
        super().__init__()
        self.first = nn.Conv2d(channels, 2 * width if one else width, 1)
        self.second = None if one else nn.Conv2d(channels, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.second is None:
            value, gate = self.first(x).chunk(2, dim=1)
        else:
            value, gate = self.first(x), self.second(x)
        return value * gate.sigmoid()


@part
def gated(shape: Map, numbers: Numbers) -> Made:
    width = numbers.pick(*WIDTHS)
    return Gated(shape.channels, width, numbers.pick(False, True)), Map(width, shape.size)


class Einsum(nn.Module):
    """A mixing of channels written as an einsum with a matrix."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(width, channels) / channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("oc,bchw->bohw", self.matrix, x)


@part
def einsum(shape: Map, numbers: Numbers) -> Made:
    width = numbers.pick(*WIDTHS)
    return Einsum(shape.channels, width), Map(width, shape.size)


class ChannelProducts(nn.Module):
    """Attention between channels: products of their maps decide how they are mixed."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.q, self.k, self.v = (nn.Conv2d(channels, width, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).flatten(2) for layer in (self.q, self.k, self.v))
        weights = (q @ k.transpose(1, 2) / x.shape[-1]).softmax(-1)
        return (weights @ v).unflatten(2, x.shape[-2:])


@part
def channel_products(shape: Map, numbers: Numbers) -> Made:
    width = numbers.pick(*WIDTHS)
    return ChannelProducts(shape.channels, width), Map(width, shape.size)
