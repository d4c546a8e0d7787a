"""A MODEL as it is written: where it comes from, its name there, and options for its builder."""

from __future__ import annotations

import ast
from typing import Any, NamedTuple

from ifso.errors import ModelNotFound

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
