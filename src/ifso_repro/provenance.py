"""Whether what is on disk was made with the data, networks and settings that are asked for now.

What differs is refused in one line that names the difference and all that must be removed to make it again. Older files
say less about their origin; what they leave out is taken to be the same.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ifso.common.text import one_line
from ifso.data.batches import Images
from ifso.data.coco_batches import BoxSamples
from ifso.data.decoding import ImageFiles
from ifso.errors import RunError
from ifso.runs.files import differences, read_config
from ifso.surgery.recipe import digest_of
from ifso.training.settings import LATER
from ifso_repro.jobs import Job
from ifso_repro.results import AnyResult, other_networks

if TYPE_CHECKING:
    from ifso_repro.schema import Row
    from ifso_repro.workspace import Workspace

BASE, DATA = "base", "data"
"""Entries in the header of an unpruned network (``data`` also in ``config.json``): how and on what it was trained."""

OF_THE_MACHINE = ("precision", "channels_last", "compile")
"""Settings of a training in which a result may differ."""

FACTS = ("shares", "measures", "seconds", "before", "after")
"""Entries of the summary of a pruning that a result is made of."""

THAT_FOLDER = "give another --out, or remove that folder"
DIGITS = 16
ANNOTATIONS = ("image_ids", "sizes", "first", "boxes", "labels", "areas", "crowd")
Part = Images | ImageFiles | BoxSamples
_KNOWN: WeakKeyDictionary[Part, bytes] = WeakKeyDictionary()


# ------------------------------------------------------------------------------------------------------ digests of data


def identity(data: Any) -> str:
    """The beginning of a SHA-256 over the classes and all parts of a data set; seeds and augmentation do not count.

    Of images in memory it covers pixels and labels, of those in files their names and labels or boxes: pixels of files
    are not read.
    """
    digest = hashlib.sha256(f"{data.num_classes}".encode())
    for name in ("train", "validation", "test"):
        digest.update(f"\n{name} ".encode() + _part_digest(getattr(data, name)))
    return digest.hexdigest()[:DIGITS]


def _part_digest(part: Part | None) -> bytes:
    """The digest of a part, computed once: data sets that differ in their seed share it."""
    if part is None:
        return b""
    if part not in _KNOWN:
        digest = hashlib.sha256()
        for piece in _pieces(part):
            digest.update(f"{len(piece)} ".encode() + piece)
        _KNOWN[part] = digest.digest()
    return _KNOWN[part]


def _pieces(part: Part) -> Iterator[bytes]:
    if isinstance(part, Images):
        yield from map(_checksum, (part.labels, part.pixels, part.mean, part.deviation))
    elif isinstance(part, ImageFiles):
        yield from (b"\0".join(part.names.tolist()), _checksum(part.labels))
    else:
        yield from (_checksum(getattr(part.annotations, name)) for name in ANNOTATIONS)
        yield f"{sorted(part.annotations.categories.items())} {part.resizing}".encode()
        if part.files is not None:
            yield b"\0".join(part.files.names.tolist())
        else:
            yield from map(_checksum, part.pixels if part.pixels is not None else ())


def _checksum(tensor: Tensor) -> bytes:
    """Dtype, shape and a checksum of all values.

    >>> _checksum(torch.zeros(2, 3)) == _checksum(torch.zeros(3, 2))
    False
    """
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return f"{tensor.dtype} {tuple(tensor.shape)} {zlib.crc32(values):08x}".encode()


# ----------------------------------------------------------------------------------------- what files say of themselves


def header_of(path: Path) -> dict[str, str]:
    """The header of an unpruned network that was trained here."""
    try:
        with safe_open(path, "pt") as file:
            return dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise _damaged_base(path, error) from error


def trained_as(space: Workspace, row: Row) -> dict[str, Any] | None:
    """How the unpruned network was trained, as its file says; None if it is given, not there, or does not say it."""
    path = space.base_file(row)
    if not space.trains(row) or space.smoke or not path.is_file():
        return None
    try:
        recorded = json.loads(header_of(path).get(BASE, "null"))
    except ValueError as error:
        raise _damaged_base(path, error) from error
    return recorded if isinstance(recorded, dict) else None


def _damaged_base(path: Path, error: Exception) -> RunError:
    return RunError(f"{path} is damaged ({one_line(error)}); remove it, and it is trained again")


def _pruned_as(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of a pruning with its learning rate, and what else decided on it, as ``config.json`` says."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        settings, about = dict(config["settings"]), dict(config["about"] or {})
        rate = settings.pop("optimizer")["groups"][0]["lr"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RunError(f"{folder / 'config.json'} is damaged; remove that folder and prune again") from error
    return {**{key: value for key, value in settings.items() if key not in ("model", "weights")}, "lr": rate}, about


def facts_of(path: Path) -> dict[str, Any]:
    """The summary of a pruning; empty if there is none."""
    if not path.is_file():
        return {}
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        lacking = [f"no {name}" for name in FACTS if name not in facts]
    except (OSError, ValueError, TypeError, RecursionError) as error:
        facts, lacking = {}, [one_line(error)]
    if lacking:
        advice = "remove that file and give the same command again, which writes it"
        raise RunError(f"{path} is damaged ({lacking[0]}); {advice}")
    return dict(facts)


def facts_at(stage: Mapping[str, Any]) -> dict[str, Any]:
    """What a summary would say if the pruning had ended with the network that this ``stage`` left."""
    sizes = {"before": {"params": 1.0}, "after": {"params": stage["shares"]["params"]}}
    return {**sizes, "shares": stage["shares"], "measures": [stage["values"]], "seconds": stage["seconds"]}


# ------------------------------------------------------------------------------------------------------ what is refused


def refuse_other_base(space: Workspace, row: Row) -> None:
    """RunError if the unpruned network was trained otherwise, or on other data, than it would be now."""
    path, before = space.base_file(row), trained_as(space, row)
    changes = [] if before is None else differences(row.base.made, before)
    if changes:
        raise RunError(f"{path} was trained otherwise: {'; '.join(changes)}; {advice(*made_from_base(space, row))}")
    if space.trains(row) and path.is_file() and header_of(path).get(DATA) not in (None, space.data_of(row)):
        raise RunError(f"{path} was made with other data; {advice(*made_from_base(space, row))}")


def refuse_other_pruning(space: Workspace, job: Job) -> None:
    """RunError if the pruned network was made with other settings or data than would be used now."""
    folder = space.pruned_folder(job)
    settings, about = _pruned_as(folder)
    if about.pop(DATA, None) not in (None, space.data_of(job.row)):
        raise RunError(f"{folder} was made with other data; {advice(*made_from_pruning(space, job))}")
    now = {**space.prune_as(job).recorded_settings(), **space.about(job)}
    changes = differences(now, {**settings, **(about or space.about(job))})
    if changes:
        raise RunError(f"{folder} was made otherwise: {'; '.join(changes)}; {advice(*made_from_pruning(space, job))}")


def refuse_other_start(space: Workspace, job: Job, unpruned: nn.Module) -> None:
    """RunError if the pruned network was made from another one than ``unpruned``."""
    folder = space.pruned_folder(job)
    if read_config(folder / "config.json")["settings"].get("weights") not in (None, digest_of(unpruned)):
        raise RunError(f"{folder} was made of another unpruned network; {advice(*made_from_pruning(space, job))}")


def refuse_other_result(space: Workspace, job: Job, result: AnyResult, path: Path) -> None:
    """RunError if ``result`` was made with other settings, networks or data than ``job`` has now."""
    if space.has_data(job.row) and result.data not in ("", space.data_of(job.row)):
        raise RunError(f"{path} was made with other data; {advice(*made_with_result(space, job, path, data=True))}")
    now = space.prune_options(job)
    changes = differences(_training(space.settings(job).as_dict()), _training(result.train))
    changes += differences(now, {"criterion": now["criterion"], **result.prune})
    for part, network, before in () if result.smoke else other_networks(job, result):
        changes += differences({part: network}, {part: before})
    if changes:
        what = advice(*made_with_result(space, job, path, data=False))
        raise RunError(f"{path} is of other settings: {'; '.join(changes)}; {what}")


def _training(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that set one training apart from another; a later one that is off is as if it were not there.

    >>> _training({"epochs": 2, "compile": True, "cutmix": 0.0})
    {'epochs': 2}
    """
    apart = {key: value for key, value in settings.items() if key not in OF_THE_MACHINE}
    return {key: value for key, value in apart.items() if value or key not in LATER}


# --------------------------------------------------------------------------------------------------------- what must go


def advice(*paths: Path) -> str:
    """A list of those ``paths`` that exist, which must be removed; a ``*`` in a name stands for anything.

    >>> advice(Path("."), Path("not there"), Path(".."))
    'give another --out, or remove . and ..'
    """
    exist = [str(path) for path in dict.fromkeys(paths) if _exists(path)]
    listed = " and ".join([", ".join(exist[:-1]), exist[-1]] if exist[1:] else exist)
    return f"give another --out, or remove {listed}"


def _exists(path: Path) -> bool:
    return any(path.parent.glob(path.name)) if "*" in path.name else path.exists()


def made_from_base(space: Workspace, row: Row) -> Iterator[Path]:
    """An unpruned network, its training, and all that was pruned from it and fine-tuned."""
    if space.trains(row):
        yield from (space.base_file(row), space.trainings / row.task)
        yield from (folder / f"{row.task}-*" for folder in (space.prunings, space.trainings))


def made_from_pruning(space: Workspace, job: Job) -> Iterator[Path]:
    """A pruning and its fine-tunings: those of all rows, recipes and seeds that share it."""
    folder = space.pruned_folder(job)
    method, _, seed = folder.name.removeprefix(f"{job.row.name}.").rpartition(".")
    if space.one_pruning and job.criterion != "random":
        seed = "*"
    if folder.name.startswith(f"{job.row.name}."):
        yield from (folder, space.trainings / f"{job.row.name}.{method}.*.{seed}")
    else:
        _, _, method = method.partition(".")
        yield from (folder, space.trainings / f"{job.row.task}-*.{method}.{job.recipe}.{seed}")


def made_with_result(space: Workspace, job: Job, path: Path, *, data: bool) -> Iterator[Path]:
    """A result and its fine-tuning; with other ``data``, all that was made with those."""
    yield path
    if not data:
        yield space.training_folder(job)
        return
    rows = (job.row, *([job.teacher] if job.teacher else ()))
    bases = [other for row in rows for other in made_from_base(space, row)]
    if space.prunings / f"{job.row.task}-*" not in bases:
        yield from made_from_pruning(space, job)
    yield from bases
