"""Going on with a run: the options it was started with, and the command that resumes it after Ctrl-C."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ifso.cli.console import chatter_to_stderr
from ifso.errors import RunError
from ifso.runs.arguments import EXECUTED, refuse_foreign, told_options, without_folders

MAY_CHANGE = ("device",)
"""Options that a resumed run may have others of."""


def stored_options(run: Path, names: Sequence[str], command: str) -> dict[str, Any]:
    """The options of these names that ``command`` started a run with."""
    from ifso.runs.files import CONFIG, is_there, read_config

    if not is_there(run / CONFIG):
        raise RunError(f"{run} holds no run to resume; start it without --resume, or give its folder")
    arguments = told_options(read_config(run / CONFIG), run / CONFIG)
    if arguments is None:
        raise RunError(
            f"{run / CONFIG} does not say how {command} was called; "
            "resume the run in Python, or start it in another folder"
        )
    return {name: value for name, value in arguments.items() if name in names}


def check_same_options(given: Mapping[str, Any], stored: Mapping[str, Any], run: Path, *others: Path) -> None:
    """Raise RunError if a run is resumed with other options than it was started with.

    Files may have moved, so that only their names are compared. Programs that came with the run, or with one of
    ``others``, which are opened with it, must be given again.
    """
    for option in EXECUTED:
        if option in stored and option not in given:
            refuse_foreign(option, str(stored[option]), (run, *others))
    from ifso.runs.files import refuse_other

    new = {name: without_folders(value) for name, value in given.items() if name not in MAY_CHANGE}
    old = {name: without_folders(stored[name]) for name in new if name in stored}
    refuse_other(new, old, f"the run in {run}")


@contextmanager
def resumable(command: Sequence[str], *folders: Path, shown: bool) -> Iterator[None]:
    """Send what libraries print to standard error; after Ctrl-C print ``command``, if all ``folders`` can go on."""
    from ifso.runs.files import CONFIG

    try:
        with chatter_to_stderr():
            yield
    except KeyboardInterrupt:
        if shown and all((folder / CONFIG).is_file() for folder in folders):
            print(f"to go on: {shlex.join(['ifso', *command])}", file=sys.stderr)
        raise
