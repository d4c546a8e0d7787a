"""Prunings in other processes, while networks are trained in this one."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple

import torch

from ifso.common.text import one_line
from ifso.errors import IfsoError
from ifso_repro.jobs import Job
from ifso_repro.provenance import facts_of
from ifso_repro.workspace import Workspace, prune_job

GRACE = 20.0
"""Seconds that a process has to keep its work before it is ended."""

DIED = "the process that pruned it has died (out of memory?); the same command goes on where it was"
FLAWED = 1
"""The exit status of an error that is not an :class:`IfsoError`."""


class PruningFailed(IfsoError):
    """A pruning that ended without a result; it has the exit status of what went wrong."""

    def __init__(self, words: str, status: int = IfsoError.exit_status) -> None:
        super().__init__(words)
        self.exit_status = status


class _Pruning(NamedTuple):
    """A process that prunes for one job, and where its end is told: None, or the words and the status of an error."""

    job: Job
    process: SpawnProcess
    told: Connection


class PrunePool:
    """``ask`` for prunings and call ``turn`` now and then; at most ``workers`` run at a time, each only once.

    Each has a process, so that one that dies takes only its own pruning with it.
    """

    def __init__(self, space: Workspace, workers: int, threads: int, say: Callable[[str], None]) -> None:
        self._space, self._most, self._threads, self._say = space, workers, threads, say
        self._asked: set[str] = set()
        self._queue: list[Job] = []
        self._failures: dict[str, PruningFailed] = {}
        self._running: list[_Pruning] = []

    def ask(self, job: Job) -> None:
        """Have the network of ``job`` pruned some time; raises what that failed with."""
        name = self._name(job)
        if name in self._failures:
            raise self._failures[name]
        if name not in self._asked:
            self._asked.add(name)
            self._queue.append(job)

    def turn(self) -> None:
        """Note which prunings have ended, and begin others."""
        for pruning in list(self._running):
            if pruning.told.poll():
                self._running.remove(pruning)
                try:
                    self._end(pruning.job, pruning.told.recv())
                except EOFError:
                    self._end(pruning.job, (DIED, FLAWED))
                pruning.process.join()
                pruning.told.close()
        while self._queue and len(self._running) < self._most:
            self._begin(self._queue.pop(0))

    def stop(self) -> None:
        """End all processes; they keep what they have done so far."""
        for pruning in self._running:
            pruning.process.terminate()
        for pruning in self._running:
            pruning.process.join(GRACE)
            if pruning.process.is_alive():
                pruning.process.kill()
                pruning.process.join()
        self._running.clear()

    def _begin(self, job: Job) -> None:
        context = multiprocessing.get_context("spawn")
        told, telling = context.Pipe(duplex=False)
        process = context.Process(target=_prune, args=(self._space, job, self._threads, telling))
        with _without_interrupts():
            process.start()
        telling.close()
        self._running.append(_Pruning(job, process, told))
        self._say(f"pruning {self._name(job)}")

    def _end(self, job: Job, failure: tuple[str, int] | None) -> None:
        name = self._name(job)
        try:
            if failure is not None:
                raise PruningFailed(*failure)
            facts = facts_of(self._space.pruned_folder(job) / "summary.json")
        except IfsoError as error:
            self._failures[name] = PruningFailed(str(error), error.exit_status)
            return
        measures = facts["measures"][-1]
        worth = measures.get("accuracy", measures.get("map"))
        words = "" if worth is None else f"{worth:.2f} %, "
        self._say(f"pruned {name}: {facts['shares']['macs']:.1%} of the MACs, {words}in {facts['seconds']:.0f} s")

    def _name(self, job: Job) -> str:
        return self._space.pruned_folder(job).name


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Within it, Ctrl-C is ignored; a process that is started inherits that: Ctrl-C is for the one that started it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _prune(space: Workspace, job: Job, threads: int, telling: Connection) -> None:
    """Prune in this process, which SIGTERM ends when it has kept what it has done, and tell how that ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop)
    failure: tuple[str, int] | None = None
    try:
        torch.set_num_threads(threads)
        if ":" in space.device:
            torch.cuda.set_device(space.device)
        with redirect_stdout(sys.stderr):
            prune_job(space, job)
    except IfsoError as error:
        failure = str(error), error.exit_status
    except KeyboardInterrupt:
        failure = "interrupted", FLAWED
    except Exception as error:
        traceback.print_exc()
        failure = f"{type(error).__name__}: {one_line(error)}", FLAWED
    telling.send(failure)


def _stop(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt
