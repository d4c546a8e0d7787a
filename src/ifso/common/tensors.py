"""Undoing what a run writes into tensors that were there before it: each is copied just before it is written first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

LEAVING = frozenset(("numpy", "__array__", "__dlpack__", "__array_interface__"))
"""Functions that hand a tensor's memory to others, which may write there unseen."""


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


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an ATen call writes into, by its schema."""
    if not func._schema.is_mutable:
        return []
    places = [
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return tensors_in([args[place] if place < len(args) else kwargs.get(name) for place, name in places])


def storage_of(tensor: Tensor) -> int | None:
    """What tells the memory of a tensor from that of others; None if it has none of its own."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def map_tensors(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """A copy of nested tuples, lists and dicts with every tensor replaced by ``change(tensor)``."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, tuple):
        return tuple(map_tensors(item, change) for item in tree)
    if isinstance(tree, list):
        return [map_tensors(item, change) for item in tree]
    if isinstance(tree, dict):
        return {key: map_tensors(item, change) for key, item in tree.items()}
    return tree


def tensors_in(tree: Any) -> list[Tensor]:
    """Every tensor in nested containers, dataclasses and model-output objects."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [tensor for item in tree.values() for tensor in tensors_in(item)]
    if isinstance(tree, (tuple, list, set)):
        return [tensor for item in tree for tensor in tensors_in(item)]
    if hasattr(tree, "__dict__") and not isinstance(tree, (nn.Module, type)):
        return [tensor for item in vars(tree).values() for tensor in tensors_in(item)]
    return []


def to_float32(leaf: Any) -> Any:
    """A tensor of half precision as float32; anything else unchanged."""
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in (torch.bfloat16, torch.float16) else leaf


def placed(vector: Tensor, dim: int, ndim: int) -> Tensor:
    """A vector along one of ``ndim`` dims, the others of size 1.

    >>> placed(torch.arange(3), 1, 4).shape
    torch.Size([1, 3, 1, 1])
    """
    return vector.reshape([vector.numel() if each == dim else 1 for each in range(ndim)])
