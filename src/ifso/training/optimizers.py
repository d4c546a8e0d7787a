"""SGD for a run's settings: what decays and what does not, with a rate that a CUDA graph can be told anew."""

from __future__ import annotations

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
