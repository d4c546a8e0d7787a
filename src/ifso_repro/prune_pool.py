"""Prunings in other processes, while networks are trained in this one."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

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

_busy = False
"""Whether this process, one of those that prune, is pruning now."""


class PruningFailed(IfsoError):
    """A pruning that ended without a result; it has the exit status of what went wrong."""

    def __init__(self, words: str, status: int = IfsoError.exit_status) -> None:
        super().__init__(words)
        self.exit_status = status


@dataclass
class _Worker:
    """An executor with one process, and the job at which that is."""

    executor: ProcessPoolExecutor
    process: BaseProcess | None = None
    job: Job | None = None
    outcome: Future[tuple[str, int] | None] | None = None


class PrunePool:
    """``ask`` for prunings and call ``turn`` now and then; at most ``workers`` run at a time, each only once.

    Every worker is an executor with one process, so that one that dies takes only its own pruning with it.
    """

    def __init__(self, space: Workspace, workers: int, threads: int, say: Callable[[str], None]) -> None:
        self._space, self._most, self._threads, self._say = space, workers, threads, say
        self._asked: set[str] = set()
        self._queue: list[Job] = []
        self._failures: dict[str, PruningFailed] = {}
        self._workers: list[_Worker] = []

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
        for worker in list(self._workers):
            if worker.job is not None and worker.outcome is not None and worker.outcome.done():
                job, worker.job = worker.job, None
                try:
                    self._end(job, worker.outcome.result())
                except BrokenProcessPool:
                    self._workers.remove(worker)
                    self._end(job, (DIED, FLAWED))
        idle = [worker for worker in self._workers if worker.job is None]
        while self._queue and (idle or len(self._workers) < self._most):
            self._begin(idle.pop() if idle else self._new_worker(), self._queue.pop(0))

    def stop(self) -> None:
        """End all processes; one that prunes keeps what it has done so far."""
        for worker in self._workers:
            if worker.job is not None and worker.process is not None:
                worker.process.terminate()
            worker.executor.shutdown(wait=False, cancel_futures=True)
        for process in (worker.process for worker in self._workers if worker.process is not None):
            process.join(GRACE)
            if process.is_alive():
                process.kill()
                process.join()
        self._workers.clear()

    def _new_worker(self) -> _Worker:
        context, arguments = multiprocessing.get_context("spawn"), (self._threads, self._space.device)
        self._workers.append(_Worker(ProcessPoolExecutor(1, context, _start, arguments)))
        return self._workers[-1]

    def _begin(self, worker: _Worker, job: Job) -> None:
        """Prune for ``job``; the first time, that starts the process."""
        before = set(multiprocessing.active_children())
        with _without_interrupts():
            try:
                worker.outcome = worker.executor.submit(_prune, self._space, job)
            except BrokenProcessPool as error:  # it died while it was idle
                worker.outcome = Future()
                worker.outcome.set_exception(error)
        worker.job = job
        worker.process = worker.process or next(iter(set(multiprocessing.active_children()) - before), None)
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


def _start(threads: int, device: str) -> None:
    """Make a process ready to prune: SIGTERM ends it, and has it keep what it has done."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop)
    torch.set_num_threads(threads)
    if ":" in device:
        torch.cuda.set_device(device)


def _stop(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt if _busy else SystemExit


def _prune(space: Workspace, job: Job) -> tuple[str, int] | None:
    """Prune in this process; return the words and the status of an error, which itself might not be pickled."""
    global _busy  # noqa: PLW0603 (the handler of a signal has no other way to know)
    _busy = True
    try:
        with redirect_stdout(sys.stderr):
            prune_job(space, job)
    except IfsoError as error:
        return str(error), error.exit_status
    except KeyboardInterrupt:
        return "interrupted", FLAWED
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {one_line(error)}", FLAWED
    finally:
        _busy = False
    return None
