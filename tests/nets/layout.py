"""Networks that cut, join, shuffle, pad or reshape their channels."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nets.convolution import Chain, ConvBN, Head


def shuffle(x: Tensor, groups: int) -> Tensor:
    """Channel shuffle as ShuffleNet writes it."""
    batch, channels, height, width = x.shape
    x = x.view(batch, groups, channels // groups, height, width)
    return x.transpose(1, 2).contiguous().view(batch, channels, height, width)


class Shuffle(nn.Module):
    """:func:`shuffle` as a layer."""

    def __init__(self, groups: int):
        super().__init__()
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        return shuffle(x, self.groups)


def shuffled() -> nn.Module:
    return Chain(
        stem=ConvBN(3, 12), gconv=ConvBN(12, 12, 1, groups=3), shuffle=Shuffle(3), body=ConvBN(12, 6), head=Head(6)
    )


def shuffle_depthwise() -> nn.Module:
    return Chain(
        stem=ConvBN(3, 12), gconv=ConvBN(12, 12, 1, groups=3), shuffle=Shuffle(3), dw=ConvBN(12, 12, groups=12),
        body=ConvBN(12, 6), head=Head(6),
    )  # fmt: skip


def channel_shuffle() -> nn.Module:
    return Chain(
        stem=ConvBN(3, 12),
        gconv=ConvBN(12, 12, 1, groups=3),
        shuffle=nn.ChannelShuffle(3),
        body=ConvBN(12, 6),
        head=Head(6),
    )


class ShuffleNetV1(nn.Module):
    """gconv, shuffle, depthwise, gconv, around a shortcut."""

    def __init__(self):
        super().__init__()
        self.stem = ConvBN(3, 18)
        self.g1, self.g2 = ConvBN(18, 18, 1, groups=3), ConvBN(18, 18, 1, groups=3, relu=False)
        self.dw = ConvBN(18, 18, groups=18, relu=False)
        self.head = Head(18)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        inner = self.dw(shuffle(self.g1(x), 3))
        return self.head(F.relu(x + self.g2(inner)))


class ShuffleUnit(nn.Module):
    """ShuffleNet V2: half of the channels pass, half go through a branch, then both are shuffled."""

    def __init__(self, channels: int):
        super().__init__()
        half = channels // 2
        self.pw1, self.pw2 = ConvBN(half, half, 1), ConvBN(half, half, 1)
        self.dw = ConvBN(half, half, groups=half, relu=False)

    def forward(self, x: Tensor) -> Tensor:
        passing, worked = x.chunk(2, dim=1)
        return shuffle(torch.cat([passing, self.pw2(self.dw(self.pw1(worked)))], 1), 2)


def shufflenet_v2() -> nn.Module:
    return Chain(stem=ConvBN(3, 8), unit=ShuffleUnit(8), body=ConvBN(8, 6), head=Head(6))


def shufflenet_v2_deep() -> nn.Module:
    return Chain(stem=ConvBN(3, 16), unit1=ShuffleUnit(16), unit2=ShuffleUnit(16), body=ConvBN(16, 6), head=Head(6))


def pixel_shuffle() -> nn.Module:
    return Chain(stem=ConvBN(3, 8), up=nn.Conv2d(8, 12, 1), shuffle=nn.PixelShuffle(2), last=nn.Conv2d(3, 5, 1))


def pixel_unshuffle() -> nn.Module:
    return Chain(stem=ConvBN(3, 4), unshuffle=nn.PixelUnshuffle(2), last=nn.Conv2d(16, 5, 1))


def flattened() -> nn.Module:
    return Chain(
        stem=ConvBN(3, 4),
        pool=nn.AvgPool2d(4),
        flatten=nn.Flatten(),
        fc1=nn.Linear(16, 6),
        relu=nn.ReLU(),
        fc2=nn.Linear(6, 5),
    )


class PaddedShortcut(nn.Module):
    """Option A with the numbers of new channels in attributes."""

    def __init__(self, front: int, back: int):
        super().__init__()
        self.front, self.back = front, back

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.front, self.back))


class OneNumberShortcut(nn.Module):
    """Option A with one attribute, under another name, for both sides."""

    def __init__(self, extra: int):
        super().__init__()
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.extra, self.extra))


class LambdaShortcut(nn.Module):
    """Option A as a closure: its numbers cannot be reached."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Padded(nn.Module):
    """Four channels, then eight: the shortcut adds two zero channels on either side."""

    def __init__(self, shortcut: nn.Module):
        super().__init__()
        self.stem = ConvBN(3, 4)
        self.conv1, self.conv2 = ConvBN(4, 6, stride=2), ConvBN(6, 8, relu=False)
        self.shortcut = shortcut
        self.head = Head(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(F.relu(self.conv2(self.conv1(x)) + self.shortcut(x)))


def padded() -> nn.Module:
    return Padded(PaddedShortcut(2, 2))


def padded_one_number() -> nn.Module:
    return Padded(OneNumberShortcut(2))


def padded_lambda() -> nn.Module:
    extra = 2
    return Padded(LambdaShortcut(lambda x: F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, extra, extra))))


class ZeroJoined(nn.Module):
    """Option A written as a concatenation with zeros of the same size."""

    def __init__(self):
        super().__init__()
        self.stem, self.wide, self.head = ConvBN(3, 4), ConvBN(4, 8, stride=2, relu=False), Head(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        small = F.avg_pool2d(x, 2)
        return self.head(F.relu(self.wide(x) + torch.cat([small, torch.zeros_like(small)], 1)))


class Res2Net(nn.Module):
    """The channels in three parts of ``self.width``, each worked on together with the one before."""

    def __init__(self):
        super().__init__()
        self.stem = ConvBN(3, 8)
        self.width = 4
        self.conv1 = ConvBN(8, 12, 1)
        self.convs = nn.ModuleList([ConvBN(4, 4), ConvBN(4, 4)])
        self.conv3 = ConvBN(12, 8, 1, relu=False)
        self.head = Head(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        parts = torch.split(self.conv1(x), self.width, 1)
        first = self.convs[0](parts[0])
        second = self.convs[1](first + parts[1])
        return self.head(F.relu(x + self.conv3(torch.cat([first, second, parts[2]], 1))))


class Halves(nn.Module):
    """Two halves cut by one number, given twice; one of them is worked on (YOLO's C2PSA)."""

    def __init__(self):
        super().__init__()
        self.c = 4
        self.stem, self.branch, self.head = ConvBN(3, 8), ConvBN(4, 6), Head(10)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.stem(x).split((self.c, self.c), 1)
        return self.head(torch.cat([first, self.branch(second)], 1))


class UnequalSplit(nn.Module):
    """Parts of different sizes, kept as a list in an attribute."""

    def __init__(self):
        super().__init__()
        self.stem = ConvBN(3, 12)
        self.sizes = [4, 8]
        self.small, self.large = ConvBN(4, 6, relu=False), ConvBN(8, 6, relu=False)
        self.head = Head(6)

    def forward(self, x: Tensor) -> Tensor:
        small, large = self.stem(x).split(self.sizes, 1)
        return self.head(F.relu(self.small(small) + self.large(large)))


class SlicedByNumber(nn.Module):
    """The first channels are picked by a number in the code."""

    def __init__(self):
        super().__init__()
        self.stem, self.body, self.head = ConvBN(3, 8), ConvBN(5, 6), Head(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)[:, :5]))


class Reversible(nn.Module):
    """y₁ = x₁ + f(x₂), y₂ = x₂ + g(y₁) over halves made by ``chunk``."""

    def __init__(self):
        super().__init__()
        self.stem = ConvBN(3, 8)
        self.f, self.g = ConvBN(4, 4, relu=False), ConvBN(4, 4, relu=False)
        self.head = Head(8)

    def forward(self, x: Tensor) -> Tensor:
        x1, x2 = self.stem(x).chunk(2, dim=1)
        y1 = x1 + self.f(x2)
        y2 = x2 + self.g(y1)
        return self.head(torch.cat([y1, y2], 1))


class Maxout(nn.Module):
    """Channels in pairs by a view; the larger of each pair goes on."""

    def __init__(self):
        super().__init__()
        self.stem, self.body, self.head = ConvBN(3, 12, relu=False), ConvBN(6, 6), Head(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        pairs = x.view(x.shape[0], x.shape[1] // 2, 2, *x.shape[2:])
        return self.head(self.body(pairs.amax(2)))


class Stacked(nn.Module):
    """Selective kernel: two branches stacked, weighted by a softmax over the branches, summed."""

    def __init__(self):
        super().__init__()
        self.stem, self.left, self.right = ConvBN(3, 8), ConvBN(8, 6), ConvBN(8, 6, 1)
        self.gate = nn.Linear(6, 12)
        self.head = Head(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        both = torch.stack([self.left(x), self.right(x)], 1)
        gate = self.gate(both.sum(1).mean((2, 3)))
        weights = gate.view(gate.shape[0], 2, -1).softmax(1)
        return self.head((both * weights[..., None, None]).sum(1))
