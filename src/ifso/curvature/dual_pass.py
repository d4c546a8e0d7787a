"""One forward and one backward pass on dual numbers."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from ifso.common.torch_state import ALONE, undisturbed, without_checkpoints
from ifso.curvature.dual_mode import DualMode, Manner, below_other_modes
from ifso.curvature.forward_rules import load_forward_mode
from ifso.curvature.losses import LossFn, checked
from ifso.curvature.taps import Taps


def dual_pass(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    taps: Taps,
    manner: Manner,
    within: contextlib.AbstractContextManager[Any] | None = None,
) -> None:
    """Run the loss forward and backward; the taps collect. The pass is made ``within`` a context of its own."""
    load_forward_mode()
    with (
        undisturbed(model),
        torch.enable_grad(),
        sdpa_kernel(SDPBackend.MATH),
        without_checkpoints(),
        ALONE,
        forward_ad.dual_level(),
        within or contextlib.nullcontext(),
    ):
        with below_other_modes(DualMode(taps.plans, manner)):
            loss = checked(loss_fn(model, batch))
        grads = torch.autograd.grad(loss, list(taps.inputs.values()), allow_unused=True) if taps.inputs else ()
        for place, grad in zip(taps.inputs, grads, strict=True):
            taps.collect(place, grad)
    taps.plans.clear()  # they hold the taps, and with them all activations, until garbage is collected
