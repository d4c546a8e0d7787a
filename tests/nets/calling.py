"""Networks that differ in how they are called, what they return and what their course depends on."""

from __future__ import annotations

from typing import Any

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


class UnwritableDict(dict):
    """A config that refuses every change."""

    def _refuse(self, *_args: Any, **_named: Any) -> None:
        raise TypeError("this config is fixed")

    __setitem__ = __delitem__ = update = clear = pop = setdefault = _refuse

    def __deepcopy__(self, _memo: Any) -> Any:
        return self


class Downsample(nn.Module):
    """Insists on the number of channels that an attribute of its own holds."""

    def __init__(self, channels: int):
        super().__init__()
        self.channels, self.conv = channels, nn.Conv2d(channels, channels, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] == self.channels, "other channels than promised"
        return self.conv(x)


class Configured(nn.Module):
    """Attributes are looked up in an unwritable config first, and submodules check their inputs: as in diffusers."""

    def __init__(self):
        super().__init__()
        self.config = UnwritableDict(width=8)
        self.stem, self.down, self.deeper = nn.Conv2d(3, 8, 3, padding=1), Downsample(8), Downsample(8)
        self.norm, self.head = nn.GroupNorm(4, 8), Head(8)

    def __getattr__(self, name: str) -> Any:
        if "config" in self.__dict__ and name in self.__dict__["config"]:
            return self.__dict__["config"][name]
        return super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        assert self.width == 8
        return self.head(F.relu(self.norm(self.deeper(F.relu(self.down(self.stem(x)))))))


class GatedByHand(nn.Module):
    """A GRU cell written out: its state begins as zeros of a size that an attribute holds."""

    def __init__(self):
        super().__init__()
        self.embed, self.reads, self.recurs, self.head = (
            nn.Linear(6, 7), nn.Linear(7, 24), nn.Linear(8, 24), nn.Linear(8, 3),
        )  # fmt: skip
        self.hidden_size = 8

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(len(x), self.hidden_size, dtype=x.dtype)
        for step in F.relu(self.embed(x)).unbind(1):
            parts = zip(self.reads(step).chunk(3, -1), self.recurs(state).chunk(3, -1), strict=True)
            (update, update_), (reset, reset_), (new, new_) = parts
            update = torch.sigmoid(update + update_)
            new = torch.tanh(new + torch.sigmoid(reset + reset_) * new_)
            state = (1 - update) * new + update * state
        return self.head(state)


class Experts(nn.Module):
    """Tokens go to one of two experts by position and come back by index, added to zeros: as in eager Mixtral."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.embed(x)).flatten(0, 1)
        found = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = torch.arange(number, len(x), 2)
            found.index_add_(0, mine, expert(x[mine]))
        return self.head(x + found)


@torch.jit.script
def bounded(x: Tensor, limit: int) -> Tensor:
    """A scripted function."""
    return torch.where(x > limit, torch.tensor(limit).type_as(x), x)


class Scripted(nn.Module):
    """Calls a scripted function between two layers."""

    def __init__(self):
        super().__init__()
        self.stem, self.body, self.head = ConvBN(3, 8), ConvBN(8, 6), Head(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(bounded(self.stem(x), 1)))


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
