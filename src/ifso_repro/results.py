"""What a run of a row came to, as one JSON file of its own."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from ifso.errors import IfsoError
from ifso_repro.jobs import job_name


class _Outcome:
    """What results have in common. ``measure`` is what networks are compared by, in per cent."""

    measure: ClassVar[str]
    row: str
    criterion: str
    recipe: str
    seed: int
    variant: dict[str, Any]
    prune: dict[str, Any]
    history: list[dict[str, Any]]
    data: str

    def __post_init__(self) -> None:
        """Refuse what cannot have come out of a run."""
        for entry in fields(self):  # type: ignore[arg-type]
            _check_kind(entry.name, getattr(self, entry.name), str(entry.type))
        for name in (f"{stage}_{self.measure}" for stage in ("base", "last", "best", "pruned")):
            if not 0 <= getattr(self, name) <= 100:
                raise IfsoError(f"{name} is {getattr(self, name)!r}; it is in per cent, from 0 to 100")
        for name in ("macs_kept", "params_kept"):
            if not 0 < getattr(self, name) <= 1:
                raise IfsoError(f"{name} is {getattr(self, name)!r}; it is a share, above 0 and up to 1")
        if self.worth("best") < self.worth("last"):
            raise IfsoError(
                f"best_{self.measure} is {self.worth('best')!r}, below last_{self.measure}, {self.worth('last')!r}"
            )
        _check_kind("prune.criterion", self.prune.get("criterion", {}), "dict")
        for number, epoch in enumerate(self.history):
            _check_epoch(number, epoch, self.measure)

    @property
    def name(self) -> str:
        """The name of the run, and of its file."""
        return job_name(self.row, self.criterion, self.variant, self.recipe, self.seed)

    def worth(self, stage: str) -> float:
        """What the network was worth at a stage: ``"base"``, ``"pruned"``, ``"last"`` or ``"best"``."""
        value: float = getattr(self, f"{stage}_{self.measure}")
        return value


@dataclass(frozen=True)
class Result(_Outcome):
    """One network pruned and fine-tuned. Accuracies are in per cent on the test set, ``macs_kept`` is a share.

    ``last_top1`` is what counts; ``best_top1`` of all epochs is chosen on the test set, as the paper does.
    ``pruned_top1`` is the accuracy before fine-tuning, ``seconds`` the time of fine-tuning and ``prune_seconds`` that
    of pruning. ``variant`` holds the options that differ from the row's, ``train`` and ``prune`` all of them (in
    ``prune``, ``criterion`` are those of the criterion), ``base`` how the unpruned network was got. ``teacher``, where
    it is another than the unpruned network, has a ``task``, a ``base`` and its ``top1``. A ``smoke`` result only shows
    that things run. ``data`` is a digest that tells the data from others, empty in older files.
    """

    measure: ClassVar[str] = "top1"

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
    teacher: dict[str, Any] = field(default_factory=dict)
    data: str = ""

    def __post_init__(self) -> None:
        """Refuse what cannot have come out of a run."""
        super().__post_init__()
        if self.teacher:
            _check_teacher(self.teacher)


@dataclass(frozen=True)
class DetectionResult(_Outcome):
    """One detector pruned and fine-tuned: as :class:`Result`, with mAP in place of top-1.

    ``before`` and ``after`` hold ``map``, ``map50``, ``map75`` and those by area of the unpruned and of the fine-tuned
    network. ``memory`` is that of a step of training at its peak, in bytes, of the ``unpruned`` and the ``pruned``
    network, and where it was measured. ``channels`` are those that every layer reads and writes:
    ``[read before, read now, written before, written now]``.
    """

    measure: ClassVar[str] = "map"

    row: str
    criterion: str
    recipe: str
    seed: int
    epochs: int
    macs_kept: float
    base_map: float
    last_map: float
    best_map: float
    history: list[dict[str, Any]]
    seconds: float
    hardware: str
    torch: str
    params_kept: float
    pruned_map: float
    prune_seconds: float
    ifso: str
    before: dict[str, Any]
    after: dict[str, Any]
    memory: dict[str, Any]
    channels: dict[str, Any]
    variant: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    prune: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=dict)
    smoke: bool = False
    data: str = ""


AnyResult = Result | DetectionResult
KIND_OF = {"last_map": DetectionResult}
"""By a field that no other kind has."""

LATER = ("teacher", "data")
"""Fields that older files do not have."""


def write(result: AnyResult, folder: Path) -> Path:
    """Write ``folder/NAME.json``, whole or not at all; a smoke result goes into ``folder/smoke/``."""
    from ifso.common.files import write_text

    place = path_of(result.name, folder, smoke=result.smoke)
    text = json.dumps(asdict(result), indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    try:
        write_text(place, text)
    except OSError as error:
        raise IfsoError(f"{place} cannot be written: {' '.join(str(error).split())}") from error
    return place


def path_of(name: str, folder: Path, *, smoke: bool = False) -> Path:
    """Where the result of a run is, or would be: ``path_of(job.name, folder).exists()`` says whether it is done."""
    return (folder / "smoke" if smoke else folder) / f"{name}.json"


def read(folder: Path) -> list[AnyResult]:
    """All results of a folder, in the order of their names; none if there is no such folder. Smoke ones stay out."""
    return [found for found in (read_file(path) for path in sorted(folder.glob("*.json"))) if not found.smoke]


def read_file(path: Path) -> AnyResult:
    """One result."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except (OSError, ValueError, RecursionError) as error:
        raise IfsoError(f"{path} is damaged ({_one_line(error)}); remove it and run it again") from error
    if not isinstance(document, dict):
        raise IfsoError(f"{path} is no result: it holds a {type(document).__name__}; remove it and run it again")
    kind = next((kind for name, kind in KIND_OF.items() if name in document), Result)
    known = [entry.name for entry in fields(kind)]
    for what, keys in (("lacks", _without(known, {*document, *LATER})), ("has the unknown", _without(document, known))):
        if keys:
            raise IfsoError(f"{path} {what} {_one_line(', '.join(keys))}; remove it and run it again")
    try:
        result: AnyResult = kind(**document)
    except IfsoError as error:
        raise IfsoError(f"{path}: {_one_line(error)}; remove it and run it again") from error
    if result.name != path.stem:
        raise IfsoError(f"{path} holds the result of {_one_line(result.name)}; give it back its name")
    return result


def state_of(path: Path) -> str | None:
    """Is a run ``"done"``, or the file of its result ``"damaged"``? None if there is none."""
    if not path.exists():
        return None
    try:
        read_file(path)
    except IfsoError:
        return "damaged"
    return "done"


def _one_line(error: Exception | str) -> str:
    from ifso.common.text import one_line

    return one_line(error)


def _without(names: Iterable[str], others: Iterable[str]) -> list[str]:
    return sorted(set(names) - set(others))


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


LARGEST = 2**53
"""Above all numbers of a result."""

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
    if kind in ("int", "float") and not abs(value) < LARGEST:
        raise IfsoError(f"{name} is {value!r}, which is not finite or far too large")
    if kind in ("int", "float") and value < 0:
        raise IfsoError(f"{name} is {value!r}, below 0")


def _check_teacher(teacher: Mapping[str, Any]) -> None:
    kinds = {"task": "str", "base": "dict", "top1": "float"}
    if set(teacher) != set(kinds):
        raise IfsoError(f"teacher is {teacher!r}; it must have {', '.join(kinds)}, or nothing")
    for key, kind in kinds.items():
        _check_kind(f"teacher.{key}", teacher[key], kind)
    if teacher["top1"] > 100:
        raise IfsoError(f"teacher.top1 is {teacher['top1']!r}; it is in per cent, from 0 to 100")


def _check_epoch(number: int, epoch: Any, measure: str) -> None:
    keys = ("epoch", "loss", measure, "lr")
    if not isinstance(epoch, dict) or set(epoch) != set(keys):
        raise IfsoError(f"history[{number}] is {epoch!r}; it must have {', '.join(keys)}")
    for key in keys:
        if not (key == measure and epoch[key] is None):
            _check_kind(f"history[{number}].{key}", epoch[key], "int" if key == "epoch" else "float")
