"""The optimizer for the settings of a run, its learning rate over the epochs, and the moving average of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ifso.common.module_state import tensor_slots
from ifso.common.tensors import to_float32
from ifso.errors import TrainingError
from ifso.training.checkpoint import copy_tensors_
from ifso.training.settings import TrainSettings


def no_parameters_error(model: nn.Module) -> TrainingError:
    """The error for a network without parameters to train."""
    return TrainingError(
        f"{type(model).__name__} has no parameter to train; set requires_grad of some, or give another network"
    )


def optimizer_of(
    model: nn.Module, settings: TrainSettings, *, lr: float | Tensor | None = None
) -> torch.optim.Optimizer:
    """The optimizer of the settings for the parameters of ``model`` that take part in training, each once.

    SGD with gradient g, weight decay λ, momentum μ and rate η: g ← g + λw, v ← μv + g, w ← w − ηv (``nesterov``:
    w ← w − η(g + μv)). Adam and AdamW have the first β from ``momentum``, the second is 0.999. With
    ``decay_all=False`` parameters of at most one dimension, norms and biases, form a second group with λ = 0.

    ``lr`` is the rate to begin with (the settings' own unless given). As a float32 tensor on the model's device it
    is read at each step, also by a step captured in a CUDA graph. The whole state is there from the start, as zeros,
    so that the first step is like any other; on a GPU one kernel updates everything.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise no_parameters_error(model)
    rate = settings.lr if lr is None else lr
    groups = [{**group, "lr": rate} for group in _groups(parameters, settings)]
    on_gpu = all(parameter.is_cuda and parameter.is_floating_point() for parameter in parameters)
    optimizer: torch.optim.Optimizer
    if settings.opt == "sgd":
        optimizer = torch.optim.SGD(
            groups, rate, momentum=settings.momentum, nesterov=settings.nesterov, fused=on_gpu or None
        )
        zeros = ["momentum_buffer"] if settings.momentum else []
    else:
        kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[settings.opt]
        optimizer = kind(groups, rate, betas=(settings.momentum, 0.999), fused=on_gpu or None, capturable=on_gpu)
        zeros = ["exp_avg", "exp_avg_sq"]
        for parameter in parameters:
            optimizer.state[parameter]["step"] = torch.zeros((), device=parameter.device if on_gpu else None)
    for parameter in parameters if zeros else ():
        optimizer.state[parameter] |= {name: torch.zeros_like(parameter, requires_grad=False) for name in zeros}
    return optimizer


def set_rate_(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate: in place where it is a tensor, so that a captured step sees it."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def momenta(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What the optimizer remembers of every parameter, by its name: the tensors themselves, not copies.

    Of SGD it is the momentum; of others every tensor has its own name behind that of the parameter.
    """
    found = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[name if key == "momentum_buffer" else f"{name}.{key}"] = value
    return found


def _groups(parameters: list[nn.Parameter], settings: TrainSettings) -> list[dict[str, object]]:
    """Parameters that decay, and those that do not; no group is empty."""
    decaying = [parameter for parameter in parameters if settings.decay_all or parameter.dim() > 1]
    spared = [parameter for parameter in parameters if not settings.decay_all and parameter.dim() <= 1]
    groups = ((decaying, settings.weight_decay), (spared, 0.0))
    return [{"params": members, "weight_decay": decay} for members, decay in groups if members]


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
    if settings.schedule == "one-cycle":
        start = RISE
    else:
        warm_up = settings.warm_up + settings.warm_up_steps / steps_per_epoch
        start = warm_up / settings.epochs if warm_up else 0.0
    risen = progress / start if progress < start else 1.0
    return settings.lr * risen * _decay(settings, progress, start)


def rates(settings: TrainSettings, steps_per_epoch: int) -> list[float]:
    """The rate of every step of the run, ``epochs`` · ``steps_per_epoch`` of them.

    >>> rates(TrainSettings(epochs=5, lr=1.0), 2)
    [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.1, 0.1, 0.010000000000000002, 0.010000000000000002]
    """
    if steps_per_epoch < 1:
        raise TrainingError(f"an epoch of {steps_per_epoch} steps trains nothing; give more images or smaller batches")
    total = settings.epochs * steps_per_epoch
    return [rate(settings, step / total, steps_per_epoch) for step in range(total)]


def check_warm_up(settings: TrainSettings, steps_per_epoch: int | None) -> None:
    """Raise if ``warm_up_steps`` take the whole run, or if the length of an epoch is unknown (None)."""
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


def _decay(settings: TrainSettings, progress: float, start: float) -> float:
    """The rate as a share of the highest, apart from its rise, which is over at ``start``."""
    if settings.schedule == "step":
        return settings.factor ** sum(progress >= milestone - _ROUNDING for milestone in settings.milestones)
    if settings.schedule == "constant" or progress <= start:
        return 1.0
    return 0.5 + 0.5 * math.cos(math.pi * (progress - start) / (1 - start))


AVERAGE, UPDATES = "average.", "updates"


class Ema:
    """The exponential moving average ā of a model's parameters and of the statistics of its batch norms.

    At update t = 0, 1, …: ā ← δā + (1 − δ)w with δ = min(``decay``, (1 + t)/(10 + t)), so that what the model began
    with is soon forgotten. Other buffers (counters, tables, masks) are copied. Weights in half precision are averaged
    in float32, where small changes are not lost.

    ``update`` makes no decision on the CPU and writes in place, so that a CUDA graph may hold it; tensors of a kind are
    written by one kernel.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.constant_(model.weight, 1.0)
    >>> average = Ema(model, 0.9)
    >>> _ = nn.init.constant_(model.weight, 2.0)
    >>> average.update()
    >>> with average.applied():
    ...     print(round(model.weight.item(), 4))
    1.9
    >>> model.weight.item()
    2.0
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay = decay
        self._slots: dict[str, tuple[nn.Module, str]] = {}
        for name, module, key in tensor_slots(model):
            self._slots.setdefault(name, (module, key))
        live = self._live()
        self._average = {name: to_float32(tensor.detach()).clone() for name, tensor in live.items()}
        self._alike: dict[tuple[bool, torch.device, torch.dtype], list[str]] = {}
        for name, mean in self._average.items():
            module, key = self._slots[name]
            statistics = isinstance(module, _NormBase) and key in {"running_mean", "running_var"}
            averaged = mean.is_floating_point() and (key in module._parameters or statistics)
            self._alike.setdefault((averaged, mean.device, mean.dtype), []).append(name)
        device = next(iter(live.values())).device if live else torch.device("cpu")
        self._updates = torch.zeros((), dtype=torch.int64, device=device)
        self._applied = False

    @torch.no_grad()
    def update(self) -> None:
        """Take the model's present weights into the average."""
        self._check_not_applied()
        live, updates = self._live(), self._updates.double()
        weight = 1 - ((1 + updates) / (10 + updates)).clamp(max=self._decay)
        for (averaged, device, dtype), names in self._alike.items():
            means, now = ([tensors[name] for name in names] for tensors in (self._average, live))
            if averaged:
                step = torch._foreach_sub([tensor.to(dtype) for tensor in now], means)
                torch._foreach_mul_(step, weight.to(device, dtype))
                torch._foreach_add_(means, step)
            else:
                torch._foreach_copy_(means, now)
        self._updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model hold the average in the same memory for a while, then its own weights again."""
        self._check_not_applied()
        live = self._live()
        own = {name: tensor.detach().clone() for name, tensor in live.items()}
        self._applied = True
        try:
            _copy_(live, self._average)
            yield
        finally:
            _copy_(self._live(), own)
            self._applied = False

    def keep_(self) -> None:
        """Copy the average into the model."""
        self._check_not_applied()
        _copy_(self._live(), self._average)

    def state_dict(self) -> dict[str, Tensor]:
        """The number of updates and the average of every tensor: not copied."""
        return {UPDATES: self._updates, **{f"{AVERAGE}{name}": mean for name, mean in self._average.items()}}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from the :meth:`state_dict` of a model of the same shape."""
        copy_tensors_(self.state_dict(), state)

    def _live(self) -> dict[str, Tensor]:
        """The model's tensors, looked up anew: buffers may be replaced when a model is moved."""
        return {name: getattr(module, key) for name, (module, key) in self._slots.items()}

    def _check_not_applied(self) -> None:
        if self._applied:
            raise TrainingError("the model holds its average now; leave `applied()` before the next update")


@torch.no_grad()
def _copy_(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
    torch._foreach_copy_(list(targets.values()), [sources[name] for name in targets])
