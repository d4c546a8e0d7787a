"""Where data with boxes meets a network: is it a detector, and has it an output for every category?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ifso.common.text import describe_error
from ifso.common.torch_state import same_modes, undisturbed
from ifso.data.sets import Data
from ifso.errors import DataError, IfsoError
from ifso.models.detectors import is_detector

CLASSES = (
    "head.classification_head.num_classes",
    "head.classification_head.num_columns",
    "roi_heads.box_predictor.cls_score.out_features",
)
"""Where torchvision's detectors keep how many classes they know, the background included."""

KEYS = ("boxes", "scores", "labels")


def check_detector_fits(model: nn.Module, data: Data) -> None:
    """One clear line if ``model`` is no detector, or one for fewer categories; it is left as it was.

    The network sees an image in eval mode.
    """
    known = classes_of(model)
    if known is not None and data.num_classes is not None and data.num_classes > known:
        raise DataError(
            f"{data.name} has {data.num_classes - 1} categories, so {data.num_classes} classes with the background, "
            f"but the network has {known}; make it with num_classes={data.num_classes}, or give other data"
        )
    batch = data.first_batch()
    images = list(batch[0])[:1]
    try:
        with torch.no_grad(), same_modes(model), undisturbed(model.eval()):
            found = model(images)
    except IfsoError:
        raise
    except Exception as error:
        if is_detector(model):
            raise DataError(
                f"{type(model).__name__} failed on the first image of {data.name} ({describe_error(error)}); "
                "check the options in its name, and the image"
            ) from error
        raise DataError(
            f"{data.name} has boxes, but {type(model).__name__} does not take a list of images as a detector does; "
            "give a detector, such as torchvision:retinanet_resnet50_fpn, or other data"
        ) from error
    if not is_detections(found, 1):
        raise DataError(
            f"{data.name} has boxes, but {type(model).__name__} gave {type(found).__name__} for a list of one image; "
            f"a detector in eval mode gives a list of dicts with {', '.join(KEYS)}"
        )


def classes_of(model: nn.Module) -> int | None:
    """How many classes a detector knows, the background included; None where it does not say."""
    for path in CLASSES:
        found: Any = model
        for name in path.split("."):
            found = getattr(found, name, None)
        if isinstance(found, int):
            return found
    return None


def is_detections(found: Any, images: int) -> bool:
    """Is it what a detector gives in eval mode?

    >>> is_detections([{"boxes": [], "scores": [], "labels": []}], 1), is_detections([], 1)
    (True, False)
    """
    listed = isinstance(found, (list, tuple)) and len(found) == images
    return listed and all(isinstance(each, Mapping) and set(KEYS) <= each.keys() for each in found)
