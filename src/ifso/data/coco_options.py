"""How a ``coco:PATH`` is used: options in Python, or after commas in its name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ifso.common.text import one_line
from ifso.data.coco_samples import Resizing
from ifso.errors import DataError

NUMBERINGS = ("contiguous", "ids")
WORDS = {"yes": True, "no": False}


@dataclass(frozen=True)
class CocoOptions:
    """How a ``coco:PATH`` is used.

    ``size`` is how long the shorter side of an image may be, or both sides (shorter, longer): every image is made so
    large. ``drop_degenerate`` leaves out boxes without area, ``keep_empty=False`` training images without boxes.
    ``hold`` says whether all images are held on the device; None leaves it to their size. Labels are 1, 2, … in the
    order of the categories' ids, or with ``labels="ids"`` these ids themselves, as published detectors have them.
    """

    size: int | tuple[int, int] | None = None
    drop_degenerate: bool = False
    keep_empty: bool = True
    hold: bool | None = None
    labels: str = "contiguous"

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for name in ("drop_degenerate", "keep_empty", "hold"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name == "hold" and value is None):
                raise DataError(f"{name}={one_line(repr(value))} will not do; give yes or no")
        if self.labels not in NUMBERINGS:
            given = one_line(repr(self.labels))
            raise DataError(f"labels={given} is unknown; choose one of {', '.join(NUMBERINGS)}")
        sides = self._sides
        whole = all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in sides)
        if not whole or len(sides) > 2 or list(sides) != sorted(sides) or (self.size is not None and not sides):
            raise DataError(
                f"size={self.size!r} will not do; give the pixels of the shorter side, or of both (480x640)"
            )

    @property
    def _sides(self) -> tuple[int, ...]:
        if self.size is None:
            return ()
        return tuple(self.size) if isinstance(self.size, (tuple, list)) else (self.size,)

    @property
    def resizing(self) -> Resizing | None:
        """What is done to every image."""
        return Resizing(*self._sides) if self.size is not None else None


KNOWN = tuple(field.name for field in dataclasses.fields(CocoOptions))


def path_and_options(text: str) -> tuple[str, str]:
    """The path in what follows ``coco:``, and the options behind it with their comma.

    >>> path_and_options("sets/cells,size=480x640,drop_degenerate"), path_and_options("a,b/cells")
    (('sets/cells', ',size=480x640,drop_degenerate'), ('a,b/cells', ''))
    """
    path, behind = text, ""
    while True:
        rest, comma, last = path.rpartition(",")
        if not comma or last.partition("=")[0] not in KNOWN:
            return path, behind
        path, behind = rest, f",{last}{behind}"


def read_options(text: str, given: Mapping[str, Any]) -> tuple[str, CocoOptions]:
    """The path in what follows ``coco:``, and the options: those behind it, and ``given`` ones, which come first.

    >>> read_options("sets/cells,size=480x640,labels=ids", {"keep_empty": False})
    ('sets/cells', CocoOptions(size=(480, 640), drop_degenerate=False, keep_empty=False, hold=None, labels='ids'))
    """
    path, behind = path_and_options(text)
    unknown = sorted(set(given) - set(KNOWN))
    if "," in path and not _is_folder(path):
        unknown.append(path.rpartition(",")[2].partition("=")[0])
    if unknown:
        raise DataError(f"coco:{one_line(text)} has no option {one_line(unknown[0])}; it has {', '.join(KNOWN)}")
    return path, CocoOptions(**{**dict(map(_option, behind.split(",")[1:])), **given})


def _is_folder(path: str) -> bool:
    try:
        return Path(path).is_dir()
    except OSError:
        return False


def _option(text: str) -> tuple[str, Any]:
    """One option as it stands in a name; without a value it is a yes."""
    name, _, value = text.partition("=")
    if name == "labels":
        return name, value
    if name != "size":
        return name, WORDS.get(value or "yes", value)
    sides = value.split("x")
    if not all(side.isdecimal() and len(side) < 10 for side in sides):
        given = one_line(value)
        raise DataError(f"size={given} will not do; give the pixels of the shorter side, or of both (480x640)")
    return name, int(value) if len(sides) == 1 else tuple(map(int, sides))
