"""What a reader owes to any file: a valid object, or an IfsoError of one line that names the file. Nothing else.

No other exception, no hang, no memory beyond measure, no file touched outside of the folder, no code run.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from mutating import generator

import ifso
from ifso.errors import IfsoError

SECONDS = 10.0
"""A small file that takes longer hangs."""

MEMORY = 256 * 2**20
"""Bytes of memory that reading one of these small files may take at most."""

LONGEST = 2000
"""Characters of a message."""

SENTINEL = "executed"
"""The file that hostile code would create."""

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
READABLE = tuple(
    map(os.path.realpath, (sys.prefix, sys.base_prefix, Path(ifso.__file__).parents[2], Path(__file__).parent))
)
"""Where Python and the libraries are, whose modules may be imported while a file is read."""

FORBIDDEN = (
    "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "subprocess.Popen", "socket.connect", "exec",
    "pickle.find_class", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.symlink", "os.link", "os.chmod",
    "os.truncate",
)  # fmt: skip


@dataclass(frozen=True)
class Reader:
    """A way in. ``make`` writes a hostile input and gives the argument of ``read``; ``check`` asserts what came out.

    ``named`` must stand in every refusal. ``share``: how many of the inputs of a run it gets, relative to the others.
    """

    name: str
    make: Callable[[Random], Any]
    read: Callable[[Any], Any]
    check: Callable[[Any], None]
    named: str = ""
    share: float = 1.0


@dataclass
class Counts:
    """Outcomes of the inputs of one reader; ``failures`` tell what was broken, and the number of the input."""

    inputs: int = 0
    valid: int = 0
    refused: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    failures: list[dict[str, Any]] = field(default_factory=list)


class Hang(BaseException):
    """Raised where an input takes too long; no reader may catch it."""


class _Watch:
    """Sees through an audit hook what Python code opens, runs and changes; a hook can never be taken away again."""

    def __init__(self) -> None:
        self.root: str | None = None
        self.faults: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.root is None:
            return
        if event == "exec" and args[0].co_filename.startswith(READABLE):
            return
        if event in FORBIDDEN:
            self.faults.append(f"{event} {str(args)[:200]}")
        elif event in ("open", "os.listdir", "os.scandir") and not isinstance(args[0], int):
            self._opened(event, args)

    def _opened(self, event: str, args: tuple[Any, ...]) -> None:
        place = os.path.realpath(os.fsdecode(args[0] if args[0] is not None else "."))
        inside = place == self.root or place.startswith(f"{self.root}{os.sep}")
        if event == "open" and args[2] & WRITING:
            self.faults.append(f"opened for writing: {place}")
        elif not inside and not place.startswith(READABLE):
            self.faults.append(f"{event} outside: {place}")


_WATCH: list[_Watch] = []


@contextmanager
def watched(root: Path) -> Iterator[list[str]]:
    """What the block does that no reader may, as lines."""
    if not _WATCH:
        _WATCH.append(_Watch())
    watch = _WATCH[0]
    watch.faults, watch.root = [], os.path.realpath(root)
    try:
        yield watch.faults
    finally:
        watch.root = None


@contextmanager
def time_limit(seconds: float = SECONDS) -> Iterator[None]:
    """Hang if the block takes longer."""

    def stop(*_: Any) -> None:
        raise Hang(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def judged(reader: Reader, argument: Any, root: Path) -> tuple[str, str]:
    """``valid`` or ``refused`` and the message; ``failed`` and what part of the contract was broken."""
    before = _peak()
    with watched(root) as faults:
        try:
            with time_limit():
                found = reader.read(argument)
            outcome, told = "valid", ""
        except IfsoError as error:
            outcome, told = "refused", str(error)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            outcome, told = "failed", f"{type(error).__name__}: {str(error)[:300]}"
    faults = [*faults, *_after(reader, outcome, told, root), *([] if _peak() - before < MEMORY else ["memory"])]
    if outcome == "valid" and not faults:
        try:
            with time_limit():
                reader.check(found)
        except Exception as error:
            faults = [f"not valid: {type(error).__name__}: {str(error)[:300]}"]
    return ("failed", "; ".join(faults)) if faults and outcome != "failed" else (outcome, told)


def _after(reader: Reader, outcome: str, told: str, root: Path) -> list[str]:
    faults = []
    if (root / SENTINEL).exists():
        (root / SENTINEL).unlink()
        faults.append("code was run")
    if outcome == "refused":
        if not told or not told.isprintable():
            faults.append(f"no line that can be printed: {told[:300]!r}")
        if len(told) > LONGEST:
            faults.append(f"message of {len(told)} characters: {told[:200]!r}")
        if reader.named not in told:
            faults.append(f"message without {reader.named}: {told[:300]!r}")
    return faults


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_one(reader: Reader, root: Path, seed: int, number: int) -> tuple[str, str]:
    """Make and judge input ``number``."""
    return judged(reader, reader.make(generator(seed, reader.name, number)), root)
