"""One of two processes that evaluate a classifier together; see test_profiling.py."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ifso.errors import IfsoError
from ifso.training.evaluation import evaluate


def main(rank: int, folder: Path) -> None:
    """Leaves what both find together, and what one of them finds alone, in the folder."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(31, 7, generator=random), torch.randint(7, (31,), generator=random)
    cut = {0: slice(0, 20), 1: slice(20, 31)}[rank]
    parts = {
        "uneven": [(x[cut], y[cut])],
        "empty": [(x, y)] if rank else [],
        "failing": [(x[cut], y[cut] + 9 * rank)],
        "nothing": [],
    }
    found = {}
    for name, batches in parts.items():
        try:
            found[name] = vars(evaluate(nn.Identity(), batches, over_ranks=True))
        except IfsoError as error:
            found[name] = str(error)
    found["own"] = evaluate(nn.Identity(), [(x[cut], y[cut])]).samples
    (folder / f"{rank}.json").write_text(json.dumps([found, vars(evaluate(nn.Identity(), [(x, y)]))]))
    dist.barrier()
    os._exit(0)  # threads of gloo may abort a process while Python shuts down
