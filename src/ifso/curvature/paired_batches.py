"""Two tensors side by side in memory, so that one kernel can take both as one batch of twice the size."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor


def halves(like: Tensor) -> tuple[Tensor, Tensor]:
    """Two new tensors of the shape and strides of ``like`` (which must be dense), one behind the other in memory.

    They are no views of a third, of which forward mode would have to keep a tangent, too.
    """
    both = torch.empty(2 * like.numel(), dtype=like.dtype, device=like.device)
    first, second = (torch.empty(0, dtype=like.dtype, device=like.device) for _ in range(2))
    first.set_(both.untyped_storage(), 0, like.shape, like.stride())
    second.set_(both.untyped_storage(), like.numel(), like.shape, like.stride())
    return first, second


def alias(x: Tensor, offset: int = 0, shape: Sequence[int] | None = None) -> Tensor:
    """A tensor on the memory of ``x`` that is no view of it, in the eyes of forward mode."""
    bare = torch.empty(0, dtype=x.dtype, device=x.device)
    return bare.set_(x.untyped_storage(), x.storage_offset() + offset, shape or x.shape, x.stride())


def split_batch(pair: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the second half of a batch [2N, …], on its memory."""
    shape = (pair.shape[0] // 2, *pair.shape[1:])
    return alias(pair, 0, shape), alias(pair, shape[0] * pair.stride(0), shape)


def empty_pair(x: Tensor) -> Tensor:
    """An empty batch of twice the size, for functions that look at its shape only."""
    shape = (2 * x.shape[0], *x.shape[1:])
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=dense_format(x))


def as_one_batch(first: Tensor, second: Tensor) -> Tensor | None:
    """Both as one batch [2N, …] without copying, or None if they do not lie side by side.

    >>> first, second = halves(torch.zeros(2, 3))
    >>> as_one_batch(first, second).shape, as_one_batch(second, first)
    (torch.Size([4, 3]), None)
    """
    beside = (
        first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and second.storage_offset() == first.storage_offset() + first.numel()
        and first.shape == second.shape
        and first.stride() == second.stride()
        and first.dim() > 1
        and first.stride(0) * first.shape[0] == first.numel()
    )
    if not beside:
        return None
    return first.as_strided((2 * first.shape[0], *first.shape[1:]), first.stride(), first.storage_offset())


def is_dense(x: Tensor) -> bool:
    """Return whether it is contiguous, channels first or last."""
    return x.is_contiguous() or (x.dim() > 2 and x.movedim(1, -1).is_contiguous())


def dense_format(x: Tensor) -> torch.memory_format:
    """Its memory format."""
    if x.is_contiguous() or x.dim() not in (4, 5):
        return torch.contiguous_format
    return torch.channels_last if x.dim() == 4 else torch.channels_last_3d


def fits_kernels(*tensors: Tensor) -> bool:
    """Return whether :mod:`ifso.curvature.kernels` takes these [N, C, …]: on the current GPU, alike and dense."""
    first = tensors[0]
    return (
        first.is_cuda
        and first.dim() in (3, 4, 5)
        and first.device.index == torch.cuda.current_device()  # where Triton would put them
        and is_dense(first)
        and all(
            tensor.dtype != torch.float64 and tensor.stride() == first.stride() and tensor.shape == first.shape
            for tensor in tensors
        )
        and _has_triton()
    )


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def load_kernels() -> Any:
    """The module with the kernels; only where :func:`fits_kernels` says yes."""
    return import_module("ifso.curvature.kernels")
