"""What a run of a row came to, as one JSON file per run."""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Required

from ifso.common.text import one_line
from ifso.errors import IfsoError
from ifso_repro.jobs import Job, job_name
from ifso_repro.reader import Check, Percent, Size, Whole, decode
from ifso_repro.schema import made

Kept = Annotated[float, Check("a share, above 0 and up to 1", lambda value: 0 < value <= 1)]
EPOCH = {"epoch": Required[Whole], "loss": Required[Size], "lr": Required[Size]}
TEACHER = {"task": Required[str], "base": Required[dict], "top1": Required[Percent]}


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
        for each in fields(self):  # type: ignore[arg-type]
            decode(each.type, getattr(self, each.name), key=each.name)
        best, last = self.worth("best"), self.worth("last")
        if best < last:
            raise IfsoError(f"best_{self.measure} must not be below last_{self.measure}, {last!r}, got {best!r}")
        decode(dict, self.prune.get("criterion", {}), key="prune.criterion")
        for number, epoch in enumerate(self.history):
            decode({**EPOCH, self.measure: Required[Size | None]}, epoch, key=f"history[{number}]")

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
    seed: Whole
    epochs: Whole
    macs_kept: Kept
    base_top1: Percent
    last_top1: Percent
    best_top1: Percent
    history: list[dict[str, Any]]
    seconds: Size
    hardware: str
    torch: str
    params_kept: Kept
    pruned_top1: Percent
    prune_seconds: Size
    ifso: str
    variant: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    prune: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=dict)
    smoke: bool = False
    teacher: dict[str, Any] = field(default_factory=dict)
    data: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teacher:
            decode(TEACHER, self.teacher, key="teacher")


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
    seed: Whole
    epochs: Whole
    macs_kept: Kept
    base_map: Percent
    last_map: Percent
    best_map: Percent
    history: list[dict[str, Any]]
    seconds: Size
    hardware: str
    torch: str
    params_kept: Kept
    pruned_map: Percent
    prune_seconds: Size
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
LATER = ("teacher", "data")
"""Fields that older files do not have."""


def write(result: AnyResult, folder: Path) -> Path:
    """Write ``folder/NAME.json``, whole or not at all; a smoke result goes into ``folder/smoke/``."""
    path = path_of(result.name, folder, smoke=result.smoke)
    keep_text(path, json.dumps(asdict(result), indent=1, allow_nan=False, ensure_ascii=False) + "\n")
    return path


def keep_text(path: Path, text: str) -> None:
    """Write a file whole or not at all, with the folders it lies in; IfsoError if it cannot be written."""
    from ifso.common.files import write_text

    try:
        write_text(path, text)
    except OSError as error:
        raise IfsoError(f"{path} cannot be written: {one_line(error)}") from error


def path_of(name: str, folder: Path, *, smoke: bool = False) -> Path:
    """Where the result of a run is, or would be: ``path_of(job.name, folder).exists()`` says whether it is done."""
    return (folder / "smoke" if smoke else folder) / f"{name}.json"


def read(folder: Path) -> list[AnyResult]:
    """All results of a folder but those of smoke runs, in the order of their names; none if there is no such folder."""
    return [result for result in map(read_file, sorted(folder.glob("*.json"))) if not result.smoke]


def read_file(path: Path) -> AnyResult:
    """One result."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except (OSError, ValueError, RecursionError) as error:
        raise IfsoError(f"{path} is damaged ({one_line(error)}); remove it and run it again") from error
    kind = DetectionResult if isinstance(document, dict) and "last_map" in document else Result
    if isinstance(document, dict):
        lacking = sorted({each.name for each in fields(kind)} - document.keys() - set(LATER))
        if lacking:
            raise IfsoError(f"{path} lacks {', '.join(lacking)}; remove it and run it again")
    try:
        result: AnyResult = decode(kind, document, str(path))
    except IfsoError as error:
        raise IfsoError(f"{error}; remove it and run it again") from error
    if result.name != path.stem:
        raise IfsoError(f"{path} holds the result of {one_line(result.name)}; give it back its name")
    return result


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


def state_of(path: Path) -> str | None:
    """Whether a run is ``"done"``, or the file of its result ``"damaged"``; None if there is none."""
    if not path.exists():
        return None
    try:
        read_file(path)
    except IfsoError:
        return "damaged"
    return "done"


def other_networks(job: Job, result: AnyResult) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """The networks (``"base"``, ``"teacher"``) of a result that differ from its row, as they are now and were before.

    Older results say nothing of the unpruned one.
    """
    networks = [("base", job.row.base.made, made(result.base))] if result.base else []
    teacher = result.teacher if isinstance(result, Result) else {}
    if teacher or job.teacher is not None:
        now = {} if job.teacher is None else {"task": job.teacher.task, **job.teacher.base.made}
        before = {"task": teacher["task"], **made(teacher["base"])} if teacher else {}
        networks.append(("teacher", now, before))
    return [(part, now, before) for part, now, before in networks if now != before]
