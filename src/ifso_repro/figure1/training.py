"""Training to convergence, with every evaluation of the gradient counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ifso_repro.figure1.settings import Stop

ADAM_RATE = 1e-2
_HISTORY = 30


@dataclass(frozen=True)
class Descent:
    """One loss for each evaluation of the gradient, and the largest entry of the last gradient."""

    losses: tuple[float, ...]
    largest_gradient: float
    converged: bool

    @property
    def last(self) -> float:
        """The loss at the end, which is what counts: no best of all."""
        return self.losses[-1]


def lbfgs_(model: nn.Module, loss: Callable[[], Tensor], stop: Stop) -> Descent:
    """L-BFGS with a strong-Wolfe line search until it has converged.

    Its memory is dropped after each ``stop.patience`` evaluations, where it may have got stuck at a kink of ReLU.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    losses: list[float] = []

    def closure() -> Tensor:
        value = _backward(parameters, loss)
        losses.append(float(value))
        return value

    while True:
        start = len(losses)
        _lbfgs(parameters, min(stop.patience, max(1, stop.most - start)), stop.gradient).step(closure)
        closure()
        largest = _largest(parameters)
        converged = largest <= stop.gradient or losses[start] - losses[-1] < stop.fall
        if converged or len(losses) >= stop.most:
            return Descent(tuple(losses), largest, converged)


def _lbfgs(parameters: list[nn.Parameter], evaluations: int, gradient: float) -> torch.optim.LBFGS:
    return torch.optim.LBFGS(
        parameters,
        max_iter=evaluations,
        max_eval=evaluations,
        history_size=_HISTORY,
        tolerance_grad=gradient,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )


def adam_(model: nn.Module, loss: Callable[[], Tensor], steps: int) -> Descent:
    """Adam from a rate of 0.01 down to 0 along a cosine: what a first-order trainer needs."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(parameters, ADAM_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
    losses = []
    for _ in range(steps):
        losses.append(float(_backward(parameters, loss)))
        optimizer.step()
        schedule.step()
    losses.append(float(_backward(parameters, loss)))
    return Descent(tuple(losses), _largest(parameters), converged=False)


def _largest(parameters: list[nn.Parameter]) -> float:
    return max(float(parameter.grad.abs().max()) for parameter in parameters if parameter.grad is not None)


def _backward(parameters: list[nn.Parameter], loss: Callable[[], Tensor]) -> Tensor:
    for parameter in parameters:
        parameter.grad = None
    value = loss()
    value.backward()
    return value.detach()


def evaluations_until(losses: Sequence[float], target: float) -> int | None:
    """How many evaluations it took to see a loss of at most ``target``; None if it was never seen.

    >>> evaluations_until([3.0, 2.0, 1.0], 2.5)
    2
    """
    return next((place for place, loss in enumerate(losses, 1) if loss <= target), None)
