"""What all benchmarks of networks are asked: where they run, how, and what they print."""

from __future__ import annotations

import argparse
from typing import Any


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
