"""Is the smaller network what it should be: the same function, the promised cost?"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ifso.common.loss_fn import LossFn, outputs_of, scalar, steady_
from ifso.common.tensors import map_tensors
from ifso.common.torch_state import full_float32, same_modes, undisturbed
from ifso.errors import VerificationError
from ifso.pruning.shrinking_network import ShrinkingNetwork
from ifso.surgery.verify import as_float64, in_float64

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
ROUGH = 5e-2
"""For outputs in half precision."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at; ``error`` is its size, if it has one."""

    name: str
    passed: bool
    detail: str
    error: float = 0.0


def outputs(network: ShrinkingNetwork, loss_fn: LossFn, batch: Any) -> list[Tensor]:
    """Everything the model gives on a batch, and the loss. In eval mode or, for a model with no loss there, train mode.

    Dropout is off, and so is TF32 in convolutions. A model whose course values decide, such as a detector that sorts
    boxes, computes in float64 if it can, so that rounding decides nothing.
    """
    with same_modes(network.model), full_float32(), network.running():
        if network.graph.on_real_tensors:
            with suppress(Exception), in_float64(network.model):
                return _run(network.model, loss_fn, map_tensors(batch, as_float64))
        return _run(network.model, loss_fn, batch)


@torch.no_grad()
def _run(model: nn.Module, loss_fn: LossFn, batch: Any) -> list[Tensor]:
    steady_(model, loss_fn, batch)
    with undisturbed(model), outputs_of(model) as found:
        loss = loss_fn(model, batch)
    return [leaf.detach().clone() for leaf in tree_leaves([*found, scalar(loss)]) if isinstance(leaf, Tensor)]


def compare(masked: list[Tensor], compacted: list[Tensor]) -> Check:
    """Check that the compacted network gives what the masked one gave."""
    name = "compacted equals masked"
    shapes = [[tuple(tensor.shape) for tensor in side] for side in (masked, compacted)]
    if shapes[0] != shapes[1]:
        return Check(name, passed=False, detail=f"outputs of shapes {shapes[1]} instead of {shapes[0]}")
    largest, passed = 0.0, True
    for one, other in zip(masked, compacted, strict=True):
        if not one.is_floating_point():
            passed &= torch.equal(one, other)
            continue
        if not bool(one.isfinite().all() and other.isfinite().all()):
            words = "the network gives NaN or infinity on a batch, so that nothing can be compared; check its weights"
            return Check(name, passed=False, detail=words)
        scale = one.abs().max().clamp(min=1e-12) if one.numel() else torch.ones(())
        error = float(((one - other).abs().max() / scale).item()) if one.numel() else 0.0
        largest = max(largest, error)
        passed &= error <= max(TOLERANCES.get(side.dtype, ROUGH) for side in (one, other))
    return Check(name, passed, f"largest relative error {largest:.1e} on a batch", largest)


def refuse_failed(checks: Sequence[Check]) -> None:
    """VerificationError if one of them failed."""
    failed = [f"{check.name}: {check.detail}" for check in checks if not check.passed]
    if failed:
        raise VerificationError(f"the result failed its check: {'; '.join(failed)}")


def worst(checks: Sequence[Check]) -> Check:
    """Of several checks of the same thing the one that failed, or came nearest to it."""
    return max(checks, key=lambda check: (not check.passed, check.error))
