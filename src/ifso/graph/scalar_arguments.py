"""Numbers that a call computes with, as opposed to sizes that it makes room for: PyTorch's own schemas tell them apart.

A mask cannot change such a number. If it depends on how many channels there are, removing channels changes the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

SIZES = frozenset((
    "size", "sizes", "shape", "normalized_shape", "split_size", "split_sizes", "pad", "groups", "group", "num_groups",
    "N", "C", "HxW", "H", "W", "output_size", "input_size", "input_sizes", "self_size", "repeats", "stride", "length",
    "storage_offset", "upscale_factor", "downscale_factor", "kernel_size", "n", "m", "row", "col", "steps", "k",
    "num_classes", "hidden_size", "batch_size", "batch_sizes", "chunks", "sections", "numel", "bias_sizes", "s",
    "embed_dim", "num_head", "num_heads", "proj_size", "in_features", "out_features", "max_size", "input_shape",
))  # fmt: skip
"""Names of whole-number arguments that count elements: a wrong one shows in the shape of the result."""
POSITIONS = {"aten.slice": ("start", "end"), "aten.select": ("index",), "aten.narrow": ("start",)}
"""Arguments that are places along the axis ``dim``: they may follow its size, but change only with it."""
MOST_ELEMENTS = 4096
"""Constants with more elements are not compared."""

Values = tuple[tuple[str, bool, Any], ...]
"""(argument, is it a whole number by its schema, such as a dim?, number)."""


def values_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], content: Callable[[Any], Any]) -> Values:
    """Everything a call computes with; ``content`` gives the numbers in a constant tensor.

    >>> x = torch.zeros(2, 8)
    >>> values_of(torch.ops.aten.add.Tensor, (x, x), {"alpha": 8}, lambda tensor: None)
    (('alpha', False, 8),)
    >>> values_of(torch.ops.aten.view.default, (x, [2, 2, 4]), {}, lambda tensor: None)
    ()
    """
    found: list[tuple[str, bool, Any]] = []
    for position, name, whole, is_size in _arguments(func):
        given = args[position] if position is not None and position < len(args) else kwargs.get(name)
        if given is None or isinstance(given, (bool, str, torch.dtype)):
            continue
        items = given if isinstance(given, (list, tuple)) else (given,)
        for item in items:
            if isinstance(item, (int, float, complex)) and not isinstance(item, bool):
                if not is_size:
                    found.append((name, whole, item))
            elif (inside := content(item)) is not None:
                found.append((name, False, inside))
    return tuple(found)


@lru_cache(maxsize=4096)
def _arguments(func: Any) -> tuple[tuple[int | None, str, bool, bool], ...]:
    """(position or None, name, is it a whole number?, and a size or a place?) of an operator's arguments."""
    places = POSITIONS.get(str(func.overloadpacket), ())
    found = []
    for position, argument in enumerate(func._schema.arguments):
        whole = not any(word in str(argument.type) for word in ("number", "float", "complex", "Tensor", "Scalar"))
        is_size = whole and (argument.name in SIZES or argument.name in places)
        found.append((None if argument.kwarg_only else position, argument.name, whole, is_size))
    return tuple(found)


def place_of(func: Any, args: Sequence[Any], size: Callable[[Any], tuple[int, ...]]) -> tuple[int, ...] | None:
    """(size of the axis, places on it) of a call that picks places along an axis; None if it is no such call."""
    if str(func.overloadpacket) not in POSITIONS or len(args) < 2 or not isinstance(args[1], int):
        return None
    shape = size(args[0])
    whole = shape[args[1]] if shape else 0
    given = [0 if item is None else item for item in args[2:4]]
    return whole, *(max(min(item + whole if item < 0 else item, whole), 0) for item in given)


def content_of(item: Any) -> Any:
    """The numbers in a small tensor that has values, as shape and list; None for others."""
    if not isinstance(item, Tensor) or isinstance(item, FakeTensor) or item.numel() > MOST_ELEMENTS:
        return None
    with _disable_current_modes():
        try:
            return tuple(item.shape), item.detach().cpu().tolist()
        except (RuntimeError, NotImplementedError):
            return None
