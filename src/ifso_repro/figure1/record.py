"""What a run of a study has measured so far: one file of JSON lines for each network, so that it can go on later."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from ifso.common.files import append_bytes, explained, replacing, storable, sync_file, write_tensors, write_text
from ifso.errors import IfsoError
from ifso_repro.figure1.settings import Settings, difference

SETTINGS = "figure1.settings.json"


class Record:
    """The lines of one network: the first about the network itself, then one for each mask in their order."""

    def __init__(self, folder: Path, label: str) -> None:
        self._lines, self._weights = folder / f"{label}.jsonl", folder / f"{label}.safetensors"
        self.base: dict[str, Any] | None = None
        self.rows: list[dict[str, Any]] = []

    def read(self) -> Record:
        """What is there; a last line that was not finished is cut off."""
        if not self._lines.exists() or not self._weights.exists():
            return self
        text = self._lines.read_text()
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            with told(self._lines):
                write_text(self._lines, whole)
        found = [json.loads(line) for line in whole.splitlines()]
        if found:
            self.base, self.rows = found[0], found[1:]
        return self

    def start(self, base: dict[str, Any], model: nn.Module) -> None:
        """The network is trained: keep its weights and what is known of it."""
        with told(self._weights), replacing(self._weights) as new:
            write_tensors(new, storable(model.state_dict()), {"format": "pt"})
        self.base, self.rows = base, []
        with told(self._lines):
            write_text(self._lines, json.dumps(base) + "\n")

    def replace(self, base: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        """Other numbers for the same network and masks, all at once."""
        self.base, self.rows = base, rows
        with told(self._lines):
            write_text(self._lines, "".join(json.dumps(line) + "\n" for line in (base, *rows)))

    def load_(self, model: nn.Module) -> None:
        """Put the trained weights into the model."""
        model.load_state_dict(load_file(self._weights))

    def add(self, row: dict[str, Any]) -> None:
        """One more mask, on disk before this returns."""
        self.rows.append(row)
        with told(self._lines):
            append_bytes(self._lines, (json.dumps(row) + "\n").encode())
            sync_file(self._lines)


@contextmanager
def told(path: Path) -> Iterator[None]:
    """What cannot be written, and what to do, in one line."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise IfsoError(f"{path}: {explained(error)}; --resume goes on with the run") from error


def open_folder(folder: Path, settings: Settings, *, resume: bool) -> None:
    """Make the folder ready, or refuse: it cannot be written, holds another run, or one with other settings."""
    place = folder / SETTINGS
    try:
        folder.mkdir(parents=True, exist_ok=True)
        begun = place.exists() and any(folder.glob("*.jsonl"))
        before = json.loads(place.read_text()) if begun else None
        if before is None:
            write_text(place, json.dumps(settings.document(), indent=2) + "\n")
            return
    except (OSError, ValueError) as error:
        raise IfsoError(f"--out {folder} cannot be used: {' '.join(str(error).split())}") from error
    if not resume:
        raise IfsoError(
            f"{folder} already holds a run of this study; continue it with --resume, or choose another --out"
        )
    found = difference(before, settings.document())
    if found:
        raise IfsoError(f"{folder} was begun with other settings, so --resume cannot continue it: {found}")
