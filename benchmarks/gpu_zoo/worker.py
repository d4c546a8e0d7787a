"""A process that examines networks one after the other, and is begun anew where one hangs or takes it down."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event
from typing import Any

from benchmarks.gpu_zoo.examine import Found, Setup, about, examine, poisoned, reason_of
from benchmarks.gpu_zoo.networks import Entry

STARTING = 120.0
"""Seconds that a new process may take in addition, for imports and the GPU."""

GLANCE = 0.5
"""Seconds between two looks at whether all is to stop."""

GAVE_UP = "took more than"


def gave_up(row: Found) -> bool:
    """Was the network given up for want of time?"""
    return any(reason.startswith(GAVE_UP) for reason in row.get("failed", {}).values())


class Worker(AbstractContextManager["Worker"]):
    """A process for examinations, begun when it is first needed. It ends with the block, or when ``stopped`` is set."""

    def __init__(
        self, setup: Setup, serve: Callable[[Connection, Setup], None] | None = None, stopped: Event | None = None
    ) -> None:
        self._setup, self._serve, self._stopped = setup, serve or _serve, stopped or Event()
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None

    def __exit__(self, *_: object) -> None:
        self._end()

    def examine(self, entry: Entry, limit: float) -> Found:
        """All that was found out within ``limit`` seconds; ``failed`` says where it hung or ended, and why."""
        until = time.monotonic() + limit + (0.0 if self._process else STARTING)
        row: Found = {}
        pipe = self._begun()
        try:
            pipe.send(entry)
            while (left := until - time.monotonic()) > 0 and not self._stopped.is_set():
                if not pipe.poll(min(left, GLANCE)):
                    continue
                told = pipe.recv()
                if told is None:
                    return self._finished(row)
                if told.get("ready"):
                    until = time.monotonic() + limit
                row |= told
            reason = f"{GAVE_UP} {limit:g} s"
        except (EOFError, OSError):
            assert self._process is not None
            self._process.join(5)
            reason = f"the process ended with exit code {self._process.exitcode}"
        self._end()
        return self._finished({**row, "failed": {**row.get("failed", {}), row.get("stage", "start"): reason}})

    def _finished(self, row: Found) -> Found:
        if any(poisoned(reason) for reason in row.get("failed", {}).values()):
            self._end()
        return {key: value for key, value in row.items() if key not in ("stage", "ready")}

    def _begun(self) -> Connection:
        if self._pipe is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=self._serve, args=(theirs, self._setup), daemon=True)
            self._process.start()
            theirs.close()
        return self._pipe

    def _end(self) -> None:
        if self._process is not None and self._pipe is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
        self._process = self._pipe = None


def _serve(pipe: Connection, setup: Setup) -> None:
    """In the process: examine what comes, quietly, until nobody is there any more."""
    import torch

    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    if setup.threads is not None:
        torch.set_num_threads(setup.threads)
    while True:
        try:
            entry: Any = pipe.recv()
            try:
                pipe.send({"ready": True, "about": about(setup.device)})
                for found in examine(entry, setup):
                    pipe.send(found)
            except Exception as error:
                pipe.send({"failed": {"start": reason_of(error)}})
            pipe.send(None)
        except (EOFError, OSError, KeyboardInterrupt):
            return
