"""Batches of lists, as detectors take them: a list of images [3, H, W] of any sizes and, beside it, one of targets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ifso.errors import TrainingError
from ifso.graph.tape import map_tensors


def is_listed(batch: Any) -> bool:
    """Does the batch, or the tuple of inputs, begin with a list of images?

    >>> is_listed(([torch.zeros(3, 4, 6)], [{}])), is_listed((torch.zeros(1, 3, 4, 6), torch.zeros(1)))
    (True, False)
    """
    return isinstance(batch, (tuple, list)) and bool(batch) and isinstance(batch[0], list)


def size_of(batch: Any) -> int:
    """How many images a batch holds.

    >>> size_of((torch.zeros(6, 3, 8, 8), torch.zeros(6))), size_of(([torch.zeros(3, 8, 8)] * 2, [{}, {}]))
    (6, 2)
    """
    if is_listed(batch):
        return len(batch[0])
    return next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), 0)


def of_batch(example_inputs: Any, batch: int) -> Any:
    """The first of the example inputs, ``batch`` times, in the memory layout that it has.

    >>> of_batch(torch.zeros(1, 3, 8, 8).to(memory_format=torch.channels_last), 4).stride()
    (192, 1, 24, 3)
    >>> [image.shape for image in of_batch(([torch.zeros(3, 8, 6)],), 2)[0]]
    [torch.Size([3, 8, 6]), torch.Size([3, 8, 6])]
    """
    if is_listed(example_inputs):
        return tuple(part[:1] * batch if isinstance(part, list) else part for part in example_inputs)
    return map_tensors(example_inputs, lambda tensor: torch.cat([tensor[:1]] * batch))


def part_of(batch: Any, number: int, parts: int) -> Any:
    """Micro-batch ``number`` of ``parts``: of every tensor, or of every list.

    Whatever is neither stays as it is, and so does a tensor of no dimension.

    >>> images, targets = part_of(([torch.zeros(3, 4, 4), torch.ones(3, 2, 2)], ["first", "second"]), 1, 2)
    >>> images[0].shape, targets
    (torch.Size([3, 2, 2]), ['second'])
    """
    if parts == 1:
        return batch
    if is_listed(batch):
        return tuple(_cut_list(part, number, parts) for part in batch)
    return tree_map(lambda leaf: _cut(leaf, number, parts), batch)


def _cut_list(values: Any, number: int, parts: int) -> Any:
    if not isinstance(values, list):
        return values
    _refuse_uneven(len(values), parts)
    each = len(values) // parts
    return values[number * each : (number + 1) * each]


def _cut(leaf: Any, number: int, parts: int) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.dim():
        return leaf
    _refuse_uneven(len(leaf), parts)
    return leaf.chunk(parts)[number]


def _refuse_uneven(size: int, parts: int) -> None:
    if size % parts:
        raise TrainingError(f"a batch of {size} cannot be cut into {parts} equal micro-batches")
