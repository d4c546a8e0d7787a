"""Options of commands as a run's ``config.json`` tells them: each is of its kind, or the run is refused in a line."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ifso.errors import RunError

LARGEST = 2**63 - 1
"""The largest whole number that torch takes, as a seed among other things."""


def told_options(config: Mapping[str, Any], where: Path) -> dict[str, Any] | None:
    """The arguments that a run was begun with, by name; None if it does not tell them."""
    about = config.get("about")
    arguments = about.get("arguments") if isinstance(about, dict) else None
    if not isinstance(arguments, dict):
        return None
    for name, value in arguments.items():
        is_right, words = KINDS.get(name, (_is_anything, ""))
        if not is_right(value):
            raise RunError(f"{where}: {name} must be {words}, got {_shown(value)}; restore the file, or start anew")
    return dict(arguments)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


def _is_anything(_: object) -> bool:
    return True


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST


def _is_from_one(value: object) -> bool:
    return _is_whole(value) and bool(value) and value > 0  # type: ignore[operator]


def _is_number(value: object) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def _is_truth(value: object) -> bool:
    return isinstance(value, bool)


def _list_of(is_right: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(map(is_right, value))


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_whole(size) and 0 < size < 2**31 for size in value)


def _is_budget(value: object) -> bool:
    return _is_number(value) or (_list_of(_is_number)(value) and bool(value))


Kind = tuple[Callable[[object], bool], str]
_TEXT: Kind = (_is_text, "a text")
_WHOLE: Kind = (_is_whole, "a whole number")
_NUMBER: Kind = (_is_number, "a number")
_TRUTH: Kind = (_is_truth, "true or false")

KINDS: Mapping[str, Kind] = {
    **dict.fromkeys(
        ("model", "weights", "data", "device", "precision", "criterion", "schedule", "preset", "normalize",
         "accumulation", "recipe", "teacher", "teacher_weights"), _TEXT
    ),
    **dict.fromkeys(
        ("batch", "seed", "round_to", "min_units", "recalibrate", "weight_update", "recover", "calibration",
         "accumulate", "batches_per_score", "units_per_step", "epochs", "warm_up_steps"), _WHOLE
    ),
    **dict.fromkeys(
        ("lr", "min_share", "stop", "factor", "warm_up", "momentum", "weight_decay", "label_smoothing", "ema", "clip",
         "distill", "temperature", "cutmix", "validation"), _NUMBER
    ),
    **dict.fromkeys(
        ("train_mode", "update", "channels_last", "nesterov", "decay_all", "compile", "padded"), _TRUTH
    ),
    **dict.fromkeys(
        ("macs", "conv_macs", "params", "activations", "latency"), (_is_budget, "a share, or a list of shares")
    ),
    **dict.fromkeys(("criterion_option", "ignore", "only"), (_list_of(_is_text), "a list of texts")),
    "evaluate_every": (_is_from_one, "a whole number from 1 up"),
    "milestones": (_list_of(_is_number), "a list of numbers"),
    "input": (_is_shape, "a list of sizes"),
}  # fmt: skip
"""What the value of each option is, as JSON has it."""
