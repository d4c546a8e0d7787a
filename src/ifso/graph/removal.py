"""What a removal makes of a model: new shapes, Python numbers that follow its channels, and removals to rehearse."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ifso.common.module_state import read_attribute, set_attribute, tensor_slots
from ifso.common.torch_state import forget_caches
from ifso.graph.balancing import balance_vector
from ifso.graph.channel_graph import STAYS, SizeAttribute
from ifso.graph.channel_ids import Labels
from ifso.graph.layouts import compact_shape, varying_dims
from ifso.graph.slim_attention import slim_attention
from ifso.graph.tape import Ref, refs_in
from ifso.graph.units import Units

Place = tuple[str, str, int | None]
"""(module, attribute, position in a tuple or list attribute)."""


def new_numbers(
    model: nn.Module, attributes: Iterable[SizeAttribute], kept: Tensor, shapes: Mapping[str, tuple[int, ...]]
) -> dict[Place, int]:
    """Values for what is kept: of attributes that were found to matter, then of those that describe known layers.

    ``shapes`` are the new shapes of parameters, by name.
    """
    new: dict[Place, int] = {(item.module, item.name, item.position): item.value(kept) for item in attributes}
    first_names = {(id(module), key): name for name, module, key in tensor_slots(model)}
    for prefix, module in model.named_modules():
        names = [first_names.get((id(module), key), "") for key in ("weight", "in_proj_weight", "weight_v")]
        normed = f"{prefix}.parametrizations.weight.original1".removeprefix(".")
        weight = next((shapes[name] for name in [*names, normed] if name in shapes), None)
        if weight is not None:
            parts = new.get((prefix, "groups", None)) or new.get((prefix, "num_heads", None))
            for name, value in _describing(module, weight, parts):
                new.setdefault((prefix, name, None), value)
    return new


def _describing(module: nn.Module, weight: tuple[int, ...], parts: int | None) -> Iterator[tuple[str, int]]:
    """Attributes that tell a layer's sizes, from the shape of its weight and, if new, its number of groups or heads."""
    if isinstance(module, nn.modules.conv._ConvNd):
        many = parts or module.groups
        made, read = (1, 0) if module.transposed else (0, 1)
        yield "out_channels", weight[made] * (many if module.transposed else 1)
        yield "in_channels", weight[read] * (1 if module.transposed else many)
    elif isinstance(module, nn.Linear):
        yield "out_features", weight[0]
        yield "in_features", weight[1]
    elif isinstance(module, nn.modules.batchnorm._NormBase):
        yield "num_features", weight[0]
    elif isinstance(module, nn.GroupNorm):
        yield "num_channels", weight[0]
    elif isinstance(module, nn.Embedding):
        yield "embedding_dim", weight[1]
    elif isinstance(module, nn.MultiheadAttention):
        yield from ((name, weight[1]) for name in ("embed_dim", "kdim", "vdim"))
        yield "head_dim", weight[0] // 3 // (parts or module.num_heads)
    elif isinstance(module, nn.PReLU):
        yield "num_parameters", weight[0]


def expected_shape(shape: tuple[int, ...], layers: list[Tensor], kept: Tensor, blocks: list[Tensor]) -> tuple[int, ...]:
    """Shape after removal of a tensor whose elements belong to the units in ``layers``.

    ``blocks`` are axes that were cut into rows [rows, n]: these keep their number of rows.
    """
    result = list(shape)
    for layer in layers:
        if bool((layer == STAYS).all()):
            continue
        for dim, size in zip(varying_dims(layer), _block(layer.squeeze(), kept, blocks), strict=True):
            result[dim] = size
    return tuple(result)


def _block(units: Tensor, kept: Tensor, blocks: list[Tensor]) -> list[int]:
    """Sizes of the block that the survivors form: a sub-block, or rows of equal length."""
    alive = kept[units]
    total = int(alive.sum())
    filled = [int(_any_other(alive, dim).sum()) for dim in range(alive.dim())]
    product = math.prod(filled)
    if product == total:
        return filled
    for dim in _position_dims(units, blocks):
        rest = product // max(filled[dim], 1)
        counts = alive.sum(dim)
        if int((counts > 0).sum()) == rest and len(set(counts[counts > 0].tolist())) == 1:
            return [total // rest if d == dim else size for d, size in enumerate(filled)]
    return filled


def _position_dims(units: Tensor, blocks: list[Tensor]) -> list[int]:
    """Dims along which rows may keep different positions, likeliest first."""
    if units.dim() == 2 and any(units.t().equal(rows) for rows in blocks):
        return [0]
    return list(range(units.dim() - 1, -1, -1))


def _any_other(alive: Tensor, dim: int) -> Tensor:
    return alive.movedim(dim, 0).flatten(1).any(1) if alive.dim() > 1 else alive


@dataclass(frozen=True)
class UnitRemoval:
    """What is to be removed from a traced model, and all that a rehearsal of it needs."""

    units: Units
    attributes: tuple[SizeAttribute, ...]
    kept: Tensor
    labels: Labels
    inputs: Any
    on_real_tensors: bool

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """New shapes of the parameters and buffers that lose something."""
        return {name: compact_shape(layout, self.kept, name) for name, layout in self.units.layouts.items()}

    def expected(self, *, arguments: bool = False) -> dict[Ref, tuple[int, ...]]:
        """The shape that each result of a torch function should have, and each of its arguments if asked for."""
        tape, of = self.labels.tape, self.units.of
        trees = ((call.args, call.kwargs, call.result) if arguments else call.result for call in tape.functions)
        blocks = [of[rows] for rows, _ in self.labels.splits]
        expected = {}
        for ref in dict.fromkeys(ref for tree in trees for ref in refs_in(tree)):
            value = tape.values[ref.index]
            if value.name:
                expected[ref] = self.shapes.get(value.name, value.shape)
            else:
                layers = [of[layer.ids] for layer in self.labels[ref]]
                expected[ref] = expected_shape(value.shape, layers, self.kept, blocks)
        return expected

    def set_numbers(self, model: nn.Module) -> list[str]:
        """Set the Python numbers; returns the names of attention layers whose class was exchanged."""
        forget_caches(model)
        modules, shapes = dict(model.named_modules()), self.shapes
        for (module, name, position), value in new_numbers(model, self.attributes, self.kept, shapes).items():
            if read_attribute(modules[module], name, position) is not None:
                set_attribute(modules[module], name, position, value)
        return slim_attention(model, shapes)


def trial(units: Units, seed: int, everywhere: bool, halve: Collection[int] = ()) -> Tensor:
    """Some units of every group go, or of most groups, with different shares: sizes must not agree by chance.

    Half of the groups in ``halve`` go: a balance had given them back all that an earlier trial took.
    """
    random = torch.Generator().manual_seed(1234 + seed)
    total = sum(group.size for group in units.groups)
    kept = torch.ones(total + 1, dtype=torch.bool, device="cpu")
    for place, group in enumerate(units.groups):
        share = 0.5 if place in halve else 0.2 + 0.4 * float(torch.rand(1, generator=random, device="cpu"))
        count = min(max(1, round(group.size * share)), max(1, group.size - 1))
        if everywhere or place in halve or float(torch.rand(1, generator=random, device="cpu")) < 0.7:
            kept[group.first + torch.randperm(group.size, generator=random, device="cpu")[:count]] = False
    for layout in units.layouts.values():
        for layer in layout.layers:
            if not bool(kept[layer].any()):
                kept[layer.flatten()[0]] = True
    return balance_vector(kept, units.balances, torch.rand(total, generator=random, device="cpu"))


def leave_one_whole(kept: Tensor, units: Units, together: list[Tensor], number: int) -> Tensor:
    """Of parts of one axis that are taken apart one loses nothing, each time another: halves must not stay equal."""
    kept, firsts = kept.clone(), torch.tensor([group.first for group in units.groups], device="cpu")
    for ids in together:
        found = units.of[ids]
        parts = (torch.searchsorted(firsts, found[found != STAYS], right=True) - 1).unique().tolist()
        if len(parts) > 1:
            kept[units.groups[parts[number % len(parts)]].units] = True
    total = kept.numel() - 1
    return balance_vector(kept, units.balances, torch.arange(total, dtype=torch.float64, device="cpu"))
