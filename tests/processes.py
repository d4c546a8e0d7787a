"""Processes that begin at once: they are forked from one that has imported what takes seconds to import."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT = 150.0
"""Seconds that processes may take together."""

APART = multiprocessing.get_context("forkserver")
APART.set_forkserver_preload(["torch._dynamo", "ifso.criteria.scorer", "ifso.pruning.prune"])


def ranks_of(work: Callable[[int, Path], Any], number: int, folder: Path) -> None:
    """Run ``work(rank, folder)`` in so many processes; each must end with status 0."""
    processes = [APART.Process(target=work, args=(rank, folder)) for rank in range(number)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(LIMIT)
        assert [process.exitcode for process in processes] == [0] * number
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
