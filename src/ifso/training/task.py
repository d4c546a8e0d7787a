"""A network and its loss put together as a command asks for them: classes, device, layout, precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ifso.curvature.losses import LossFn
from ifso.models import create_model
from ifso.models.names import is_program
from ifso.training.precision import autocast, check_score_precision


def network_for(
    name: str,
    num_classes: int | None,
    *,
    weights: str | None = None,
    pretrained: bool = False,
    device: str = "cpu",
    channels_last: bool = False,
) -> nn.Module:
    """The MODEL ``name`` with ``num_classes`` outputs; a user's own ``file.py:factory`` is called as it is.

    ``pretrained`` allows published weights where ``weights`` names no file.

    >>> network_for("ifso:resnet20", 7).fc.out_features
    7
    """
    classes = None if is_program(name) else num_classes
    model = create_model(name, weights=weights, num_classes=classes, pretrained=pretrained and weights is None)
    model = model.to(device)
    return model.to(memory_format=torch.channels_last) if channels_last else model


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
