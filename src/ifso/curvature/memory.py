"""Memory that has run out, whichever way PyTorch tells of it."""

from __future__ import annotations

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
