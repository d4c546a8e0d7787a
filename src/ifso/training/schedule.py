"""The learning rate over a run: in steps, along a cosine, in one cycle, or constant, with an optional warm-up."""

from __future__ import annotations

import math

from ifso.errors import TrainingError
from ifso.training.settings import TrainSettings

RISE = 0.25
"""The share of a one-cycle run in which the rate rises."""

_ROUNDING = 1e-9
"""A milestone is reached when the progress is this close to it: far less than a step, far more than rounding."""


def rate(settings: TrainSettings, progress: float, steps_per_epoch: int = 1) -> float:
    """The learning rate when the share ``progress`` of all steps is done, from 0 (before the first) to 1.

    ``step`` multiplies ``lr`` by ``factor`` at every milestone, ``cosine`` falls to 0 as (1 + cos πp)/2, ``one-cycle``
    rises in a straight line over the first quarter and then falls along a cosine, ``constant`` stays. Over
    ``warm_up`` epochs, or ``warm_up_steps`` steps, the rate first rises in a straight line from 0; milestones stay
    where they are, a cosine takes what is left of the run. (``one-cycle`` has its own rise: :class:`TrainSettings`
    refuses a warm-up with it.)

    >>> paper = TrainSettings()
    >>> [round(rate(paper, epoch / 200), 5) for epoch in (0, 119.99, 120, 159.99, 160, 200)]
    [0.1, 0.1, 0.01, 0.01, 0.001, 0.001]
    >>> [round(rate(TrainSettings(lr=1, schedule="one-cycle"), part / 8), 3) for part in (0, 1, 2, 5, 8)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    >>> [round(rate(TrainSettings(lr=1, schedule="cosine", warm_up=50), part / 8), 3) for part in (0, 1, 2, 5, 8)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    progress = min(max(progress, 0.0), 1.0)
    start = _rise(settings, steps_per_epoch)
    risen = progress / start if progress < start else 1.0
    return settings.lr * risen * _share(settings, progress, start)


def rates(settings: TrainSettings, steps_per_epoch: int) -> list[float]:
    """The rate of every step of the run, ``epochs`` · ``steps_per_epoch`` of them.

    >>> rates(TrainSettings(epochs=5, lr=1.0), 2)
    [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.1, 0.1, 0.010000000000000002, 0.010000000000000002]
    """
    if steps_per_epoch < 1:
        raise TrainingError(f"an epoch of {steps_per_epoch} steps trains nothing; give more images or smaller batches")
    total = settings.epochs * steps_per_epoch
    return [rate(settings, step / total, steps_per_epoch) for step in range(total)]


def refuse_long_warm_up(settings: TrainSettings, steps_per_epoch: int | None) -> None:
    """One clear line if ``warm_up_steps`` take the whole run, or nobody knows how many steps an epoch has (None)."""
    if not settings.warm_up_steps or not settings.epochs:
        return
    if steps_per_epoch is None:
        raise TrainingError(
            f"{settings.warm_up_steps} steps of warm-up need batches with a length; give them one (len), or the "
            "warm-up in epochs"
        )
    total = settings.epochs * steps_per_epoch
    if settings.warm_up_steps >= total:
        raise TrainingError(
            f"{settings.warm_up_steps} steps of warm-up leave nothing of the {total} of the run; give fewer "
            "(--warm-up-steps)"
        )


def _rise(settings: TrainSettings, steps_per_epoch: int) -> float:
    """The share of the run in which the rate rises."""
    if settings.schedule == "one-cycle":
        return RISE
    epochs = settings.warm_up + settings.warm_up_steps / steps_per_epoch
    return epochs / settings.epochs if epochs else 0.0


def _share(settings: TrainSettings, progress: float, start: float) -> float:
    """The rate as a share of the highest, but for its rise, which is over at ``start``."""
    if settings.schedule == "step":
        return settings.factor ** sum(progress >= milestone - _ROUNDING for milestone in settings.milestones)
    if settings.schedule == "constant" or progress <= start:
        return 1.0
    return 0.5 + 0.5 * math.cos(math.pi * (progress - start) / (1 - start))
