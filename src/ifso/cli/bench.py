"""``ifso bench``: what ifso itself costs, and what its choices are worth."""

from __future__ import annotations

import argparse
from typing import Any

from ifso.cli import bench_choose, bench_prune, bench_score, bench_trace
from ifso.errors import IfsoError

MOVED = ("train", "export", "everyday", "zoo")
"""Benchmarks for developers, which a checkout has and the package has not."""


def add_parser(commands: Any) -> None:
    """Register the command and what it can measure."""
    parser = commands.add_parser("bench", help="measure what ifso itself costs and chooses")
    what = parser.add_subparsers(title="what to measure", metavar="WHAT", required=True)
    for benchmark in (bench_trace, bench_score, bench_prune, bench_choose):
        benchmark.add_parser(what)
    for name in MOVED:
        moved = what.add_parser(name, add_help=False, prefix_chars="\0")
        moved.add_argument("rest", nargs="*")
        moved.set_defaults(run=_moved, name=name)


def _moved(args: argparse.Namespace) -> int:
    raise IfsoError(f"ifso bench {args.name} is for developers: run python -m benchmarks {args.name} in a checkout")
