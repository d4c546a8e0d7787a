"""What helps the smaller network before it is trained again, what undoes it, and numbers that are not finite."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifso.common.batches import not_finite, on_device
from ifso.common.distributed import average_over_ranks_
from ifso.common.loss_fn import LossFn, output_tensors, outputs_of, scalar, steady_
from ifso.common.module_state import named_tensors
from ifso.common.torch_state import same_modes, undisturbed
from ifso.curvature.loss_change import true_loss_change
from ifso.curvature.solvers import SolverWarning, create_solver
from ifso.errors import ScoreError, WeightsError
from ifso.graph.channel_graph import ChannelGraph

ITERATIONS = 20
"""Of conjugate gradients for ΔW."""

Evaluate = Callable[[nn.Module], Mapping[str, float]]


def norms_of(model: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """The batch norms that keep running statistics."""
    kind = nn.modules.batchnorm._BatchNorm
    return [module for module in model.modules() if isinstance(module, kind) and module.running_mean is not None]


@torch.no_grad()
def recalibrate_(model: nn.Module, loss_fn: LossFn, batches: Iterable[Any]) -> None:
    """Give batch norms the statistics that they have now: the mean over the batches of all ranks."""
    norms = norms_of(model)
    momenta = [norm.momentum for norm in norms]
    with same_modes(model):
        try:
            for number, batch in enumerate(batches):
                if not number:
                    steady_(model, loss_fn, batch)
                    for norm in norms:
                        norm.reset_running_stats()
                        norm.momentum = None
                        norm.train()
                loss_fn(model, batch)
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
    average_over_ranks_(buffer for buffer in model.buffers() if buffer.is_floating_point())


def mean_loss(model: nn.Module, loss_fn: LossFn, batches: Sequence[Any]) -> float:
    """The mean loss in eval mode, or in train mode where the model has no loss in eval mode."""
    with same_modes(model):
        steady_(model, loss_fn, batches[0])
        with undisturbed(model), torch.no_grad():
            losses = [scalar(loss_fn(model, batch)) for batch in batches]
        return float(torch.stack([loss.double() for loss in losses]).mean())


def update_weights_(
    model: nn.Module, graph: ChannelGraph, loss_fn: LossFn, batches: Sequence[Any], damping: float
) -> float:
    """W + ΔW of Proposition 1, ΔW = −(C + λI)⁻¹g over the surviving weights; the norm of ΔW over that of W.

    C is the Gauss-Newton matrix in eval mode, the inverse a few iterations of conjugate gradients: enough of it, and
    far from where the quadratic model ends.
    """
    with same_modes(model), warnings.catch_warnings():
        warnings.simplefilter("ignore", SolverWarning)
        steady_(model, loss_fn, batches[0])
        size = _norm(parameter.detach() for parameter in model.parameters())
        solver = create_solver("cg", iterations=ITERATIONS)
        change = true_loss_change(
            model, graph, graph.keep_all(), loss_fn, batches, solver, path_steps=1, damping=damping, apply=True
        )
    return _norm(change.weight_update.values()) / size


def _norm(parts: Iterable[Tensor]) -> float:
    return float(torch.stack([part.double().square().sum() for part in parts]).sum().sqrt())


class Snapshot:
    """A copy in memory of tensors that change in place, to return to. ``live`` gives them by name."""

    def __init__(self, live: Callable[[], dict[str, Tensor]]) -> None:
        self._live = live
        self.copies: dict[str, Tensor] = {}
        self.renew()

    @torch.no_grad()
    def renew(self) -> None:
        """Copy again; memory is only taken where shapes have changed."""
        live = self._live()
        shapes = [[(name, tensor.shape) for name, tensor in side.items()] for side in (live, self.copies)]
        if shapes[0] != shapes[1]:
            self.copies = {name: tensor.clone() for name, tensor in live.items()}
            return
        torch._foreach_copy_(list(self.copies.values()), list(live.values()))

    @torch.no_grad()
    def restore_(self) -> None:
        """Back to the copy."""
        for name, tensor in self._live().items():
            if name in self.copies:
                tensor.copy_(self.copies[name])


class Undo(Snapshot):
    """The weights as they were, should a change have done harm."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(lambda: named_tensors(model))

    def __call__(self) -> None:
        """Back to then."""
        self.restore_()


LOOK_FOR = 20.0
"""Seconds that are spent on looking for a bad batch after a training has failed."""


def refuse_spoilt_weights(model: nn.Module) -> None:
    """WeightsError that names the first parameter or buffer with NaN or infinity in it."""
    for name, tensor in named_tensors(model).items():
        if not tensor.is_meta and bool(not_finite(tensor)):
            raise WeightsError(f"{name} of the network holds NaN or infinity; give other weights")


def first_bad(batches: Iterable[Any]) -> int | None:
    """The number, from 0, of the first batch that holds NaN or infinity; None if none is found in good time."""
    began = time.monotonic()
    for number, batch in enumerate(batches):
        if bool(not_finite(batch)):
            return number
        if time.monotonic() - began > LOOK_FOR:
            return None
    return None


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
