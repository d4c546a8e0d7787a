"""Which recipe is best for fine-tuning: candidates compared on images that neither training nor the test set has.

A ResNet-32 is trained on 40,000 images of CIFAR-10, half of its MACs are removed at once, and a copy is fine-tuned by
every candidate, all side by side. What counts is the accuracy on the 10,000 images held out, at the last epoch, in the
mean over seeds, which order and augment the images otherwise.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

import ifso
from ifso.cli.console import chatter_to_stderr, console, print_json, say
from ifso.common.devices import usable_device
from ifso.data import open_data
from ifso.data.base import ImageData
from ifso.data.generated import generated_images
from ifso.errors import DataError, IfsoError, TrainingError
from ifso.training.evaluation import Evaluator, evaluation_batches
from ifso.training.objective import TeacherCaches, batches_and_loss
from ifso.training.profiling import hardware
from ifso.training.settings import TrainSettings, training_recipe
from ifso.training.trainer import Trainer, TrainerHooks, fit_side_by_side, seeded_rng
from ifso_repro.cli import RECIPE
from ifso_repro.commands import OUT, training_changes
from ifso_repro.results import keep_text
from ifso_repro.table_lines import UNKNOWN, Grid, as_rich
from ifso_repro.workspace import former_shape

NETWORK, KEPT, HELD_OUT = "ifso:resnet32", 0.5, 10_000
START = training_recipe("scratch")
CANDIDATES: Mapping[str, Mapping[str, Any]] = {
    "decay 5e-4": {"distill": 0.9, "weight_decay": 5e-4},
    "decay 2e-4": {"distill": 0.9, "weight_decay": 2e-4},
    "decay 1e-4": {"distill": 0.9, "weight_decay": 1e-4},
    "decay 5e-5": {"distill": 0.9, "weight_decay": 5e-5},
    "decay 2e-4, T = 2": {"distill": 0.9, "weight_decay": 2e-4, "temperature": 2.0},
}
"""Changes to one-cycle SGD without a teacher; the temperature is 4 where nothing is said."""

CAPTION = (
    "Top-1 in per cent on {held_out} training images held out, at the last of {epochs} epochs, after half of the MACs "
    "of {network} went at once; unpruned {unpruned:.2f}. Standard error of one accuracy: {standard_error:.2f}."
)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Effort:
    """Epochs of training and of fine-tuning, runs of each candidate, and what makes them quick on a device."""

    base_epochs: int = 30
    epochs: int = 60
    seeds: int = 1
    quick: Mapping[str, Any] = field(default_factory=dict)
    scored: int = 10

    def settings(self, changes: Mapping[str, Any], epochs: int, seed: int = 0) -> TrainSettings:
        """A candidate."""
        return replace(START, epochs=epochs, seed=seed, **{**changes, **self.quick})


SMOKE = Effort(base_epochs=1, epochs=1, quick={"batch": 16}, scored=1)
SMOKE_HELD_OUT = 32


def smoke_images(device: str = "cpu") -> ImageData:
    """A few generated images, of which some are held out."""
    made_up = generated_images("cifar10", device=device)
    order = torch.arange(len(made_up.train), device=device)
    train, held_out = (made_up.train.part(part) for part in (order[SMOKE_HELD_OUT:], order[:SMOKE_HELD_OUT]))
    return replace(made_up, train=train, validation=held_out)


def choose(
    data: ImageData,
    effort: Effort,
    *,
    device: str = "cpu",
    say: Say,
    network: str = NETWORK,
    candidates: Mapping[str, Mapping[str, Any]] = CANDIDATES,
) -> dict[str, Any]:
    """Accuracies on the validation part by candidate, and the best of them; ``data`` was opened with such a part.

    ``standard_error`` is that of an accuracy on so many images: what differs by less is alike.
    """
    if data.validation is None:
        raise DataError(f"{data.name} was opened without a validation part, on which candidates are compared")
    for changes in candidates.values():
        effort.settings(changes, effort.epochs)
    held_out = len(data.validation)
    with seeded_rng([], 0):
        base = ifso.create_model(network, num_classes=data.num_classes).to(device)

        def watch() -> TrainerHooks:
            """Measure on the images held out, at the end only."""
            batches = evaluation_batches(data, device, validation=True)
            examiner = Evaluator(batches, effort.quick.get("precision", "float32"))
            return TrainerHooks(lambda model: {"top1": examiner(model).top1}, every=10**9, final=1)

        unpruned = _trained(base, data, effort.settings({}, effort.base_epochs), watch())
        say(f"unpruned: {unpruned:.2f} % of {held_out} held out")
        pruned = _halved(base, data, effort, say)
        scores = _compared(pruned, base, data, effort, candidates, watch, say)
    failed = [name for name in candidates if len(scores[name]) < effort.seeds]
    means = {name: statistics.fmean(tops) for name, tops in scores.items() if name not in failed}
    if not means:
        raise TrainingError("every candidate failed, as was said above; give more data, or other settings")
    ranked = sorted(means, key=lambda name: -means[name])
    share = means[ranked[0]] / 100
    return {
        "network": network, "removed": 1 - KEPT, "data": data.name.partition(":")[0], "held_out": held_out,
        "base_epochs": effort.base_epochs, "epochs": effort.epochs, "seeds": effort.seeds, "unpruned": unpruned,
        "validation_top1": {name: scores[name] for name in ranked}, "mean": {name: means[name] for name in ranked},
        "standard_error": 100 * math.sqrt(share * (1 - share) / held_out),
        "failed": failed,
        "candidates": {name: dict(changes) for name, changes in candidates.items()}, "best": ranked[0],
    }  # fmt: skip


def _trained(model: nn.Module, data: ImageData, settings: TrainSettings, watch: TrainerHooks) -> float:
    batches, loss_fn = batches_and_loss(data, settings)
    lane = Trainer(model, batches, settings, loss_fn=loss_fn, hooks=watch)
    for failure in fit_side_by_side([lane]):
        if failure is not None:
            raise failure
    return lane.done[-1].measures["top1"]


def _halved(base: nn.Module, data: ImageData, effort: Effort, say: Say) -> nn.Module:
    """A copy without half of its MACs, removed at once; on a GPU in the former shape."""
    model = copy.deepcopy(base)
    ifso.prune(
        model,
        data.train_batches(effort.settings({}, 1).batch),
        data.loss_fn,
        budget=ifso.Budget(macs=KEPT),
        example_inputs=data.example_inputs(),
        preset="paper",
        schedule="one-shot",
        batches_per_score=effort.scored,
    )
    if not next(base.parameters()).is_cuda:
        return model
    return former_shape(copy.deepcopy(base), model, data, say)


def _compared(
    pruned: nn.Module,
    teacher: nn.Module,
    data: ImageData,
    effort: Effort,
    candidates: Mapping[str, Mapping[str, Any]],
    watch: Callable[[], TrainerHooks],
    say: Say,
) -> dict[str, list[float]]:
    """The accuracy of every candidate at its end, in the order of seeds; all of them side by side."""
    tables, lanes = TeacherCaches(), []
    runs = [(name, seed) for seed in range(effort.seeds) for name in candidates]
    for name, seed in runs:
        settings = effort.settings(candidates[name], effort.epochs, seed)
        shuffled = replace(data, seed=seed)
        batches, loss_fn = batches_and_loss(shuffled, settings, teacher, caches=tables, networks=len(runs), say=say)
        lanes.append(Trainer(copy.deepcopy(pruned), batches, settings, loss_fn=loss_fn, hooks=watch()))
    try:
        failures = fit_side_by_side(lanes)
    except torch.OutOfMemoryError as error:
        raise TrainingError(f"no memory is left for {len(runs)} networks; give fewer --seeds") from error
    scores: dict[str, list[float]] = {name: [] for name in candidates}
    for (name, seed), lane, failure in zip(runs, lanes, failures, strict=True):
        for note in lane.notes:
            say(f"{name}, seed {seed}: {note}")
        if failure is None:
            scores[name].append(lane.done[-1].measures["top1"])
        say(f"{name}, seed {seed}: {failure or f'{scores[name][-1]:.2f} %'}")
    return scores


def run(args: argparse.Namespace) -> int:
    """``ifso repro recipe``: compare the candidates, and write which one did best."""
    if set(args.studies) - {RECIPE}:
        raise IfsoError(f"{RECIPE} is a study of its own kind; run it alone")
    with chatter_to_stderr():
        choice = _chosen(args)
        path = (args.out or OUT) / "results" / ("smoke" if args.smoke else "") / RECIPE / "choice.json"
        keep_text(path, json.dumps(choice, indent=1) + "\n")
    if args.json:
        print_json(choice)
    else:
        console().print(as_rich(_table(choice)), f"best: {choice['best']}; written: {path}", sep="\n")
    return 0


def _chosen(args: argparse.Namespace) -> dict[str, Any]:
    device = args.device or "cpu"
    usable = usable_device(device)
    effort = SMOKE if args.smoke else Effort()
    quick = {**effort.quick, **training_changes(args, usable.type, ("precision", "channels_last", "compile"))}
    counts = {name: getattr(args, name) for name in ("epochs", "seeds") if getattr(args, name) is not None}
    if args.smoke:
        data: Any = smoke_images(device)
    else:
        if args.data is None or len(args.data) != 1 or args.data[0].partition(":")[0] not in ("cifar10", "cifar100"):
            raise IfsoError(f"{RECIPE} takes one data set; give --data cifar10:PATH or cifar100:PATH, or --smoke")
        data = open_data(args.data[0], device=device, validation=args.validation or HELD_OUT)
    choice = choose(data, replace(effort, quick=quick, **counts), device=device, say=say)
    return {**choice, "smoke": args.smoke, "quick": quick, "hardware": hardware(usable)}


def _table(choice: dict[str, Any]) -> Grid:
    lines = []
    for name, mean in choice["mean"].items():
        scores, changes = choice["validation_top1"][name], choice["candidates"][name]
        words = ", ".join(f"{key}={value}" for key, value in changes.items()) or "none"
        lines.append((name, words, *(f"{value:.2f}" for value in (mean, min(scores), max(scores)))))
    lines += [(name, "failed", *[UNKNOWN] * 3) for name in choice["failed"]]
    title = f"Candidates for the recipe of fine-tuning, {choice['seeds']} seed(s)"
    headings = ("candidate", "changes", "mean", "lowest", "highest")
    return Grid(title, headings, (tuple(lines),), (CAPTION.format(**choice),), words=2)
