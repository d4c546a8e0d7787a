"""The losses of a classifier: ``loss_fn(model, batch)`` with a batch of (images, labels), or of mixed images."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ifso.common.loss_fn import LossFn
from ifso.errors import TrainingError


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    """The mean cross entropy of the model's logits [N, classes] on (images, labels).

    >>> import torch
    >>> batch = torch.zeros(2, 4), torch.tensor([0, 1])
    >>> round(float(cross_entropy(nn.Flatten(), batch)), 4)
    1.3863
    """
    images, labels = batch
    return F.cross_entropy(logits_in(model(images)), labels)


def classification(label_smoothing: float = 0.0, *, mixed: bool = False) -> LossFn:
    """The cross entropy to labels of which the share ``label_smoothing`` is spread evenly over all K classes.

    (1 − ε) · CE(label) + ε/K · Σₖ CE(k). Without smoothing it is :func:`cross_entropy` itself. With ``mixed``, batches
    are those of :class:`ifso.training.objective.MixedBatches`, whose images have two labels
    (:func:`mixed_cross_entropy`).

    >>> import torch
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

    >>> import torch
    >>> logits, sure = torch.tensor([[0.0, 9.0]]), torch.tensor([1])
    >>> [round(float(mixed_cross_entropy(logits, sure, 0 * sure, torch.tensor([s]))), 3) for s in (1.0, 0.75)]
    [0.0, 2.25]
    """
    own, other = (
        F.cross_entropy(logits, each, reduction="none", label_smoothing=label_smoothing) for each in (labels, others)
    )
    return (share * own + (1 - share) * other).mean()


def logits_in(answer: Any) -> Any:
    """The logits of an answer that names them beside those of auxiliary heads (GoogLeNet, Inception); else the answer.

    >>> from collections import namedtuple
    >>> logits_in(namedtuple("Outputs", "logits aux_logits")(1, 2)), logits_in((1, 2))
    (1, (1, 2))
    """
    return answer.logits if hasattr(answer, "logits") and not isinstance(answer, Tensor) else answer


def check_same_classes(teacher: Any, student: Any) -> None:
    """TrainingError unless the teacher's output is a tensor of logits like the student's."""
    for who, output in (("teacher", teacher), ("network", student)):
        if not isinstance(output, Tensor) or output.dim() != 2:
            shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise TrainingError(f"the {who} returns {shape}; distillation takes logits [N, classes] of both")
    if teacher.shape[1] != student.shape[1]:
        raise TrainingError(
            f"the teacher knows {teacher.shape[1]} classes and the network {student.shape[1]}; "
            "give a teacher for the same data"
        )
    if len(teacher) != len(student):
        raise TrainingError(f"the teacher's logits are of {len(teacher)} images, the batch has {len(student)}")
