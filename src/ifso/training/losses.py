"""Losses of classifiers, with and without a teacher, and sums of losses with names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifso.common.distributed import mean_over_ranks
from ifso.common.loss_fn import LossFn
from ifso.common.torch_state import eval_mode
from ifso.tasks.classification import check_same_classes, cross_entropy, logits_in
from ifso.tasks.detection import to_float32


def classification(label_smoothing: float = 0.0, *, mixed: bool = False) -> LossFn:
    """The cross entropy to labels of which the share ``label_smoothing`` is spread evenly over all K classes.

    (1 − ε) · CE(label) + ε/K · Σₖ CE(k). Without smoothing it is :func:`cross_entropy` itself. With ``mixed``, batches
    are those of :class:`ifso.training.objective.MixedBatches`, whose images have two labels
    (:func:`mixed_cross_entropy`).

    >>> batch = torch.tensor([[0.0, 9.0]]), torch.tensor([1])
    >>> [round(float(classification(smoothing)(nn.Identity(), batch)), 3) for smoothing in (0.0, 0.1)]
    [0.0, 0.45]
    """

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        if mixed:
            images, labels, others, share = batch
            return mixed_cross_entropy(logits_in(model(images)), labels, others, share, label_smoothing=label_smoothing)
        images, labels = batch
        return F.cross_entropy(logits_in(model(images)), labels, label_smoothing=label_smoothing)

    return loss_fn if mixed or label_smoothing else cross_entropy


def mixed_cross_entropy(
    logits: Tensor, labels: Tensor, others: Tensor, share: Tensor, *, label_smoothing: float = 0.0
) -> Tensor:
    """The mean over images of s · CE(label) + (1 − s) · CE(other label), with the share s [N] of the first label.

    >>> logits, sure = torch.tensor([[0.0, 9.0]]), torch.tensor([1])
    >>> [round(float(mixed_cross_entropy(logits, sure, 0 * sure, torch.tensor([s]))), 3) for s in (1.0, 0.75)]
    [0.0, 2.25]
    """
    own, other = (
        F.cross_entropy(logits, each, reduction="none", label_smoothing=label_smoothing) for each in (labels, others)
    )
    return (share * own + (1 - share) * other).mean()


def distillation(
    teacher: nn.Module,
    *,
    temperature: float = 4.0,
    weight: float = 0.9,
    label_smoothing: float = 0.0,
    mixed: bool = False,
) -> LossFn:
    """The loss to labels and to a teacher (Hinton et al., 2015), which is asked in eval mode.

    (1 − weight) · cross entropy + weight · T² · KL(teacher ‖ model), both logits divided by the temperature T.
    Without weight the teacher is not asked. With ``mixed`` it is asked about the mixed images, and the cross entropy is
    :func:`mixed_cross_entropy`.
    """

    def answer(batch: Any) -> Tensor:
        with torch.no_grad(), eval_mode(teacher):
            return logits_in(teacher(batch[0]))

    return distillation_from_logits(
        answer, temperature=temperature, weight=weight, label_smoothing=label_smoothing, mixed=mixed
    )


def distillation_from_logits(
    logits_of: Callable[[Any], Tensor],
    *,
    temperature: float = 4.0,
    weight: float = 0.9,
    label_smoothing: float = 0.0,
    mixed: bool = False,
) -> LossFn:
    """:func:`distillation` with the teacher's logits [N, classes] of a batch given rather than computed.

    A batch may hold more than (images, labels), such as those logits:

    >>> loss_fn = distillation_from_logits(lambda batch: batch[2], temperature=1.0, weight=1.0)
    >>> even, sure = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 50.0]])
    >>> round(float(loss_fn(nn.Identity(), (even, torch.tensor([0]), sure))), 4)
    0.6931
    """

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        images, labels, *more = batch
        given = logits_of(batch) if weight else None
        logits = logits_in(model(images))
        if mixed:
            hard = mixed_cross_entropy(logits, labels, *more, label_smoothing=label_smoothing)
        else:
            hard = F.cross_entropy(logits, labels, label_smoothing=label_smoothing)
        if given is None:
            return hard
        check_same_classes(given, logits)
        target, answer = (F.log_softmax(to_float32(each) / temperature, 1) for each in (given.detach(), logits))
        soft = F.kl_div(answer, target, reduction="batchmean", log_target=True)
        return (1 - weight) * hard + weight * temperature**2 * soft

    return loss_fn


LossesOf = Callable[[nn.Module, Any], Mapping[str, Tensor]]
"""``losses_of(model, batch)`` gives scalars by name."""


class NamedLosses:
    """A ``loss_fn(model, batch)``: the sum of what ``losses_of`` gives, with means of its parts over batches.

    >>> loss_fn = NamedLosses(lambda model, batch: {"class": model(batch).sum(), "box": model(batch).mean()})
    >>> [float(loss_fn(nn.Identity(), batch)) for batch in (torch.ones(2), torch.zeros(2))]
    [3.0, 0.0]
    >>> loss_fn.pop_means(), loss_fn.pop_means()
    ({'class': 1.0, 'box': 0.5}, {})
    """

    def __init__(self, losses_of: LossesOf) -> None:
        self.losses_of = losses_of
        self._sums: dict[str, Tensor] = {}
        self._count = 0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The sum of the losses."""
        losses = self.losses_of(model, batch)
        for name, loss in losses.items():
            self._sums[name] = self._sums.get(name, 0.0) + loss.detach()
        self._count += 1
        return torch.stack(list(losses.values())).sum()

    def pop_means(self) -> dict[str, float]:
        """The mean of each part since the last call, over the batches of all processes."""
        if not self._count:
            return {}
        names, total = list(self._sums), torch.stack(list(self._sums.values()))
        means = mean_over_ranks(total, self._count)
        self._sums, self._count = {}, 0
        return dict(zip(names, means.tolist(), strict=True))
