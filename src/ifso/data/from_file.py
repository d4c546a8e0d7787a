"""Data from a user's own file: ``path/file.py:factory``."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ifso.common.text import describe_error
from ifso.data.base import Data
from ifso.data.batches import WHOLE, Shard
from ifso.errors import DataError, IfsoError, users_line
from ifso.models.from_file import blamed, find_in_file
from ifso.tasks.detection import detection_loss

MOST_CLASSES = 2**24
"""More would take all memory for the last layer alone."""

PARTS = ("train_batches", "validation_batches", "test_batches")


class FileData(Data):
    """What ``factory()`` of a file returned: an object with ``train_batches``, an iterable of batches.

    It may also have ``test_batches``, ``validation_batches``, ``num_classes``, ``input_shape`` (without the batch) and
    ``loss_fn(model, batch)``; without the last a batch is (images, labels) and the loss their cross entropy. With
    ``task = "detection"`` a batch is (images, targets) as detectors take them, see :mod:`ifso.tasks.detection`, and
    a target has ``boxes``, ``labels`` and ``image_id``. The file decides how large its batches are and how they are
    made: what is asked for here does not change them. A factory with a parameter ``rank`` or ``ranks`` is given which
    of several processes it makes batches for; otherwise all have the same.
    """

    def __init__(self, path: str, factory: str, device: torch.device | str, shard: Shard = WHOLE) -> None:
        self.name, self._device, self._ranks = f"{path}:{factory}", device, shard.ranks
        make = find_in_file(path, factory, DataError)
        with blamed(f"{self.name} failed", DataError):
            source = make(**_accepted(make, {"rank": shard.rank, "ranks": shard.ranks}))
        with blamed(self.name, DataError):
            self._take(source)

    def _take(self, source: Any) -> None:
        """The attributes of the object, checked."""
        self._parts = {part: self._checked(part, getattr(source, part, None)) for part in PARTS}
        if self._parts["train_batches"] is None:
            raise DataError(
                f"{self.name} returned {type(source).__name__} without train_batches; "
                "return an object that has it, an iterable of batches"
            )
        self.task = getattr(source, "task", "classification")
        if self.task not in ("classification", "detection"):
            raise DataError(f"{self.name}: task is {self.task!r}; give classification or detection")
        self.num_classes = getattr(source, "num_classes", None)
        if self.num_classes is not None and (
            type(self.num_classes) is not int or not 1 <= self.num_classes <= MOST_CLASSES
        ):
            words = f"give a whole number from 1 to {MOST_CLASSES}"
            raise DataError(f"{self.name}: num_classes is {self.num_classes!r}; {words}")
        shape = getattr(source, "input_shape", None)
        if shape is not None and (
            not isinstance(shape, (tuple, list)) or not all(isinstance(size, int) and size > 0 for size in shape)
        ):
            raise DataError(f"{self.name}: input_shape is {shape!r}; give sizes without the batch, such as (3, 32, 32)")
        self.input_shape = None if shape is None else tuple(shape)
        loss_fn = getattr(source, "loss_fn", detection_loss if self.task == "detection" else None)
        if loss_fn is not None:
            if not callable(loss_fn):
                raise DataError(f"{self.name}: loss_fn is {type(loss_fn).__name__}; give a function (model, batch)")
            self.loss_fn = loss_fn

    def train_batches(self, batch_size: int = 128, augment: bool = True, drop_last: bool = True) -> DeviceBatches:  # noqa: ARG002
        """The file's own training batches, on the device."""
        return self._part("train_batches")

    def validation_batches(self, batch_size: int = 500) -> DeviceBatches:  # noqa: ARG002
        """The file's own validation batches, on the device."""
        return self._part("validation_batches")

    def test_batches(self, batch_size: int = 500) -> DeviceBatches:  # noqa: ARG002
        """The file's own test batches, on the device."""
        return self._part("test_batches")

    def example_inputs(self) -> Any:
        """Zeros [1, …] of ``input_shape``, or the first image of a training batch; for a detector in a list."""
        if self.input_shape is not None:
            image = torch.zeros(self.input_shape, device=self._device)
            return ([image],) if self.task == "detection" else image[None]
        batch = next(iter(self.train_batches()))
        images = batch[0] if isinstance(batch, (tuple, list)) and batch else None
        if self.task == "detection" and isinstance(images, list):
            return (images[:1],)
        if isinstance(images, Tensor) and images.dim() > 1:
            return images[:1]
        raise DataError(f"{self.name} says no input_shape, and its batches are not (images, labels); give input_shape")

    def _part(self, name: str) -> DeviceBatches:
        batches, where = self._parts[name], f"{self.name}: {name}"
        if batches is None:
            raise DataError(f"{self.name} has no {name}; let the object it returns have it")
        kind = SizedDeviceBatches if _has_length(batches, where) else DeviceBatches
        return kind(batches, self._device, where, self._ranks > 1 and name != PARTS[0])

    def _checked(self, name: str, batches: Any) -> Any:
        """The batches, which may be None."""
        where = f"{self.name}: {name} is {type(batches).__name__}"
        if isinstance(batches, (str, Mapping, Tensor)) or not isinstance(batches, Iterable | None):
            raise DataError(f"{where}; give an iterable of batches, such as a DataLoader")
        if isinstance(batches, Iterator):
            raise DataError(
                f"{where}, which can be gone through only once; give a list, a DataLoader or an object with __iter__"
            )
        return batches


def _accepted(function: Any, offered: Mapping[str, int]) -> dict[str, int]:
    """Those of the arguments that the function has parameters for."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    kinds = {name: parameters[name].kind for name in offered if name in parameters}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: offered[name] for name, kind in kinds.items() if kind in named}


class DeviceBatches:
    """The same batches with all their tensors on a device; the first one of each epoch is looked at.

    They may not be empty, except for a rank that has nothing to test while others have.
    """

    def __init__(self, batches: Any, device: torch.device | str, where: str, may_be_empty: bool = False) -> None:
        self.loader, self._device, self._where, self._may_be_empty = batches, device, where, may_be_empty

    def set_epoch(self, epoch: int) -> None:
        """Set it in the batches, or in the sampler of a DataLoader, if they have ``set_epoch``."""
        for listener in (self.loader, getattr(self.loader, "sampler", None)):
            if listener is not None and hasattr(listener, "set_epoch"):
                listener.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        number = 0
        for number, batch in enumerate(self._items(), 1):
            moved = tree_map(self._move, batch)
            if number == 1:
                _refuse_bad(moved, self._where)
            yield moved
        if not number and not self._may_be_empty:
            raise DataError(f"{self._where} is empty; it must yield one batch at least")

    def _items(self) -> Iterator[Any]:
        number = 0
        try:
            for batch in self.loader:
                yield batch
                number += 1
        except (IfsoError, torch.OutOfMemoryError):
            raise
        except (Exception, SystemExit) as error:
            said = f"{describe_error(error)}{users_line(error)}"
            raise DataError(f"{self._where} failed after {number} batches: {said}") from error

    def _move(self, leaf: Any) -> Any:
        return leaf.to(self._device, non_blocking=True) if isinstance(leaf, Tensor) else leaf


class SizedDeviceBatches(DeviceBatches):
    """Batches whose number is known."""

    def __len__(self) -> int:
        return len(self.loader)


def _has_length(batches: Any, where: str) -> bool:
    """Return whether ``len(batches)`` works: a DataLoader has ``__len__`` even where its data has none."""
    with blamed(f"{where}: its length cannot be read", DataError):
        try:
            return len(batches) >= 0
        except TypeError:
            return False


def _refuse_bad(batch: Any, where: str) -> None:
    """DataError if there is no tensor in a batch, none with a number, or one that is not finite."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    if not tensors:
        raise DataError(f"{where} yields {type(batch).__name__} without a tensor; give batches of tensors")
    if any(tensor.is_floating_point() and not bool(tensor.isfinite().all()) for tensor in tensors):
        raise DataError(f"{where}: the first batch holds NaN or infinite numbers")
    if all(not tensor.numel() for tensor in tensors):
        raise DataError(f"{where}: the first batch is empty")
