"""Memory that has run out, whichever way PyTorch tells of it."""

from __future__ import annotations

import traceback

import torch

NO_MEMORY = ("can't allocate memory", "out of memory")


def out_of_memory(error: BaseException | None) -> bool:
    """Has memory run out, on a GPU or not? Also if another error tells of it.

    >>> out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"))
    True
    """
    if error is None:
        return False
    told = isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)
    return told or isinstance(error, (torch.OutOfMemoryError, MemoryError)) or out_of_memory(error.__cause__)


def let_go_of(error: BaseException | None) -> None:
    """Free what the frames behind an error, and behind those it tells of, still hold: they may be tensors by the score.

    The error itself stays as it is, and is printed as before.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
