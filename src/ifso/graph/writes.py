"""Undoing what a run writes into tensors that were there before it: each is copied just before it is written first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ifso.graph.tape import LEAVING, storage_of, written_by


class Writes:
    """Memory of ``tensors`` that is written: copied before the first write, put back by :meth:`undo`."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._watched = {storage: tensor for tensor in tensors if (storage := storage_of(tensor)) is not None}
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def before(self, func: Any, args: Any, kwargs: Any) -> None:
        """An ATen call is about to be made."""
        for tensor in written_by(func, args, kwargs):
            self.protect(tensor)

    def protect(self, tensor: Tensor) -> None:
        """Copy the memory of a tensor that is about to be written."""
        storage = storage_of(tensor)
        if storage in self._watched and storage not in self._copies:
            own = self._watched[storage].untyped_storage()
            self._copies[storage] = (own, own.clone())

    def undo(self) -> None:
        """Put back what was written over."""
        for storage, before in self._copies.values():
            storage.copy_(before)
        self._copies.clear()


class WatchedCalls(TorchDispatchMode):
    """Tells ``writes`` of every ATen call."""

    def __init__(self, writes: Writes) -> None:
        super().__init__()
        self._writes = writes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._writes.before(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class WatchedLeavings(TorchFunctionMode):
    """Tells ``writes`` of tensors whose memory is handed to others."""

    def __init__(self, writes: Writes) -> None:
        super().__init__()
        self._writes = writes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and getattr(func, "__name__", "") in LEAVING and isinstance(args[0], Tensor):
            self._writes.protect(args[0])
        return func(*args, **(kwargs or {}))
