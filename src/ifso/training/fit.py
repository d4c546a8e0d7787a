"""Training with SGD: enough for a small network, for fine-tuning after a removal, and for distillation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ifso.curvature.losses import LossFn, same_modes
from ifso.errors import DataError, DivergedError, IfsoError
from ifso.training.losses import cross_entropy

Schedule = Literal["cosine", "one-cycle", "constant"]
RISE = 0.25
"""The share of a one-cycle run in which the rate rises."""


@dataclass(frozen=True)
class Epoch:
    """An epoch that is over: its number from 1, the mean loss of its batches, the rate it ended with, its seconds."""

    number: int
    loss: float
    lr: float
    seconds: float


@dataclass(frozen=True)
class Sgd:
    """SGD with momentum, and weight decay on all parameters; ``lr`` is the highest rate (see :func:`rate`)."""

    lr: float
    schedule: Schedule = "cosine"
    momentum: float = 0.9
    weight_decay: float = 5e-4
    nesterov: bool = True

    def optimizer(self, model: nn.Module) -> torch.optim.SGD:
        """For the parameters of ``model`` that take part in training."""
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return torch.optim.SGD(
            parameters, self.lr, momentum=self.momentum, weight_decay=self.weight_decay, nesterov=self.nesterov
        )


def rate(progress: float, schedule: Schedule) -> float:
    """The rate as a share of the highest, when the share ``progress`` of all steps is done.

    ``cosine`` falls from 1 to 0; ``one-cycle`` rises in a straight line first, then falls along a cosine.

    >>> [round(rate(part / 4, "cosine"), 3) for part in range(5)]
    [1.0, 0.854, 0.5, 0.146, 0.0]
    >>> [round(rate(part / 8, "one-cycle"), 3) for part in (0, 1, 2, 5, 8)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    if schedule == "constant":
        return 1.0
    start = RISE if schedule == "one-cycle" else 0.0
    if progress < start:
        return progress / start
    return 0.5 + 0.5 * math.cos(math.pi * (progress - start) / (1 - start))


def fit(
    model: nn.Module,
    batches: Iterable[Any],
    epochs: int,
    *,
    lr: float = 0.1,
    sgd: Sgd | None = None,
    loss_fn: LossFn = cross_entropy,
    seed: int = 0,
    on_epoch: Callable[[Epoch], None] | None = None,
) -> list[Epoch]:
    """Train ``model`` in place and in train mode for ``epochs`` rounds over ``batches``; modes are then as before.

    ``sgd`` is ``Sgd(lr)`` unless given; its rate changes at every step if ``batches`` have a length, else once an
    epoch. Batches with ``set_epoch`` are told 0, 1, …, and dropout follows ``seed``, so that the same call gives the
    same weights; the global random state is left alone. For distillation give ``loss_fn=distillation(teacher)``.
    """
    trainer = _Trainer(model, batches, loss_fn, sgd or Sgd(lr), epochs)
    devices = sorted({tensor.device for tensor in model.parameters() if tensor.is_cuda}, key=str)
    done = []
    with same_modes(model), torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        model.train()
        for number in range(epochs):
            done.append(trainer.epoch(number))
            if on_epoch is not None:
                on_epoch(done[-1])
    return done


class _Trainer:
    def __init__(self, model: nn.Module, batches: Any, loss_fn: LossFn, sgd: Sgd, epochs: int) -> None:
        if epochs < 0 or not 0 <= sgd.lr < math.inf:
            raise IfsoError(f"{epochs} epochs at a rate of {sgd.lr}: neither may be negative or infinite")
        self._model, self._batches, self._loss_fn, self._sgd, self._epochs = model, batches, loss_fn, sgd, epochs
        self._optimizer = sgd.optimizer(model)
        self._steps = len(batches) if hasattr(batches, "__len__") else 1

    def epoch(self, number: int) -> Epoch:
        """Epoch ``number`` from 0; the loss is looked at once, at its end, so that a GPU need not wait."""
        if hasattr(self._batches, "set_epoch"):
            self._batches.set_epoch(number)
        begun, total, count = time.perf_counter(), torch.zeros(()), 0
        for batch in self._batches:
            part = min(count / self._steps, 1.0)
            loss = self._step(batch, self._sgd.lr * rate((number + part) / self._epochs, self._sgd.schedule))
            total, count = loss if count == 0 else total + loss, count + 1
        if not count:
            raise DataError("there is nothing to train on: the batches ran out before the first one")
        mean = float(total) / count
        if not math.isfinite(mean):
            raise DivergedError(
                f"the loss was {mean} in epoch {number + 1} of training; lower the learning rate ({self._sgd.lr})"
            )
        return Epoch(number + 1, mean, self._optimizer.param_groups[0]["lr"], time.perf_counter() - begun)

    def _step(self, batch: Any, lr: float) -> Tensor:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.zero_grad()
        loss = self._loss_fn(self._model, batch)
        loss.backward()
        self._optimizer.step()
        return loss.detach()
