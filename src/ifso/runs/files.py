"""The one reader of run folders: names of their files, what those say, and how settings differ from others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ifso.common.serialization import MAX_JSON_BYTES, located, parsed, refuse_special, strict_json
from ifso.common.text import few, shown
from ifso.errors import RunError
from ifso.runs.values import is_kind
from ifso.surgery.store import RECIPE, RUN_SUMMARY, seal_of

CONFIG = "config.json"
SCORES = "scores.safetensors"
FIRST_SCORES = "first_scores.safetensors"
STRUCTURE = "structure.json"
METRICS = "metrics.jsonl"
SUMMARY = RUN_SUMMARY
CHECKPOINTS = "checkpoints"
NETWORKS = "networks"
LOCK = ".lock"
TRAINING = "training"
"""The name of the settings that tell a training from a pruning."""

RUN = "run"
"""In the state of a checkpoint: the run that it is of."""

DIGESTS = "digests"
"""In a summary: the files that it belongs to."""

_BOUND = {"settings": CONFIG, "recipe": f"{RECIPE} and the weights", "metrics": METRICS}
HEAD = {"format": "ifso-run", "version": 1}


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file of a run, None if it holds anything else; RunError if it cannot be read."""
    with located(path):
        refuse_special(path)
        with path.open("rb") as file:
            return parsed(file.read(MAX_JSON_BYTES + 1))


def refuse_other_files(folder: Path, config: Mapping[str, Any]) -> None:
    """RunError if settings, network or metrics are others than those that the summary in ``folder`` was written for.

    Summaries of earlier versions do not tell.
    """
    bound = (read_object(folder / SUMMARY) or {}).get(DIGESTS)
    if not isinstance(bound, dict):
        return
    with located(folder / SUMMARY):
        now = digests(folder, config)
        other = [_BOUND[name] for name in _BOUND if bound.get(name, now[name]) != now[name]]
        if other:
            raise RunError(f"of another run than {' and '.join(other)} beside it; restore what belongs together")


def digests(folder: Path, config: Mapping[str, Any]) -> dict[str, str | None]:
    """What binds a summary to the other files of a run."""
    with located(folder / METRICS):
        refuse_special(folder / METRICS)
        lines = hashlib.sha256()
        if (folder / METRICS).exists():
            with (folder / METRICS).open("rb") as file:
                lines = hashlib.file_digest(file, "sha256")
    return {"settings": digest(config["settings"]), "recipe": seal_of(folder), "metrics": lines.hexdigest()}


def digest(document: Any) -> str:
    """SHA-256 of JSON values, whatever the order of keys."""
    canonical = json.dumps(json.loads(strict_json(document)), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def refuse_other(now: Mapping[str, Any], before: Mapping[str, Any], whose: str) -> None:
    """RunError that shows where settings differ from ``before``, which were read as JSON."""
    found = differences(json.loads(strict_json(now)), before)
    if found:
        raise RunError(f"other settings than {whose}: {few(found, 5, '; ')}")


def differences(now: Mapping[str, Any], before: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Where two trees of settings differ, in words.

    >>> differences({"accumulate": 5, "budget": {"macs": 0.4}}, {"accumulate": 10, "budget": {"macs": 0.5}})
    ['accumulate is 5 and was 10', 'budget.macs is 0.4 and was 0.5']
    """
    found: list[str] = []
    for name in {**now, **before}:
        new, old = now.get(name, _NOT_SET), before.get(name, _NOT_SET)
        if isinstance(new, dict) and isinstance(old, dict):
            found += differences(new, old, f"{prefix}{name}.")
        elif name in _WEIGHTS and not prefix and new != old:
            found.append(_WEIGHTS[name])
        elif new != old or isinstance(new, bool) != isinstance(old, bool):
            found.append(f"{prefix}{name} is {shown(new)} and was {shown(old)}")
    return found


_NOT_SET = type("NotSet", (), {"__repr__": lambda _: "not set"})()

_WEIGHTS = {
    "weights": "the weights are other ones (give the network as it was before the run)",
    "teacher_weights": "the teacher's weights are other ones (give those that the run began with)",
}


def holds_run(path: Path) -> bool:
    """Return whether there is a run, finished or not, in a folder."""
    return not path.is_symlink() and is_there(path / CONFIG) and is_config(path / CONFIG)


def is_config(path: Path) -> bool:
    """Return whether a file is the ``config.json`` of a run."""
    try:
        read_config(path)
    except RunError:
        return False
    return True


def is_there(path: Path) -> bool:
    """Return whether there is anything; RunError where the system will not say."""
    with located(path):
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
    return True


def read_config(path: Path) -> dict[str, Any]:
    """What stands in a ``config.json``, if it is that of a run."""
    config = read_object(path)
    with located(path):
        if path.stat().st_size > MAX_JSON_BYTES:
            raise RunError(f"larger than {MAX_JSON_BYTES} bytes, which no run's settings are; give another folder")
        if config is None or not isinstance(config.get("settings"), dict) or config.get("format") != HEAD["format"]:
            raise RunError("damaged, or not of a run of ifso; restore it or start the run in another folder")
        if config.get("version") != HEAD["version"] or isinstance(config["version"], bool):
            version = shown(config.get("version"))
            raise RunError(f"version {version} is unknown, of another version of ifso; use the one that began the run")
    return config


def number_of(line: Mapping[str, Any], kind: str) -> int:
    """The number of a removal or an epoch that a line is about; -1 if it is about none."""
    number = line.get(kind)
    return number if isinstance(number, int) and not isinstance(number, bool) else -1


RESUMED = "resumed after removal"
"""How the note about a resume begins; the number of the removal follows."""


def read_summary(folder: Path) -> dict[str, Any]:
    """What the summary of a finished pruning says, each part of it known to be right; RunError if one is not."""
    summary = read_object(folder / SUMMARY)
    with located(folder / SUMMARY):
        if summary is None or not is_kind(summary, _SUMMARY):
            raise RunError("damaged; remove it and resume the run, which then writes it again")
        if not summary["targets"] or not summary["targets"].keys() <= summary["shares"].keys():
            raise RunError("says nothing of its budget; remove it and resume the run, which then writes it again")
    return summary


_NUMBERS: Any = {str: float}
_VALUES: Any = {str: (float, None)}
"""Of values that were measured, one that was not finite is null."""
_SUMMARY: Any = {
    "targets": _NUMBERS, "shares": _NUMBERS, "timings": _NUMBERS, "removals": float, "seconds": float,
    "checks": [{"name": str, "passed": bool, "detail": str, "error": (float, None), str: ()}],
    "measures": [{"stage": str, **_VALUES}], "notes": [str],
    "latency": (None, dict.fromkeys(("before", "after", "share"), float)), "floors?": [str],
    "stages?": [{"stage": int, "units": int, "shares": _NUMBERS, "values": _VALUES, "seconds": float}],
}  # fmt: skip
"""What earlier versions did not write need not be there."""
