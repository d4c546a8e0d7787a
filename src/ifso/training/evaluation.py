"""How well a classifier does on batches of (images, labels)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifso.errors import DataError
from ifso.training.modes import eval_mode

FIVE = 5


@dataclass(frozen=True)
class Accuracy:
    """Shares of right answers in percent; ``loss`` is the mean cross entropy. ``top5`` is None for few classes."""

    top1: float
    top5: float | None
    loss: float
    samples: int


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Any]) -> Accuracy:
    """Accuracy of ``model`` in eval mode over all batches; every module then has its mode back.

    >>> logits = torch.tensor([[3.0, 0.0], [3.0, 0.0], [0.0, 3.0], [3.0, 0.0]])
    >>> found = evaluate(nn.Identity(), [(logits, torch.tensor([0, 0, 1, 1]))])
    >>> found.top1, found.top5, round(found.loss, 4), found.samples
    (75.0, None, 0.7986, 4)
    """
    samples, sums = 0, None
    with eval_mode(model):
        for images, labels in batches:
            found = _sums(model(images), labels)
            sums = found if sums is None else sums + found
            samples += len(labels)
    if sums is None or not samples:
        raise DataError("there is nothing to evaluate on: the batches ran out before the first one")
    loss, first, five = (sums / samples).tolist()
    return Accuracy(100 * first, None if math.isnan(five) else 100 * five, loss, samples)


def _sums(logits: Any, labels: Tensor) -> Tensor:
    """Sums over a batch, in float64 [3]: cross entropy, right answers, right ones among the first five (else NaN)."""
    if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != len(labels):
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise DataError(f"the model gave {shape} for {len(labels)} labels; a classifier gives logits [N, classes]")
    loss = F.cross_entropy(logits.float(), labels, reduction="sum")
    first = (logits.argmax(1) == labels).sum()
    if logits.shape[1] > FIVE:
        five = (logits.topk(FIVE, 1).indices == labels[:, None]).sum()
    else:
        five = torch.full_like(loss, float("nan"))
    return torch.stack([loss.double(), first.double(), five.double()])
