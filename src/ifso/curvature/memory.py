"""Memory that has run out, whichever way PyTorch tells of it."""

from __future__ import annotations

import traceback
from contextlib import suppress
from pathlib import Path

import torch

from ifso.common.devices import available_memory
from ifso.errors import IfsoError

CONTAINER = Path("/sys/fs/cgroup")
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


def refuse_too_large(numbers: int, what: str, size: int = 4) -> None:
    """IfsoError if so many numbers of ``size`` bytes do not fit into the memory that is free: a kill says nothing.

    >>> refuse_too_large(10**15, "a batch of 10**9")
    Traceback (most recent call last):
    ifso.errors.IfsoError: a batch of 10**9 takes 3,725,290.3 GiB of memory, and ... GiB are free; give a smaller one
    """
    free = free_memory()
    if free is not None and numbers * size > free:
        raise IfsoError(
            f"{what} takes {numbers * size / 2**30:,.1f} GiB of memory, and {free / 2**30:,.1f} GiB are free; "
            "give a smaller one"
        )


def free_memory() -> int | None:
    """Bytes of main memory left to this process: by the machine, and by the limit of a container it is in."""
    found = [available_memory()]
    with suppress(OSError, ValueError):
        limit, used = (int((CONTAINER / name).read_text()) for name in ("memory.max", "memory.current"))
        found.append(limit - used)
    return min((free for free in found if free is not None), default=None)


def let_go_of(error: BaseException | None) -> None:
    """Free what the frames behind an error, and behind those it tells of, still hold: they may be tensors by the score.

    The error itself stays as it is, and is printed as before.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
