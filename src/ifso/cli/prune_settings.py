"""What ``ifso prune`` was asked for: options of the command line, and those of the run that is resumed."""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ifso.errors import BudgetError, IfsoError, RunError, ScoreError
from ifso.runs.open import EXECUTED, found_again, refuse_foreign, told_options

COSTS = ("macs", "conv_macs", "params", "activations", "latency")
PASSED_ON = (
    "preset", "normalize", "update", "recover", "stop", "calibration", "accumulate", "accumulation",
    "batches_per_score", "units_per_step", "round_to", "min_units", "min_share", "ignore", "only", "seed",
    "recalibrate", "weight_update", "train_mode",
)  # fmt: skip
"""Options that ``ifso.prune`` has under the same name."""

OF_ALGORITHM_2 = ("accumulate", "accumulation", "batches_per_score", "units_per_step", "lr")
"""Options that only Algorithm 2 has: one of them asks for it."""

STAGED = "staged"

MAY_CHANGE = ("device",)
"""Options that a resumed run may have others of."""

OPTIONS = (
    *("model", "weights", "data", "input", "batch", "lr", "device", "precision", "channels_last"),
    *("criterion", "criterion_option", "schedule"),
    *COSTS,
    *PASSED_ON,
)
MIXED = "mixed"
FOLDERS = re.compile(r"[^:]*/")
CONSTANTS = {"true": True, "false": False, "none": None}


def gather(args: argparse.Namespace) -> dict[str, Any]:
    """The options that were given, as JSON values, with those of the run in ``--out`` if that is resumed."""
    if args.flops and args.macs:
        raise BudgetError("--macs and --flops mean the same; give one of them")
    args.macs = args.macs or args.flops
    given = {name: getattr(args, name) for name in OPTIONS if getattr(args, name) not in (None, [])}
    given = json.loads(json.dumps({name: _one(value) if name in COSTS else value for name, value in given.items()}))
    stored = _of_the_run(args.out) if args.resume else {}
    if stored:
        refuse_others(given, stored, args.out)
        stored = found_again(args.out, stored, [*given, *(["data"] if args.download else ())])
    settings = {**stored, **given}
    for name in ("model", "data"):
        if name not in settings:
            raise IfsoError(f"--{name} is missing; ifso prune --help says what it can be")
    if not any(cost in settings for cost in COSTS):
        named = ", ".join(f"--{cost.replace('_', '-')}" for cost in COSTS)
        raise BudgetError(f"no budget; give the share KEPT of one of {named}: --macs 0.5 keeps half")
    return settings


def _one(shares: Any) -> Any:
    """A single share as a number, several as they are.

    >>> _one([0.5]), _one([0.8, 0.5]), _one(0.5)
    (0.5, [0.8, 0.5], 0.5)
    """
    return shares[0] if isinstance(shares, list) and len(shares) == 1 else shares


def usual_of(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """What stands for options that were not given: those of the staged run or, if that was asked for, of Algorithm 2.

    >>> usual_of({"lr": 0.1})["schedule"], usual_of({"schedule": "staged", "stop": 1})["criterion"]
    ('incremental', 'true-loss')
    """
    from ifso.pruning.settings import usual

    other = settings.get("schedule", STAGED)
    asked = {name: settings.get(name) for name in OF_ALGORITHM_2}
    return usual(settings.get("preset"), {**asked, "schedule": None if other == STAGED else other})


def _of_the_run(run: Path) -> dict[str, Any]:
    """The options that a run was started with. Where Algorithm 2 went without saying, it is said now."""
    from ifso.runs.folder import CONFIG, TRAINING, is_there, read_config

    settings = read_config(run / CONFIG)["settings"] if is_there(run / CONFIG) else {}
    if TRAINING in settings:
        raise RunError(f"{run} holds a training and no pruning; go on with it: ifso train --resume --out {run}")
    stored = stored_options(run, OPTIONS, "ifso prune")
    schedule = settings.get("schedule", STAGED)
    earlier = schedule != STAGED and usual_of(stored)["schedule"] == STAGED
    return {"preset": "paper", **stored} if earlier else stored


def stored_options(run: Path, names: Sequence[str], command: str) -> dict[str, Any]:
    """The options of these names that ``command`` started a run with."""
    from ifso.runs.folder import CONFIG, is_there, read_config

    if not is_there(run / CONFIG):
        raise RunError(f"{run} holds no run to resume; start it without --resume, or give its folder")
    arguments = told_options(read_config(run / CONFIG), run / CONFIG)
    if arguments is None:
        raise RunError(
            f"{run / CONFIG} does not say how {command} was called; "
            "resume the run in Python, or start it in another folder"
        )
    return {name: value for name, value in arguments.items() if name in names}


def refuse_others(given: Mapping[str, Any], stored: Mapping[str, Any], run: Path, *others: Path) -> None:
    """Files may have moved, so that only their names are compared. Programs that came with the run must be given.

    ``others`` are further folders that are opened with the run.
    """
    for option in (option for option in EXECUTED if option in stored and option not in given):
        refuse_foreign(option, str(stored[option]), (run, *others))
    from ifso.runs.folder import differences

    new = {name: _without_folders(value) for name, value in given.items() if name not in MAY_CHANGE}
    old = {name: _without_folders(stored[name]) for name in new if name in stored}
    found = differences(new, old)
    if found:
        raise RunError(f"other settings than the run in {run}: {'; '.join(found)}")


def _without_folders(value: Any) -> Any:
    """A name without the folders of a path in it.

    >>> _without_folders("cifar10:sets/cifar.npz"), _without_folders("nets/small.py:make"), _without_folders(8)
    ('cifar10:cifar.npz', 'small.py:make', 8)
    """
    return FOLDERS.sub("", value) if isinstance(value, str) else value


def criterion_of(name: str, options: Sequence[str]) -> Any:
    """The criterion with options ``KEY=VALUE``; a dot leads into an option that holds options itself.

    >>> criterion_of("ifso", ["inverse=neumann", "inverse_options.terms=2", "careful=true"])
    Ifso(inverse='neumann', coupled='shared', weights='layers', curvature='hessian', inverse_options={'terms': 2},
    micro_batch=None, careful=True)
    """
    from ifso.criteria.registry import create

    found: dict[str, Any] = {}
    for option in options:
        key, equals, text = option.partition("=")
        if not key or not equals:
            raise ScoreError(f"--criterion-option {option!r} is not KEY=VALUE, for example inverse=neumann")
        *path, last = key.split(".")
        place = found
        for part in path:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise ScoreError(f"--criterion-option {option!r}: {part} was given a value of its own before")
        place[last] = _value(text)
    return create(name, **found)


def _value(text: str) -> Any:
    """A number, true, false or none, anything that Python writes as a literal, or else the text itself.

    >>> _value("2"), _value("1e-3"), _value("true"), _value("neumann")
    (2, 0.001, True, 'neumann')
    """
    if text.lower() in CONSTANTS:
        return CONSTANTS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def schedule_of(text: str) -> Any:
    """What ``ifso.prune`` takes as a schedule: ``mixed:0.75`` becomes ``ifso.Mixed(0.75)``, other names stay."""
    name, _, share = text.partition(":")
    if name != MIXED:
        return text
    from ifso.pruning.budget import Mixed

    try:
        return Mixed(float(share))
    except ValueError as error:
        raise IfsoError(
            f"--schedule {text!r}: write {MIXED}:SHARE, for example {MIXED}:0.75 for three quarters one by one"
        ) from error
