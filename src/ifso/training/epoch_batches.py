"""The batches of an epoch; in those that a user made, what is random follows the seed and the epoch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ifso.common.batch_stream import BatchStream
from ifso.data.batches import Epochs


class OneEpoch(BatchStream):
    """Epoch ``epoch`` of ``batches`` as a :class:`BatchStream` has it, and no other.

    >>> list(OneEpoch([1, 2, 3], seed=0, epoch=5))
    [1, 2, 3]
    """

    def __init__(self, batches: Iterable[Any], seed: int, epoch: int) -> None:
        super().__init__(batches, seed, (epoch, 0))

    def _end_epoch(self) -> None:
        raise StopIteration


def batches_of(batches: Any, seed: int, epoch: int) -> Iterator[Any]:
    """Epoch ``epoch`` of ``batches``, which are told its number if they have ``set_epoch``.

    Ours have random numbers of their own, and a list has none. For others the global random states of torch, numpy and
    Python and the generator of a DataLoader are set, so that a training which was interrupted goes on as if it had not
    been; between two batches the states are as they were.
    """
    if isinstance(batches, Epochs):
        batches.set_epoch(epoch)
        return iter(batches)
    return iter(batches) if type(batches) in (list, tuple) else OneEpoch(batches, seed, epoch)
