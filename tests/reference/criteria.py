"""Scores by plain loops.

Which layers read, make and norm each unit of a few networks, written down by hand, and scores from loops over them.

Nothing here looks at the members of a channel graph.

``true-loss``: every unit is regressed on the others, every sample is run alone.

r_S = x_S − Σ_j b_j x_j over the channels j of other units, b by ridge regression: E|x_S − b x_O|² + λ|b|² is least, all
x less their means. That is what P = (Cov + λI)⁻¹ says, for P_SS⁻¹ P_SO = −Cov_SO (Cov_OO + λI)⁻¹. λ is a share of the
mean variance of all channels that a layer reads. b and the means are those of one half of the samples, the residuals of
the other. Of the channel graph only the members are used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from cases import run
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import ifso
from reference.second_order import mask_places

TWICE = [unit for unit in range(8) for _ in range(2)]


@dataclass(frozen=True)
class Layer:
    """A module and the unit of each of its channels (None: channel i is unit i)."""

    name: str
    channel_units: list[int] | None = None

    def units(self, channels: int) -> list[int]:
        return list(range(channels)) if self.channel_units is None else self.channel_units


@dataclass(frozen=True)
class Places:
    """The layers of one group. ``out`` are layers whose outputs the mask scales, where no layer reads the units."""

    size: int
    read: tuple[Layer, ...] = ()
    made: tuple[Layer, ...] = ()
    norms: tuple[Layer, ...] = ()
    out: tuple[Layer, ...] = ()


def places(size: int, read: str = "", made: str = "", norms: str = "", out: str = "") -> Places:
    """Names separated by spaces; a ``*`` after a name: each unit has two neighbouring channels there."""

    def layers(names: str) -> tuple[Layer, ...]:
        return tuple(Layer(name.rstrip("*"), TWICE if name.endswith("*") else None) for name in names.split())

    return Places(size, layers(read), layers(made), layers(norms), layers(out))


NETS: dict[str, dict[str, Places]] = {
    "residual": {
        "stem.conv": places(
            8,
            "block1.conv1.conv block2.conv1.conv block2.shortcut.conv",
            "stem.conv block1.conv2.conv",
            "stem.bn block1.conv2.bn",
        ),
        "block1.conv1.conv": places(6, "block1.conv2.conv", "block1.conv1.conv", "block1.conv1.bn"),
        "block2.conv1.conv": places(6, "block2.conv2.conv", "block2.conv1.conv", "block2.conv1.bn"),
        "block2.conv2.conv": places(
            12, "head.fc", "block2.conv2.conv block2.shortcut.conv", "block2.conv2.bn block2.shortcut.bn"
        ),
    },
    "grouped": {
        "stem.conv": places(8, "gconv.conv", "stem.conv", "stem.bn"),
        "gconv.conv": places(12, "body.conv", "gconv.conv", "gconv.bn"),
        "body.conv": places(6, "head.fc", "body.conv", "body.bn"),
    },
    "depthwise": {
        "stem.conv": places(8, "pw.conv*", "stem.conv wide.conv*", "stem.bn dw.bn wide.bn*"),
        "pw.conv": places(6, "head.fc", "pw.conv", "pw.bn"),
    },
    "shared-module": {"stem.conv": places(8, "shared head.fc", "stem.conv shared", "stem.bn")},
    "transposed": {
        "stem.conv": places(8, "up", "stem.conv", "stem.bn"),
        "up": places(6, "last", "up"),
    },
    "fpn": {
        "s1.conv": places(6, "s2.conv l1", "s1.conv", "s1.bn"),
        "s2.conv": places(8, "s3.conv l2", "s2.conv", "s2.bn"),
        "s3.conv": places(10, "l3", "s3.conv", "s3.bn"),
        "l3": places(8, "o1 o2 o3", "l3 l2 l1"),
        "o1": places(8, "tower", "o1 o2 o3"),
        "tower": places(8, "cls box", "tower", "norm"),
    },
    "one-head": {
        "embed": places(8, "q k v", "embed"),
        "q": places(6, "", "q k", "", "q k"),
        "v": places(10, "head", "v"),
    },
}


def reading_slice(layer: nn.Module, channel: int) -> Tensor:
    """The weights that multiply an input channel."""
    weight = layer.weight.detach()
    if isinstance(layer, nn.Linear):
        return weight[:, channel]
    if isinstance(layer, nn.modules.conv._ConvTransposeNd):
        return weight[channel]
    group, place = divmod(channel, layer.in_channels // layer.groups)
    per_group = layer.out_channels // layer.groups
    return weight[group * per_group : (group + 1) * per_group, place]


def filter_of(layer: nn.Module, channel: int) -> Tensor:
    """The weights that make an output channel."""
    weight = layer.weight.detach()
    return weight[:, channel] if isinstance(layer, nn.modules.conv._ConvTransposeNd) else weight[channel]


def inputs_of(layer: nn.Module) -> int:
    return layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels


def outputs_of(layer: nn.Module) -> int:
    return layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels


def per_unit(size: int, layer: Layer, channels: int, value: Callable[[int], float]) -> Tensor:
    """Sum of a value per channel over the channels of each unit."""
    total = torch.zeros(size, dtype=torch.float64)
    for channel, unit in enumerate(layer.units(channels)):
        total[unit] += value(channel)
    return total


def mask_gradients(model: nn.Module, net: dict[str, Places], loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    """∂L/∂M by hooks that multiply the features in front of (or behind) the layers by a mask of ones."""
    masks = {name: torch.ones(group.size, dtype=torch.float64, requires_grad=True) for name, group in net.items()}
    with ExitStack() as stack:
        for name, group in net.items():
            for layer in group.read:
                module = model.get_submodule(layer.name)
                hook = _before(masks[name], layer, module)
                stack.callback(module.register_forward_pre_hook(hook).remove)
            for layer in group.out:
                module = model.get_submodule(layer.name)
                handle = module.register_forward_hook(lambda _, __, y, mask=masks[name]: y * mask)
                stack.callback(handle.remove)
        grads = torch.autograd.grad(loss(model), list(masks.values()))
    return dict(zip(masks, grads, strict=True))


def _before(mask: Tensor, layer: Layer, module: nn.Module) -> Callable[..., tuple[Tensor]]:
    def multiply(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        factor = mask[layer.units(inputs_of(module))]
        return (args[0] * (factor if isinstance(module, nn.Linear) else factor[:, None, None]),)

    return multiply


DIMS = {"linear": 0} | {f"conv{'_transpose' * t}{d}d": d for t in (0, 1) for d in (1, 2, 3)}
Place = tuple[str, int]
Objective = Callable[[nn.Module, int, int, Any], Tensor]
"""``objective(model, batch number, sample number, sample)`` is what is differentiated."""


class Visit(NamedTuple):
    """A feature map on its way into a layer: zeros are added to it, the gradient of which is ∂L/∂x."""

    place: Place
    rows: Tensor
    delta: Tensor
    dim: int
    groups: int

    def first(self, sample: int, samples: int, batch: int) -> Tensor:
        """Which rows are in the first half, if they are those of one of the samples of a batch."""
        lead = len(self.delta) if self.dim else 1
        number = torch.arange(sample * lead, (sample + 1) * lead)
        first = number < lead * samples // 2 if lead * samples > 1 else number == batch % 2
        return first.repeat_interleave(len(self.rows) // lead)


class Regression(NamedTuple):
    """Channels of a unit, those that predict them, b, and the mean of all."""

    unit: int
    own: Tensor
    others: Tensor
    b: Tensor
    mean: Tensor

    def residual(self, rows: Tensor) -> Tensor:
        x = rows - self.mean
        return x[:, self.own] - x[:, self.others] @ self.b


def samples_of(batch: Any) -> list[Any]:
    number = len(tree_leaves(batch)[0])
    return [tree_map(lambda leaf, n=n: leaf[n : n + 1], batch) for n in range(number)]


class Truth:
    """Scores of a network, or (``plain=True``) those of Group Fisher: x in the place of r, and no ½."""

    def __init__(self, model: nn.Module, graph: ifso.ChannelGraph, damping: float) -> None:
        named = dict(model.named_parameters())
        self.model, self.graph, self.damping = model, graph, damping
        self.owners = {key: owner for key, owner in mask_places(graph).items() if named[key[0]].dim() > 1}
        self.names = {id(tensor): name for name, tensor in named.items()}

    @contextlib.contextmanager
    def watching(self) -> Iterator[list[Visit]]:
        """Layers are replaced, one function after the other."""
        visits: list[Visit] = []
        with contextlib.ExitStack() as stack:
            for kind in DIMS:
                stack.enter_context(mock.patch.object(F, kind, self._layer(kind, getattr(F, kind), visits)))
            yield visits

    def _layer(self, kind: str, function: Callable[..., Tensor], visits: list[Visit]) -> Callable[..., Tensor]:
        reads = 0 if "transpose" in kind else 1

        def visited(place: Place, x: Tensor, groups: int) -> Tensor:
            if place not in self.owners:
                return x
            dim, delta = x.dim() - DIMS[kind] - 1, torch.zeros_like(x, requires_grad=True)
            visits.append(Visit(place, x.detach().movedim(dim, -1).flatten(0, -2), delta, dim, groups))
            return x + delta

        def call(x: Tensor, weight: Tensor, bias: Tensor | None = None, *options: Any) -> Tensor:
            name = self.names.get(id(weight), "")
            x = visited((name, reads), x, options[3] if options else 1)
            return visited((name, 1 - reads), function(x, weight, bias, *options), 1)

        return call

    def _units(self, place: Place, groups: int) -> Tensor:
        """The unit of each channel."""
        owner = self.owners[place]
        if place[1] == 0 or owner.dim() == 1:
            return owner if place[1] == 0 else owner.repeat(groups)
        return torch.cat([rows[0] for rows in owner.chunk(groups)])

    def regressions(self, batches: list[list[Any]]) -> tuple[dict[Place, list[Regression]], ...]:
        """Those for the first half of the samples, fitted to the second, and the reverse."""
        rows: dict[Place, list[tuple[Tensor, Tensor]]] = {}
        groups = {}
        for number, samples in enumerate(batches):
            for place, sample in enumerate(samples):
                with self.watching() as visits:
                    run(self.model, sample)
                for visit in visits:
                    rows.setdefault(visit.place, []).append((visit.rows, visit.first(place, len(samples), number)))
                    groups[visit.place] = visit.groups
        found: tuple[dict[Place, list[Regression]], ...] = ({}, {})
        for place, seen in rows.items():
            x, first = (torch.cat(parts) for parts in zip(*seen, strict=True))
            both = bool(first.any()) and bool((~first).any())
            for half, fitted_to in zip(found, (~first, first), strict=True):
                half[place] = self._regressions(place, x[fitted_to] if both else x, groups[place])
        return found

    def _regressions(self, place: Place, x: Tensor, groups: int) -> list[Regression]:
        found = []
        units = self._units(place, groups)
        variance = x.var(0, correction=0)
        alive = variance > 1e-12 * x.square().mean(0)
        lam = self.damping * (variance[alive].mean() if bool(alive.any()) else variance.new_ones(()))
        for channels in torch.arange(len(units)).chunk(groups):
            for unit in units[channels][units[channels] >= 0].unique().tolist():
                own, others = channels[units[channels] == unit], channels[units[channels] != unit]
                found.append(_regression(unit, own, others, x, lam))
        return found

    def scores(self, batches: list[Any], objective: Objective, plain: bool = False) -> dict[str, Tensor]:
        """½ E_n (Σ ⟨∂ objective/∂x, r⟩)²: the mean over the samples of each batch, then over batches."""
        regressions = self.regressions([samples_of(batch) for batch in batches])
        total = torch.zeros(self.graph.num_units, dtype=torch.float64)
        for number, batch in enumerate(batches):
            samples = samples_of(batch)
            for place, sample in enumerate(samples):
                change = self._change(
                    regressions, lambda n=number, p=place, x=sample: objective(self.model, n, p, x), plain,
                    (place, len(samples), number),
                )  # fmt: skip
                total += change**2 / (1 if plain else 2 * len(samples) * len(batches))
        return {group.name: total[group.units] for group in self.graph.groups}

    def _change(
        self, regressions: tuple[dict[Place, list[Regression]], ...], value: Callable[[], Tensor], plain: bool,
        sample: tuple[int, int, int],
    ) -> Tensor:  # fmt: skip
        change = torch.zeros(self.graph.num_units, dtype=torch.float64)
        with self.watching() as visits:
            loss = value()
        grads = torch.autograd.grad(loss, [visit.delta for visit in visits], allow_unused=True)
        for visit, grad in zip(visits, grads, strict=True):
            back = torch.zeros_like(visit.rows) if grad is None else grad.movedim(visit.dim, -1).flatten(0, -2)
            first = visit.first(*sample)
            for half, rows in zip(regressions, (first, ~first), strict=True):
                for one in half[visit.place]:
                    r = visit.rows[:, one.own] if plain else one.residual(visit.rows)
                    change[one.unit] += (back[rows][:, one.own] * r[rows]).sum()
        return change


def _regression(unit: int, own: Tensor, others: Tensor, x: Tensor, lam: Tensor) -> Regression:
    centred = (x - x.mean(0)) / len(x) ** 0.5
    left = torch.cat([centred[:, others], lam.sqrt() * torch.eye(len(others), dtype=x.dtype)])
    right = torch.cat([centred[:, own], x.new_zeros(len(others), len(own))])
    return Regression(unit, own, others, torch.linalg.lstsq(left, right, driver="gelsd").solution, x.mean(0))
