"""Locks between processes: turns in a folder that several write into, and a folder that one holds."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EACCES, EAGAIN, EBUSY
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

NO_LINK = getattr(os, "O_NOFOLLOW", 0)
"""A link in the place of a file leads out of the folder: it is refused."""

WAIT, GLANCE = 600.0, 0.02
"""Seconds that a folder is waited for, and between two looks."""


@contextmanager
def turn_in(folder: Path, *, reading: bool = False) -> Iterator[None]:
    """Nobody else writes into ``folder`` by :func:`replacing` or ``ifso.save`` meanwhile; they wait. Readers share it.

    A thread may take its turn again within. OSError (EBUSY) after ten minutes. Where the disk knows no such locks, all
    go on at once.
    """
    held: set[str] = _turns.__dict__.setdefault("held", set())
    name = os.path.realpath(folder)
    descriptor = None if fcntl is None or name in held else _open_folder(folder)
    if descriptor is None:
        yield
        return
    try:
        _wait_for(descriptor, fcntl.LOCK_SH if reading else fcntl.LOCK_EX)
        held.add(name)
        yield
    finally:
        held.discard(name)
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


_turns = threading.local()


def _open_folder(folder: Path) -> int | None:
    try:
        return os.open(folder, os.O_RDONLY)
    except OSError:
        return None


def _wait_for(descriptor: int, kind: int) -> None:
    deadline = time.monotonic() + WAIT
    while True:
        try:
            return fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (EAGAIN, EACCES):
                return None
            if time.monotonic() > deadline:
                raise OSError(EBUSY, os.strerror(EBUSY)) from error
        time.sleep(GLANCE)


class FolderLock:
    """Held by one process at a time, and let go by the system when that process dies, however it dies.

    BlockingIOError if another holds it. ``refused``: the disk knows no such locks. Windows has none at all.
    """

    def __init__(self, path: Path) -> None:
        self.refused = False
        self._descriptor: int | None = None
        if fcntl is None:
            return
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | NO_LINK, 0o666)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise
        except OSError:
            self.release()
            self.refused = True
        else:
            _held.add(self)

    def release(self) -> None:
        """Let another have it."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def __del__(self) -> None:
        if getattr(self, "_descriptor", None) is not None:
            self.release()


_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _forget_locks() -> None:
    for lock in list(_held):
        lock.release()


if hasattr(os, "register_at_fork"):
    # a forked worker of a data loader may outlive this process, and must not hold its locks then
    os.register_at_fork(after_in_child=_forget_locks)
