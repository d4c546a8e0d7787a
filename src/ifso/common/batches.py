"""Batches cut into samples: tensors along their first dim, or lists item by item, as detectors have them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ifso.common.tensors import map_tensors
from ifso.errors import ScoreError, TrainingError


def num_samples(batch: Any) -> int:
    """How many samples a batch can be cut into.

    >>> import torch
    >>> num_samples((torch.zeros(3, 2), torch.zeros(3))), num_samples(([torch.zeros(3, 8, 8)] * 2, [{}, {}]))
    (3, 2)
    """
    return len(batch[0]) if is_lists(batch) else tensor_length(batch)


def pieces(batch: Any, size: int) -> Iterator[Any]:
    """The batch as batches of ``size`` samples.

    >>> list(pieces((["a", "b", "c"], [1, 2, 3]), 2))
    [(['a', 'b'], [1, 2]), (['c'], [3])]
    """
    if not is_lists(batch):
        yield from tensor_pieces(batch, size)
        return
    for start in range(0, num_samples(batch), size):
        yield tuple(part[start : start + size] for part in batch)


def micro_batches(batch: Any, size: int | None) -> Iterator[tuple[Any, float]]:
    """The batch in parts of ``size`` samples, each with its share of all samples; whole if ``size`` is None.

    >>> [(part.tolist(), share) for part, share in micro_batches(torch.arange(4), 3)]
    [([0, 1, 2], 0.75), ([3], 0.25)]
    """
    if size is None:
        yield batch, 1.0
        return
    total = num_samples(batch)
    for part in pieces(batch, size):
        yield part, num_samples(part) / total


def is_lists(batch: Any) -> bool:
    """Is it lists of equal length, an item for each sample: (images, targets)?"""
    if not isinstance(batch, (tuple, list)) or not batch or not all(isinstance(part, list) for part in batch):
        return False
    return len({len(part) for part in batch}) == 1


def rough_count(batch: Any) -> int:
    """How many samples there may be in anything that a network is called with: the length of lists, or first dims."""
    lists = [len(part) for part in batch if isinstance(part, list)] if isinstance(batch, (tuple, list)) else []
    sizes = [leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    return max(lists or sizes, default=1)


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


def tensor_pieces(batch: Any, size: int) -> Iterator[Any]:
    """A batch cut along the first dim of its tensors into batches of ``size`` samples.

    >>> [part[0].tolist() for part in pieces((torch.arange(3), "name"), 2)]
    [[0, 1], [2]]
    """
    leaves, shape = tree_flatten(batch)
    length = tensor_length(batch)
    for start in range(0, length, size):
        cut: Sequence[Any] = [
            leaf[start : start + size] if isinstance(leaf, Tensor) and leaf.dim() > 0 else leaf for leaf in leaves
        ]
        yield tree_unflatten(cut, shape)


def tensor_length(batch: Any) -> int:
    """The first dim that all tensors of a batch have in common.

    >>> num_samples((torch.zeros(3, 2), torch.zeros(3)))
    3
    """
    lengths = {leaf.shape[0] for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor) and leaf.dim() > 0}
    if len(lengths) != 1:
        raise ScoreError(
            f"cannot cut a batch into samples: its tensors have first dims {sorted(lengths)}; they must be equal"
        )
    return lengths.pop()


def looks_like_one_batch(batches: Any) -> bool:
    """Is it a batch, where an iterable of batches should be?"""
    if isinstance(batches, (Tensor, str, Mapping)) or hasattr(batches, "__array__"):
        return True
    if not isinstance(batches, (tuple, list)) or not all(isinstance(item, Tensor) for item in batches):
        return False
    if isinstance(batches, tuple):
        return bool(batches)
    return len({(item.dim(), item.dtype) for item in batches}) > 1
