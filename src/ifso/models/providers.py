"""Where networks come from: each provider lists its names and builds a network from one."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

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

LOADING = (
    "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained_strict", "checkpoint_path", "cache_dir",
    "weights", "weights_backbone",
)  # fmt: skip
"""Options with which torchvision and timm load files or download."""

CONSTANTS = {"true": True, "false": False, "none": None}


class ModelName(NamedTuple):
    """``source`` is a provider or a Python file, ``inner`` the name there."""

    source: str
    inner: str
    options: dict[str, Any]


def read_name(text: str) -> ModelName:
    """A MODEL with its options, which follow the name after commas: ``SOURCE:NAME,KEY=VALUE,KEY=VALUE``.

    >>> read_name("torchvision:retinanet_resnet50_fpn,min_size=480,norms=frozen")
    ModelName(source='torchvision', inner='retinanet_resnet50_fpn', options={'min_size': 480, 'norms': 'frozen'})
    >>> read_name("nets/small.py:make")
    ModelName(source='nets/small.py', inner='make', options={})
    """
    whole, *given = text.split(",")
    if ".py:" in text:
        path, _, rest = text.partition(".py:")
        whole, *given = rest.split(",")
        whole = f"{path}.py:{whole}"
    source, _, inner = whole.rpartition(":") if whole.rpartition(":")[0].endswith(".py") else whole.partition(":")
    return ModelName(source, inner, dict(_option(part, text) for part in given))


def is_program(name: str) -> bool:
    """Is it a function of a Python file?"""
    return read_name(name).source.endswith(".py")


def loading(name: str) -> list[str]:
    """The options in a MODEL of torchvision or timm that would load a file or download; a program is its own affair.

    >>> loading("timm:resnet18,pretrained=True,num_classes=3"), loading("timm:resnet18,pretrained=False")
    (['pretrained'], [])
    """
    written = read_name(name)
    return [] if is_program(name) else [key for key in LOADING if written.options.get(key)]


def without_loading(name: str) -> str:
    """The same network with weights of nobody.

    >>> without_loading("timm:resnet18,pretrained=True,num_classes=3")
    'timm:resnet18,num_classes=3'
    """
    if not loading(name):
        return name
    whole, *given = name.split(",")
    return ",".join([whole, *(part for part in given if part.partition("=")[0] not in LOADING)])


def _option(part: str, text: str) -> tuple[str, Any]:
    key, equals, value = part.partition("=")
    if not equals or not key.isidentifier():
        raise ModelNotFound(f"{_short(text)}: {_short(part)} is no option; write them as NAME,KEY=VALUE,KEY=VALUE")
    try:
        return key, CONSTANTS[value.lower()] if value.lower() in CONSTANTS else ast.literal_eval(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return key, value


def _short(text: str) -> str:
    return repr(text if len(text) <= 200 else f"{text[:199]}…")
