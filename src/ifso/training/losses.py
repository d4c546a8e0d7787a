"""Losses of a classifier, as ``loss_fn(model, batch)`` with a batch of (images, labels)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifso.curvature.losses import LossFn
from ifso.training.modes import eval_mode


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    """The mean cross entropy of the model's logits [N, classes] on (images, labels).

    >>> batch = torch.zeros(2, 4), torch.tensor([0, 1])
    >>> round(float(cross_entropy(nn.Flatten(), batch)), 4)
    1.3863
    """
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def distillation(teacher: nn.Module, *, temperature: float = 4.0, weight: float = 0.9) -> LossFn:
    """Learn from labels and from a teacher (Hinton et al., 2015), which is asked in eval mode.

    (1 − weight) · cross entropy + weight · T² · KL(teacher ‖ model), both logits divided by the temperature T.
    """

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        images, labels = batch
        with torch.no_grad(), eval_mode(teacher):
            target = F.log_softmax(teacher(images) / temperature, 1)
        logits = model(images)
        soft = F.kl_div(F.log_softmax(logits / temperature, 1), target, reduction="batchmean", log_target=True)
        return (1 - weight) * F.cross_entropy(logits, labels) + weight * temperature**2 * soft

    return loss_fn
