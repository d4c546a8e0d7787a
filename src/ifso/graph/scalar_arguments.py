"""Numbers that a call computes with, as opposed to sizes that it makes room for: PyTorch's own schemas tell them apart.

A mask cannot change such a number. If it depends on how many channels there are, removing channels changes the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from ifso.common.module_state import named_tensors
from ifso.graph.tape import FunctionCall, Ref, Tape, content_of

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


class ComputedNumbers:
    """Notes what the ATen calls of one torch function compute with."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[Computed] = []
        self._known = {id(tensor) for tensor in named_tensors(model).values()}

    def note(self, func: Any, args: Any, kwargs: Any) -> None:
        """An ATen call is about to be made."""
        self.calls.append(_computed(func, args, kwargs, self._content, lambda tensor: tuple(tensor.shape)))

    def _content(self, item: Any) -> Any:
        return None if id(item) in self._known else content_of(item)


def changed_numbers(before: Any, now: Any) -> Iterator[tuple[int, int]]:
    """(old, new) where arguments of a recorded call hold another int at the same place now.

    >>> list(changed_numbers((2, [1, 16]), (2, [1, 13])))
    [(16, 13)]
    """
    if type(before) is int and type(now) is int:
        if before != now:
            yield before, now
    elif isinstance(before, (tuple, list)) and isinstance(now, (tuple, list)):
        for old, new in zip(before, now, strict=False):
            yield from changed_numbers(old, new)
    elif isinstance(before, dict) and isinstance(now, dict):
        yield from changed_numbers([before[key] for key in before], [now.get(key) for key in before])


Computed = tuple[str, Values, "tuple[int, ...] | None"]
"""An ATen call: its operator, the numbers it computes with, and the place along an axis that it picks."""


def _computed(func: Any, args: Any, kwargs: Any, content: Callable[[Any], Any], size: Callable[[Any], Any]) -> Computed:
    return str(func.overloadpacket), values_of(func, args, kwargs, content), place_of(func, args, size)


def recorded_numbers(call: FunctionCall, tape: Tape) -> list[Computed]:
    """What the ATen calls of a recorded function computed with."""

    def content(item: Any) -> Any:
        return tape.values[item.index].content if isinstance(item, Ref) else None

    return [_computed(one.func, one.args, one.kwargs, content, tape.shape) for one in tape.calls_of(call.key)]


def same_numbers(before: list[Computed], now: list[Computed]) -> bool:
    """Return whether two runs of a function compute with the same numbers. A place may move with the size of its axis.

    Where PyTorch itself takes other operators for other sizes, as in an einsum, their dims and places tell nothing.
    """
    if [op for op, _, _ in before] != [op for op, _, _ in now]:
        return _fractions(before) == _fractions(now)
    if [values for _, values, _ in before] != [values for _, values, _ in now]:
        return False
    places = [[place for _, _, place in calls if place is not None] for calls in (before, now)]
    return all(one == other or one[0] != other[0] for one, other in zip(*places, strict=True))


def _fractions(calls: list[Computed]) -> list[Any]:
    return [value for _, values, _ in calls for _, whole, value in values if not whole]


OWN_SCALES = ("scaled_dot_product_attention", "multi_head_attention_forward")
"""Functions that divide by the root of a head's size, which masks account for."""
