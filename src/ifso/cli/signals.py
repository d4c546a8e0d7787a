"""SIGTERM, which schedulers and ``kill`` send, stops a command as Ctrl-C does: what is done is kept."""

from __future__ import annotations

import argparse
import functools
import os
import signal
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from ifso.cli.console import complain

TERMINATED = 143
"""The status of a process stopped by SIGTERM."""

Command = Callable[[argparse.Namespace], int]


class Terminated(KeyboardInterrupt):
    """Raised where a command is when SIGTERM comes."""


def stoppable(run: Command) -> Command:
    """A command that cleans up after SIGTERM. Under ``torchrun`` the ranks settle that among themselves."""

    @functools.wraps(run)
    def stopped(args: argparse.Namespace) -> int:
        if not _may_listen():
            return run(args)
        before = signal.signal(signal.SIGTERM, _terminate_once)
        try:
            return run(args)
        except Terminated:
            complain("terminated")
            return TERMINATED
        finally:
            signal.signal(signal.SIGTERM, before)

    return stopped


def _may_listen() -> bool:
    """Only the main thread may, and nobody else who has a handler of their own is overruled."""
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    listening = threading.current_thread() is threading.main_thread()
    return alone and listening and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def _terminate_once(*_: Any) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated
