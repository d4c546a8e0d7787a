"""Commands under ``torchrun``: every process joins in, the first one speaks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """The number of this process out of ``ranks``, and where it computes."""

    rank: int
    device: str
    ranks: int = 1

    @property
    def speaks(self) -> bool:
        """Is it the one that shows progress and prints?"""
        return self.rank == 0


@contextmanager
def joined(device: str) -> Iterator[Place]:
    """Alone, or with the other processes that ``torchrun`` started; each has a GPU of its own if ``device`` is cuda."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Place(0, device)
        return
    import torch
    import torch.distributed as dist

    on_gpus = device.partition(":")[0] == "cuda"
    if on_gpus:
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    yield Place(dist.get_rank(), device, dist.get_world_size())
    dist.barrier()  # nobody leaves while another still needs the group


def leave(status: int) -> int:
    """``status``; under ``torchrun`` the process ends here: threads of gloo may abort it while Python shuts down."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status
