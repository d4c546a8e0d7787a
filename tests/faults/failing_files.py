"""A disk that fails: every change of a file below a folder is numbered, and the n-th of them goes wrong.

``full``: from then on nothing can grow. ``read-only``: from then on nothing can change. ``refused``: only that one call
fails. ``crash``: the process is gone, half of what it was writing is there, and nothing that it would still do to clean
up happens. ``power``: as a crash, and what was not synced is lost; ``names``: as a crash, and renamings that were not
synced are undone. ``SIGINT`` and ``SIGTERM``: the process gets that signal just before.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self
from unittest import mock

from safetensors import SafetensorError

from ifso.common import files
from ifso.exporting import formats

REFUSALS = {"full": errno.ENOSPC, "read-only": errno.EROFS, "refused": errno.EACCES}
STOPS = ("crash", "power", "names")
KINDS = (*REFUSALS, *STOPS)
SIGNALS = {"SIGINT": 130, "SIGTERM": 143}
"""With the status that a command then ends with."""
GROWING = ("open", "write", "save", "saved", "mkdir", "fsync")
"""What needs room; a disk may say so only when it is told to sync."""

HOLDERS = (files, formats)
"""Modules that write safetensors by ``save_file``."""

_WRITING = os.O_WRONLY | os.O_RDWR


class Crash(BaseException):
    """The machine is gone."""


class Disk:
    """Within it, changes below ``root`` are counted in ``done``, by name; the ``at``-th one, from 1, goes wrong.

    ``at`` None: nothing fails. ``failed`` says whether something did.
    """

    def __init__(self, root: Path, kind: str = "refused", at: int | None = None) -> None:
        self._root, self.kind, self._at = str(root.resolve()), kind, at
        self.done: list[str] = []
        self.failed = self.dead = False
        self._paths: dict[int, str] = {}
        self._unsynced: dict[str, bytes] = {}
        self._renamed: list[tuple[str, str, bytes | None]] = []
        self._patches: list[Any] = []

    def __enter__(self) -> Self:
        self._real = {name: getattr(os, name) for name in ("open", "write", "fsync", "replace", "close")}
        self._real_open = builtins.open
        changes: dict[tuple[Any, str], Callable[..., Any]] = {
            (os, "open"): self._os_open, (os, "write"): self._write, (os, "fsync"): self._fsync,
            (os, "replace"): self._replace, (os, "rename"): self._replace, (os, "close"): self._close,
            (builtins, "open"): self._open, (io, "open"): self._open,
            (os, "ftruncate"): self._by_descriptor("ftruncate"),
            **{(os, name): self._by_path(name) for name in ("unlink", "remove", "mkdir", "rmdir", "chmod", "utime")},
            **{(module, "save_file"): self._save for module in HOLDERS},
        }  # fmt: skip
        for (owner, name), instead in changes.items():
            patch = mock.patch.object(owner, name, instead)
            patch.start()
            self._patches.append(patch)
        return self

    def __exit__(self, *exc: object) -> None:
        for patch in reversed(self._patches):
            patch.stop()
        if self.dead:
            self._lose()

    # ------------------------------------------------------------------------------------------------- what goes wrong

    def _due(self, name: str, path: str | None) -> bool:
        """Count a change; does it go wrong? What comes after a crash never happens."""
        if path is None or not path.startswith(self._root):
            return False
        if self.dead:
            raise Crash
        self.done.append(name)
        if self.kind == "full" and name not in GROWING:
            return False
        first = len(self.done) == self._at
        lasting = self.kind in ("full", "read-only") and self._at is not None and len(self.done) > self._at
        self.failed |= first or lasting
        return first or lasting

    def _fail(self, path: str) -> None:
        if self.kind in SIGNALS:
            signal.raise_signal(signal.Signals[self.kind])
            return
        if self.kind in STOPS:
            self.dead = True
            raise Crash
        code = REFUSALS[self.kind]
        raise OSError(code, os.strerror(code), path)

    def _lose(self) -> None:
        """What the disk does not hold after a power failure."""
        if self.kind == "power":
            for path, before in self._unsynced.items():
                if os.path.exists(path):  # noqa: PTH110
                    Path(path).write_bytes(before)
        if self.kind == "names":
            for source, target, before in reversed(self._renamed):
                with suppress(OSError):
                    os.replace(target, source)  # noqa: PTH105
                if before is not None:
                    Path(target).write_bytes(before)

    # ------------------------------------------------------------------------------------------------------- the calls

    def _os_open(self, path: Any, flags: int, *args: Any, **options: Any) -> int:
        place = self._place(path)
        if flags & _WRITING and self._due("open", place):
            self._fail(place)
        if flags & _WRITING:
            self._changing(place, fresh=bool(flags & os.O_TRUNC))
        descriptor: int = self._real["open"](path, flags, *args, **options)
        self._paths[descriptor] = place
        return descriptor

    def _write(self, descriptor: int, data: Any) -> int:
        path = self._paths.get(descriptor)
        if self._due("write", path):
            self._real["write"](descriptor, bytes(data)[: len(data) // 2])
            self._fail(str(path))
        return self._real["write"](descriptor, data)

    def _fsync(self, descriptor: int) -> None:
        path = self._paths.get(descriptor)
        if self._due("fsync", path):
            self._fail(str(path))
        self._real["fsync"](descriptor)
        self._unsynced.pop(str(path), None)
        self._renamed = [entry for entry in self._renamed if os.path.dirname(entry[1]) != path]  # noqa: PTH120

    def _replace(self, source: Any, target: Any) -> None:
        old, new = self._place(source), self._place(target)
        if self._due("replace", new):
            self._fail(new)
        before = self._read(new) if new.startswith(self._root) and Path(new).is_file() else None
        self._real["replace"](source, target)
        self._renamed.append((old, new, before))
        if old in self._unsynced:
            self._unsynced[new] = self._unsynced.pop(old)

    def _save(self, tensors: Any, path: Any, **options: Any) -> None:
        """safetensors writes below Python, under a name of its own first."""
        place = self._place(path)
        if self._due("save", place):
            self._say_no(place)
        self._changing(place, fresh=True)
        _REAL_SAVE(tensors, path, **options)
        if self._due("saved", place):
            whole, own = self._read(place), str(Path(place).with_name(".tmpAbCd12"))
            for left in (place, *([own] if self.kind in STOPS else ())):
                with self._real_open(left, "wb") as file:
                    file.write(whole[: len(whole) // 2])
            self._say_no(place)

    def _say_no(self, place: str) -> None:
        """As safetensors tells what the system said."""
        try:
            self._fail(place)
        except OSError as error:
            raise SafetensorError(
                f"Error while serializing: I/O error: {error.strerror} (os error {error.errno})"
            ) from None

    def _open(self, file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        place = None if isinstance(file, int) else self._place(file)
        if place is None or not place.startswith(self._root):
            return self._real_open(file, mode, *args, **options)
        if set(mode) & set("wax+"):
            if self._due("open", place):
                self._fail(place)
            self._changing(place, fresh="w" in mode)
        raw = _Raw(place, mode.replace("b", "").replace("t", ""), self)
        self._paths[raw.fileno()] = place
        if "+" in mode:
            return io.BufferedRandom(raw) if "b" in mode else io.TextIOWrapper(io.BufferedRandom(raw), "utf-8")
        buffered: Any = io.BufferedReader(raw) if "r" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, options.get("encoding") or "utf-8")

    def _close(self, descriptor: int) -> None:
        self._paths.pop(descriptor, None)
        self._real["close"](descriptor)

    def _by_path(self, name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(path: Any, *args: Any, **options: Any) -> Any:
            place = path if isinstance(path, int) else self._place(path)
            if isinstance(place, str) and self._there(name, place) and self._due(name, place):
                self._fail(place)
            return real(path, *args, **options)

        return call

    def _by_descriptor(self, name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(descriptor: int, *args: Any) -> Any:
            path = self._paths.get(descriptor)
            if self._due(name, path):
                self._fail(str(path))
            return real(descriptor, *args)

        return call

    @staticmethod
    def _there(name: str, place: str) -> bool:
        """Would the call change anything?"""
        return (name == "mkdir") != os.path.lexists(place)

    def _place(self, path: Any) -> str:
        return os.path.abspath(os.fsdecode(path))  # noqa: PTH100

    def _changing(self, place: str, *, fresh: bool) -> None:
        """What a power failure would leave of a file that is about to be written."""
        if place.startswith(self._root) and place not in self._unsynced and not place.endswith(".lock"):
            there = not fresh and Path(place).is_file()
            self._unsynced[place] = self._read(place) if there else b""

    def _read(self, place: str) -> bytes:
        with self._real_open(place, "rb") as file:
            return file.read()


class _Raw(io.FileIO):
    """A file of which every write that reaches the system is counted."""

    def __init__(self, path: str, mode: str, disk: Disk) -> None:
        super().__init__(path, mode)
        self._path, self._disk = path, disk

    def write(self, data: Any) -> int:
        if self._disk._due("write", self._path):
            super().write(bytes(data)[: len(data) // 2])
            self._disk._fail(self._path)
        return super().write(data)

    def close(self) -> None:
        if not self.closed:
            self._disk._paths.pop(self.fileno(), None)
        super().close()


_REAL_SAVE = files.save_file


@contextmanager
def hearing() -> Iterator[None]:
    """Signals do what they do at a terminal, also in a process that was begun in the background."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def provisional_files(folder: Path) -> list[str]:
    """Names of files that were never meant to stay."""
    found = (path for path in folder.rglob(".*") if path.is_file() and path.name != ".lock")
    return sorted(str(path.relative_to(folder)) for path in found)


def copied(source: Path, target: Path) -> Path:
    """A folder as it is, in another place."""
    return Path(shutil.copytree(source, target))
