"""SGD for the settings of a run, and its learning rate over the epochs."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ifso.errors import TrainingError
from ifso.training.settings import TrainSettings


def untrainable(model: nn.Module) -> TrainingError:
    """What to say of a network without parameters."""
    return TrainingError(
        f"{type(model).__name__} has no parameter to train; set requires_grad of some, or give another network"
    )


def sgd(model: nn.Module, settings: TrainSettings, *, lr: float | Tensor | None = None) -> torch.optim.SGD:
    """SGD with momentum for the parameters of ``model`` that take part in training, each once.

    With gradient g, weight decay λ, momentum μ and rate η: g ← g + λw, v ← μv + g, w ← w − ηv (``nesterov``:
    w ← w − η(g + μv)). With ``decay_all=False`` parameters of at most one dimension, norms and biases, form a second
    group with λ = 0.

    ``lr`` is the rate to begin with (the settings' own unless given). As a float32 tensor on the model's device it
    is read at each step, also by a step captured in a CUDA graph. The momentum v is there from the start, as zeros,
    so that the first step is like any other; on a GPU one kernel updates everything.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise untrainable(model)
    rate = settings.lr if lr is None else lr
    optimizer = torch.optim.SGD(
        [{**group, "lr": rate} for group in _groups(parameters, settings)],
        rate,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        fused=all(parameter.is_cuda and parameter.is_floating_point() for parameter in parameters) or None,
    )
    if settings.momentum:
        for parameter in parameters:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
    return optimizer


def set_rate_(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Go on with the rate ``lr``: where the rate is a tensor, in place, so that a captured step sees it."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def momenta(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The momentum of every parameter by its name: the tensors themselves, to be stored or filled again in place."""
    return {
        name: optimizer.state[parameter]["momentum_buffer"]
        for name, parameter in model.named_parameters()
        if "momentum_buffer" in optimizer.state.get(parameter, {})
    }


def _groups(parameters: list[nn.Parameter], settings: TrainSettings) -> list[dict[str, object]]:
    """Parameters that decay, and those that do not; no group is empty."""
    spared = [parameter for parameter in parameters if not settings.decay_all and parameter.dim() <= 1]
    known = {id(parameter) for parameter in spared}
    decaying = [parameter for parameter in parameters if id(parameter) not in known]
    found = ((decaying, settings.weight_decay), (spared, 0.0))
    return [{"params": members, "weight_decay": decay} for members, decay in found if members]


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
