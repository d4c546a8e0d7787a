"""Where a teacher meets the network that is to learn from it: do both answer alike about the same images?"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ifso.common.text import describe_error
from ifso.common.torch_state import same_modes, undisturbed
from ifso.data.base import Data, detects
from ifso.data.compatibility import SAMPLES, check_fits, same_random_numbers
from ifso.errors import IfsoError, TrainingError
from ifso.tasks.classification import cross_entropy, logits_in, refuse_other_classes
from ifso.training.detector_distillation import check_detectors


def check_teacher(teacher: nn.Module, network: nn.Module, data: Data) -> None:
    """One clear line if ``network`` cannot learn from ``teacher`` on ``data``; both are left as they were.

    Both see the first images in eval mode. Data with a loss of its own is not tried: nothing is distilled there.

    >>> from ifso.data import open_data
    >>> nine, ten = (nn.Sequential(nn.Flatten(), nn.Linear(64, classes)) for classes in (9, 10))
    >>> check_teacher(nine, ten, open_data("digits"))
    Traceback (most recent call last):
    ...
    ifso.errors.TrainingError: the teacher knows 9 classes and the network 10; give a teacher for the same data
    """
    if not detects(data) and data.loss_fn is not cross_entropy:
        return
    check_fits(network, data)
    with same_random_numbers():
        images = data.first_batch()[0]
    try:
        if detects(data):
            check_detectors(teacher, network, list(images)[:1])
        else:
            refuse_other_classes(*(_answer(model, images[:SAMPLES]) for model in (teacher, network)))
    except IfsoError:
        raise
    except Exception as error:
        raise TrainingError(
            f"the teacher, {type(teacher).__name__}, failed on the first images of {data.name} "
            f"({describe_error(error)}); "
            "give a teacher for the same data"
        ) from error


def _answer(model: nn.Module, images: Any) -> Any:
    with torch.no_grad(), same_modes(model):
        model.eval()
        with undisturbed(model):
            return logits_in(model(images))
