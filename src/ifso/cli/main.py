"""``ifso``: finds the command, runs it, and turns errors into one line and an exit status."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import ifso
from ifso.cli import bench, demo, export, finetune, inspect, prune, report, repro, train
from ifso.cli import eval as evaluate
from ifso.cli.output import complain
from ifso.cli.ranks import leave
from ifso.cli.stopping import stoppable
from ifso.errors import IfsoError

COMMANDS = (demo, inspect, train, prune, finetune, evaluate, report, export, bench, repro)
INTERRUPTED = 130
_ENDED = "the network, its data or its loss ended the process by sys.exit({}); let it raise an error or return"
UNREAD = 141
"""The reader of standard output went away (``ifso … | head``): the status of a process stopped by SIGPIPE."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv`` (the process's arguments if None) and return its exit status."""
    args = _parser().parse_args(argv)
    try:
        status = stoppable(args.run)(args)
        sys.stdout.flush()
        return status
    except IfsoError as error:
        complain(f"error: {error}")
        return leave(error.exit_status)
    except SystemExit as error:
        complain(f"error: {_ENDED.format(error.code)}")
        return leave(IfsoError.exit_status)
    except KeyboardInterrupt:
        complain("interrupted")
        return leave(INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ifso",
        description="Structured pruning for any PyTorch network.",
        epilog="Exit status: 0 done, 2 bad input, 3 the budget cannot be met, 4 a check of the result failed.",
    )
    parser.add_argument("--version", action="version", version=f"ifso {ifso.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser
