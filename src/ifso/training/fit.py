"""Training a network, or several side by side on one GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ifso.curvature.losses import LossFn
from ifso.data.fitting import same_random_numbers
from ifso.errors import IfsoError, TrainingError
from ifso.training.crew import Crew
from ifso.training.lane import Epoch, Lane, Watch
from ifso.training.losses import classification
from ifso.training.mixing import MixedBatches
from ifso.training.settings import TrainSettings


def fit(
    model: nn.Module,
    batches: Iterable[Any],
    settings: TrainSettings,
    *,
    loss_fn: LossFn | None = None,
    watch: Watch | None = None,
) -> list[Epoch]:
    """Train ``model`` in place and in train mode for ``settings.epochs`` rounds over ``batches``.

    Afterwards modes are as before. The rate changes at every step if ``batches`` have a length, else once an epoch.
    Batches with ``set_epoch`` are told 0, 1, …, and dropout and what is random in batches follow ``settings.seed``, so
    that the same call gives the same weights; the global random states are left alone. On a GPU, batches held there
    (see :mod:`ifso.data`) are learned from in one CUDA graph a step. The loss is the cross entropy with the settings'
    label smoothing unless given; for distillation give ``loss_fn=distillation(teacher)``. With ``cutmix`` the batches
    must be mixed ones, as :func:`ifso.training.lessons.lessons` makes them.
    """
    if loss_fn is None and settings.distill:
        raise TrainingError(
            f"distill={settings.distill:g} needs a teacher; give loss_fn=distillation(teacher), or distill=0"
        )
    if settings.cutmix and not isinstance(batches, MixedBatches):
        raise TrainingError(
            f"cutmix={settings.cutmix:g} needs MixedBatches and a loss for them; give those of lessons()"
        )
    loss_fn = classification(settings.label_smoothing, mixed=settings.cutmix > 0) if loss_fn is None else loss_fn
    lane = Lane(model, batches, settings, loss_fn=loss_fn, watch=watch)
    failure = fit_side_by_side([lane])[0]
    if failure is not None:
        raise failure
    return lane.done


def fit_side_by_side(lanes: Sequence[Lane]) -> list[IfsoError | None]:
    """Run all lanes in turns, none waiting for another. What each failed with, or None.

    With dropout the numbers drawn by one network depend on the others.
    """
    failures: list[IfsoError | None] = [None] * len(lanes)
    crew = Crew()
    with own_random_numbers([lane.model for lane in lanes], lanes[0].settings.seed if lanes else 0):
        for number, lane in enumerate(lanes):
            crew.add(lane, partial(failures.__setitem__, number))
        try:
            while crew.size:
                crew.turn()
        finally:
            crew.close()
    return failures


@contextmanager
def own_random_numbers(models: Sequence[nn.Module], seed: int) -> Iterator[None]:
    """Within it torch's random numbers follow ``seed``; then the global states, also numpy's and Python's, are back."""
    devices = sorted({p.device for model in models for p in model.parameters() if p.is_cuda}, key=str)
    with same_random_numbers(), torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
