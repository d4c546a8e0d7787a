"""How well a classifier does on batches of (images, labels)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifso.criteria.ranks import collective_device
from ifso.errors import DataError
from ifso.processes import several
from ifso.pruning.ranks import sum_over_ranks, together
from ifso.training.losses import logits_in
from ifso.training.modes import eval_mode

FIVE = 5
NOTHING = "there is nothing to evaluate on: the batches ran out before the first one"


@dataclass(frozen=True)
class Accuracy:
    """Shares of right answers in percent; ``loss`` is the mean cross entropy. ``top5`` is None for few classes."""

    top1: float
    top5: float | None
    loss: float
    samples: int


def evaluate(model: nn.Module, batches: Iterable[Any], *, over_ranks: bool = False) -> Accuracy:
    """Accuracy of ``model`` in eval mode over all batches; every module then has its mode back.

    With ``over_ranks`` every process of ``torch.distributed`` brings batches of its own, and all are told what they
    found together; if one fails, none goes on. The device is waited for once, after the last batch.

    >>> logits = torch.tensor([[3.0, 0.0], [3.0, 0.0], [0.0, 3.0], [3.0, 0.0]])
    >>> found = evaluate(nn.Identity(), [(logits, torch.tensor([0, 0, 1, 1]))])
    >>> found.top1, found.top5, round(found.loss, 4), found.samples
    (75.0, None, 0.7986, 4)
    """
    total = added_up(lambda: _total(model, batches), over_ranks=over_ranks)
    return accuracy_of(total[:-1], round(float(total[-1])))


def added_up(sums: Callable[[], Tensor], *, over_ranks: bool) -> Tensor:
    """What ``sums`` gives; with ``over_ranks`` its sum over all processes, and if one fails, none goes on."""
    return sum_over_ranks(together(sums).to(collective_device())) if over_ranks and several() else sums()


def accuracy_of(sums: Tensor, samples: int) -> Accuracy:
    """What :func:`sums_of` all batches, added up [3], amount to.

    >>> accuracy_of(torch.tensor([2.0, 6.0, 8.0]), 8)
    Accuracy(top1=75.0, top5=100.0, loss=0.25, samples=8)
    """
    if not samples:
        raise DataError(NOTHING)
    loss, first, five = (value / samples for value in sums.tolist())
    return Accuracy(100 * first, None if math.isnan(five) else 100 * five, loss, samples)


def sums_of(logits: Any, labels: Tensor) -> Tensor:
    """Sums over a batch, in float64 [3]: cross entropy, right answers, right ones among the first five (else NaN).

    Nothing waits for the device. An answer whose cross entropy is not finite is never right, so that NaN is no class 0.
    A label outside the classes, which would end the work of a GPU, counts as the nearest
    class in the cross entropy; :func:`evaluate` refuses it after the last batch.
    """
    if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != len(labels):
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise DataError(f"the model gave {shape} for {len(labels)} labels; a classifier gives logits [N, classes]")
    if labels.dim() != 1 or labels.dtype.is_floating_point:
        raise DataError(
            f"labels of shape {tuple(labels.shape)} and {labels.dtype} cannot be compared with answers; "
            "give the number of the class for each image"
        )
    losses = F.cross_entropy(logits.float(), labels.long().clamp(0, logits.shape[1] - 1), reduction="none").double()
    sound, loss = losses.isfinite(), losses.sum()
    first = ((logits.argmax(1) == labels) & sound).sum()
    if logits.shape[1] > FIVE:
        five = ((logits.topk(FIVE, 1).indices == labels[:, None]) & sound[:, None]).sum()
    else:
        five = torch.full_like(loss, float("nan"))
    return torch.stack([loss, first.double(), five.double()])


@torch.no_grad()
def _total(model: nn.Module, batches: Iterable[Any]) -> Tensor:
    """The sums over all batches and the number of samples [4], if all labels are classes of the network."""
    samples = classes = 0
    sums: list[Tensor] = []
    ends: list[Tensor] = []
    with eval_mode(model):
        for images, labels in batches:
            logits = logits_in(model(images))
            sums.append(sums_of(logits, labels))
            if len(labels):
                samples, classes = samples + len(labels), logits.shape[1]
                ends.append(torch.stack([labels.min(), labels.max()]))
    if not samples:
        return torch.zeros(4, dtype=torch.float64)
    _refuse_outside(torch.cat(ends), classes)
    total = torch.stack(sums).sum(0)
    return torch.cat([total, total.new_tensor([samples])])


def _refuse_outside(labels: Tensor, classes: int) -> None:
    """DataError if one of the labels is no class of the network."""
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0 or highest >= classes:
        raise DataError(
            f"label {lowest if lowest < 0 else highest} is none of the {classes} classes of the network "
            f"(0 to {classes - 1}); give the data that the network was trained for, or a network with as many outputs "
            "as the data has classes"
        )
