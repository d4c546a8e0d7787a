"""Example inputs for a MODEL when the user gives none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ifso.errors import TraceError
from ifso.models.detectors import example_images, is_detector
from ifso.models.names import read_name
from ifso.models.providers import OWN_IMAGES

FRAMES = 16
DEFAULT_SIZE = 224


def default_inputs(name: str, model: nn.Module) -> Any:
    """Inputs that ``model``, made from the MODEL ``name``, runs on: a tensor, or a tuple of positional arguments.

    Detection models take one image in a list and have to be in eval mode.

    >>> from ifso.models.registry import create_model
    >>> default_inputs("ifso:resnet20", create_model("ifso:resnet20")).shape
    torch.Size([1, 3, 32, 32])
    """
    prefix, inner, _ = read_name(name)
    if is_detector(model):
        return example_images(1, DEFAULT_SIZE, DEFAULT_SIZE)
    if prefix == "ifso":
        return torch.randn(1, *OWN_IMAGES.get(inner, (3, 32, 32)))
    if prefix == "timm":
        return _timm_inputs(model)
    if prefix == "torchvision":
        return _torchvision_inputs(inner, model)
    raise TraceError(f"no example input is known for {name}; give its shape, for example 1,3,224,224")


def _timm_inputs(model: nn.Module) -> Tensor:
    from timm.data import resolve_model_data_config

    return torch.randn(1, *resolve_model_data_config(model)["input_size"])


def _torchvision_inputs(inner: str, model: nn.Module) -> Any:
    family = type(model).__module__.removeprefix("torchvision.models.").partition(".")[0]
    if family == "optical_flow":
        return torch.randn(1, 3, 128, 128), torch.randn(1, 3, 128, 128)
    size = _torchvision_size(inner, model)
    if family == "video":
        return torch.randn(1, 3, FRAMES, *size)
    return torch.randn(1, 3, *size)


def _torchvision_size(inner: str, model: nn.Module) -> tuple[int, int]:
    """The size the model insists on, else the one its first published weights were trained with."""
    own = getattr(model, "image_size", None)
    if isinstance(own, int):
        return own, own
    from torchvision.models import get_model_weights

    published = next(iter(get_model_weights(inner)), None)
    crop = getattr(getattr(published, "transforms", None), "keywords", {}).get("crop_size", DEFAULT_SIZE)
    height, width = (crop, crop) if isinstance(crop, int) else crop
    return height, width
