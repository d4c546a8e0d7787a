"""The precision in which a network computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ifso.errors import IfsoError, ScoreError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ifso.common.loss_fn import LossFn

PRECISIONS = ("float32", "tf32", "bf16", "fp16")

SCORE_PRECISIONS = ("float32", "tf32", "bf16")
"""Precisions in which scores can be computed."""

_HALF = {"bf16": "bfloat16", "fp16": "float16"}


def check_precision(name: str) -> None:
    """Raise unless ``name`` is one of :data:`PRECISIONS`."""
    if name not in PRECISIONS:
        raise IfsoError(f"precision {name!r} is unknown; choose one of {', '.join(PRECISIONS)}")


def check_score_precision(name: str) -> None:
    """Raise for float16 as well: gradients below 6e-8 are 0 in it unless the loss is scaled, which no criterion does.

    Group Fisher on ResNet-32 with a loss divided by 256, as a mean over a large batch does: 9 of 672 scores are 0.
    """
    check_precision(name)
    if name not in SCORE_PRECISIONS:
        raise ScoreError(f"scores cannot be computed in {name}; choose one of {', '.join(SCORE_PRECISIONS)}")


@contextmanager
def tensor_cores(name: str) -> Iterator[None]:
    """Within it convolutions on a GPU round their factors to TF32 if ``name`` is ``"tf32"``, and otherwise do not."""
    from ifso.common.torch_state import full_float32

    check_precision(name)
    with full_float32(name != "tf32"):
        yield


def autocast(name: str, device: torch.device | str) -> torch.autocast:
    """A new context in which layers compute in bfloat16 if ``name`` is ``"bf16"``, in float16 if ``"fp16"``.

    >>> import torch
    >>> for name in ("bf16", "fp16", "tf32"):
    ...     with autocast(name, "cpu"):
    ...         (torch.ones(1, 1) @ torch.ones(1, 1)).dtype
    torch.bfloat16
    torch.float16
    torch.float32
    """
    import torch

    dtype = getattr(torch, _HALF.get(name, "bfloat16"))
    return torch.autocast(torch.device(device).type, dtype, enabled=name in _HALF)


def scaler(name: str, device: torch.device | str) -> torch.amp.GradScaler:
    """A scaler of the loss that keeps gradients of float16 from becoming 0; for other precisions it does nothing.

    >>> [scaler(name, "cpu").is_enabled() for name in ("fp16", "bf16")]
    [True, False]
    """
    import torch

    check_precision(name)
    return torch.amp.GradScaler(torch.device(device).type, enabled=name == "fp16")


def loss_in(precision: str, loss_fn: LossFn) -> LossFn:
    """The loss with the network computing in bfloat16 if ``precision`` is ``"bf16"``, otherwise the loss itself.

    >>> loss_in("fp16", lambda model, batch: model(batch).mean())
    Traceback (most recent call last):
    ifso.errors.ScoreError: scores cannot be computed in fp16; choose one of float32, tf32, bf16
    """
    check_score_precision(precision)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with autocast(precision, next(model.parameters()).device):
            return loss_fn(model, batch)

    return loss if precision == "bf16" else loss_fn
