"""Whether what is on disk was made with the data, networks and settings that are asked for now."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ifso.common.text import one_line
from ifso.data.batches import Images
from ifso.data.coco_samples import BoxSamples
from ifso.data.image_folder import ImageFiles
from ifso.errors import RunError
from ifso.runs.folder import differences
from ifso.training.settings import LATER
from ifso_repro import provenance as remains
from ifso_repro.jobs import Job
from ifso_repro.results import AnyResult, Result
from ifso_repro.schema import made
from ifso_repro.workspace import Workspace

if TYPE_CHECKING:
    from ifso_repro.jobs import Job
    from ifso_repro.schema import Row
    from ifso_repro.workspace import Workspace


class Network(NamedTuple):
    """The unpruned network (``"base"``) or the ``"teacher"``: what decides on it, ``now`` and ``before``."""

    part: str
    now: dict[str, Any]
    before: dict[str, Any]


def other_networks(job: Job, result: AnyResult) -> list[Network]:
    """Those that are others than the rows say now. An older result does not tell of its unpruned network."""
    found = [Network("base", job.row.base.made, made(result.base))] if result.base else []
    teacher = result.teacher if isinstance(result, Result) else {}
    if teacher or job.teacher is not None:
        now = {} if job.teacher is None else {"task": job.teacher.task, **job.teacher.base.made}
        before = {"task": teacher["task"], **made(teacher["base"])} if teacher else {}
        found.append(Network("teacher", now, before))
    return [network for network in found if network.now != network.before]


DIGITS = 16

PARTS = ("train", "validation", "test")

ANNOTATIONS = ("image_ids", "sizes", "first", "boxes", "labels", "areas", "crowd")

Part = Images | ImageFiles | BoxSamples

_KNOWN: WeakKeyDictionary[Part, bytes] = WeakKeyDictionary()


def identity(data: Any) -> str:
    """The beginning of a SHA-256 over the classes and all parts of a data set; seeds and augmentation do not count.

    Of images that are held in memory it is over pixels and labels, of those in files over their names and labels or
    boxes: pixels of files are not read.
    """
    digest = hashlib.sha256(f"{data.num_classes}".encode())
    for name in PARTS:
        digest.update(f"\n{name} ".encode() + _part(getattr(data, name)))
    return digest.hexdigest()[:DIGITS]


def _part(part: Part | None) -> bytes:
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
    """What tells one part of a data set from another."""
    if isinstance(part, Images):
        yield from (_told(part.labels), _told(part.pixels), _told(part.mean), _told(part.deviation))
    elif isinstance(part, ImageFiles):
        yield from (b"\0".join(part.names.tolist()), _told(part.labels))
    else:
        yield from (_told(getattr(part.annotations, name)) for name in ANNOTATIONS)
        yield f"{sorted(part.annotations.categories.items())} {part.resizing}".encode()
        if part.files is not None:
            yield b"\0".join(part.files.names.tolist())
        else:
            yield from map(_told, part.pixels if part.pixels is not None else ())


def _told(tensor: Tensor) -> bytes:
    """Dtype, shape and a check sum of all values.

    >>> _told(torch.zeros(2, 3)) == _told(torch.zeros(3, 2)), _told(torch.zeros(2)) == _told(torch.zeros(2))
    (False, True)
    """
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return f"{tensor.dtype} {tuple(tensor.shape)} {zlib.crc32(values):08x}".encode()


FACTS = ("shares", "measures", "seconds", "before", "after")
"""What the summary of a pruning has and a result is made of."""


def header_of(place: Path) -> dict[str, str]:
    """What stands in the header of an unpruned network that was trained here."""
    try:
        with safe_open(place, "pt") as file:
            return dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise _damaged_base(place, error) from error


def told_of_base(place: Path, entry: str) -> dict[str, Any] | None:
    """The settings under ``entry`` in the header; an older file tells nothing."""
    try:
        told = json.loads(header_of(place).get(entry, "null"))
    except ValueError as error:
        raise _damaged_base(place, error) from error
    return told if isinstance(told, dict) else None


def _damaged_base(place: Path, error: Exception) -> RunError:
    return RunError(f"{place} is damaged ({one_line(error)}); remove it, and it is trained again")


class Pruned(NamedTuple):
    """How a pruning was made: its settings, with the rate of its optimizer, and what else decides on it."""

    settings: dict[str, Any]
    about: dict[str, Any]


def pruned_as(folder: Path) -> Pruned:
    """What ``config.json`` in the folder of a pruning tells; that of an older one tells nothing beside the settings."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        before, about = dict(config["settings"]), dict(config["about"] or {})
        rate = before.pop("optimizer")["groups"][0]["lr"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RunError(f"{folder / 'config.json'} is damaged; remove that folder and prune again") from error
    kept = {key: value for key, value in before.items() if key not in ("model", "weights")}
    return Pruned({**kept, "lr": rate}, about)


def facts_of(place: Path) -> dict[str, Any]:
    """What ``summary.json`` of a pruning tells; empty if it is not there."""
    if not place.is_file():
        return {}
    try:
        facts = json.loads(place.read_text(encoding="utf-8"))
        lacking = [name for name in FACTS if name not in facts]
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise _damaged_summary(place, one_line(error)) from error
    if lacking or not isinstance(facts, dict):
        raise _damaged_summary(place, f"no {lacking[0]}" if lacking else "no object")
    return facts


def _damaged_summary(place: Path, why: str) -> RunError:
    return RunError(f"{place} is damaged ({why}); remove that file and give the same command again, which writes it")


THAT_FOLDER = "give another --out, or remove that folder"


def advice(*places: Path) -> str:
    """Of ``places`` those that are there are named.

    >>> advice(Path("."), Path("not there"), Path(".."))
    'give another --out, or remove . and ..'
    """
    found = [str(place) for place in dict.fromkeys(places) if _is_there(place)]
    listed = " and ".join([", ".join(found[:-1]), found[-1]] if found[1:] else found)
    return f"give another --out, or remove {listed}"


def of_base(shop: Workspace, row: Row) -> Iterator[Path]:
    """An unpruned network, its training, and all that was pruned from it and fine-tuned."""
    if shop.trains(row):
        yield from (shop.base_file(row), shop.trainings / row.task)
        yield from (folder / f"{row.task}-*" for folder in (shop.prunings, shop.trainings))


def of_pruning(shop: Workspace, job: Job) -> Iterator[Path]:
    """A pruning and its fine-tunings: those of all recipes, and of all seeds that share it."""
    folder = shop.pruned_folder(job)
    method, _, seed = folder.name.rpartition(".")
    shared = shop.one_pruning and job.criterion != "random"
    yield from (folder, shop.trainings / f"{method}.*{'' if shared else f'.{seed}'}")


def of_result(shop: Workspace, job: Job, place: Path, *, data: bool) -> Iterator[Path]:
    """A result and its fine-tuning; with other ``data``, whatever was made of that."""
    yield place
    rows = (job.row, *([job.teacher] if job.teacher else ()))
    bases = [path for row in rows for path in of_base(shop, row)] if data else []
    if data and shop.prunings / f"{job.row.task}-*" not in bases:
        bases = [*of_pruning(shop, job), *bases]
    yield from bases or [shop.training_folder(job)]


def _is_there(place: Path) -> bool:
    """A ``*`` in the name stands for anything."""
    return any(place.parent.glob(place.name)) if "*" in place.name else place.exists()


OF_THE_MACHINE = ("precision", "channels_last", "compile")
"""Settings of a training that may be others than those of a result that is there."""


def refuse_other_result(shop: Workspace, job: Job, result: AnyResult, place: Path) -> None:
    """RunError if ``result`` was made with other settings, networks or data than ``job`` has now.

    An older one does not say what data it had, nor what options its criterion had; it is taken to have had these.
    """
    if shop.has_data(job.row) and result.data not in ("", shop.data_of(job.row)):
        what = remains.advice(*remains.of_result(shop, job, place, data=True))
        raise RunError(f"{place} was made with other data; {what}")
    now = shop.prune_options(job)
    found = differences(_training(shop.settings(job).as_dict()), _training(result.train))
    found += differences(now, {"criterion": now["criterion"], **result.prune})
    for part, network, before in () if result.smoke else other_networks(job, result):
        found += differences({part: network}, {part: before})
    if found:
        what = remains.advice(*remains.of_result(shop, job, place, data=False))
        raise RunError(f"{place} is of other settings: {'; '.join(found)}; {what}")


def _training(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What sets one training apart from another; a setting of later times that is not used was always there.

    >>> _training({"epochs": 2, "compile": True, "cutmix": 0.0})
    {'epochs': 2}
    """
    apart = {key: value for key, value in settings.items() if key not in OF_THE_MACHINE}
    return {key: value for key, value in apart.items() if value or key not in LATER}
