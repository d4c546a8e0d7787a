"""Networks that differ in how they are called, what they return and what their course depends on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nets import attention, convolution, layout
from nets.convolution import Chain, ConvBN, Head


class KeywordInputs(nn.Module):
    """Called with keywords; one input scales the features of the other."""

    def __init__(self):
        super().__init__()
        self.stem, self.scale, self.head = ConvBN(3, 8), nn.Linear(4, 8), Head(8)

    def forward(self, *, image: Tensor, extra: Tensor) -> Tensor:
        return self.head(self.stem(image) * self.scale(extra).sigmoid()[:, :, None, None])


class DictOutputs(nn.Module):
    """Segmentation with an auxiliary output, by name."""

    def __init__(self):
        super().__init__()
        self.stem, self.body = ConvBN(3, 8, stride=2), ConvBN(8, 6)
        self.out, self.aux = nn.Conv2d(6, 3, 1), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.stem(x)
        out = F.interpolate(self.out(self.body(features)), x.shape[-2:], mode="bilinear", align_corners=False)
        return {"out": out, "aux": self.aux(features)}


class ManyOutputs(nn.Module):
    """Two features and a prediction as a tuple: the features are outputs, so their channels stay."""

    def __init__(self):
        super().__init__()
        self.s1, self.s2, self.s3, self.head = ConvBN(3, 4), ConvBN(4, 6), ConvBN(6, 8), Head(8)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        first = self.s1(x)
        last = self.s3(self.s2(first))
        return self.head(last), [first]


class NestedInputs(nn.Module):
    """A list of images of different sizes, as detectors take them."""

    def __init__(self):
        super().__init__()
        self.stem, self.body, self.head = ConvBN(3, 8), ConvBN(8, 6), Head(6)

    def forward(self, images: list[Tensor]) -> Tensor:
        return torch.cat([self.head(self.body(self.stem(image[None]))) for image in images])


class DataDependent(nn.Module):
    """Positions are chosen by value, and a number read from a tensor decides a branch."""

    def __init__(self):
        super().__init__()
        self.stem, self.score, self.deep, self.head = ConvBN(3, 8), nn.Conv2d(8, 1, 1), nn.Linear(8, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        features = self.stem(x)
        best = x.abs().sum(1).flatten().topk(5).indices
        chosen = features.movedim(1, -1).flatten(0, 2)[best]
        strongest = chosen[(x[:, 0].flatten()[best] > -1e9).nonzero().flatten()]
        if x.sum().item() > 1e9:
            return self.head(self.deep(strongest) * 2)
        return self.head(F.relu(self.deep(strongest))) + self.score(features).mean()


class ChosenPositions(nn.Module):
    """A detector in small: channels split by a width kept in Python, then only the positions with a good score."""

    def __init__(self):
        super().__init__()
        self.width = 4
        self.stem, self.branch, self.score = ConvBN(3, 8), ConvBN(4, 6), nn.Conv2d(10, 1, 1)
        self.deep, self.head = nn.Linear(10, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.stem(x).split(self.width, 1)
        features = torch.cat([first, self.branch(second)], 1)
        chosen = features.movedim(1, -1)[self.score(features)[:, 0] > 0]
        return self.head(F.relu(self.deep(chosen))).sum(0)


class OnRealTensors(nn.Module):
    """Makes any network data-dependent: it looks at a value of the input before it runs."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x * 2 if x.sum().item() > 1e9 else x)


class Picky(nn.Module):
    """Runs with any number of channels but 15."""

    def __init__(self):
        super().__init__()
        self.stem, self.body, self.head = ConvBN(3, 16), ConvBN(16, 8), Head(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if x.shape[1] == 15:
            raise ValueError("fifteen channels\nare not wanted")
        return self.head(self.body(x))


class Insistent(nn.Module):
    """Its own code insists on eight channels."""

    def __init__(self):
        super().__init__()
        self.stem, self.body, self.head = ConvBN(3, 8), ConvBN(8, 6), Head(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        assert x.shape[1] == 8, "eight channels"
        return self.head(self.body(x))


class Recurrent(nn.Module):
    """A GRU between two linear layers."""

    def __init__(self):
        super().__init__()
        self.embed, self.gru, self.head = nn.Linear(6, 8), nn.GRU(8, 6, batch_first=True), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(self.embed(x))[0])


class Constants(nn.Module):
    """A per-channel constant that is a plain attribute, not a buffer: the channels that meet it must stay."""

    def __init__(self):
        super().__init__()
        self.stem, self.body, self.head = ConvBN(3, 8), ConvBN(8, 6), Head(6)
        self.shift = torch.linspace(-1, 1, 8, dtype=torch.float64)[:, None, None]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x) + self.shift))


class BufferPerChannel(nn.Module):
    """A per-channel buffer goes along with its channels."""

    def __init__(self):
        super().__init__()
        self.stem, self.body, self.head = ConvBN(3, 8), ConvBN(8, 6), Head(6)
        self.register_buffer("shift", torch.linspace(-1, 1, 8)[:, None, None])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x) + self.shift))


class InPlace(nn.Module):
    """In-place operators on the features and on their sum."""

    def __init__(self):
        super().__init__()
        self.stem, self.body, self.head = ConvBN(3, 8, relu=False), ConvBN(8, 8, relu=False), Head(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x.mul_(1.5).clamp_(max=2.0)
        y = self.body(x)
        y += x
        return self.head(y.relu_())


class InPlaceShape(nn.Module):
    """An operator that changes the shape of a tensor in place."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x.transpose_(0, 1)
        return self.head(F.relu(x))


def unused_parts() -> nn.Module:
    """A layer that never runs: it has no channels that anyone knows of."""
    net = Chain(stem=ConvBN(3, 8), body=ConvBN(8, 6), head=Head(6))
    net.stem.add_module("spare", nn.Conv2d(8, 8, 3))
    return net


def real_residual() -> nn.Module:
    return OnRealTensors(convolution.residual())


def real_along_channels() -> nn.Module:
    return OnRealTensors(convolution.AlongChannels())


def real_channels_as_batch() -> nn.Module:
    return OnRealTensors(convolution.ChannelsAsBatch())


def real_shuffle() -> nn.Module:
    return OnRealTensors(layout.shufflenet_v2())


def real_attention() -> nn.Module:
    return OnRealTensors(attention.attention())


def real_padded() -> nn.Module:
    return OnRealTensors(layout.padded())


def real_res2net() -> nn.Module:
    return OnRealTensors(layout.Res2Net())
