"""``ifso``: finds the command, runs it, and turns errors into one line and an exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import ifso
from ifso.cli import bench, demo, inspect
from ifso.errors import IfsoError

COMMANDS = (demo, inspect, bench)
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv`` (the process's arguments if None) and return its exit status."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except IfsoError as error:
        print(f"ifso: error: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("ifso: interrupted", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ifso",
        description="Structured pruning for any PyTorch network.",
        epilog="Exit status: 0 done, 2 bad input, 4 a check of the result failed.",
    )
    parser.add_argument("--version", action="version", version=f"ifso {ifso.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser
