"""The one reader of run folders: names of their files, what those say, and how settings differ from others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifso.common.serialization import (
    MAX_JSON_BYTES,
    located,
    parsed,
    refuse_special,
    strict_json,
)
from ifso.errors import RunError
from ifso.surgery.store import RECIPE, RUN_SUMMARY, seal_of

if TYPE_CHECKING:
    pass


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

_HEAD = {"format": "ifso-run", "version": 1}


def refuse_other_files(folder: Path, config: Mapping[str, Any]) -> None:
    """RunError if settings, network or metrics are others than those that the summary in ``folder`` was written for.

    Summaries of earlier versions do not tell.
    """
    with located(folder / SUMMARY):
        refuse_special(folder / SUMMARY)
        bound = (parsed((folder / SUMMARY).read_bytes()) or {}).get(DIGESTS)
        if not isinstance(bound, dict):
            return
        now = _digests(folder, config)
        other = [_BOUND[name] for name in _BOUND if bound.get(name, now[name]) != now[name]]
        if other:
            raise RunError(f"of another run than {' and '.join(other)} beside it; restore what belongs together")


def _digests(folder: Path, config: Mapping[str, Any]) -> dict[str, str | None]:
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
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise RunError(f"other settings than {whose}: {'; '.join(found[:5])}{more}")


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
            found.append(f"{prefix}{name} is {_shown(new)} and was {_shown(old)}")
    return found


_NOT_SET = object()

_WEIGHTS = {
    "weights": "the weights are other ones (give the network as it was before the run)",
    "teacher_weights": "the teacher's weights are other ones (give those that the run began with)",
}


def _shown(value: object) -> str:
    text = "not set" if value is _NOT_SET else repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


def holds_run(path: Path) -> bool:
    """Is there a run, finished or not, in a folder?"""
    return not path.is_symlink() and is_there(path / CONFIG) and _is_run(path / CONFIG)


def _is_run(path: Path) -> bool:
    try:
        read_config(path)
    except RunError:
        return False
    return True


def is_there(path: Path) -> bool:
    """Is there anything? RunError where the system will not say."""
    with located(path):
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
    return True


def read_config(path: Path) -> dict[str, Any]:
    """What stands in a ``config.json``, if it is that of a run."""
    with located(path):
        refuse_special(path)
        with path.open("rb") as file:
            data = file.read(MAX_JSON_BYTES + 1)
        if len(data) > MAX_JSON_BYTES:
            raise RunError(f"larger than {MAX_JSON_BYTES} bytes, which no run's settings are; give another folder")
        config = parsed(data)
        if config is None or not isinstance(config.get("settings"), dict) or config.get("format") != _HEAD["format"]:
            raise RunError("damaged, or not of a run of ifso; restore it or start the run in another folder")
        if config.get("version") != _HEAD["version"] or isinstance(config["version"], bool):
            raise RunError(
                f"version {_shown(config.get('version'))} is unknown; resume with the ifso that began the run"
            )
    return config


def _number(line: Mapping[str, Any], kind: str) -> int:
    number = line.get(kind)
    return number if isinstance(number, int) and not isinstance(number, bool) else -1


RESUMED = "resumed after removal"
"""How the note about a resume begins; the number of the removal follows."""


def _summary(folder: RunFolder) -> dict[str, Any]:
    with located(folder.path / SUMMARY):
        refuse_special(folder.path / SUMMARY)
        summary = parsed((folder.path / SUMMARY).read_bytes())
        if summary is None or not _is_right(summary):
            raise RunError("damaged; remove it and resume the run, which then writes it again")
        if not summary["targets"] or not summary["targets"].keys() <= summary["shares"].keys():
            raise RunError("says nothing of its budget; remove it and resume the run, which then writes it again")
    return summary


def _is_right(summary: Mapping[str, Any]) -> bool:
    needed = all(name in summary and is_right(summary[name]) for name, is_right in _PARTS.items())
    return needed and all(is_right(summary[name]) for name, is_right in _LATER_PARTS.items() if name in summary)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _LARGEST


def _are_numbers(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


def _are_values(value: object) -> bool:
    """Measured numbers; one that was not finite is None."""
    return isinstance(value, dict) and all(part is None or _is_number(part) for part in value.values())


def _are_checks(value: object) -> bool:
    kinds: dict[str, Any] = {"name": str, "passed": bool, "detail": str, "error": (int, float, type(None))}
    return isinstance(value, list) and all(
        isinstance(one, dict) and one.keys() == kinds.keys() and all(isinstance(one[key], kinds[key]) for key in kinds)
        for one in value
    )


def _are_measures(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, dict)
        and isinstance(one.get("stage"), str)
        and _are_values({key: part for key, part in one.items() if key != "stage"})
        for one in value
    )


def _are_stages(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, dict) and all(name in one and is_right(one[name]) for name, is_right in _STAGE.items())
        for one in value
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and _is_number(value)


def _are_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_latency(value: object) -> bool:
    return value is None or (isinstance(value, dict) and all(_is_number(value.get(key)) for key in _LATENCIES))


_LARGEST = 2**53

_LATENCIES = ("before", "after", "share")

_PARTS: Mapping[str, Callable[[object], bool]] = {
    "targets": _are_numbers, "shares": _are_numbers, "timings": _are_numbers, "removals": _is_number,
    "seconds": _is_number, "checks": _are_checks, "measures": _are_measures, "latency": _is_latency,
    "notes": _are_strings,
}  # fmt: skip
"""What a summary must hold, and how each part of it is known to be right."""

_LATER_PARTS: Mapping[str, Callable[[object], bool]] = {"stages": _are_stages, "floors": _are_strings}
"""What older summaries do not hold."""

_STAGE: Mapping[str, Callable[[object], bool]] = {
    "stage": _is_count, "units": _is_count, "shares": _are_numbers, "values": _are_values, "seconds": _is_number,
}  # fmt: skip
