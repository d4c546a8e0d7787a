"""Prunings in processes of their own, while networks are trained in this one."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from multiprocessing.connection import Connection
from typing import Any

import torch

from ifso.errors import IfsoError
from ifso_repro.jobs import Job
from ifso_repro.workspace import Workspace, prune_job

GRACE = 20.0
"""Seconds that a process has to keep its work before it is ended."""

DONE = "done"
FLAWED = 1
"""The exit status of an error that is none of ours."""


class PruningFailed(IfsoError):
    """A pruning that ended without a result; it has the exit status of what went wrong."""

    def __init__(self, words: str, status: int = IfsoError.exit_status) -> None:
        super().__init__(words)
        self.exit_status = status


class PrunePool:
    """``ask`` for prunings and call ``turn`` now and then; at most ``workers`` are made at a time, each only once.

    A process that dies takes only the pruning it was at with it.
    """

    def __init__(self, shop: Workspace, workers: int, threads: int, say: Callable[[str], None]) -> None:
        self._shop, self._workers, self._threads, self._say = shop, workers, threads, say
        self._asked: set[str] = set()
        self._queue: list[Job] = []
        self._failures: dict[str, PruningFailed] = {}
        self._processes: list[_Process] = []

    def ask(self, job: Job) -> None:
        """Have the network of ``job`` pruned some time; raises what that failed with."""
        name = self._shop.pruned_folder(job).name
        if name in self._failures:
            raise self._failures[name]
        if name not in self._asked:
            self._asked.add(name)
            self._queue.append(job)

    def turn(self) -> None:
        """Hear what has become of those begun, and begin others."""
        for process in list(self._processes):
            try:
                answer = process.answer()
            except EOFError:
                self._processes.remove(process)
                answer = (process.words_of_death(), FLAWED)
            if answer is not None:
                self._end(process, answer)
        idle = [process for process in self._processes if process.job is None]
        while self._queue and (idle or len(self._processes) < self._workers):
            process = idle.pop() if idle else self._new_process()
            process.begin(self._queue.pop(0))
            self._say(f"pruning {self._name(process.job)}")

    def stop(self) -> None:
        """End all processes; one that prunes keeps what it has done so far."""
        for process in self._processes:
            process.interrupt()
        for process in self._processes:
            process.end()
        self._processes.clear()

    def _new_process(self) -> _Process:
        self._processes.append(_Process(self._shop, self._threads))
        return self._processes[-1]

    def _end(self, process: _Process, answer: Any) -> None:
        assert process.job is not None
        job, process.job = process.job, None
        if answer != DONE:
            self._failures[self._name(job)] = PruningFailed(*answer)
            return
        try:
            facts = self._shop.prune_facts(job)
        except IfsoError as error:
            self._failures[self._name(job)] = PruningFailed(str(error), error.exit_status)
            return
        kept, found = facts["shares"]["macs"], facts["measures"][-1]
        worth = found.get("accuracy", found.get("map"))
        words = "" if worth is None else f"{worth:.2f} %, "
        self._say(f"pruned {self._name(job)}: {kept:.1%} of the MACs, {words}in {facts['seconds']:.0f} s")

    def _name(self, job: Job | None) -> str:
        assert job is not None
        return self._shop.pruned_folder(job).name


class _Process:
    """One that prunes; ``job`` is what it is at."""

    def __init__(self, shop: Workspace, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, shop, threads))
        with _deaf():
            self._process.start()
        theirs.close()
        self.job: Job | None = None

    def begin(self, job: Job) -> None:
        """Prune for ``job``."""
        self.job = job
        try:
            self._ours.send(job)
        except OSError:
            return  # it has died, and will be missed in the next turn

    def answer(self) -> Any:
        """None while there is nothing to hear, :data:`DONE`, or the words and the status of an error."""
        if self.job is None or not self._ours.poll():
            return None
        try:
            return self._ours.recv()
        except OSError as error:
            raise EOFError from error

    def words_of_death(self) -> str:
        """How it came to its end."""
        self._process.join(GRACE)
        code = self._process.exitcode
        how = f"signal {-code}" if code is not None and code < 0 else f"status {code}"
        return f"the process that pruned it has died ({how}; out of memory?); the same command goes on where it was"

    def interrupt(self) -> None:
        """Have it keep what it has done, and end."""
        if self.job is not None:
            self._process.terminate()
        self._ours.close()

    def end(self) -> None:
        """Wait until it is over, but not too long."""
        self._process.join(GRACE)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@contextmanager
def _deaf() -> Iterator[None]:
    """A process that is begun within does not hear Ctrl-C: that is for the one that began it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupt_once(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _serve(connection: Connection, shop: Workspace, threads: int) -> None:
    """Prune what is asked for until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _interrupt_once)
    torch.set_num_threads(threads)
    if ":" in shop.device:
        torch.cuda.set_device(shop.device)
    try:
        while True:
            connection.send(_answer(shop, connection.recv()))
    except (EOFError, OSError, KeyboardInterrupt):
        return


def _answer(shop: Workspace, job: Job) -> str | tuple[str, int]:
    try:
        with redirect_stdout(sys.stderr):
            prune_job(shop, job)
    except IfsoError as error:
        return str(error), error.exit_status
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {' '.join(str(error).split())}", FLAWED
    return DONE
