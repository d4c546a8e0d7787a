"""Where networks come from: each provider lists its names and builds a network from one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

from torch import nn

from ifso.errors import ModelNotFound
from ifso.models.detectors import SMALL, is_detector, refuse_unknown, small_retinanet
from ifso.models.resnet import DEPTHS, cifar_resnet, digits_resnet
from ifso.models.vgg import CifarVGG16

Builder = Callable[..., nn.Module]

OWN: dict[str, Builder] = {
    **{f"resnet{depth}": partial(cifar_resnet, depth) for depth in DEPTHS},
    **{f"resnet{depth}-padded": partial(cifar_resnet, depth, padded=True) for depth in DEPTHS},
    "vgg16": CifarVGG16,
    "resnet8-digits": digits_resnet,
}
OWN_IMAGES = {"resnet8-digits": (1, 8, 8)}
"""The image (C, H, W) that a network of ours is made for, where it is not one of CIFAR."""


@dataclass(frozen=True)
class Provider:
    """``names()`` are the networks it has; ``build(name, **options)`` makes one, without pretrained weights."""

    names: Callable[[], Sequence[str]]
    build: Builder


def _build_own(name: str, **options: Any) -> nn.Module:
    if name in SMALL:
        _package("torchvision")
        model = small_retinanet(name, **options)
        refuse_unknown(model, f"ifso:{name}", small_retinanet, options)
        return model
    return OWN[name](**options)


def _torchvision_names() -> Sequence[str]:
    return _package("torchvision.models").list_models()


def _build_torchvision(name: str, **options: Any) -> nn.Module:
    models = _package("torchvision.models")
    accepted = inspect.signature(models.get_model_builder(name)).parameters
    no_weights = {key: None for key in ("weights", "weights_backbone") if key in accepted}
    model = models.get_model(name, **{**no_weights, **options})
    if is_detector(model):
        refuse_unknown(model, f"torchvision:{name}", models.get_model_builder(name), options)
    return model


def _timm_names() -> Sequence[str]:
    timm = _package("timm")
    return [*timm.list_models(), *timm.list_pretrained()]


def _build_timm(name: str, **options: Any) -> nn.Module:
    return _package("timm").create_model(name, **{"pretrained": False, **options})


def _package(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ModelNotFound(
            f'{package}: models need {package}, which cannot be imported ({error}); pip install "ifso[vision]"'
        ) from error


PROVIDERS = {
    "ifso": Provider(lambda: [*OWN, *SMALL], _build_own),
    "torchvision": Provider(_torchvision_names, _build_torchvision),
    "timm": Provider(_timm_names, _build_timm),
}
