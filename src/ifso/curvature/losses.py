"""Calling the user's loss: what it must return, and leaving no trace in the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ifso.errors import ScoreError
from ifso.graph.running import forget_caches

LossFn = Callable[[nn.Module, Any], Tensor]
"""``loss_fn(model, batch)`` gives a scalar: the mean loss of the batch."""


def checked(loss: Any) -> Tensor:
    """The loss, if it is a scalar that can be differentiated."""
    if not isinstance(loss, Tensor):
        raise ScoreError(f"loss_fn returned {type(loss).__name__}; it must return a scalar tensor")
    if loss.numel() != 1:
        shape = tuple(loss.shape)
        raise ScoreError(f"loss_fn returned a tensor of shape {shape}; it must return a scalar (a mean or a sum)")
    if not loss.is_floating_point():
        raise ScoreError(f"loss_fn returned {loss.dtype}; it must return a floating-point scalar")
    if not loss.requires_grad:
        raise ScoreError(
            "the loss has no gradient: loss_fn must not detach it, run under no_grad, or freeze all weights"
        )
    return loss.reshape(())


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Leave running statistics, other buffers, cached tensors and the random state as they were.

    So two passes in a row also see the same dropout.
    """
    norms = [
        module
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.training and module.track_running_stats
    ]
    quiet = {id(buffer) for module in norms for buffer in module.buffers(recurse=False)}
    others = [buffer for buffer in model.buffers() if id(buffer) not in quiet]
    copies = [buffer.clone() for buffer in others]
    devices = {tensor.device for tensor in model.parameters() if tensor.is_cuda}
    capturing = bool(devices) and torch.cuda.is_current_stream_capturing()
    forget_caches(model)
    try:
        for module in norms:
            module.track_running_stats = False
        with torch.random.fork_rng(devices=sorted(devices, key=str), enabled=not capturing):
            yield
    finally:
        forget_caches(model)
        for module in norms:
            module.track_running_stats = True
        if others:
            with torch.no_grad():
                torch._foreach_copy_(others, copies)
