"""Every error a user can meet. A message says what is wrong, where, and what to do about it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType


class IfsoError(Exception):
    """Base of all errors of this library. ``exit_status`` is what the command line returns."""

    exit_status = 2


class TraceError(IfsoError):
    """The model could not be run on the example inputs, or not be followed."""


class TraceMemoryError(TraceError):
    """Tracing on real tensors would take more memory than allowed."""


class ModelNotFound(IfsoError):
    """A MODEL name that leads to no network."""


class KeepError(IfsoError):
    """A ``keep`` that does not fit the graph: unknown group, wrong size, an emptied layer, a broken balance."""


class CompactionError(IfsoError):
    """Physical removal failed its check; the model was left as it was."""


class StaleGraphError(IfsoError):
    """The graph was traced from another model, or before the model was compacted."""


class RecipeError(IfsoError):
    """A recipe or weight file that is missing, damaged, edited, of another model or of an unknown version."""


class WeightsError(IfsoError):
    """Weights that do not fit the network they are loaded into."""


class ScoreError(IfsoError):
    """A score or loss change that cannot be computed: a bad loss, no batches, an unknown criterion or option."""


class BudgetError(IfsoError):
    """A budget that makes no sense: no share named, or a share that is not between 0 and 1."""


class UnreachableBudget(BudgetError):
    """A budget that no legal choice of units can meet; the message says what is in the way."""

    exit_status = 3


class RunError(IfsoError):
    """A run folder that cannot be used: it exists already, is damaged, or was made with other settings."""


class RankError(RunError):
    """This one of several processes stopped, because another one failed or is gone."""


class DivergedError(IfsoError):
    """The loss was no longer finite during a run, which stopped at its last good state."""


class VerificationError(IfsoError):
    """The result of a run failed its check: the smaller network, its cost or its budget."""

    exit_status = 4


class ExportError(IfsoError):
    """A network that cannot be written as a file for others, a package that this needs, or a place that will not do."""


class DataError(IfsoError):
    """Data that cannot be found, read or used."""


class TrainingError(IfsoError):
    """Training that makes no sense as asked for: settings, a teacher or a resume that do not fit."""


def required(
    module: str, need: str, extra: str, failure: type[IfsoError] = IfsoError, otherwise: str = ""
) -> ModuleType:
    """The module; where it cannot be imported, a ``failure`` with what ``need`` there is of it and what brings it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise failure(f'{need}, which cannot be imported ({error}); pip install "ifso[{extra}]"{otherwise}') from error


def users_line(error: BaseException) -> str:
    """`` (FILE, line N)``: the last line of the user's own that an error came through; "" if there is none.

    What is installed, Python's own and what has no file is no line of a user's.
    """
    import sysconfig
    from pathlib import Path
    from traceback import walk_tb

    others = ("<", str(Path(__file__).parent), sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    frames = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    theirs = [place for place in frames if "site-packages" not in place[0] and not place[0].startswith(others)]
    if not theirs:
        return ""
    file, line = Path(theirs[-1][0]), theirs[-1][1]
    return f" ({file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}, line {line})"
