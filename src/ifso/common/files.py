"""Writing files so that nobody ever sees half of one, tensors as safetensors, and a lock between processes."""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from errno import EACCES, EBUSY, EDQUOT, EFBIG, ELOOP, ENAMETOOLONG, ENOENT, ENOSPC, ENOTDIR, ENXIO, EPERM, EROFS
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ifso.common.locks import NO_LINK, turn_in
from ifso.common.text import one_line


class NotPlain(OSError):
    """In the place of a file is something that is never replaced: a link, a device, a pipe, a folder."""

    def __init__(self, words: str) -> None:
        super().__init__(words)
        self.strerror = words


def provisional(path: Path) -> Path:
    """The name under which a file is written before it takes its place.

    >>> provisional(Path("run/config.json")).name
    '.config.json.new'
    """
    return path.with_name(f".{path.name}.new")


def scratch(path: Path) -> Path:
    """The folder in which safetensors writes ``path``, under names of its own; one that is killed leaves its file."""
    return path.with_name(f"{path.name}.d")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the provisional name to write to; at the end of the block the file takes the place of ``path``.

    If anything fails, the earlier file stays and the provisional one is removed. :class:`NotPlain` if there is anything
    else than a plain file in that place. Who writes into the same folder meanwhile waits.
    """
    refuse_not_plain(path)
    new = provisional(path)
    with turn_in(path.parent):
        try:
            yield new
            sync_file(new)
            refuse_not_plain(path)
            new.replace(path)
        except BaseException:
            with suppress(OSError):
                new.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


@contextmanager
def delivering(path: Path) -> Iterator[Path]:
    """As :func:`replacing`, for a file that the user names: a device or a pipe is written into, and stays."""
    if not _is_stream(path):
        with replacing(path) as new:
            yield new
        return
    with tempfile.TemporaryDirectory() as folder:
        new = Path(folder) / (path.name or "new")
        yield new
        _pour(new.read_bytes(), path)


def refuse_not_plain(path: Path) -> None:
    """:class:`NotPlain` unless there is a plain file or nothing; a link is not followed."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISLNK(mode):
        raise NotPlain(f"it is a link to {os.readlink(path)}, which is not followed; give the place itself")  # noqa: PTH115
    if not stat.S_ISREG(mode):
        raise NotPlain(f"it is {'a folder' if stat.S_ISDIR(mode) else 'no plain file'}; give the name of a file")


def _is_stream(path: Path) -> bool:
    """A device or a pipe, or a link that the system has for one, such as ``/dev/stdout``, wherever that leads."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    place = path.absolute().parent
    of_the_system = path.is_symlink() and (place.parts[1:2] == ("proc",) or place in (Path("/dev"), Path("/dev/fd")))
    return of_the_system or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _pour(data: bytes, stream: Path) -> None:
    """Write into a device or pipe; a pipe that nobody reads from is refused and not waited for."""
    try:
        descriptor = os.open(stream, os.O_WRONLY | os.O_APPEND | _BINARY | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        if error.errno == ENXIO:
            raise NotPlain("nobody reads from this pipe; begin to read, or give the name of a file") from error
        raise
    try:
        os.set_blocking(descriptor, True)
        _write_all(descriptor, data)
    finally:
        os.close(descriptor)


def remove_provisional(path: Path) -> None:
    """Remove what a killed process was writing for ``path``, plain files of ours and never what a link leads to."""
    new = provisional(path)
    if is_plain(new):
        new.unlink(missing_ok=True)
    clear_scratch(new)


def clear_scratch(path: Path) -> None:
    """Remove the :func:`scratch` folder of ``path`` with the files in it, but nothing that a link leads to."""
    folder = scratch(path)
    if folder.is_dir() and not folder.is_symlink():
        with suppress(OSError):
            for left in filter(is_plain, folder.iterdir()):
                left.unlink()
            folder.rmdir()


def exists(path: Path) -> bool:
    """Return whether there is anything; False where the system will not say, as with a name that is too long."""
    return os.path.exists(path)  # noqa: PTH110 (Path.exists raises there)


def is_folder(path: str | Path) -> bool:
    """Return whether it is a folder; what cannot be a path is none."""
    return os.path.isdir(path)  # noqa: PTH112


def is_file(path: Path) -> bool:
    """Return whether there is a file, also by a link; False where the system will not say."""
    return os.path.isfile(path)  # noqa: PTH113


def is_plain(path: Path) -> bool:
    """Return whether there is a plain file, and no link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def write_text(path: Path, text: str) -> None:
    """Write a file of text as a whole or not at all, with the folders it lies in; or into a device or a pipe."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with delivering(path) as new:
        new.write_text(text, encoding="utf-8")


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file from its beginning."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _BINARY | NO_LINK, 0o666)
    try:
        _write_all(descriptor, data)
    finally:
        os.close(descriptor)


def append_bytes(path: Path, data: bytes) -> None:
    """Add to the end of a file; if it cannot take all, it is cut back to what it was."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _BINARY | NO_LINK, 0o666)
    try:
        length = os.fstat(descriptor).st_size
        try:
            _write_all(descriptor, data)
        except BaseException:
            with suppress(OSError):
                os.ftruncate(descriptor, length)
            raise
    finally:
        os.close(descriptor)


_BINARY = getattr(os, "O_BINARY", 0)


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def sync_file(path: Path) -> None:
    """Bring what was written to the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make renamings last through a power failure; Windows has no such call."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors on the CPU, no two of them in the same memory. ValueError for meta and sparse ones."""
    ready: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.is_meta or tensor.layout != torch.strided:
            raise ValueError(
                f"cannot save {name!r}: only dense tensors with values can be stored, not meta or sparse ones"
            )
        stored = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        address = stored.untyped_storage().data_ptr()
        ready[name] = stored.clone() if address in storages else stored
        storages.add(address)
    return ready


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """A safetensors file as readable to others as any file. ValueError for a dtype that the format has not."""
    if not path.exists():
        write_bytes(path, b"")
    mode = path.stat().st_mode
    folder = scratch(path)
    folder.mkdir(exist_ok=True)
    try:
        if folder.is_symlink():
            raise NotPlain(f"{folder.name} is a link, which is not followed; remove it")
        save_file(dict(tensors), folder / path.name, metadata=metadata)
        if len(metadata) > 1:
            _sort_metadata(folder / path.name)
        (folder / path.name).chmod(mode)
        (folder / path.name).replace(path)
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(f"safetensors cannot hold such a tensor: {one_line(error)}") from error
    finally:
        clear_scratch(path)


def _sort_metadata(path: Path) -> None:
    """Entries of a safetensors file's metadata in the order of their names; without, each process has its own."""
    with path.open("rb+") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        file.seek(8)
        file.write(text.ljust(length))


NO_ROOM, NOT_ALLOWED, NOT_THERE = (ENOSPC, EDQUOT, EFBIG), (EACCES, EPERM, EROFS), (ENOENT, ENOTDIR)
ADVICE = {
    **dict.fromkeys(NO_ROOM, "make room, and do it again; what was written before is whole"),
    **dict.fromkeys(NOT_ALLOWED, "make it readable and writable, or give another folder"),
    **dict.fromkeys(NOT_THERE, "give a folder that is there"),
    ELOOP: "it is a link, which is not followed; give the place itself",
    EBUSY: "another process writes there; do it again when that is through, or give another folder",
    ENAMETOOLONG: "give a shorter name",
}


def explained(error: Exception, advice: Mapping[int, str] = ADVICE, otherwise: str = "check the disk") -> str:
    """Why a file could not be read or written, and what to do about it.

    >>> explained(OSError(ENOSPC, "no room"))
    'No space left on device; make room, and do it again; what was written before is whole'
    """
    if isinstance(error, NotPlain):
        return one_line(error)
    code = error_number(error)
    return f"{os.strerror(code) if code else one_line(error)}; {advice.get(code or 0, otherwise)}"


def error_number(error: Exception) -> int | None:
    """The system's number of an error; safetensors gives it only in words."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    found = re.search(r"os error (\d+)", str(error))
    return int(found[1]) if found else None
