"""How a network is trained or fine-tuned: every choice in one place, and recipes of them."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ifso.errors import TrainingError
from ifso.training.precision import check_precision

SCHEDULES = ("step", "cosine", "one-cycle", "constant")
OPTIMIZERS = ("sgd", "adam", "adamw")
ADAM_RATE = 1e-3
"""The learning rate of Adam and AdamW where a recipe, which is for SGD, has another."""
LATER = ("warm_up_steps", "cutmix", "opt", "mixup")
"""Settings that older files lack."""


@dataclass(frozen=True)
class TrainSettings:
    """The choices of a training run, checked. The defaults are the paper's for CIFAR.

    ``lr`` is the highest rate; ``milestones`` are the shares of the run at which ``schedule="step"`` multiplies it by
    ``factor``, ``warm_up`` the epochs in which it rises to ``lr`` first, or ``warm_up_steps`` the steps (not with
    ``"one-cycle"``, which rises by itself). With ``decay_all=False`` norms and biases have no weight decay. ``ema`` is
    the decay of a moving average of the weights (0: none), which is then evaluated and kept. ``accumulate``
    micro-batches make a batch. ``distill`` is the weight of the teacher (0: labels only), at ``temperature``.
    ``opt`` is the optimizer; ``momentum`` is then the first β of Adam and AdamW, whose second one is 0.999.
    ``cutmix`` is the share of images with a rectangle of another one, ``mixup`` the share of the others that are
    blended with another one (:mod:`ifso.training.objective`).
    """

    epochs: int = 200
    batch: int = 128
    lr: float = 0.1
    schedule: str = "step"
    milestones: tuple[float, ...] = (0.6, 0.8)
    factor: float = 0.1
    warm_up: float = 0.0
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 1e-4
    decay_all: bool = True
    label_smoothing: float = 0.0
    ema: float = 0.0
    clip: float = 0.0
    accumulate: int = 1
    distill: float = 0.0
    temperature: float = 4.0
    precision: str = "float32"
    channels_last: bool = False
    compile: bool = False
    seed: int = 0
    warm_up_steps: int = 0
    cutmix: float = 0.0
    opt: str = "sgd"
    mixup: float = 0.0

    def __post_init__(self) -> None:
        """Raise a TrainingError for values out of range, or that do not go together."""
        check_precision(self.precision)
        if self.schedule not in SCHEDULES:
            raise TrainingError(f"schedule {self.schedule!r} is unknown; choose one of {', '.join(SCHEDULES)}")
        if self.opt not in OPTIMIZERS:
            raise TrainingError(f"optimizer {self.opt!r} is unknown; choose one of {', '.join(OPTIMIZERS)}")
        for name, (kinds, least, most, words) in _ALLOWED.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
                raise TrainingError(
                    f"{name} must be {words or f'a whole number from {least} to {most}'}, got {value!r}"
                )
        for name in ("nesterov", "decay_all", "channels_last", "compile"):
            if not isinstance(getattr(self, name), bool):
                raise TrainingError(f"{name} must be true or false, got {getattr(self, name)!r}")
        self._check_schedule()
        if self.nesterov and self.opt != "sgd":
            raise TrainingError(f"nesterov is of SGD, and the optimizer is {self.opt}; leave it out")
        if self.nesterov and not self.momentum:
            raise TrainingError("nesterov needs a momentum; give one, such as 0.9, or no nesterov")
        if self.batch % self.accumulate:
            raise TrainingError(
                f"a batch of {self.batch} cannot be cut into {self.accumulate} equal micro-batches; "
                "let accumulate divide batch"
            )

    def _check_schedule(self) -> None:
        if not _are_rising_shares(self.milestones):
            raise TrainingError(
                f"milestones must be rising shares of the run, such as 0.6, 0.8, got {self.milestones!r}"
            )
        object.__setattr__(self, "milestones", tuple(self.milestones))
        if self.warm_up and self.warm_up_steps:
            raise TrainingError(
                f"a warm-up of {self.warm_up:g} epochs and one of {self.warm_up_steps} steps; give one of them"
            )
        if (self.warm_up or self.warm_up_steps) and self.schedule == "one-cycle":
            length = f"{self.warm_up:g} epochs" if self.warm_up else f"{self.warm_up_steps} steps"
            raise TrainingError(f"a warm-up of {length} before one-cycle, which rises by itself; give 0")
        if self.warm_up and self.warm_up >= self.epochs:
            raise TrainingError(f"{self.warm_up:g} epochs of warm-up leave nothing of {self.epochs}; give fewer")

    @property
    def mixes(self) -> bool:
        """Whether images are mixed, so that they have two labels."""
        return bool(self.cutmix or self.mixup)

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON values; without those of :data:`LATER` that are the defaults, as in older files."""
        plain = {**dataclasses.asdict(self), "milestones": list(self.milestones)}
        usual = {field.name: field.default for field in dataclasses.fields(self)}
        return {name: value for name, value in plain.items() if name not in LATER or value != usual[name]}


def _are_rising_shares(values: object) -> bool:
    if not isinstance(values, (tuple, list)):
        return False
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    return numbers and all(0 < value < 1 for value in values) and list(values) == sorted(set(values))


_FLOAT = (int, float)
_LARGEST = sys.float_info.max
_BELOW_ONE = math.nextafter(1.0, 0.0)

_ALLOWED: Mapping[str, tuple[Any, float, float, str]] = {
    "epochs": (int, 0, 10**9, ""),
    "batch": (int, 1, 10**9, ""),
    "accumulate": (int, 1, 10**9, ""),
    "seed": (int, 0, 2**63 - 1, ""),
    "warm_up_steps": (int, 0, 10**9, ""),
    "lr": (_FLOAT, 0, _LARGEST, "a rate of 0 or more"),
    "factor": (_FLOAT, 0, _LARGEST, "a factor of 0 or more"),
    "warm_up": (_FLOAT, 0, _LARGEST, "a number of epochs"),
    "momentum": (_FLOAT, 0, _BELOW_ONE, "a number from 0 up to, but not including, 1"),
    "weight_decay": (_FLOAT, 0, _LARGEST, "a number of 0 or more"),
    "label_smoothing": (_FLOAT, 0, _BELOW_ONE, "a number from 0 up to, but not including, 1"),
    "ema": (_FLOAT, 0, _BELOW_ONE, "a decay from 0 (none) up to, but not including, 1"),
    "clip": (_FLOAT, 0, _LARGEST, "the largest norm of the gradient, or 0 for none"),
    "distill": (_FLOAT, 0, 1, "a weight from 0 to 1"),
    "temperature": (_FLOAT, 1e-6, _LARGEST, "a temperature of 1e-6 or more"),
    **dict.fromkeys(("cutmix", "mixup"), (_FLOAT, 0, 1, "a share of the images from 0 to 1")),
}

_CYCLE = TrainSettings(batch=256, lr=0.2, schedule="one-cycle", nesterov=True, weight_decay=5e-4, decay_all=False)

RECIPES: Mapping[str, TrainSettings] = {
    "paper": TrainSettings(),
    "brief": dataclasses.replace(_CYCLE, epochs=30, lr=0.05),
    "short": dataclasses.replace(_CYCLE, epochs=60, lr=0.1, distill=0.9, cutmix=0.5),
    "quick": dataclasses.replace(_CYCLE, epochs=100, batch=128, lr=0.1, distill=0.9),
    "ours": dataclasses.replace(_CYCLE, epochs=150, weight_decay=2e-4, distill=0.9, temperature=2.0),
    "patient": dataclasses.replace(_CYCLE, epochs=180, distill=0.9, cutmix=0.5),
    "scratch": dataclasses.replace(_CYCLE, epochs=120),
    "detection": TrainSettings(
        epochs=12, batch=2, lr=0.001, milestones=(8 / 12, 11 / 12), clip=35.0, temperature=1.0, warm_up_steps=500
    ),
}
"""``paper``: 200 epochs at 0.1, divided by ten at 60 and 80 % of them. ``ours``: one cycle and a teacher, with the
weight decay and temperature that did best on images held out of training (``ifso repro recipe``). ``quick``: the first
one of ours, shorter. ``brief``: what a comparison of many networks can afford; no teacher. ``patient``: long, and the
teacher is asked about mixed images, the very pixels that the network sees (Beyer et al., 2022); it was not chosen on
held-out images. ``short``: a third of it, at half the rate. ``scratch``: for a network with random weights, which has
no teacher.
``detection``: the paper's for RetinaNet, 12 epochs at 0.001, divided by ten after 8 and 11; what it does not say, the
warm-up and the largest gradient, is MMDetection's.
"""


def training_recipe(name: str, **changes: Any) -> TrainSettings:
    """The recipe of that name with ``changes``.

    >>> training_recipe("paper", epochs=20).milestones
    (0.6, 0.8)
    >>> training_recipe("ours", opt="adamw").lr
    0.001
    """
    if name not in RECIPES:
        raise TrainingError(f"recipe {name!r} is unknown; choose one of {', '.join(RECIPES)}")
    known = {field.name for field in dataclasses.fields(TrainSettings)}
    unknown = sorted(set(changes) - known)
    if unknown:
        raise TrainingError(f"training has no setting {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    if changes.get("opt", "sgd") != "sgd":
        changes = {"lr": ADAM_RATE, "nesterov": False, **changes}
    return dataclasses.replace(RECIPES[name], **changes)
