"""A last step on request: the smaller network is taught by the unpruned one, on the same unlabelled batches."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifso.common.batches import on_device
from ifso.common.loss_fn import LossFn, output_tensors, outputs_of, steady_
from ifso.common.torch_state import same_modes
from ifso.errors import ScoreError
from ifso.pruning.recovery import norms_of

RATE = 5e-3
"""The highest learning rate of Adam for a kernel, in shares of the root mean square of its weights."""


def distil_(
    model: nn.Module, teacher: nn.Module, loss_fn: LossFn, batches: Sequence[Any], steps: int, seed: int
) -> None:
    """Take steps towards the teacher's outputs, in place. Labels play no part: ``loss_fn`` only calls the network.

    Args:
        model: the smaller network.
        teacher: the unpruned one.
        loss_fn: ``loss_fn(model, batch)`` runs a network on a batch.
        batches: gone through again and again, in random order.
        steps: how many, one batch each, with Adam and a learning rate that falls to zero along half a cosine.
        seed: of the order.

    Raises:
        ScoreError: if the network has no outputs beside its loss.
    """
    device = next(model.parameters()).device
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": [one], "lr": RATE * _size(one)} for one in parameters]
    optimizer = torch.optim.Adam(groups)
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / steps)) / 2)
    teacher = copy.deepcopy(teacher).to(device)
    with same_modes(model):
        first = on_device(batches[0], device)
        for network in (model, teacher):
            steady_(network, loss_fn, first)
            for norm in norms_of(network):
                norm.train()
        for number in _order(len(batches), steps, seed):
            batch = on_device(batches[number], device)
            with torch.no_grad():
                wanted = _outputs(teacher, loss_fn, batch)
            with torch.enable_grad():
                found = _outputs(model, loss_fn, batch)
                loss = torch.stack([distance(one, other) for one, other in zip(found, wanted, strict=True)]).sum()
                gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
            falling.step()
            optimizer.zero_grad()


def is_better(after: Mapping[str, float], before: Mapping[str, float]) -> bool:
    """Return whether the first number is higher or, of a loss or an error, lower.

    >>> is_better({"accuracy": 70.0}, {"accuracy": 68.0}), is_better({"loss": 1.2}, {"loss": 1.1})
    (True, False)
    """
    name = next(iter(after))
    return after[name] < before[name] if is_loss(name) else after[name] > before[name]


def is_loss(name: str) -> bool:
    """Return whether less is better of a measure of that name.

    >>> is_loss("test_loss"), is_loss("accuracy")
    (True, False)
    """
    return "loss" in name or "error" in name


def _size(parameter: Tensor) -> float:
    """The root mean square of a kernel, or a tenth for what has one dim: norms and biases."""
    return max(float(parameter.detach().square().mean().sqrt()), 1e-3) if parameter.dim() > 1 else 0.1


def _order(batches: int, steps: int, seed: int) -> Iterator[int]:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    for start in range(0, steps, batches):
        order = torch.randperm(batches, generator=generator, device="cpu").tolist()
        yield from order[: steps - start]


def _outputs(network: nn.Module, loss_fn: LossFn, batch: Any) -> list[Tensor]:
    with outputs_of(network) as caught:
        loss_fn(network, batch)
    found = output_tensors(caught)
    if not found:
        raise ScoreError("recover needs a network that returns its outputs; this one returns nothing but its loss")
    return found


def distance(found: Tensor, wanted: Tensor) -> Tensor:
    """Half the squared distance, in units of the teacher's spread."""
    return F.mse_loss(found, wanted) / (2 * wanted.float().var().clamp_min(1e-12))
