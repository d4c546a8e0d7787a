"""What commands print: tables for people, one JSON document for machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def console() -> Console:
    """A console on standard output: as wide as the terminal, or 120 characters in a pipe or file."""
    from rich.console import Console

    from ifso.graph.table import WIDTH

    return Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False, markup=False, emoji=False)


def print_json(document: Any) -> None:
    """Print ``document`` as the one JSON document of a command."""
    print(json.dumps(document, indent=2))


def say(line: str) -> None:
    """One line of progress, on standard error."""
    print(f"· {line}", file=sys.stderr, flush=True)


def complain(words: str) -> None:
    """What went wrong, as one line on standard error, written in one piece: lines of several ranks do not mix."""
    sys.stderr.write(f"ifso: {' '.join(words.split())}\n")
    sys.stderr.flush()


@contextmanager
def chatter_to_stderr() -> Iterator[None]:
    """Whatever models and libraries print goes to standard error, so that standard output stays the command's own."""
    with redirect_stdout(sys.stderr):
        yield


def amount(number: float) -> str:
    """A count as people read it.

    >>> amount(69_124_736), amount(464_432), amount(12)
    ('69.12 M', '464.43 k', '12')
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.2f} {letter}"
    return f"{number:g}"
