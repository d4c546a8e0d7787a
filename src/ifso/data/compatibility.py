"""Where data meets a network: whether it takes these images and has an output for every category."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ifso.common.batches import same_random_numbers
from ifso.common.text import describe_error
from ifso.common.torch_state import same_modes, undisturbed
from ifso.data.base import Data, detects
from ifso.errors import DataError, IfsoError
from ifso.models.detectors import is_detector
from ifso.tasks.classification import cross_entropy, logits_in

SAMPLES = 2

IGNORED = -100
"""The label that the cross entropy leaves out."""

CLASSES = (
    "head.classification_head.num_classes",
    "head.classification_head.num_columns",
    "roi_heads.box_predictor.cls_score.out_features",
)
"""Where torchvision's detectors keep how many classes they know, the background included."""

KEYS = ("boxes", "scores", "labels")


def check_fits(model: nn.Module, data: Data) -> None:
    """DataError of one line if the images or the labels of ``data`` do not fit ``model``, which is left as it was.

    The network sees two images in eval mode, a detector one. Labels are those of the first training batch, beside
    ``num_classes``. Data with a loss of its own is not tried, because only that loss knows how the network is called.

    >>> from ifso.data import open_data
    >>> check_fits(nn.Sequential(nn.Flatten(), nn.Linear(64, 9)), open_data("digits"))
    Traceback (most recent call last):
    ...
    ifso.errors.DataError: digits has 10 classes, but the network 9 outputs; give it as many, or other data
    """
    if detects(data):
        check_detector_fits(model, data)
    elif data.loss_fn is cross_entropy:
        with same_random_numbers():
            images, labels = _pair(data.first_batch(), data.name)
        outputs = _outputs(model, images[:SAMPLES], data.name)
        if data.num_classes is not None and data.num_classes > outputs:
            raise DataError(
                f"{data.name} has {data.num_classes} classes, but the network {outputs} outputs; "
                "give it as many, or other data"
            )
        _check_labels(labels, outputs, data.name)


def _pair(batch: Any, name: str) -> tuple[Tensor, Tensor]:
    """The images and labels of a batch."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not all(isinstance(part, Tensor) for part in batch):
        raise DataError(
            f"{name}: a batch is {type(batch).__name__}, not two tensors (images, labels); "
            "give such batches, or a loss_fn that knows what they are"
        )
    images, labels = batch
    if len(images) != len(labels):
        raise DataError(f"{name}: the first batch has {len(images)} images and {len(labels)} labels; give one for each")
    return images, labels


def answer(model: nn.Module, images: Any) -> Any:
    """What the network returns in eval mode; it is left as it was."""
    with torch.no_grad(), same_modes(model), undisturbed(model.eval()):
        return logits_in(model(images))


def _evaluated(model: nn.Module, images: Any, fault: str, remedy: str) -> Any:
    """What the network returns in eval mode; if it fails, a DataError of ``fault``, the error and ``remedy``."""
    try:
        return answer(model, images)
    except IfsoError:
        raise
    except Exception as error:
        raise DataError(f"{fault} ({describe_error(error)}); {remedy}") from error


def _outputs(model: nn.Module, images: Tensor, name: str) -> int:
    """How many logits the network returns for an image."""
    shape = "×".join(map(str, images.shape[1:]))
    logits = _evaluated(
        model,
        images,
        f"images {shape} of {name} do not fit the network",
        "give images of the size, colours and device that it takes, or another network",
    )
    if is_detections(logits, len(images)):
        raise DataError(
            f"{name} has a label for each image and no boxes, but the network is a detector; "
            "give data with boxes (coco:PATH), or a classifier"
        )
    if not isinstance(logits, Tensor) or logits.dim() < 2 or len(logits) != len(images):
        shown = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise DataError(f"the network gave {shown} for {len(images)} images of {name}; it must give [N, classes]")
    return logits.shape[1]


def _check_labels(labels: Tensor, outputs: int, name: str) -> None:
    if labels.is_floating_point():
        if labels.dim() < 2 or labels.shape[1] != outputs:
            raise DataError(
                f"{name}: labels are {labels.dtype} of shape {tuple(labels.shape)}; "
                f"give whole numbers from 0 to {outputs - 1}, or a probability for each of {outputs} outputs"
            )
        return
    counted = labels[labels != IGNORED]
    lowest, highest = (int(value) for value in counted.aminmax()) if counted.numel() else (0, 0)
    if lowest < 0 or highest >= outputs:
        wrong = lowest if lowest < 0 else highest
        raise DataError(
            f"{name}: label {wrong} is outside the {outputs} outputs of the network; "
            f"give labels from 0 to {outputs - 1}, or a network with more outputs"
        )


def check_detector_fits(model: nn.Module, data: Data) -> None:
    """DataError of one line if ``model`` is no detector, or one for fewer categories; it is left as it was."""
    known, kind = classes_of(model), type(model).__name__
    if known is not None and data.num_classes is not None and data.num_classes > known:
        raise DataError(
            f"{data.name} has {data.num_classes - 1} categories, so {data.num_classes} classes with the background, "
            f"but the network has {known}; make it with num_classes={data.num_classes}, or give other data"
        )
    fault = f"{data.name} has boxes, but {kind} does not take a list of images as a detector does"
    remedy = "give a detector, such as torchvision:retinanet_resnet50_fpn, or other data"
    if is_detector(model):
        fault = f"{kind} failed on the first image of {data.name}"
        remedy = "check the options in its name, and the image"
    detections = _evaluated(model, list(data.first_batch()[0])[:1], fault, remedy)
    if not is_detections(detections, 1):
        raise DataError(
            f"{data.name} has boxes, but {kind} gave {type(detections).__name__} for a list of one image; "
            f"a detector in eval mode gives a list of dicts with {', '.join(KEYS)}"
        )


def classes_of(model: nn.Module) -> int | None:
    """How many classes a detector knows, the background included; None where it does not say."""
    for path in CLASSES:
        value: Any = model
        for name in path.split("."):
            value = getattr(value, name, None)
        if isinstance(value, int):
            return value
    return None


def is_detections(outputs: Any, images: int) -> bool:
    """Return whether ``outputs`` is what a detector returns for so many images in eval mode.

    >>> is_detections([{"boxes": [], "scores": [], "labels": []}], 1), is_detections([], 1)
    (True, False)
    """
    listed = isinstance(outputs, (list, tuple)) and len(outputs) == images
    return listed and all(isinstance(each, Mapping) and set(KEYS) <= each.keys() for each in outputs)
