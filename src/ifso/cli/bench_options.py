"""What benchmarks share: where they run, how, what they print, and measuring in a process of its own."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from ifso.errors import IfsoError

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def add_machine(parser: Any) -> None:
    """Device, precision, layout, threads and the form of the output."""
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    parser.add_argument("--precision", default="float32", help="float32, tf32 or bf16 (%(default)s)")
    parser.add_argument("--channels-last", action="store_true", help="channels-last memory layout")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (torch's own choice)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def take_threads(args: argparse.Namespace) -> None:
    """Compute with as many threads as were asked for."""
    if args.threads is not None:
        import torch

        torch.set_num_threads(args.threads)


def measured_apart(worker: str, arguments: Sequence[str]) -> dict[str, Any]:
    """What the module ``worker`` of :mod:`ifso.bench` finds in a process of its own, with one thread."""
    environment = {**os.environ, **dict.fromkeys(THREADS, "1")}
    command = [sys.executable, "-m", f"ifso.bench.{worker}", *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise IfsoError(f"measuring {arguments[0]} failed with status {done.returncode} (its message is above)")
    result = json.loads(done.stdout)
    if "error" in result:
        raise IfsoError(result["error"])
    return result
