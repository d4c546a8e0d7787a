"""Run each check in a process of its own that is killed when it takes too long or too much memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from catalog import Entry

GIB = 2**30
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Limits:
    """What one check may use, and up to how many parameters it computes in float64."""

    seconds: float
    gib: float
    double_below: float
    device: str = "cpu"


@dataclass
class Worker:
    """A running check."""

    entry: Entry
    process: multiprocessing.process.BaseProcess
    results: Connection
    begun: float = field(default_factory=time.monotonic)
    peak_gib: float = 0.0

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return time.monotonic() - self.begun

    def outcome(self, limits: Limits) -> dict[str, Any] | None:
        """The result, or why there will be none, or None while it runs."""
        self.peak_gib = max(self.peak_gib, resident_gib(self.process.pid))
        if self.results.poll():
            try:
                return self.results.recv()
            except EOFError:
                self.process.join()
                return {"status": "crashed", "reason": f"the process ended with exit code {self.process.exitcode}"}
        if self.peak_gib > limits.gib:
            return {"status": "killed", "reason": f"killed: memory above {limits.gib:g} GiB"}
        if self.seconds > limits.seconds:
            return {"status": "killed", "reason": f"killed: time above {limits.seconds:g} s"}
        return None

    def end(self) -> None:
        """Kill it if it still runs."""
        self.process.join(timeout=1)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.results.close()


def run_all(entries: Sequence[Entry], jobs: int, limits: Limits) -> Iterator[tuple[Entry, dict[str, Any]]]:
    """Results in the order of completion."""
    context = _context()
    waiting, running = list(reversed(entries)), list[Worker]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_start(context, waiting.pop(), limits))
            time.sleep(POLL_SECONDS)
            for worker in list(running):
                outcome = worker.outcome(limits)
                if outcome is not None:
                    running.remove(worker)
                    seconds, peak = round(worker.seconds, 1), round(worker.peak_gib, 1)
                    worker.end()
                    yield worker.entry, outcome | {"seconds": seconds, "peak_gib": peak}
    finally:
        for worker in running:
            worker.process.kill()
            worker.end()


def _context() -> Any:
    """Processes are forked from a server that has the libraries loaded, on one core each, and deaf to Ctrl-C."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torchvision", "timm"])
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    return context


def _start(context: Any, entry: Entry, limits: Limits) -> Worker:
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(entry, limits, sender), daemon=True)
    process.start()
    sender.close()
    return Worker(entry, process, receiver)


def _work(entry: Entry, limits: Limits, results: Connection) -> None:
    """In the child: check quietly and send the result."""
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    from check import check

    results.send(check(entry, limits.double_below, limits.device))


def resident_gib(pid: int | None) -> float:
    """Memory in use by a process; 0 where the system does not tell.

    >>> resident_gib(os.getpid()) < 1
    True
    """
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / GIB
