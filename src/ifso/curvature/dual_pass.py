"""One forward and one backward pass on dual numbers."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointError

from ifso.curvature.dual_mode import DualMode, Manner, below_other_modes
from ifso.curvature.losses import LossFn, checked, undisturbed
from ifso.curvature.taps import Taps
from ifso.errors import ScoreError
from ifso.graph.running import ALONE


def dual_pass(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    taps: Taps,
    manner: Manner,
    within: contextlib.AbstractContextManager[Any] | None = None,
) -> None:
    """Run the loss forward and backward; the taps collect. The pass is made ``within`` a context of its own."""
    _load_forward_mode()
    with (
        explained(),
        undisturbed(model),
        torch.enable_grad(),
        sdpa_kernel(SDPBackend.MATH),
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


@cache
def _load_forward_mode() -> None:
    """Let torch load its formulas now: it warns of a deprecated function that it calls itself in doing so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        import_module("torch._decomp.decompositions_for_jvp")


_SIGNS = ("forward AD", "jvp", "forward-mode", "forward mode", "Batching rule", "functorch", "checkpoint")


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """A part of the model that cannot be differentiated twice is refused in one line; other errors pass."""
    try:
        yield
    except (NotImplementedError, CheckpointError, RuntimeError) as error:
        text = " ".join(str(error).split())
        if not isinstance(error, (NotImplementedError, CheckpointError)) and not any(sign in text for sign in _SIGNS):
            raise
        raise ScoreError(
            f"the model or loss uses something that cannot be differentiated twice this way: {text[:200]}; "
            "write that operation out in plain tensor operations, or switch off checkpointing and compilation"
        ) from error
