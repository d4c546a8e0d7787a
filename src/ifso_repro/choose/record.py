"""The JSON file of ``ifso bench choose``, a row for each method and share as it comes in, and the figure of several."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifso.common.files import write_text
from ifso.common.serialization import parsed
from ifso.common.text import one_line
from ifso.errors import IfsoError
from ifso.runs.arguments import without_folders
from ifso.runs.values import is_kind
from ifso_repro.plots import COLUMN, INK, LOOKS, MUTED, PAGE, PURPLE, VERMILION, Look, draw, key, name, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_BYTES = 2**22
BENCH = "choose"

MORE = (
    Look(INK, "X", (0, (5, 1.5))),
    Look(VERMILION, "<", (0, (1, 1))),
    Look(PURPLE, ">", "-"),
    Look(MUTED, "h", "-"),
)
"""Beside those of the paper's figures, because there are more lines."""

UNPRUNED: Any = {"color": INK, "linewidth": 0.8, "linestyle": (0, (1, 2))}
TITLE = "Top-1 without training"


@dataclass
class Record:
    """``settings`` say what was run and ``about`` where and with which versions; without a ``path`` nothing is written.

    A row has ``method`` and ``target``, and either ``macs`` and ``params`` (shares kept), ``top1`` (per cent) and
    ``seconds``, or the reason why it ``failed``.
    """

    settings: dict[str, Any]
    about: dict[str, Any]
    path: Path | None = None
    unpruned: dict[str, Any] | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def has(self, method: str, target: float) -> bool:
        """Return whether that was run and did not fail."""
        return any(_is(row, method, target) and "failed" not in row for row in self.rows)

    def add(self, method: str, target: float, found: Mapping[str, Any]) -> None:
        """One more row, in place of one that failed, and into the file."""
        self.rows = [row for row in self.rows if not _is(row, method, target)]
        self.rows.append({"method": method, "target": target, **found})
        self.write()

    def write(self) -> None:
        """The file as a whole."""
        if self.path is not None:
            write_text(self.path, json.dumps(self.as_dict(), indent=2) + "\n")

    def as_dict(self) -> dict[str, Any]:
        """As it stands in the file."""
        return {
            "bench": BENCH, "settings": self.settings, "about": self.about, "unpruned": self.unpruned,
            "rows": self.rows, "left_out": self.left_out,
        }  # fmt: skip


def _is(row: Mapping[str, Any], method: str, target: float) -> bool:
    return bool(row["method"] == method and row["target"] == target)


def read_record(path: Path) -> Record:
    """A file that was written by :meth:`Record.write`."""
    try:
        with path.open("rb") as file:
            document = parsed(file.read(MAX_BYTES + 1))
    except OSError as error:
        raise IfsoError(f"{path}: {error.strerror or error}; give a file of ifso bench choose --json") from None
    if document is None or not is_kind(document, _RECORD):
        raise IfsoError(f"{path}: not a record of ifso bench choose --json; give another file")
    return Record(path=path, **{part: document[part] for part in ("settings", "about", "unpruned", "rows", "left_out")})


_ROW = {"method": str, "target": float}
_RECORD = {
    "bench": BENCH,
    "settings": {"model": str, "calibration": float, "measured": float},
    "about": {"device_name": str, "torch": str, "ifso": str},
    "unpruned": (None, {"top1": float}),
    "rows": [({**_ROW, "failed": str}, {**_ROW, "macs": float, "params": float, "top1": float, "seconds": float})],
    "left_out": {str: str},
}
"""What tables and figures take for granted."""


def opened(path: Path | None, settings: Mapping[str, Any], about: Mapping[str, Any]) -> Record:
    """A new record, or the one in ``path`` if it was made with the same settings, versions and device."""
    fresh = Record(named(settings), dict(about), path)
    if path is None or not path.exists():
        return fresh
    old = read_record(path)
    before, now = ({**record.settings, **record.about} for record in (old, fresh))
    if before.get("torch_pruning") is None or now["torch_pruning"] is None:
        before["torch_pruning"] = now["torch_pruning"] = before.get("torch_pruning") or now["torch_pruning"]
    for setting, value in now.items():
        if before.get(setting) != value:
            raise IfsoError(
                f"{path} was made with {setting}={one_line(str(before.get(setting)))}, not {one_line(str(value))}; "
                "give another file, or the same settings to go on with this one"
            )
    old.about["torch_pruning"] = now["torch_pruning"]
    return old


def named(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without the folders in which files lie, and with a digest of the weights.

    >>> named({"model": "nets/mine.py:net", "data": "jpegs:/there/a.npz", "weights": None})["data"]
    'jpegs:a.npz'
    """
    weights, digest = settings["weights"], None
    if weights is not None:
        try:
            with Path(weights).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise IfsoError(f"no weight file {weights}: {error.strerror or error}") from None
    short = {key: without_folders(settings[key]) for key in ("model", "data", "weights")}
    return {**settings, **short, "weights_sha256": digest}


def draw_choices(records: Sequence[Record], stem: Path) -> tuple[Path, Path]:
    """``stem.svg`` and ``stem.png``; a method looks the same in all panels."""
    for record in records:
        if not any("top1" in row for row in record.rows):
            raise IfsoError(f"{record.path} has no row to draw; run ifso bench choose --json {record.path} first")
    found = dict.fromkeys(row["method"] for record in records for row in record.rows if "top1" in row)
    methods = sorted(found, key=lambda method: method != "default")
    looks = dict(zip(methods, cycle((*LOOKS, *MORE)), strict=False))
    width = COLUMN if len(records) == 1 else PAGE
    return draw(stem, TITLE, (width, 3.4), lambda figure: _fill(figure, records, looks))


def _fill(figure: Figure, records: Sequence[Record], looks: dict[str, Look]) -> None:
    from matplotlib.lines import Line2D

    grid = figure.subplots(1, len(records), squeeze=False)[0]
    for axes, record in zip(grid, records, strict=True):
        _panel(axes, record, looks)
    grid[0].set_ylabel("Top-1 (%)")
    handles = [Line2D([], [], label=plain(method), **look.as_dict()) for method, look in looks.items()]
    handles.append(Line2D([], [], **UNPRUNED, label="unpruned"))
    images = (f"{r.settings['calibration']} images to calibrate, {r.settings['measured']} to measure" for r in records)
    places = (f"{record.about['device_name']}, torch {record.about['torch']}" for record in records)
    notes = [f"No training; {count}; {place}." for count, place in zip(images, places, strict=True)]
    key(figure, handles, list(dict.fromkeys(notes)), columns=2 if len(records) == 1 else 4)


def _panel(axes: Axes, record: Record, looks: dict[str, Look]) -> None:
    name(axes, plain(str(record.settings["model"]).rpartition(":")[2]), room=False)
    axes.set_xlabel("MACs removed (%)")
    for method, look in looks.items():
        rows = [row for row in record.rows if row["method"] == method and "top1" in row]
        points = sorted((100 * (1 - row["macs"]), row["top1"]) for row in rows)
        if points:
            axes.plot(*zip(*points, strict=True), **look.as_dict())
    axes.set_xlim(left=0)
    if record.unpruned is not None:
        axes.axhline(record.unpruned["top1"], **UNPRUNED)
