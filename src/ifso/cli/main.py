"""``ifso``: finds the command, runs it, and turns errors into one line and an exit status.

SIGTERM, which schedulers and ``kill`` send, stops a command as Ctrl-C does: what is done is kept.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ifso._version import __version__
from ifso.cli import bench, demo, evaluate, export, finetune, inspect, prune, report, train
from ifso.cli.console import complain, give_up, steady_streams
from ifso.cli.distributed import leave
from ifso.errors import IfsoError

COMMANDS = (demo, inspect, train, prune, finetune, evaluate, report, export, bench)
REPRO = (
    "Run studies of the paper again, or what is left of them: tables, figures (their names are below), or rows such as "
    "resnet32-cifar10-50 (network, data, per cent of MACs removed). What was interrupted goes on when the same command "
    "is given again."
)
INTERRUPTED = 130
_ENDED = "the network, its data or its loss ended the process by sys.exit({}); let it raise an error or return"
DEBUG = "--debug"
TERMINATED = 143
"""The status of a process stopped by SIGTERM."""
UNREAD = 141
"""The reader of standard output went away (``ifso … | head``): the status of a process stopped by SIGPIPE."""
NO_OUTPUT = (errno.ENOSPC, errno.EIO, errno.EBADF, errno.EDQUOT)
"""What standard output fails with; the system names the file where it was another."""


def main(argv: Sequence[str] | None = None, parser: argparse.ArgumentParser | None = None) -> int:
    """Run the command in ``argv`` (the process's arguments if None) and return its exit status.

    ``parser`` is that of another program than ``ifso``; each of its commands sets ``run``.
    """
    with steady_streams():
        try:
            given, parser = list(sys.argv[1:] if argv is None else argv), parser or _parser()
            if not given:
                parser.exit(2, parser.format_help())
            args, unknown = parser.parse_known_args([word for word in given if word != DEBUG])
            if unknown:
                command = next(word for word in given if not word.startswith("-"))
                refused(f"unrecognized arguments: {' '.join(unknown)}", f"{parser.prog} {command}")
            status = _run(args, debug=DEBUG in given)
            sys.stdout.flush()
            return status
        except BrokenPipeError:
            give_up(sys.stdout)
            return UNREAD
        except OSError as error:
            unwritable = error.filename is None and error.errno in NO_OUTPUT
            if sys.stdout.closed or unwritable:
                give_up(sys.stdout)
                complain(f"error: standard output cannot be written: {error.strerror}")
            else:
                complain(f"error: {_describe(error)}")
            return leave(IfsoError.exit_status)


def _run(args: argparse.Namespace, *, debug: bool) -> int:
    """The status of a command; what went wrong is told in a line, after the traceback if ``debug``."""
    try:
        return _stoppable(args)
    except IfsoError as error:
        if debug:
            traceback.print_exception(error)
        complain(f"error: {error}")
        return leave(error.exit_status)
    except SystemExit as error:
        complain(f"error: {_ENDED.format(error.code)}")
        return leave(IfsoError.exit_status)
    except UnicodeEncodeError as error:
        complain(f"error: {error.object!r} is no UTF-8 name, which some libraries need; rename it")
        return leave(IfsoError.exit_status)
    except KeyboardInterrupt:
        complain("interrupted")
        return leave(INTERRUPTED)


def _describe(error: OSError) -> str:
    """A file that could not be read or written, which nobody else has spoken of."""
    from ifso.common.files import explained

    where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
    return f"{where}{explained(error)}"


def refused(message: str, command: str) -> NoReturn:
    """Print what is wrong and where the options are explained, and exit with status 2."""
    complain(f"error: {message}; {command} --help shows what can be given")
    raise SystemExit(2)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line; commands below it are parsed by the same class."""

    def error(self, message: str) -> NoReturn:
        """As everywhere else."""
        refused(message, self.prog)


def _parser() -> Parser:
    parser = Parser(
        prog="ifso",
        description="Structured pruning for any PyTorch network.",
        epilog="Exit status: 0 done, 2 bad input, 3 the budget cannot be met, 4 a check of the result failed.",
    )
    parser.add_argument("--version", action="version", version=f"ifso {__version__}")
    parser.add_argument(DEBUG, action="store_true", help="show the traceback of an error; also after a command")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    from ifso_repro.choose.command import add_parser
    from ifso_repro.cli import add_commands

    more = {bench: [add_parser]}
    for command in COMMANDS:
        command.add_parser(commands, *more.get(command, ()))
    add_commands(commands.add_parser("repro", help="run studies of the paper again", description=REPRO, add_help=False))
    return parser


class Terminated(KeyboardInterrupt):
    """Raised where a command is when SIGTERM comes."""


def _stoppable(args: argparse.Namespace) -> int:
    """The status of a command that cleans up after SIGTERM; whoever has a handler of their own is not overruled.

    Under ``torchrun`` the ranks settle that among themselves.
    """
    run: Callable[[argparse.Namespace], int] = args.run
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    listening = threading.current_thread() is threading.main_thread()
    if not (alone and listening and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL):
        return run(args)
    before = signal.signal(signal.SIGTERM, _terminate_once)
    try:
        return run(args)
    except Terminated:
        complain("terminated")
        return TERMINATED
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate_once(*_: Any) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated
