"""``torch.utils.checkpoint`` under gradients by :func:`torch.autograd.grad`, and under modes that watch a pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch.utils import checkpoint


@contextlib.contextmanager
def not_reentrant() -> Iterator[None]:
    """Within it reentrant checkpoints, which ``torch.autograd.grad`` cannot pass, are made of the other kind."""
    with mock.patch.object(checkpoint.CheckpointFunction, "apply", staticmethod(_of_the_other_kind)):
        yield


@contextlib.contextmanager
def without_checkpoints() -> Iterator[None]:
    """Within it functions that are checkpointed keep their activations.

    What is computed again on the way back would not be seen by a mode that was on before: it would be no dual number.
    """
    with (
        mock.patch.object(checkpoint.CheckpointFunction, "apply", staticmethod(_called)),
        mock.patch.object(checkpoint, "_checkpoint_hook", contextlib.nullcontext),
    ):
        yield


def _of_the_other_kind(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


def _called(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:  # noqa: ARG001 (torch's order)
    return function(*args)
