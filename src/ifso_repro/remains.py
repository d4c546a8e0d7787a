"""What must go before something is made anew: whatever was made from it, too, as advice in one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ifso_repro.jobs import Job
    from ifso_repro.schema import Row
    from ifso_repro.workspace import Workshop

THAT_FOLDER = "give another --out, or remove that folder"


def advice(*places: Path) -> str:
    """Of ``places`` those that are there are named.

    >>> advice(Path("."), Path("not there"), Path(".."))
    'give another --out, or remove . and ..'
    """
    found = [str(place) for place in dict.fromkeys(places) if _is_there(place)]
    listed = " and ".join([", ".join(found[:-1]), found[-1]] if found[1:] else found)
    return f"give another --out, or remove {listed}"


def of_base(shop: Workshop, row: Row) -> Iterator[Path]:
    """An unpruned network, its training, and all that was pruned from it and fine-tuned."""
    if shop.trains(row):
        yield from (shop.base_file(row), shop.trainings / row.task)
        yield from (folder / f"{row.task}-*" for folder in (shop.prunings, shop.trainings))


def of_pruning(shop: Workshop, job: Job) -> Iterator[Path]:
    """A pruning and its fine-tunings: those of all recipes, and of all seeds that share it."""
    folder = shop.pruned_folder(job)
    method, _, seed = folder.name.rpartition(".")
    shared = shop.one_pruning and job.criterion != "random"
    yield from (folder, shop.trainings / f"{method}.*{'' if shared else f'.{seed}'}")


def of_result(shop: Workshop, job: Job, place: Path, *, data: bool) -> Iterator[Path]:
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
