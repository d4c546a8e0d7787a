"""Batches: cut into samples along first dims or item by item, dealt in an order that can be resumed, looked at."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.data import DataLoader

from ifso.common.distributed import rank
from ifso.common.tensors import map_tensors
from ifso.errors import DataError, ScoreError, TrainingError


def num_samples(batch: Any) -> int:
    """How many samples a batch can be cut into: items of its lists, or the first dim that all its tensors have.

    >>> import torch
    >>> num_samples((torch.zeros(3, 2), torch.zeros(3))), num_samples(([torch.zeros(3, 8, 8)] * 2, [{}, {}]))
    (3, 2)
    """
    if is_lists(batch):
        return len(batch[0])
    lengths = {leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 0}
    if len(lengths) != 1:
        raise ScoreError(
            f"cannot cut a batch into samples: its tensors have first dims {sorted(lengths)}; they must be equal"
        )
    return lengths.pop()


def pieces(batch: Any, size: int) -> Iterator[Any]:
    """The batch as batches of ``size`` samples.

    >>> list(pieces((["a", "b", "c"], [1, 2, 3]), 2))
    [(['a', 'b'], [1, 2]), (['c'], [3])]
    >>> [part[0].tolist() for part in pieces((torch.arange(3), "name"), 2)]
    [[0, 1], [2]]
    """
    for start in range(0, num_samples(batch), size):
        here = slice(start, start + size)
        if is_lists(batch):
            yield tuple(part[here] for part in batch)
        else:
            yield tree_map(lambda leaf: leaf[here] if isinstance(leaf, Tensor) and leaf.dim() else leaf, batch)  # noqa: B023


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
    """Return whether it is lists of equal length, an item for each sample: (images, targets)."""
    if not isinstance(batch, (tuple, list)) or not batch or not all(isinstance(part, list) for part in batch):
        return False
    return len({len(part) for part in batch}) == 1


def rough_count(batch: Any) -> int:
    """How many samples there may be in anything that a network is called with: the length of lists, or first dims."""
    lists = [len(part) for part in batch if isinstance(part, list)] if isinstance(batch, (tuple, list)) else []
    sizes = [leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    return max(lists or sizes, default=1)


def is_listed(batch: Any) -> bool:
    """Return whether the batch, or the tuple of inputs, begins with a list of images.

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


def shared_size(batch_size: int, ranks: int) -> int:
    """How many samples of each batch a process takes if ``ranks`` of them share it out.

    >>> shared_size(128, 4)
    32
    """
    if batch_size % ranks:
        raise TrainingError(f"a batch of {batch_size} cannot be shared by {ranks} processes; give a multiple")
    return batch_size // ranks


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
        return tuple(_share(part, number, parts) if isinstance(part, list) else part for part in batch)
    cut = lambda leaf: _share(leaf, number, parts) if isinstance(leaf, Tensor) and leaf.dim() else leaf  # noqa: E731
    return tree_map(cut, batch)


def _share(items: Any, number: int, parts: int) -> Any:
    if len(items) % parts:
        raise TrainingError(f"a batch of {len(items)} cannot be cut into {parts} equal micro-batches")
    each = len(items) // parts
    return items[number * each : (number + 1) * each]


def joined(batches: Sequence[Any]) -> Any | None:
    """All samples as one batch, or None if the batches do not go together: lists of images, other sizes.

    >>> joined([(torch.zeros(2, 3), torch.zeros(2)), (torch.ones(1, 3), torch.ones(1))])[1]
    tensor([0., 0., 1.])
    >>> joined([torch.zeros(2, 3), torch.zeros(2, 4)]), joined([([torch.zeros(3, 4, 4)], [{}])])
    (None, None)
    """
    if not batches or any(is_listed(batch) for batch in batches):
        return None
    flat = [tree_flatten(batch) for batch in batches]
    columns = list(zip(*(leaves for leaves, _ in flat), strict=False))
    if any(shape != flat[0][1] for _, shape in flat) or not all(map(_fit_together, columns)):
        return None
    return tree_unflatten([torch.cat(column) for column in columns], flat[0][1])


def _fit_together(leaves: Sequence[Any]) -> bool:
    """Return whether they are tensors that differ in nothing but the length of their first dim."""
    if not all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
        return False
    return len({(leaf.shape[1:], leaf.dtype, leaf.device) for leaf in leaves}) == 1


def looks_like_one_batch(batches: Any) -> bool:
    """Return whether it is a batch, where an iterable of batches should be."""
    if isinstance(batches, (Tensor, str, Mapping)) or hasattr(batches, "__array__"):
        return True
    if not isinstance(batches, (tuple, list)) or not all(isinstance(item, Tensor) for item in batches):
        return False
    if isinstance(batches, tuple):
        return bool(batches)
    return len({(item.dim(), item.dtype) for item in batches}) > 1


_EMPTY = "train_batches is empty, or a generator that has run out; give an iterable with a batch in it"


class BatchStream:
    """Epoch after epoch of ``batches``.

    What is random in them depends on ``seed`` and the epoch alone: the global random states of torch, numpy and Python
    are set for each epoch, kept apart from what else happens, and put back after each batch. A ``generator`` of a
    DataLoader or its sampler is seeded, and whatever has ``set_epoch`` is told. So a stream that starts at an epoch and
    index goes on as one that was there before. Ranks have seeds of their own.

    >>> stream = BatchStream([1, 2, 3], seed=0)
    >>> [next(stream) for _ in range(5)], stream.position
    ([1, 2, 3, 1, 2], (1, 2))
    >>> next(BatchStream([1, 2, 3], seed=0, position=(1, 2)))
    3
    """

    def __init__(self, batches: Iterable[Any], seed: int, position: tuple[int, int] = (0, 0)) -> None:
        if looks_like_one_batch(batches):
            raise DataError(f"train_batches is one batch ({type(batches).__name__}); give an iterable of batches")
        if not isinstance(batches, Iterable):
            raise DataError(
                f"train_batches is a {type(batches).__name__}; give an iterable of batches, e.g. a DataLoader"
            )
        self._batches, self._seed = batches, seed
        self._epoch, self._index = position[0], 0
        self._inner = _RandomStates.seeded(seed, self._epoch)
        self._items: Iterator[Any] | None = None
        for _ in range(position[1]):
            next(self)

    @property
    def position(self) -> tuple[int, int]:
        """The epoch, and how many of its batches were taken."""
        return self._epoch, self._index

    def __iter__(self) -> BatchStream:
        return self

    def __next__(self) -> Any:
        for _ in range(2):
            with self._own_randomness():
                if self._items is None:
                    self._items = self._start()
                for batch in self._items:
                    self._index += 1
                    return batch
            self._end_epoch()
        raise DataError(_EMPTY)

    def _start(self) -> Iterator[Any]:
        for part in _parts(self._batches):
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(self._epoch)
            if isinstance(getattr(part, "generator", None), torch.Generator):
                part.generator.manual_seed(_number(self._seed, self._epoch))
        return iter(self._batches)

    def _end_epoch(self) -> None:
        if self._index == 0:
            raise DataError(_EMPTY)
        if self._items is self._batches:
            raise DataError(
                f"train_batches ran out after {self._index} batches; give an iterable that can be gone through again "
                "(a list, a DataLoader), not a generator"
            )
        self._epoch, self._index, self._items = self._epoch + 1, 0, None
        self._inner = _RandomStates.seeded(self._seed, self._epoch)

    @contextlib.contextmanager
    def _own_randomness(self) -> Iterator[None]:
        with same_random_numbers():
            self._inner.put()
            try:
                yield
            finally:
                self._inner = _RandomStates.current()


REMEMBERS = (
    "the workers of this DataLoader live on from epoch to epoch (persistent_workers), and what is random in them is "
    "not as in a run that was never stopped; leave that out to resume exactly"
)


def remembers(batches: Iterable[Any]) -> bool:
    """Return whether batches come from processes whose random state goes on over epochs, beyond any checkpoint."""
    loaders = (batches, getattr(batches, "loader", None))
    return any(isinstance(each, DataLoader) and each.num_workers > 0 and each.persistent_workers for each in loaders)


def first_batches(batches: Iterable[Any], seed: int, samples: int | None, least: int) -> list[Any]:
    """The first batches of an epoch, up to so many ``samples``; or, with None, the ``least`` first of the stream.

    A generator that can be gone through only once will do where samples are asked for.
    """
    stream = BatchStream(batches, seed)
    found: list[Any] = []
    if samples is None:
        return [next(stream) for _ in range(least)]
    total = 0
    while total < samples:
        try:
            batch = next(stream)
        except DataError as error:
            if found and error.__cause__ is None:
                break
            raise
        if stream.position[0]:
            break
        found.append(batch)
        total += rough_count(batch)
    return found


def dealt_again(batches: list[Any], seed: int) -> list[Any]:
    """The same samples in batches of the same sizes, in random order: a batch is then not of one class alone.

    Batches that are anything else than tensors with the samples along their first dim come back as they are.

    >>> [batch.tolist() for batch in dealt_again([torch.tensor([0, 1]), torch.tensor([2, 3])], seed=1)]
    [[1, 3], [2, 0]]
    """
    whole = joined(batches) if len(batches) > 1 else None
    sizes = [] if whole is None else [{len(leaf) for leaf in tree_leaves(batch)} for batch in batches]
    if whole is None or any(len(size) != 1 for size in sizes):
        return batches
    counts = [size.pop() for size in sizes]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed), device="cpu")
    leaves, shape = tree_flatten(whole)
    dealt = zip(*(leaf[order.to(leaf.device)].split(counts) for leaf in leaves), strict=True)
    return [tree_unflatten(list(each), shape) for each in dealt]


def _parts(batches: Any) -> list[Any]:
    """What is random in a DataLoader, or in something around one: innermost first."""
    inner = [getattr(batches, name, None) for name in ("loader", "batch_sampler", "sampler")]
    return [*(part for one in inner if one is not None for part in _parts(one)), batches]


class _RandomStates(NamedTuple):
    """The global random states of torch (CPU), numpy and Python."""

    of_torch: Tensor
    of_numpy: Any
    of_python: Any

    @classmethod
    def current(cls) -> _RandomStates:
        return cls(torch.get_rng_state(), np.random.get_state(), random.getstate())  # noqa: NPY002 (what users use)

    @classmethod
    def seeded(cls, seed: int, epoch: int) -> _RandomStates:
        number = _number(seed, epoch)
        return cls(
            torch.Generator().manual_seed(number).get_state(),
            np.random.RandomState(number).get_state(),
            random.Random(number).getstate(),  # noqa: S311 (no secret)
        )

    def put(self) -> None:
        torch.set_rng_state(self.of_torch)
        np.random.set_state(self.of_numpy)  # noqa: NPY002
        random.setstate(self.of_python)


@contextlib.contextmanager
def same_random_numbers() -> Iterator[None]:
    """Put the global random states on the CPU back, which a user's own batches may draw from."""
    before = _RandomStates.current()
    try:
        yield
    finally:
        before.put()


def _number(seed: int, epoch: int) -> int:
    return int(np.random.SeedSequence([seed, epoch, *([rank()] if rank() else [])]).generate_state(1)[0])


def seed_of(seed: int, rounds: int) -> int:
    """Another seed for each round: what is random in a model does not depend on where a run was resumed."""
    return (seed * 1_000_003 + rounds * 97 + rank()) % 2**31


def on_device(batch: Any, device: torch.device) -> Any:
    """The batch with all its tensors on a device."""
    if not isinstance(batch, (Tensor, tuple, list, dict)) and callable(getattr(batch, "to", None)):
        return batch.to(device)
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, batch)


def not_finite(batch: Any) -> Tensor:
    """Return whether a batch holds NaN or infinity, as a bool scalar on its device, so that nobody need wait for it.

    Minus infinity is left alone: masks of attention are made of it.
    """
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not leaves:
        return torch.zeros((), dtype=torch.bool, device="cpu")
    return torch.stack([(leaf.isnan() | leaf.isposinf()).any() for leaf in leaves]).any()
