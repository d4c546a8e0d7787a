"""Random networks: descriptions that hypothesis can draw, shrink and print, and modules made of them.

A description is plain data. Whatever numbers stand in it, a network can be built: choices are taken modulo the number
of options, and a part that cannot be had where it stands is left out. ``coverage`` says what was built.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import random_layouts  # noqa: F401 - registers its parts
import torch
import torch.nn.functional as F
from cases import enliven_
from hypothesis import strategies as st
from random_parts import IMAGE_PARTS, Map, Numbers
from random_tokens import TOKEN_PARTS, Row
from torch import Tensor, nn

SIZE, BATCH, CLASSES = 4, 2, 5
WIDEST = 16
TOKENS = "tokens"


@dataclass(frozen=True)
class Part:
    """A kind of part, the numbers that choose its details, and the parts it is put around."""

    kind: str
    numbers: tuple[int, ...] = ()
    inside: tuple[Part, ...] = ()


@dataclass(frozen=True)
class Net:
    """A whole network: how it is called, its parts, how it ends, and the seed of its parameters."""

    inputs: str
    width: int
    body: tuple[Part, ...]
    ends: tuple[str, ...]
    seed: int = 0


# ---- drawing --------------------------------------------------------------------------------------------------------

COMPOSITES = ("residual", "global_residual", "concat", "dense", "summed", "shared", "levels", "again")
INPUTS = ("image", "two images", "keywords", "image, looked at")
ENDS = ("pooled", "flattened", "map", "mean of tokens", "features")

_numbers = st.tuples(*[st.integers(0, 11)] * 4)


def _leaves(kinds: dict[str, Any]) -> st.SearchStrategy[Part]:
    return st.builds(Part, st.sampled_from(sorted(kinds)), _numbers)


def _sequence(inner: st.SearchStrategy[Part], most: int = 2) -> st.SearchStrategy[tuple[Part, ...]]:
    return st.lists(inner, min_size=1, max_size=most).map(tuple)


def _around(inner: st.SearchStrategy[Part]) -> st.SearchStrategy[Part]:
    return st.builds(Part, st.sampled_from(COMPOSITES), _numbers, _sequence(inner))


_of_images = _leaves(IMAGE_PARTS)
_of_tokens = st.builds(Part, st.just(TOKENS), _numbers, _sequence(_leaves(TOKEN_PARTS), 2))
_parts = st.one_of(
    *[_of_images] * 4, _of_tokens, _around(_of_images), _around(_of_images), _around(_around(_of_images))
)
KINDS = (*sorted(IMAGE_PARTS), *sorted(TOKEN_PARTS), *COMPOSITES)


def _of_kind(kind: str) -> st.SearchStrategy[Part]:
    if kind in COMPOSITES:
        return st.builds(
            Part, st.just(kind), _numbers, _sequence(st.one_of(_of_images, _of_images, _of_images, _of_tokens))
        )
    leaf = st.builds(Part, st.just(kind), _numbers)
    if kind in IMAGE_PARTS:
        return leaf
    inside = st.builds(
        lambda a, part, b: (*a, part, *b), *(_few(_leaves(TOKEN_PARTS)), leaf, _few(_leaves(TOKEN_PARTS)))
    )
    return st.builds(Part, st.just(TOKENS), _numbers, inside)


def _few(inner: st.SearchStrategy[Part], most: int = 1) -> st.SearchStrategy[tuple[Part, ...]]:
    return st.lists(inner, max_size=most).map(tuple)


def networks(kind: str, before: int = 1, after: int = 1) -> st.SearchStrategy[Net]:
    """Descriptions of networks that have a part of that kind, with up to so many parts before and after it."""
    body = st.builds(lambda a, part, b: (*a, part, *b), _few(_parts, before), _of_kind(kind), _few(_parts, after))
    ends = st.lists(st.sampled_from((*ENDS[:-1] * 3, *ENDS)), min_size=1, max_size=2, unique=True).map(tuple)
    inputs, widths = st.sampled_from((*INPUTS[:1] * 3, *INPUTS)), st.sampled_from((4, 6, 8, 12))
    return st.builds(Net, inputs, widths, body, ends, st.integers(0, 1000))


# ---- building -------------------------------------------------------------------------------------------------------


class _Building:
    """Makes parts one after the other and counts them."""

    def __init__(self) -> None:
        self.built: Counter[str] = Counter()

    def chain(self, parts: tuple[Part, ...], shape: Map) -> tuple[nn.Sequential, Map]:
        """Parts one after the other; those that cannot be had are left out, and what grows too wide is narrowed."""
        layers = []
        for part in parts:
            made = self._part(part, shape)
            if made is None:
                continue
            self.built[part.kind] += 1
            layers.append(made[0])
            shape = made[1]
            if shape.channels > WIDEST:
                layers.append(nn.Conv2d(shape.channels, 6, 1))
                shape = replace(shape, channels=6)
        return nn.Sequential(*layers), shape

    def _part(self, part: Part, shape: Map) -> tuple[nn.Module, Map] | None:
        numbers = Numbers(part.numbers)
        if part.kind in IMAGE_PARTS:
            return IMAGE_PARTS[part.kind](shape, numbers)
        if part.kind == TOKENS:
            return self._tokens(part.inside, shape, numbers)
        return self._composite(part, shape, numbers)

    def _tokens(self, parts: tuple[Part, ...], shape: Map, numbers: Numbers) -> tuple[nn.Module, Map] | None:
        if shape.size > 4:
            return None
        row, layers = Row(shape.size**2, shape.channels), []
        for part in parts:
            made = TOKEN_PARTS[part.kind](row, Numbers(part.numbers))
            if made is not None:
                self.built[part.kind] += 1
                layers.append(made[0])
                row = made[1]
        return AsTokens(nn.Sequential(*layers), shape.size, numbers.pick("reshape", "pixels")), Map(
            row.width, shape.size
        )

    def _composite(self, part: Part, shape: Map, numbers: Numbers) -> tuple[nn.Module, Map] | None:
        first, second = part.inside[: -(-len(part.inside) // 2)], part.inside[-(-len(part.inside) // 2) :]
        if part.kind in ("concat", "summed"):
            branches = [self.chain(half, shape) for half in (first, second)]
            size = max(out.size for _, out in branches)
            if part.kind == "concat":
                return Concat(*[net for net, _ in branches], size), Map(sum(out.channels for _, out in branches), size)
            (net, out), (other, other_out) = branches
            join = (
                nn.Identity() if out.channels == other_out.channels else nn.Conv2d(other_out.channels, out.channels, 1)
            )
            return Summed(net, nn.Sequential(other, join), size), Map(out.channels, size)
        net, out = self.chain(part.inside, shape)
        if part.kind == "dense":
            return Dense(net, out.size), Map(shape.channels + out.channels, out.size)
        if part.kind == "residual" and (out.channels != shape.channels or numbers.pick(False, True)):
            return Summed(net, nn.Conv2d(shape.channels, out.channels, 1), out.size), out
        if out.channels != shape.channels:
            net, out = nn.Sequential(net, nn.Conv2d(out.channels, shape.channels, 1)), Map(shape.channels, out.size)
        if part.kind == "global_residual":
            return GlobalResidual(net, numbers.pick("positions", "channels")), shape
        if part.kind == "residual":
            return Summed(net, nn.Identity(), out.size), out
        return Shared(net, part.kind, shape.size), shape


def fit(x: Tensor, size: int) -> Tensor:
    """The same channels on ``size`` × ``size`` positions."""
    return x if x.shape[-1] == size else F.interpolate(x, (size, size))


class AsTokens(nn.Module):
    """Token parts in an image network; tokens that were added are dropped again, missing ones repeated."""

    def __init__(self, inner: nn.Module, size: int, way: str):
        super().__init__()
        self.inner, self.size, self.way = inner, size, way

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2) if self.way == "pixels" else x.permute(0, 2, 3, 1).flatten(1, 2)
        y = self.inner(tokens)
        wanted = self.size**2
        if y.shape[1] < wanted:
            y = torch.cat([y, y[:, : wanted - y.shape[1]]], 1)
        y = y[:, y.shape[1] - wanted :]
        if self.way == "pixels":
            return y.transpose(1, 2).unflatten(2, (self.size, self.size))
        return y.reshape(x.shape[0], self.size, self.size, -1).permute(0, 3, 1, 2)


class Concat(nn.Module):
    """Two branches side by side."""

    def __init__(self, left: nn.Module, right: nn.Module, size: int):
        super().__init__()
        self.left, self.right, self.size = left, right, size

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([fit(self.left(x), self.size), fit(self.right(x), self.size)], 1)


class Summed(nn.Module):
    """Two branches added: a residual block where one of them passes or projects."""

    def __init__(self, left: nn.Module, right: nn.Module, size: int):
        super().__init__()
        self.left, self.right, self.size = left, right, size

    def forward(self, x: Tensor) -> Tensor:
        return fit(self.left(x), self.size) + fit(self.right(x), self.size)


class Dense(nn.Module):
    """What comes in beside what is made of it."""

    def __init__(self, inner: nn.Module, size: int):
        super().__init__()
        self.inner, self.size = inner, size

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([fit(x, self.size), self.inner(x)], 1)


class GlobalResidual(nn.Module):
    """A shortcut to which one number per channel, or per position, is added."""

    def __init__(self, inner: nn.Module, kept: str):
        super().__init__()
        self.inner, self.kept = inner, kept

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.kept == "positions":
            return x + y.mean((2, 3), keepdim=True)
        return x + fit(y.sum(1, keepdim=True), x.shape[-1])


class Shared(nn.Module):
    """One module used at two places: one after the other, on two inputs, or on two levels."""

    def __init__(self, inner: nn.Module, way: str, size: int):
        super().__init__()
        self.inner, self.way, self.size = inner, way, size

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "again":
            return fit(self.inner(fit(self.inner(x), self.size)), self.size)
        if self.way == "levels":
            return fit(self.inner(x), self.size) + fit(self.inner(x.flip(3)), self.size)
        return fit(self.inner(x), self.size) * fit(self.inner(x.tanh()), self.size).sigmoid()


# ---- whole networks -------------------------------------------------------------------------------------------------


class End(nn.Module):
    """From the last image to an output whose channels must stay."""

    def __init__(self, kind: str, shape: Map):
        super().__init__()
        self.kind = kind
        features = shape.channels * (shape.size**2 if kind == "flattened" else 1)
        makes = {"features": nn.Identity, "map": lambda: nn.Conv2d(shape.channels, CLASSES, 1)}
        self.last = makes.get(kind, lambda: nn.Linear(features, CLASSES))()

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "pooled":
            return self.last(F.adaptive_avg_pool2d(x, 1).flatten(1))
        if self.kind == "flattened":
            return self.last(x.flatten(1))
        if self.kind == "mean of tokens":
            return self.last(x.flatten(2).transpose(1, 2)).mean(1)
        return self.last(x)


class RandomNetwork(nn.Module):
    """Stem, body and ends of a description."""

    def __init__(self, net: Net):
        super().__init__()
        building = _Building()
        self.inputs, self.names = net.inputs, net.ends
        self.stem = nn.Conv2d(3, net.width, 3, padding=1)
        self.extra = nn.Linear(4, net.width) if net.inputs == "keywords" else None
        self.body, shape = building.chain(net.body, Map(net.width, SIZE))
        self.ends = nn.ModuleList([End(kind, shape) for kind in net.ends])
        self.built = building.built

    def forward(self, image: Tensor, other: Tensor | None = None, extra: Tensor | None = None) -> Any:
        if self.inputs == "image, looked at" and image.sum().item() > 1e9:
            image = image * 2
        x = self.stem(image)
        if other is not None:
            x = x * self.stem(other).sigmoid()
        if self.extra is not None:
            x = x * self.extra(extra).sigmoid()[:, :, None, None]
        x = self.body(x)
        outputs = [end(x) for end in self.ends]
        if self.inputs == "keywords":
            return dict(zip(self.names, outputs, strict=True))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


def build(net: Net) -> RandomNetwork:
    """The network in eval mode and float64, always with the same parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(net.seed)
        model = RandomNetwork(net).double().eval()
    enliven_(model, net.seed)
    return model


def inputs_of(net: Net) -> Any:
    """What the network is called with."""
    random = torch.Generator().manual_seed(net.seed + 1)
    make: Callable[..., Tensor] = lambda *shape: torch.randn(shape, generator=random, dtype=torch.float64)  # noqa: E731
    image = make(BATCH, 3, SIZE, SIZE)
    if net.inputs == "two images":
        return image, make(BATCH, 3, SIZE, SIZE)
    return {"image": image, "extra": make(BATCH, 4)} if net.inputs == "keywords" else image
