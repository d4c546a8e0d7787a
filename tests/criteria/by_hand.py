"""Which layers read, make and norm each unit of a few networks, written down by hand, and scores from loops over them.

Nothing here looks at the members of a channel graph.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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
