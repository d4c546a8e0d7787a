"""``python -m benchmarks``: what ifso costs where only its developers look."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks import everyday, export, train
from benchmarks.zoo import command as zoo
from ifso.cli import main as cli


def parser() -> argparse.ArgumentParser:
    """The parser of the benchmarks, one subcommand each."""
    made = cli.Parser(prog="python -m benchmarks", description=__doc__)
    what = made.add_subparsers(title="what to measure", metavar="WHAT", required=True)
    for benchmark in (train, export, everyday, zoo):
        benchmark.add_parser(what)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark in ``argv`` and return the exit status."""
    return cli.main(argv, parser())


if __name__ == "__main__":
    sys.exit(main())
