"""Where networks and data lie, and memory that has run out, whichever way PyTorch says so."""

from __future__ import annotations

import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ifso.errors import DataError, IfsoError


def available_memory() -> int | None:
    """Bytes of main memory that the machine has left, where the system tells."""
    try:
        with Path("/proc/meminfo").open() as lines:
            found = next(line for line in lines if line.startswith("MemAvailable"))
        return int(found.split()[1]) * 1024
    except (OSError, StopIteration):
        return None


def devices_apart(model: nn.Module, inputs: Any) -> str:
    """Where a model and what it is called with are, and what to do, if they are not on one device; else empty.

    >>> devices_apart(nn.Linear(2, 2), (torch.zeros(2), torch.zeros(2, device="meta")))
    'the model is on cpu, what it is given on cpu and meta; move one to the device of the other'
    """
    mine = {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())}
    theirs = {str(leaf.device) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)}
    if not mine or not theirs or mine == theirs:
        return ""
    here, there = (" and ".join(sorted(places)) for places in (mine, theirs))
    return f"the model is on {here}, what it is given on {there}; move one to the device of the other"


CONTAINER = Path("/sys/fs/cgroup")

NO_MEMORY = ("can't allocate memory", "out of memory")


def out_of_memory(error: BaseException | None) -> bool:
    """Return whether memory has run out, on a GPU or not; also if another error tells of it.

    >>> out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"))
    True
    """
    if error is None:
        return False
    told = isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)
    return told or isinstance(error, (torch.OutOfMemoryError, MemoryError)) or out_of_memory(error.__cause__)


def refuse_too_large(numbers: int, what: str) -> None:
    """IfsoError if so many float32 numbers do not fit into the memory that is free: a kill says nothing.

    >>> refuse_too_large(10**15, "a batch of 10**9")
    Traceback (most recent call last):
    ifso.errors.IfsoError: a batch of 10**9 takes 3,725,290.3 GiB of memory, and ... GiB are free; give a smaller one
    """
    free, size = free_memory(), numbers * 4
    if free is not None and size > free:
        raise IfsoError(
            f"{what} takes {size / 2**30:,.1f} GiB of memory, and {free / 2**30:,.1f} GiB are free; give a smaller one"
        )


def free_memory() -> int | None:
    """Bytes of main memory left to this process: by the machine, and by the limit of a container it is in."""
    found = [available_memory()]
    with suppress(OSError, ValueError):
        limit, used = (int((CONTAINER / name).read_text()) for name in ("memory.max", "memory.current"))
        found.append(limit - used)
    return min((free for free in found if free is not None), default=None)


def let_go_of(error: BaseException | None, *, wholly: bool = False) -> None:
    """Free what the frames behind an error, and behind those it tells of, still hold: they may be tensors by the score.

    The error itself stays as it is, and is printed as before; ``wholly``, without the lines it came from.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        if wholly:
            error.__traceback__ = None
        error = error.__cause__ or error.__context__


def usable_device(name: torch.device | str) -> torch.device:
    """The device of that name, if something can be put there.

    >>> usable_device("cpu")
    device(type='cpu')
    """
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("it holds no numbers")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"device {str(name)!r} cannot be used: {reason}; use cpu or cuda") from error
    return device
