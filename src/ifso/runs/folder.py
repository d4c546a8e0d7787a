"""The folder of a run: what it was asked to do, what it has done, and where it can go on after any interruption.

Every file but ``metrics.jsonl`` is written under a provisional name, brought to the disk and then renamed, so it is
there as a whole or not at all. A line of ``metrics.jsonl`` that was cut short is left out when the run goes on.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors import SafetensorError
from torch import Tensor, nn

from ifso.common.files import (
    NotPlain,
    append_bytes,
    clear_scratch,
    provisional,
    refuse_not_plain,
    remove_provisional,
    replacing,
    sync_file,
    write_bytes,
)
from ifso.common.locks import FolderLock
from ifso.common.serialization import (
    finite,
    json_line,
    located,
    pretty_json,
    read_lines,
    read_tensor_file,
    write_tensor_file,
)
from ifso.common.text import one_line
from ifso.errors import RecipeError, RunError
from ifso.runs.files import (
    CHECKPOINTS,
    CONFIG,
    DIGESTS,
    FIRST_SCORES,
    HEAD,
    LOCK,
    METRICS,
    NETWORKS,
    RUN,
    SCORES,
    STRUCTURE,
    SUMMARY,
    TRAINING,
    digest,
    digests,
    holds_run,
    is_config,
    number_of,
    read_config,
    refuse_other,
)
from ifso.surgery.recipe import Recipe
from ifso.surgery.store import NEW_WEIGHTS, RECIPE, save

_OF_A_RUN = re.compile(
    r"\.lock|\..+\.new(\.d)?|config\.json|recipe\.json|model\.safetensors|(first_)?scores\.safetensors|structure\.json|metrics\.jsonl"
    r"|summary\.json|checkpoints|networks|tensorboard|finetune|eval\.json|report\.html"
)
"""What ifso writes into the folder of a run."""

KEPT_CHECKPOINTS = 2
_CHECKPOINT_BEGUN = re.compile(r"\.(\d{8,}\.safetensors)\.new(?:\.d)?")

Checkpoint = tuple[int, dict[str, Tensor], dict[str, Any]]
"""Number, tensors and state."""


class RunFolder:
    """A run folder that this process holds; close it, or use it in a ``with``, to let another process have it.

    Without a ``lock`` it is only there to be read. ``config`` is what stands in ``config.json``, ``notes`` what
    a person should hear about the state of the files.
    """

    def __init__(self, path: Path, config: dict[str, Any], lock: FolderLock | None) -> None:
        self.path = path
        self.config = config
        self.notes: list[str] = []
        self._lock = lock
        if lock is not None and lock.refused:
            self._note(f"{path} is on a disk without locks: do not run two processes in it")

    @classmethod
    def create(cls, path: str | os.PathLike[str], config: Mapping[str, Any], *, overwrite: bool | None = None) -> Self:
        """A new run in a folder that is empty or not there yet, or that holds a pruning which ``overwrite`` gives up.

        Nothing else is ever deleted to make room for it. None: whoever starts the run cannot ask for that.
        """
        path = Path(path)
        try:
            str(path).encode()
        except UnicodeEncodeError:
            raise RunError(f"{str(path)!r} is no UTF-8 name, which safetensors needs; give another") from None
        if overwrite and holds_run(path):
            _clear(path)
        hint = "" if overwrite is None else ", or give it up (overwrite=True, --overwrite)"
        _refuse_taken(path, hint)
        with located(path):
            path.mkdir(parents=True, exist_ok=True)
        folder = cls(path, {**HEAD, **config}, _locked(path))
        try:
            _refuse_taken(path)
            folder._write(CONFIG, pretty_json(folder.config, path / CONFIG))
        except BaseException:
            folder.close()
            raise
        return folder

    @classmethod
    def resume(cls, path: str | os.PathLike[str], config: Mapping[str, Any], *, reading: bool = False) -> Self:
        """A run that was begun earlier with the same ``config["settings"]``; what else is in ``config`` may differ.

        ``reading`` is for those who look on while another process holds the folder, and never write.
        """
        path = Path(path)
        if not (path / CONFIG).is_file():
            raise RunError(
                f"{path} holds no run to resume (no {CONFIG}); start one there without resume, or give its folder"
            )
        stored = read_config(path / CONFIG)
        refuse_other(config["settings"], stored["settings"], f"the run in {path}")
        folder = cls(path, stored, None if reading else _locked(path))
        if not reading:
            folder._remove_stale()
        return folder

    def close(self) -> None:
        """Let another process have the folder."""
        if self._lock is not None:
            self._lock.release()

    def discard_if_empty(self) -> None:
        """A run that failed before its first removal leaves nothing behind, so that it can be started anew there."""
        if self.finished or (self.path / RECIPE).exists() or self.metrics()[0]:
            return
        files = (self.path / name for name in (METRICS, FIRST_SCORES, STRUCTURE, CONFIG, LOCK))
        for path in (*self._checkpoints().values(), *files):
            self._unless_refused(path, _unlink_plain)
        with suppress(OSError):
            (self.path / CHECKPOINTS).rmdir()
        with suppress(OSError):
            self.path.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------ checkpoints

    def write_checkpoint(self, number: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Keep this moment of the run, and the lines of metrics up to it. Only it and the one before it stay.

        Those with a higher number go, too: the run went on from an earlier one because they could not be read.
        """
        folder = self.path / CHECKPOINTS
        with located(folder):
            _refuse_link(folder)
            folder.mkdir(exist_ok=True)
        self._sync_metrics()
        write_tensor_file(folder / f"{number:08d}.safetensors", tensors, {**state, RUN: self._identity})
        known = self._checkpoints()
        earlier = [other for other in known if other < number]
        for other in known.keys() - {number, *earlier[1 - KEPT_CHECKPOINTS :]}:
            self._unless_refused(known[other], _unlink_plain)

    def newest_checkpoint(self) -> Checkpoint | None:
        """Number, tensors (on the CPU) and state of the newest whole checkpoint. Damaged ones are told in ``notes``."""
        for number, path in reversed(self._checkpoints().items()):
            try:
                tensors, state = read_tensor_file(path)
            except RunError as error:
                self._note(f"{error}; an earlier state of the run is used")
            else:
                return number, tensors, self._of_this_run(path, state)
        return None

    def _of_this_run(self, path: Path, state: Any) -> dict[str, Any]:
        """The state of a checkpoint; RunError if it is of another run. Older ones do not tell."""
        with located(path):
            if not isinstance(state, dict):
                raise RunError("holds no state of a run; remove it, and resume")
            if state.pop(RUN, self._identity) != self._identity:
                raise RunError(
                    f"of another run, or {CONFIG} was edited since; restore that, or start the run in another folder"
                )
        return state

    @property
    def _identity(self) -> str:
        """Tells a run from others: what it was asked to do, and how."""
        return digest({name: self.config.get(name) for name in ("settings", "about")})

    def _checkpoints(self) -> dict[int, Path]:
        """Those there are, oldest first."""
        folder = self.path / CHECKPOINTS
        if not folder.is_dir():
            return {}
        with located(folder):
            _refuse_link(folder)
            found = [path for path in folder.iterdir() if re.fullmatch(r"\d{8,}\.safetensors", path.name)]
        return {int(path.stem): path for path in sorted(found, key=lambda path: int(path.stem))}

    # ---------------------------------------------------------------------------------------------------- metrics

    def append(self, line: Mapping[str, Any]) -> None:
        """One more line of ``metrics.jsonl``. A number that is not finite is written as null: JSON has no NaN."""
        with located(self.path / METRICS):
            append_bytes(self.path / METRICS, json_line(line))

    def metrics(self) -> tuple[list[dict[str, Any]], int]:
        """The lines of ``metrics.jsonl``, and how many others are there that are no whole JSON objects."""
        return read_lines(self.path / METRICS)

    def rewind(self, removals: int) -> None:
        """Keep the lines of ``metrics.jsonl`` with ``"removal"`` up to ``removals``, each once, and nothing else."""
        numbered = {number_of(line, "removal"): line for line in self.metrics()[0]}
        lines = {number: line for number, line in numbered.items() if 0 <= number <= removals}
        missing = removals - sum(number > 0 for number in lines)
        if missing:
            self._note(f"{self.path / METRICS}: {missing} of the {removals} removals so far are not in it any more")
        self.rewrite(lines[number] for number in sorted(lines))

    def rewrite(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Let ``metrics.jsonl`` hold these lines and nothing else."""
        self._write(METRICS, b"".join(json_line(line) for line in lines))

    # ------------------------------------------------------------------------------------------------ other files

    def write_scores(self, scores: Mapping[str, Tensor]) -> None:
        """``scores.safetensors``: a tensor for each group."""
        write_tensor_file(self.path / SCORES, scores)

    def write_first_scores(self, scores: Mapping[str, Tensor]) -> None:
        """``first_scores.safetensors``: those of the first step, normalised, a tensor for each group."""
        write_tensor_file(self.path / FIRST_SCORES, scores)

    def write_model(self, model: nn.Module, recipe: Recipe) -> None:
        """``recipe.json`` and ``model.safetensors``, for :func:`ifso.load`."""
        self._save(model, self.path, recipe)

    @staticmethod
    def _save(model: nn.Module, folder: Path, recipe: Recipe) -> None:
        try:
            save(model, folder, recipe)
        except RecipeError as error:
            with located(folder):
                if isinstance(error.__cause__, (OSError, SafetensorError)):
                    raise error.__cause__ from error
            raise

    def write_network(self, name: str, model: nn.Module, recipe: Recipe) -> Path:
        """Write the network for one budget of several, for :func:`ifso.load`, and return its folder."""
        folder = self.path / NETWORKS / name
        with located(folder):
            _refuse_link(self.path / NETWORKS)
            _refuse_link(folder)
            folder.mkdir(parents=True, exist_ok=True)
        self._save(model, folder, recipe)
        return folder

    def write_json(self, name: str, document: Mapping[str, Any]) -> None:
        """Another JSON file of the run. A number that is not finite is written as null."""
        if name != Path(name).name or name in {"", ".", "..", CONFIG, METRICS}:
            raise ValueError(f"no name for a JSON file in a run folder: {name!r}")
        self._write(name, pretty_json(finite(document), self.path / name))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run is at its end: ``summary.json``."""
        self._sync_metrics()
        self.write_json(SUMMARY, {**summary, DIGESTS: digests(self.path, self.config)})

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end."""
        return (self.path / SUMMARY).is_file()

    def _write(self, name: str, data: bytes) -> None:
        with located(self.path / name), replacing(self.path / name) as new:
            write_bytes(new, data)

    def _sync_metrics(self) -> None:
        with located(self.path / METRICS):
            if (self.path / METRICS).exists():
                sync_file(self.path / METRICS)

    def _remove_stale(self) -> None:
        """What a killed process was writing of a run; of ``ifso.save`` only the folder that its weights came from."""
        names = (CONFIG, SCORES, FIRST_SCORES, STRUCTURE, METRICS, SUMMARY)
        begun = [self.path / name for name in names]
        if not (self.path / CHECKPOINTS).is_symlink():
            left = (_CHECKPOINT_BEGUN.fullmatch(path.name) for path in (self.path / CHECKPOINTS).glob(".*"))
            begun += [self.path / CHECKPOINTS / match[1] for match in left if match]
        for path in begun:
            self._unless_refused(path, remove_provisional)
        self._unless_refused(self.path / NEW_WEIGHTS, clear_scratch)

    def _unless_refused(self, path: Path, remove: Callable[[Path], None]) -> None:
        try:
            remove(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._note(f"{path}: no longer needed, but cannot be removed ({one_line(error)})")

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


def _unlink_plain(path: Path) -> None:
    refuse_not_plain(path)
    path.unlink()


def _refuse_link(folder: Path) -> None:
    """What a link leads to may be another run's, and is neither written nor cleaned."""
    if folder.is_symlink():
        raise NotPlain(f"it is a link to {os.readlink(folder)}, which other runs may use; put the folder itself there")  # noqa: PTH115


def _refuse_taken(path: Path, hint: str = "") -> None:
    """RunError if a new run would find anything but an empty folder."""
    with located(path):
        if not path.exists() and not path.is_symlink():
            return
        if not path.is_dir():
            raise RunError("is no folder; give another place for the run")
        inside = {entry.name for entry in path.iterdir()} - {LOCK, provisional(path / CONFIG).name}
    if CONFIG in inside and is_config(path / CONFIG):
        kind = "epoch" if TRAINING in read_config(path / CONFIG)["settings"] else "removal"
        done = max((number_of(line, kind) for line in read_lines(path / METRICS)[0]), default=0)
        state = "finished" if (path / SUMMARY).is_file() else "unfinished"
        raise RunError(
            f"{path} already holds a run ({done} {kind}s, {state}); "
            f"resume it (resume=…, --resume) or give another folder{hint}"
        )
    if inside:
        raise RunError(f"{path} is not empty and no run folder; give another")


def _clear(path: Path) -> None:
    """Delete a run that no process works in. What is in its folder and no file of a run is not deleted, but refused."""
    lock = _locked(path)
    try:
        with located(path):
            if TRAINING in read_config(path / CONFIG)["settings"]:
                raise RunError("holds a training and no pruning; give another folder")
            foreign = sorted(entry.name for entry in path.iterdir() if not _OF_A_RUN.fullmatch(entry.name))
            if foreign:
                raise RunError(f"holds {foreign[0]}, which is of no run; move it away, or give another folder")
            for entry in path.iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                elif entry.name not in (LOCK, CONFIG):
                    entry.unlink()
            (path / CONFIG).unlink()
    finally:
        lock.release()


def _locked(path: Path) -> FolderLock:
    with located(path / LOCK):
        try:
            return FolderLock(path / LOCK)
        except BlockingIOError:
            pass
    raise RunError(f"{path} is in use by another process; wait until it has ended, or give another folder")
