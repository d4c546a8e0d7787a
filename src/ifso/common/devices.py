"""Where networks and data lie, and memory that has run out, whichever way PyTorch says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def available_memory() -> int | None:
    """Bytes of main memory free for use, where the system tells."""
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
