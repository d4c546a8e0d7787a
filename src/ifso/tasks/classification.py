"""The loss of a classifier: ``loss_fn(model, batch)`` with a batch of (images, labels)."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

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
