"""What ``ifso finetune`` and ``ifso train`` are asked alike: how a network is trained, on what, and where."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ifso.cli.distributed import device_of
from ifso.cli.options import BATCH, add_former, add_option, add_settings, add_shared, positive, share
from ifso.cli.resume import check_same_options, stored_options
from ifso.errors import IfsoError, TrainingError
from ifso.runs.arguments import SPELLED
from ifso.training.settings import ADAM_RATE, OPTIMIZERS, RECIPES, SCHEDULES, TrainSettings, training_recipe

FIELDS = tuple(field.name for field in dataclasses.fields(TrainSettings))
TEACHER = ("teacher", "teacher_weights")
STORED = (*FIELDS, "recipe", "model", "weights", "data", "validation", "evaluate_every", "device", *TEACHER)
"""Options that a training is resumed with."""

RECIPE, BOXES = "paper", "detection"
"""Recipes where none is asked for: of classifiers, and of detectors on ``coco:`` data."""

RECIPE_NAMES = (
    "paper; ours: one cycle, and a teacher; quick: shorter; brief: 30 epochs, no teacher; "
    "patient: longer, on mixed images; short: a third of that; scratch: from random weights; "
    f"detection: the paper's for RetinaNet ({RECIPE}; {BOXES} on coco:)"
)
DECAYS = ", ".join(f"{RECIPES[name].weight_decay:g} in {name}" for name in ("ours", "quick"))
SETTINGS = {
    "epochs": ("N", "rounds over the training set ({})"),
    "batch": ("N", f"{BATCH} ({{}})"),
    "opt": ("NAME", f"optimizer: {', '.join(OPTIMIZERS)} ({{}})"),
    "lr": ("RATE", f"highest learning rate ({{}}; {ADAM_RATE:g} of adam and adamw)"),
    "schedule": ("NAME", f"of the learning rate: {', '.join(SCHEDULES[:-1])} or {SCHEDULES[-1]} ({{}})"),
    "milestones": ("SHARE", "of the run, for step ({})"),
    "factor": ("X", "by which step multiplies the rate there ({})"),
    "warm_up": ("EPOCHS", "in which the rate rises at first ({})"),
    "warm_up_steps": ("N", f"the same in steps ({{}}; {RECIPES[BOXES].warm_up_steps} in {BOXES})"),
    "momentum": ("X", "of SGD, or the first beta of adam and adamw ({})"),
    "nesterov": ("", "Nesterov's momentum"),
    "weight_decay": ("X", f"({{}}; {DECAYS})"),
    "decay_all": ("", "weight decay for norms and biases, too"),
    "label_smoothing": ("SHARE", "of every label, for all classes ({})"),
    "cutmix": ("SHARE", "of images into which a piece of another goes ({})"),
    "mixup": ("SHARE", "of the other images, which are blended with another one ({})"),
    "ema": ("DECAY", "moving average of the weights, such as 0.999 ({}: none)"),
    "clip": ("NORM", "largest norm of the gradient ({}: none)"),
    "accumulate": ("N", "micro-batches that make a batch ({})"),
}


def add_recipe(group: Any) -> None:
    """Recipe and settings that change it. None has a default here: what is not given is left to the recipe."""
    add_option(group, "recipe", str, "NAME", RECIPE_NAMES)
    add_settings(group, TrainSettings(), SETTINGS, **SPELLED)
    add_former(group, "schedule", "lr-schedule", str, dest="schedule")
    add_former(group, "accumulate", "micro-batches", int, dest="accumulate")


def add_data(group: Any) -> None:
    """Downloading and what is set apart."""
    add_shared(group, "download", "workers")
    words = "of the training set, or number of images, set apart and evaluated on in place of the test set (0)"
    add_option(group, "validation", share, "SHARE", words)


def add_running(group: Any) -> None:
    """Device, precision, and how to go on."""
    add_shared(group, "device")
    precisions = "float32, tf32, bf16 or fp16 ({}; bf16 and channels-last on cuda)"
    layout, compiled = ("", "channels-last memory layout"), ("", "torch.compile the network")
    names = {"precision": ("NAME", precisions), "channels_last": layout, "compile": compiled}
    add_settings(group, TrainSettings(), names)
    add_option(group, "evaluate_every", positive, "N", "epochs between two evaluations (1)")
    add_option(group, "resume", None, "", "go on after an interruption; needs no other options")
    add_shared(group, "json")


def gather(
    args: argparse.Namespace, folder: Path, defaults: Mapping[str, Any], command: str, *others: Path
) -> dict[str, Any]:
    """The options of a training in ``folder`` as JSON values: given ones, stored ones if resumed, and defaults.

    On a GPU the defaults are bf16 and channels-last; they are stored, so that a training can go on elsewhere.
    ``others`` are further folders that are opened with it.
    """
    named = {name: getattr(args, name, None) for name in STORED}
    given = json.loads(json.dumps({name: value for name, value in named.items() if value is not None}))
    stored = stored_options(folder, STORED, command) if args.resume else {}
    if stored:
        check_same_options(given, stored, folder, *others)
    options = {**defaults, **stored, **given}
    options["device"] = device_of(options.get("device"), vars(args).setdefault("said", []))
    if not args.resume and options["device"].partition(":")[0] == "cuda":
        options = {"precision": "bf16", "channels_last": True, **options}
    return options


def settings_of(options: Mapping[str, Any]) -> TrainSettings:
    """The recipe with the settings that were given; on data with boxes, the usual recipe is that of detectors.

    >>> settings_of({"data": "coco:cells"}) == RECIPES["detection"], settings_of({"data": "digits"}) == RECIPES["paper"]
    (True, True)
    """
    if options.get("epochs") == 0:
        raise TrainingError("--epochs 0 trains nothing; give 1 or more")
    changes = {name: options[name] for name in FIELDS if name in options}
    return training_recipe(options.get("recipe") or (BOXES if has_boxes(options.get("data")) else RECIPE), **changes)


def has_boxes(data: str | None) -> bool:
    """Whether DATA is a name of images with boxes."""
    return data is not None and data.startswith("coco:")


def common_option(options: Sequence[Mapping[str, Any]], name: str, default: str) -> str:
    """The value that all trainings side by side have of an option."""
    values = sorted({str(each.get(name, default)) for each in options})
    if len(values) > 1:
        raise IfsoError(f"trainings with --{name} {' and '.join(values)} cannot go on side by side; resume them apart")
    return values[0] if values else default
