"""How the recipe ``ours`` was chosen: candidates compared on images that neither training nor the test set has.

A ResNet-32 is trained on 45,000 images of CIFAR-10, half of its MACs are removed at once, and a copy is fine-tuned by
every candidate, all side by side. What counts is the accuracy on the 5,000 images held out, at the last epoch.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ifso.data import Data
from ifso.errors import IfsoError
from ifso.models import create_model
from ifso.pruning.budget import Budget
from ifso.pruning.prune import prune
from ifso.surgery.files import replacing
from ifso.surgery.recipe import recipe_of as removals_of
from ifso.training.crew import Crew
from ifso.training.examining import Examiner
from ifso.training.fit import own_random_numbers
from ifso.training.lane import Lane, Watch
from ifso.training.lessons import Tables, lessons
from ifso.training.padding import Padding
from ifso.training.settings import TrainSettings, recipe_of

NETWORK, KEPT, HELD_OUT = "ifso:resnet32", 0.5, 5000
START = recipe_of("ours", distill=0.0)
CANDIDATES: Mapping[str, Mapping[str, Any]] = {
    "paper, distilled": {
        "schedule": "step", "nesterov": False, "weight_decay": 1e-4, "decay_all": True, "distill": 0.9
    },
    "one-cycle": {},
    "distilled": {"distill": 0.9},
    "distilled, T = 2": {"distill": 0.9, "temperature": 2.0},
    "distilled, decay 1e-4": {"distill": 0.9, "weight_decay": 1e-4},
    "distilled, lr 0.2": {"distill": 0.9, "lr": 0.2},
    "distilled, decay everywhere": {"distill": 0.9, "decay_all": True},
}  # fmt: skip
"""Changes to one-cycle SGD without a teacher."""


@dataclass(frozen=True)
class Effort:
    """Epochs of training and of fine-tuning, and what makes them quick on a device."""

    base_epochs: int = 30
    epochs: int = 20
    quick: Mapping[str, Any] = field(default_factory=dict)

    def settings(self, changes: Mapping[str, Any], epochs: int) -> TrainSettings:
        """A candidate."""
        return replace(START, epochs=epochs, **{**changes, **self.quick})


def choose(
    data: Data, effort: Effort, *, device: str = "cpu", say: Callable[[str], None], network: str = NETWORK
) -> dict[str, Any]:
    """Accuracies on the validation part by candidate, and the best of them; ``data`` was opened with such a part."""
    with own_random_numbers([], 0):
        torch.manual_seed(0)
        base = create_model(network, num_classes=data.num_classes).to(device)
        watch = _Validation(data, device, effort.quick.get("precision", "float32"))
        found = _trained(base, data, effort.settings({}, effort.base_epochs), watch)
        say(f"unpruned: {found:.2f} % of {HELD_OUT} held out")
        pruned = _halved(base, data)
        crew, tables = Crew(), Tables()
        scores: dict[str, float] = {}
        for name, changes in CANDIDATES.items():
            settings, model = effort.settings(changes, effort.epochs), copy.deepcopy(pruned)
            batches, loss_fn = lessons(data, settings, base, tables=tables, networks=len(CANDIDATES), say=say)
            lane = Lane(model, batches, settings, loss_fn=loss_fn, watch=watch.watch())
            crew.add(lane, partial(_note, scores, name, lane, say))
        while crew.size:
            crew.turn()
    ranked = sorted(scores, key=lambda name: -scores[name])
    return {
        "network": network, "removed": 1 - KEPT, "held_out": HELD_OUT, "base_epochs": effort.base_epochs,
        "epochs": effort.epochs, "unpruned": found, "validation_top1": {name: scores[name] for name in ranked},
        "candidates": {name: dict(changes) for name, changes in CANDIDATES.items()}, "best": ranked[0],
    }  # fmt: skip


def keep(choice: Mapping[str, Any], path: Path) -> None:
    """Write what was found as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as new:
        new.write_text(json.dumps(choice, indent=1) + "\n", encoding="utf-8")


class _Validation:
    def __init__(self, data: Data, device: str, precision: str) -> None:
        self._data, self._precision = data, precision
        self._size = 2500 if device.startswith("cuda") else 500

    def watch(self) -> Watch:
        """One that asks at the end only."""
        examiner = Examiner(self._data.validation_batches(self._size), self._precision)
        return Watch(lambda model: {"top1": examiner(model).top1}, every=10**9, final=1)


def _trained(model: nn.Module, data: Data, settings: TrainSettings, validation: _Validation) -> float:
    batches, loss_fn = lessons(data, settings)
    lane = Lane(model, batches, settings, loss_fn=loss_fn, watch=validation.watch())
    failures: list[IfsoError | None] = []
    crew = Crew()
    crew.add(lane, failures.append)
    while crew.size:
        crew.turn()
    if failures[0] is not None:
        raise failures[0]
    return lane.done[-1].measures["top1"]


def _halved(base: nn.Module, data: Data) -> nn.Module:
    """A copy without half of its MACs, removed at once."""
    model = copy.deepcopy(base)
    prune(
        model,
        data.train_batches(128),
        data.loss_fn,
        budget=Budget(macs=KEPT),
        example_inputs=data.example_inputs(),
        schedule="one-shot",
        batches_per_score=10,
    )
    recipe = removals_of(model)
    if not next(base.parameters()).is_cuda or recipe is None:
        return model
    return Padding(base, recipe, data.example_inputs()).pad_(copy.deepcopy(base), model)


def _note(
    scores: dict[str, float], name: str, lane: Lane, say: Callable[[str], None], failure: IfsoError | None
) -> None:
    scores[name] = 0.0 if failure is not None else lane.done[-1].measures["top1"]
    say(f"{name}: {scores[name]:.2f} %" + (f" ({failure})" if failure else ""))
