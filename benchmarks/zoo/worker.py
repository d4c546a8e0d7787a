"""A process that is asked about networks one after the other, and is begun anew where one hangs or takes it down."""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event
from typing import Any

STARTING = 120.0
"""Seconds that a new process may take in addition, for imports and the GPU."""

GLANCE = 0.1
"""Seconds between two looks at whether all is to stop, and at the memory."""

GIB = 2**30
Told = dict[str, Any]
Serve = Callable[[Connection, Any], None]


class Worker(AbstractContextManager["Worker"]):
    """A process that runs ``serve(pipe, setup)``, begun when it is first needed. It ends with the block.

    ``serve`` receives questions and sends dicts, ``{"ready": True}`` before it begins with one, None at its end. It
    ends when ``stopped`` is set, and may take ``gib`` of memory, of which ``peak_gib`` is the most that was seen.
    """

    def __init__(
        self, serve: Serve, setup: Any, *, stopped: Event | None = None, gib: float = math.inf, context: Any = None
    ) -> None:
        self._serve, self._setup, self._most = serve, setup, gib
        self._stopped, self._context = stopped or Event(), context or multiprocessing.get_context("spawn")
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None
        self.peak_gib = 0.0

    def __exit__(self, *_: object) -> None:
        self.end()

    def ask(self, question: Any, limit: float) -> tuple[Told, str]:
        """All that was told within ``limit`` seconds, and why no more was, empty where it came to its end."""
        until = time.monotonic() + limit + (0.0 if self._process else STARTING)
        told: Told = {}
        pipe = self._begun()
        try:
            pipe.send(question)
            reason = ""
            while not reason:
                self.peak_gib = max(self.peak_gib, resident_gib(self._process.pid if self._process else None))
                if pipe.poll(min(max(until - time.monotonic(), 0.0), GLANCE)):
                    more = pipe.recv()
                    if more is None:
                        return told, ""
                    if more.pop("ready", False):
                        until = time.monotonic() + limit
                    told |= more
                elif self._stopped.is_set():
                    reason = "stopped"
                elif self.peak_gib > self._most:
                    reason = f"took more than {self._most:g} GiB"
                elif time.monotonic() >= until:
                    reason = self.out_of_time(limit)
        except (EOFError, OSError):
            assert self._process is not None
            self._process.join(5)
            reason = f"the process ended with exit code {self._process.exitcode}"
        self.end()
        return told, reason

    @staticmethod
    def out_of_time(limit: float) -> str:
        """Why no more was told where the time was too short."""
        return f"took more than {limit:g} s"

    def _begun(self) -> Connection:
        if self._pipe is None:
            self._pipe, theirs = self._context.Pipe()
            self._process = self._context.Process(target=self._serve, args=(theirs, self._setup), daemon=True)
            self._process.start()
            theirs.close()
        return self._pipe

    def end(self) -> None:
        """Kill the process; the next question begins another."""
        if self._process is not None and self._pipe is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
        self._process = self._pipe = None


def serving(pipe: Connection, answers: Callable[[Any], Iterable[Told]]) -> None:
    """Answer what comes until nobody is there any more; what is printed goes nowhere."""
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    try:
        while True:
            question = pipe.recv()
            pipe.send({"ready": True})
            for told in answers(question):
                pipe.send(told)
            pipe.send(None)
    except (EOFError, OSError, KeyboardInterrupt):
        return


def resident_gib(pid: int | None) -> float:
    """Memory in use by a process; 0 where the system does not tell.

    >>> 0 <= resident_gib(os.getpid()) < 1
    True
    """
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / GIB
