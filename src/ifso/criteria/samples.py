"""A batch cut into samples: lists item by item, as detectors have them, or tensors along their first dim."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from ifso.curvature import objective


def num_samples(batch: Any) -> int:
    """How many samples a batch can be cut into.

    >>> import torch
    >>> num_samples((torch.zeros(3, 2), torch.zeros(3))), num_samples(([torch.zeros(3, 8, 8)] * 2, [{}, {}]))
    (3, 2)
    """
    return len(batch[0]) if is_listed(batch) else objective.num_samples(batch)


def pieces(batch: Any, size: int) -> Iterator[Any]:
    """The batch as batches of ``size`` samples.

    >>> list(pieces((["a", "b", "c"], [1, 2, 3]), 2))
    [(['a', 'b'], [1, 2]), (['c'], [3])]
    """
    if not is_listed(batch):
        yield from objective.pieces(batch, size)
        return
    for start in range(0, num_samples(batch), size):
        yield tuple(part[start : start + size] for part in batch)


def is_listed(batch: Any) -> bool:
    """Is it lists of equal length, an item for each sample: (images, targets)?"""
    if not isinstance(batch, (tuple, list)) or not batch or not all(isinstance(part, list) for part in batch):
        return False
    return len({len(part) for part in batch}) == 1


def rough_count(batch: Any) -> int:
    """How many samples there may be in anything that a network is called with: the length of lists, or first dims."""
    lists = [len(part) for part in batch if isinstance(part, list)] if isinstance(batch, (tuple, list)) else []
    sizes = [leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    return max(lists or sizes, default=1)
