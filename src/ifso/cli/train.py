"""``ifso train``: a network from scratch, or from weights; with it, what ``ifso finetune`` asks and does alike."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifso.cli.console import console, path_from, print_json, table
from ifso.cli.distributed import World, device_of, joined, leave
from ifso.cli.inputs import data_options, name_networks, report_notes
from ifso.cli.options import (
    BATCH,
    WEIGHTS,
    add_former,
    add_option,
    add_settings,
    add_shared,
    check_same_options,
    positive,
    resumable,
    seed,
    share,
    stored_options,
)
from ifso.cli.progress import training_progress
from ifso.common.text import with_error
from ifso.errors import IfsoError, TrainingError
from ifso.runs.arguments import PATHS, SPELLED, without_folders
from ifso.training.settings import ADAM_RATE, OPTIMIZERS, RECIPES, SCHEDULES, TrainSettings, training_recipe

if TYPE_CHECKING:
    from rich.table import Table

    from ifso.training.runs import Training

    Outcome = dict[str, Any] | IfsoError
    Say = Callable[[str], None]

FIELDS = tuple(field.name for field in dataclasses.fields(TrainSettings))
TEACHER = ("teacher", "teacher_weights")
STORED = (*FIELDS, "recipe", "model", "weights", "data", "validation", "evaluate_every", "device", *TEACHER, "padded")
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


DESCRIPTION = (
    "Train a network; DIR/model.safetensors is then what ifso prune takes as --weights. "
    "What is not given is as in the recipe. Under torchrun, all ranks train it together."
)


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("train", help="train a network to be pruned", description=DESCRIPTION)
    task = parser.add_argument_group("what is trained")
    add_shared(task, "model")
    add_option(task, "weights", str, "FILE", f"{WEIGHTS}, to begin with (random ones otherwise)")
    add_shared(task, "pretrained", "data")
    add_option(task, "out", Path, "DIR", "the folder of the training", required=True)
    add_data(task)
    how = parser.add_argument_group("how it is trained")
    add_recipe(how)
    add_option(how, "seed", seed, "N", "fixes everything that is random (0)")
    add_running(parser.add_argument_group("where and how it runs"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train, and print what came out."""
    start = Path.cwd()
    args.said = name_networks(args)
    options = gather(args, args.out, {"distill": 0.0}, "ifso train")
    if args.resume:
        from ifso.runs.open import found_again

        given = [name for name in PATHS if getattr(args, name) is not None]
        options = found_again(args.out, options, [*given, *(["data"] if args.download else ())])
    for name in ("model", "data"):
        if name not in options:
            raise IfsoError(f"--{name} is missing; ifso train --help says what it can be")
    command = ["train", "--resume", "--out", str(args.out)]
    with joined(options["device"]) as world, resumable(command, args.out, shown=world.is_first):
        prepare = partial(_training, args, options, world)
        (summary,) = train_each("train", [args.out], lambda _, say: [prepare(say)], args, world)
        if isinstance(summary, IfsoError):
            raise summary
    if world.is_first and args.json:
        print_json(summary)
    elif world.is_first:
        show_trained([summary])
        print(f"weights: {path_from(args.out, start) / 'model.safetensors'}")
    return leave(0)


def _training(args: argparse.Namespace, options: dict[str, Any], world: World, say: Say) -> Training:
    """All that it takes: data, network, settings."""
    from ifso.data import open_data
    from ifso.models.registry import network_for
    from ifso.surgery.recipe import digest_of
    from ifso.training.runs import Training

    settings, validation, weights = settings_of(options), options.get("validation", 0), options.get("weights")
    data = open_data(options["data"], **data_options(args, world, settings.seed, validation))
    report_notes(data, say)
    given = {"weights": weights, "pretrained": args.pretrained}
    model = network_for(options["model"], data.num_classes, device=world.device, seed=settings.seed, **given)
    fixed = {
        "model": without_folders(options["model"]), "data": without_folders(data.name), "validation": validation,
        **({"weights": digest_of(model)} if any(given.values()) else {}),
    }  # fmt: skip
    return Training(
        name=options["model"], folder=args.out, model=model, data=data, settings=settings,
        validation=bool(validation), every=options.get("evaluate_every", 1), fixed=fixed,
        about={"arguments": options}, start="weights given" if any(given.values()) else None,
    )  # fmt: skip


TITLES = {"top1": "Accuracy in per cent", "map": "mAP in per cent", "eval_loss": "Loss"}


def train_each(
    command: str,
    folders: Sequence[Path],
    prepare: Callable[[Sequence[int], Say], list[Training]],
    args: argparse.Namespace,
    world: World,
) -> list[Outcome]:
    """Train in all ``folders`` side by side what ``prepare`` makes for their numbers; what is finished is only read."""
    from ifso.training.runs import SilentTraining, finished_summary, remove_checkpoint, train_side_by_side

    found = {number: finished_summary(folder) if args.resume else None for number, folder in enumerate(folders)}
    done: dict[int, Outcome] = {number: summary for number, summary in found.items() if summary is not None}
    for number in done if world.is_first else ():
        remove_checkpoint(folders[number])
    left = [number for number in found if number not in done]
    if left:
        with training_progress(command) if world.is_first else nullcontext(SilentTraining()) as listener:
            trainings = prepare(left, listener.said)
            for line in dict.fromkeys(args.said):
                listener.said(line)
            outcomes = train_side_by_side(trainings, listener, resume=args.resume, ranks=world.ranks)
        done.update(zip(left, outcomes, strict=True))
    return [done[number] for number in found]


def show_trained(summaries: Sequence[Mapping[str, Any]]) -> None:
    """The table, and a line for each network that was better before."""
    console().print(summary_table(summaries))
    for summary in summaries:
        for note in summary.get("notes", ()):
            print(f"note: {summary['folder']}: {note}")


def summary_table(summaries: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each network that was trained: accuracies, mAP, or losses where the data has a loss of its own."""
    splits = sorted({summary["split"] for summary in summaries})
    own = all(summary.get("last_top1") is None and "eval_loss" in summary["last"] for summary in summaries)
    kind = "map" if all("last_map" in summary for summary in summaries) else "eval_loss" if own else "top1"
    stages = list(dict.fromkeys(stage for summary in summaries for stage in summary["before"]))
    rows = []
    for summary in summaries:
        values = [*map(summary["before"].get, stages), summary.get(f"last_{kind}"), summary.get(f"best_{kind}")]
        counted = summary.get("samples") if kind == "top1" else None
        cells = ["–" if value is None else with_error(value, counted) for value in values]
        cells = [f"{summary['last']['eval_loss']:.4g}"] if kind == "eval_loss" else cells
        rows.append((summary["folder"], *cells, str(summary["epochs"]), f"{summary['seconds']:.1f}"))
    best = () if kind == "eval_loss" else ("best epoch",)
    headings = ("folder", *stages, "last epoch", *best, "epochs", "seconds")
    error = " ± standard error" if kind == "top1" and any(summary.get("samples") for summary in summaries) else ""
    return table(headings, rows, title=f"{TITLES[kind]}{error} on {' and '.join(splits)} images")
