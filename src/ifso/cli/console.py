"""What commands print: tables for people, one JSON document for machines."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO, cast

from ifso.common.text import one_line
from ifso.errors import IfsoError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

LONGEST = 2000
"""Letters of a line that says what went wrong; a hostile file may make it as long as it likes."""


def console() -> Console:
    """A console on standard output: as wide as the terminal, or 120 characters in a pipe or file."""
    from rich.console import Console

    from ifso.graph.printing import WIDTH

    return Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False, markup=False, emoji=False)


def table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "", caption: str = "", left: int = 1
) -> Table:
    """A table of ``rows``, the first ``left`` columns aligned to the left and the others, numbers, to the right."""
    from rich.table import Table

    made = Table(title=title or None, caption=caption or None, title_justify="left", caption_justify="left")
    for number, heading in enumerate(headings):
        justify: Literal["left", "right"] = "left" if number < left else "right"
        made.add_column(heading, justify=justify, overflow="ellipsis" if number else "fold")
    for row in rows:
        made.add_row(*row)
    return made


def print_json(document: Any) -> None:
    """Print ``document`` as the one JSON document of a command."""
    print(json.dumps(document, indent=2))


def write_json(path: Path, document: Any) -> None:
    """Write ``document`` as a JSON file, as a whole or not at all."""
    write_text(path, json.dumps(document, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file as a whole or not at all."""
    from ifso.common.files import delivering

    try:
        with delivering(path) as new:
            new.write_text(text, encoding="utf-8")
    except OSError as error:
        raise IfsoError(f"{path} cannot be written: {error.strerror or error}; give another file") from error


def say(line: str) -> None:
    """One line of progress, on standard error."""
    print(f"· {line}", file=sys.stderr, flush=True)


def complain(words: str) -> None:
    """What went wrong, as one line on standard error, written in one piece: lines of several ranks do not mix."""
    sys.stderr.write(f"ifso: {one_line(words, LONGEST)}\n")
    sys.stderr.flush()


@contextmanager
def steady_streams() -> Iterator[None]:
    r"""Within it standard output and error are there, take every letter, and what cannot be told stops no work.

    A stream that was closed before ifso began leads nowhere. What an encoding such as ASCII has not is written as
    ``\u2013``. Standard error that cannot be written is given up; of standard output the caller is told.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # closed: the next file would take its place, and be written into
            os.open(os.devnull, os.O_RDWR)
    out, error = _taking_all(sys.stdout, 1), _taking_all(sys.stderr, 2)
    sys.stdout, sys.stderr = out, cast("TextIO", _Unfailing(error))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, error


def give_up(stream: TextIO) -> None:
    """From now on what is written to a stream goes nowhere."""
    with suppress(OSError, ValueError):
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)
    with suppress(OSError, ValueError):
        stream.flush()


def _taking_all(stream: TextIO | None, descriptor: int) -> TextIO:
    if stream is None:
        return open(descriptor, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return stream


class _Unfailing:
    """A stream that is given up when it fails."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, words: str) -> int:
        """As much as can be."""
        try:
            return self._stream.write(words)
        except OSError:
            give_up(self._stream)
            return len(words)

    def flush(self) -> None:
        """If that can be."""
        try:
            self._stream.flush()
        except OSError:
            give_up(self._stream)


@contextmanager
def chatter_to_stderr() -> Iterator[None]:
    """Whatever models and libraries print goes to standard error, so that standard output stays the command's own."""
    with redirect_stdout(sys.stderr):
        yield


def path_from(path: Path, start: Path) -> Path:
    """A path as the user wrote it; in full if the working directory is no longer ``start``."""
    return path if Path.cwd() == start else path.absolute()
