"""The Python numbers of a model that must follow its channels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor, nn

from ifso.common.module_state import tensor_slots
from ifso.graph.channel_graph import SizeAttribute

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
