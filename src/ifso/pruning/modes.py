"""Modes in which a network gives the same loss each time it is asked."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ifso.common.torch_state import undisturbed
from ifso.curvature.losses import LossFn, scalar

_RANDOM = ("drop", "stochasticdepth")
"""Beginnings or parts of the class names of modules that leave something out at random."""


def steady_(model: nn.Module, loss_fn: LossFn, batch: Any) -> None:
    """Eval mode or, for a model that has no loss there (a detector), train mode with dropout off."""
    model.eval()
    try:
        with torch.no_grad(), undisturbed(model):
            scalar(loss_fn(model, batch))
    except Exception:
        model.train()
        for module in model.modules():
            if any(sign in type(module).__name__.lower() for sign in _RANDOM) and not list(module.children()):
                module.eval()
