"""What a run of a row came to, as one JSON file of its own."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ifso.errors import IfsoError
from ifso.repro.rows import job_name

HISTORY = ("epoch", "loss", "top1", "lr")


@dataclass(frozen=True)
class Result:
    """One network pruned and fine-tuned. Accuracies are in per cent on the test set, ``macs_kept`` is a share.

    ``last_top1`` is what counts; ``best_top1`` of all epochs is chosen on the test set, as the paper does.
    ``pruned_top1`` is the accuracy before fine-tuning, ``seconds`` the time of fine-tuning and ``prune_seconds`` that
    of pruning. ``variant`` holds the options that differ from the row's, ``train`` and ``prune`` all of them, ``base``
    how the unpruned network was got. A ``smoke`` result only shows that things run.
    """

    row: str
    criterion: str
    recipe: str
    seed: int
    epochs: int
    macs_kept: float
    base_top1: float
    last_top1: float
    best_top1: float
    history: list[dict[str, Any]]
    seconds: float
    hardware: str
    torch: str
    params_kept: float
    pruned_top1: float
    prune_seconds: float
    ifso: str
    variant: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    prune: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=dict)
    smoke: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot have come out of a run."""
        for entry in fields(self):
            _check_kind(entry.name, getattr(self, entry.name), str(entry.type))
        for name in ("base_top1", "last_top1", "best_top1", "pruned_top1"):
            if not 0 <= getattr(self, name) <= 100:
                raise IfsoError(f"{name} is {getattr(self, name)!r}; it is in per cent, from 0 to 100")
        for name in ("macs_kept", "params_kept"):
            if not 0 < getattr(self, name) <= 1:
                raise IfsoError(f"{name} is {getattr(self, name)!r}; it is a share, above 0 and up to 1")
        if self.best_top1 < self.last_top1:
            raise IfsoError(f"best_top1 is {self.best_top1!r}, below last_top1, {self.last_top1!r}")
        for number, epoch in enumerate(self.history):
            _check_epoch(number, epoch)

    @property
    def name(self) -> str:
        """The name of the run, and of its file."""
        return job_name(self.row, self.criterion, self.variant, self.recipe, self.seed)


def write(result: Result, folder: Path) -> Path:
    """Write ``folder/NAME.json``, whole or not at all; a smoke result goes into ``folder/smoke/``."""
    from ifso.surgery.files import replacing

    place = path_of(result.name, folder, smoke=result.smoke)
    text = json.dumps(asdict(result), indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with replacing(place) as new:
            new.write_text(text, encoding="utf-8")
    except OSError as error:
        raise IfsoError(f"{place} cannot be written: {' '.join(str(error).split())}") from error
    return place


def path_of(name: str, folder: Path, *, smoke: bool = False) -> Path:
    """Where the result of a run is, or would be: ``path_of(job.name, folder).exists()`` says whether it is done."""
    return (folder / "smoke" if smoke else folder) / f"{name}.json"


def read(folder: Path) -> list[Result]:
    """All results of a folder, in the order of their names; none if there is no such folder. Smoke ones stay out."""
    return [found for found in (read_file(path) for path in sorted(folder.glob("*.json"))) if not found.smoke]


def read_file(path: Path) -> Result:
    """One result."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except (OSError, ValueError) as error:
        raise IfsoError(f"{path} is damaged ({' '.join(str(error).split())}); remove it and run it again") from error
    if not isinstance(document, dict):
        raise IfsoError(f"{path} is no result: it holds a {type(document).__name__}; remove it and run it again")
    known = [entry.name for entry in fields(Result)]
    for what, keys in (("lacks", _without(known, document)), ("has the unknown", _without(document, known))):
        if keys:
            raise IfsoError(f"{path} {what} {', '.join(keys)}; remove it and run it again")
    try:
        result = Result(**document)
    except IfsoError as error:
        raise IfsoError(f"{path}: {error}; remove it and run it again") from error
    if result.name != path.stem:
        raise IfsoError(f"{path} holds the result of {result.name}; give it back its name")
    return result


def _without(names: Iterable[str], others: Iterable[str]) -> list[str]:
    return sorted(set(names) - set(others))


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


KINDS: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "float": (int, float),
    "dict": (dict,),
    "list": (list,),
}


def _check_kind(name: str, value: Any, annotation: str) -> None:
    kind = annotation.partition("[")[0]
    right = isinstance(value, KINDS[kind]) and (kind == "bool" or not isinstance(value, bool))
    if not right:
        raise IfsoError(f"{name} is {value!r}, which is no {kind}")
    if kind == "float" and not math.isfinite(value):
        raise IfsoError(f"{name} is {value!r}, which is not finite")
    if kind in ("int", "float") and value < 0:
        raise IfsoError(f"{name} is {value!r}, below 0")


def _check_epoch(number: int, epoch: Any) -> None:
    if not isinstance(epoch, dict) or set(epoch) != set(HISTORY):
        raise IfsoError(f"history[{number}] is {epoch!r}; it must have {', '.join(HISTORY)}")
    for key in HISTORY:
        if not (key == "top1" and epoch[key] is None):
            _check_kind(f"history[{number}].{key}", epoch[key], "int" if key == "epoch" else "float")
