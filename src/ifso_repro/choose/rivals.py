"""Torch-Pruning as its documentation has it, taken to the share of MACs that is asked for; it need not be installed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from ifso.common.loss_fn import LossFn
from ifso.common.text import one_line
from ifso.errors import IfsoError
from ifso.pruning.recovery import recalibrate_

WANTED = "1.6.1"
CLOSE = 0.002
"""A network that keeps up to so much less than the share asked for is close enough …"""

TRIES = 14
"""… and so many pruning ratios are tried at most."""


@dataclass(frozen=True)
class Rival:
    """A class of ``torch_pruning.importance``, what it finds as gradients, and in words how it is run."""

    name: str
    importance: str
    gradients: str | None
    form: str


RIVALS = {
    rival.name: rival
    for rival in (
        Rival("tp-taylor", "GroupTaylorImportance", "mean", "gradients added up over all calibration batches"),
        Rival("tp-magnitude", "GroupMagnitudeImportance", None, ""),
        Rival(
            "tp-hessian", "GroupHessianImportance", "squared",
            "bug mended: squared gradients of all calibration images, one by one, where its own sum keeps the last",
        ),
    )
}  # fmt: skip
"""All with ``global_pruning`` and the final classifier left whole, batch norms recalibrated as ours are."""


@dataclass(frozen=True)
class Found:
    """A smaller network, the pruning ratio that made it, and the share of MACs it keeps."""

    model: nn.Module
    ratio: float
    kept: float


class Rivals:
    """Torch-Pruning's methods for one network. ``macs`` gives the share of MACs that a network keeps."""

    def __init__(
        self,
        model: nn.Module,
        example: Tensor,
        batches: Sequence[tuple[Tensor, Tensor]],
        loss_fn: LossFn,
        macs: Callable[[nn.Module], float],
    ) -> None:
        self._model, self._example, self._batches, self._loss_fn, self._macs = model, example, batches, loss_fn, macs

    @staticmethod
    def version() -> str | None:
        """Of the package that is installed, if one is."""
        try:
            return metadata.version("torch-pruning")
        except metadata.PackageNotFoundError:
            return None

    @staticmethod
    def absent() -> str | None:
        """Why it cannot be used, or None."""
        if find_spec("torch_pruning") is None:
            return f"Torch-Pruning is not installed: pip install torch-pruning=={WANTED}"
        return None

    def prune(self, rival: Rival, target: float) -> Found:
        """The network with the most MACs up to the target, its batch norms recalibrated."""
        gradients = None if rival.gradients is None else self.gradients(squared=rival.gradients == "squared")
        found = search(lambda ratio: self._attempt(rival, gradients, ratio), target)
        found.model.zero_grad()
        recalibrate_(found.model, self._loss_fn, self._batches)
        return found

    def _attempt(self, rival: Rival, gradients: dict[str, Tensor] | None, ratio: float) -> Found:
        library = import_module("torch_pruning")
        model = copy.deepcopy(self._model).eval()
        for name, parameter in model.named_parameters():
            parameter.grad = None if gradients is None else gradients[name].clone()
        pruner = library.pruner.BasePruner(
            model, self._example, importance=getattr(library.importance, rival.importance)(), global_pruning=True,
            pruning_ratio=ratio, ignored_layers=[self._classifier(model)], in_channel_groups={}, out_channel_groups={},
        )  # fmt: skip
        pruner.step()
        return Found(model, ratio, self._macs(model))

    def _classifier(self, model: nn.Module) -> nn.Module:
        """The last layer with as many outputs as the network."""
        with torch.no_grad():
            outputs = model(self._example).shape[-1]
        layers = [
            module for module in model.modules()
            if getattr(module, "out_features", getattr(module, "out_channels", None)) == outputs
        ]  # fmt: skip
        if not layers:
            raise IfsoError(f"{type(model).__name__} has no layer with {outputs} outputs that could be left whole")
        return layers[-1]

    def gradients(self, *, squared: bool) -> dict[str, Tensor]:
        """By parameter: the mean over batches of the gradient or, image by image, of its square; in eval mode."""
        model = copy.deepcopy(self._model).eval()
        named = dict(model.named_parameters())
        sums = {name: torch.zeros_like(parameter) for name, parameter in named.items()}
        batches: Sequence[Any] = self._batches
        if squared:
            batches = [part for x, y in batches for part in zip(x.split(1), y.split(1), strict=True)]
        for batch in batches:
            found = torch.autograd.grad(self._loss_fn(model, batch), list(named.values()), materialize_grads=True)
            for total, gradient in zip(sums.values(), found, strict=True):
                total += gradient.square() if squared else gradient
        return {name: total / len(batches) for name, total in sums.items()}


def search(attempt: Callable[[float], Found], target: float) -> Found:
    """By bisection, the attempt that keeps the largest share up to ``target``; one that fails was too much.

    >>> search(lambda ratio: Found(nn.Identity(), ratio, (1 - ratio) ** 2), 0.25).ratio
    0.5
    """
    low, high, ratio = 0.0, 1.0, 1 - math.sqrt(target)
    best: Found | None = None
    reason = f"it keeps more at every pruning ratio up to {1 - 2.0**-TRIES:.4f}"
    for _ in range(TRIES):
        try:
            found = attempt(ratio)
        except Exception as error:
            reason, high = f"{type(error).__name__}: {one_line(error)}", ratio
        else:
            if found.kept > target:
                low = ratio
            else:
                best, high = found if best is None or found.kept > best.kept else best, ratio
                if target - best.kept <= CLOSE:
                    break
        ratio = (low + high) / 2
    if best is None:
        raise IfsoError(f"Torch-Pruning did not get to {target:.0%} of the MACs: {reason}")
    return best
