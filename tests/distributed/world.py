"""Starts ``torchrun`` with commands of ifso, and says how that ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import ifso

HERE = Path(__file__).parent
TASK = HERE / "shared_task.py"
SOURCE = Path(ifso.__file__).parents[1]


@dataclass(frozen=True)
class Ended:
    """How a start of ``torchrun`` ended: its status, what it wrote, its seconds, and those after ``meanwhile``."""

    status: int
    out: str
    err: str
    seconds: float
    after: float

    @property
    def errors(self) -> list[str]:
        """The lines that ifso ended with, of all ranks."""
        return [line for line in self.err.splitlines() if line.startswith("ifso: error:")]


def torchrun(
    ranks: int,
    arguments: Sequence[object],
    meanwhile: Callable[[subprocess.Popen[str]], None] | None = None,
    limit: float = 120.0,
    **variables: str,
) -> Ended:
    """``arguments`` after ``torchrun``: a script, or ``-m ifso.cli`` and a command."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    paths = os.pathsep.join([str(SOURCE), str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **variables}
    start = time.monotonic()
    process = subprocess.Popen(
        [*command, *map(str, arguments)],
        env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        if meanwhile is not None:
            meanwhile(process)
        since = time.monotonic()
        out, err = process.communicate(timeout=limit)
    finally:
        if process.poll() is None:
            process.terminate()  # it ends its ranks, too
            process.wait(60)
    now = time.monotonic()
    return Ended(process.returncode, out, err, now - start, now - since)


def ifso_on(ranks: int, *arguments: object, **options: object) -> Ended:
    """The command line on so many ranks."""
    return torchrun(ranks, ["-m", "ifso.cli", *arguments], **options)  # type: ignore[arg-type]
