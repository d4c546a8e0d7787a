"""What the files of a workshop tell of how they were made; one that is damaged is named, with what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from ifso.common.text import one_line
from ifso.errors import RunError

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
