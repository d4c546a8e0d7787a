"""``ifso bench``: what ifso itself costs, and what its choices are worth."""

from __future__ import annotations

from typing import Any

from ifso.cli import (
    bench_choose,
    bench_everyday,
    bench_export,
    bench_prune,
    bench_score,
    bench_trace,
    bench_train,
    bench_zoo,
)


def add_parser(commands: Any) -> None:
    """Register the command and what it can measure."""
    parser = commands.add_parser("bench", help="measure what ifso itself costs and chooses")
    what = parser.add_subparsers(title="what to measure", metavar="WHAT", required=True)
    bench_trace.add_parser(what)
    bench_score.add_parser(what)
    bench_prune.add_parser(what)
    bench_choose.add_parser(what)
    bench_train.add_parser(what)
    bench_export.add_parser(what)
    bench_everyday.add_parser(what)
    bench_zoo.add_parser(what)
