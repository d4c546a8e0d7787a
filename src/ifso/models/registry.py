"""MODEL names: ``torchvision:NAME``, ``timm:NAME``, ``ifso:NAME`` or ``path/file.py:factory``, with options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ifso.common.text import one_line
from ifso.errors import IfsoError, ModelNotFound, TraceError
from ifso.models.detectors import example_images, is_detector, prepare_, refuse_thawed
from ifso.models.from_file import build_from_file
from ifso.models.providers import OWN_IMAGES, PROVIDERS, ModelName, Provider, is_program, loading, read_name
from ifso.models.weights import load_weights

if TYPE_CHECKING:
    import torch

FORMS = "torchvision:NAME, timm:NAME, ifso:NAME or file.py:factory"

OF_DETECTORS = ("norms", "backbone")


def create_model(
    name: str,
    *,
    weights: str | Path | None = None,
    num_classes: int | None = None,
    pretrained: bool = False,
    **options: Any,
) -> nn.Module:
    """The network called ``name``, randomly initialised or with ``weights`` from a file.

    ``options``, and those that follow the name after commas, go to the network's builder. Detectors also take
    ``norms`` and ``backbone`` (see :func:`ifso.models.detectors.prepare_`). Only with ``pretrained`` do torchvision and
    timm load published weights, or those that options in the name ask for, and download them if need be.

    >>> create_model("ifso:resnet20", num_classes=100).fc.out_features
    100
    >>> create_model("ifso:resnet20,num_classes=7").fc.out_features
    7
    """
    written = read_name(name)
    if num_classes is not None:
        said = written.options.get("num_classes", num_classes)
        if said != num_classes:
            raise ModelNotFound(
                f"{name} says num_classes={said}, but {num_classes} are needed; leave that out of the name"
            )
        options["num_classes"] = num_classes
    if pretrained:
        options |= _published(written, name)
    elif loading(name):
        raise ModelNotFound(
            f"{name} would load or download weights ({', '.join(loading(name))}); allow that with --pretrained "
            "(pretrained=True), or give a file with --weights"
        )
    options = {**written.options, **options}
    special = {key: options.pop(key) for key in OF_DETECTORS if key in options and written.source in PROVIDERS}
    model = _build(written, name, options)
    if is_detector(model):
        prepare_(model, name, **special)
    elif special:
        raise ModelNotFound(f"{name} is no detector; it takes no {' and no '.join(special)}")
    if weights is not None:
        if is_detector(model):
            refuse_thawed(model, name, weights)
        load_weights(model, weights)
    return model


def _published(written: ModelName, name: str) -> dict[str, Any]:
    """The option that asks for published weights, if the name does not say which."""
    asking: dict[str, dict[str, Any]] = {"torchvision": {"weights": "DEFAULT"}, "timm": {"pretrained": True}}
    if written.source not in asking:
        raise ModelNotFound(f"{name} has no published weights; leave --pretrained out, and give a file with --weights")
    return {} if loading(name) else asking[written.source]


def _build(written: ModelName, name: str, options: dict[str, Any]) -> nn.Module:
    prefix, inner = written.source, written.inner
    if prefix in PROVIDERS:
        provider = PROVIDERS[prefix]
        names = provider.names()
        if inner not in names:
            some = f"; there are {', '.join(names[:3])} and {len(names) - 3} more"
            raise ModelNotFound(f"no model {name!r}{_suggest(inner, {prefix: names}) or some}")
        return _built(provider, name, inner, options)
    if prefix.endswith(".py"):
        return build_from_file(prefix, inner, **options)
    raise ModelNotFound(f"{name!r} is no model name; write {FORMS}{_suggest(inner or prefix, _all_names())}")


def _built(provider: Provider, name: str, inner: str, options: dict[str, Any]) -> nn.Module:
    try:
        return provider.build(inner, **options)
    except IfsoError:
        raise
    except Exception as error:
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise ModelNotFound(f"{name} cannot be built with {given or 'no options'}: {_said(error)}") from error


def _said(error: Exception) -> str:
    kind = "" if isinstance(error, (TypeError, ValueError)) else f"{type(error).__name__}: "
    return f"{kind}{one_line(error)}"


def _all_names() -> dict[str, Sequence[str]]:
    names = {}
    for prefix, provider in PROVIDERS.items():
        with suppress(ModelNotFound):
            names[prefix] = provider.names()
    return names


def _suggest(inner: str, names: Mapping[str, Sequence[str]]) -> str:
    """``; did you mean …?`` with the names closest to ``inner``, or nothing."""
    each = 3 if len(names) == 1 else 1
    close = [f"{prefix}:{match}" for prefix in names for match in get_close_matches(inner, names[prefix], n=each)]
    return f"; did you mean {', '.join(close)}?" if close else ""


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


def network_for(
    name: str,
    num_classes: int | None,
    *,
    weights: str | None = None,
    pretrained: bool = False,
    device: str = "cpu",
    channels_last: bool = False,
) -> nn.Module:
    """The MODEL ``name`` with ``num_classes`` outputs; a user's own ``file.py:factory`` is called as it is.

    ``pretrained`` allows published weights where ``weights`` names no file.

    >>> network_for("ifso:resnet20", 7).fc.out_features
    7
    """
    classes = None if is_program(name) else num_classes
    model = create_model(name, weights=weights, num_classes=classes, pretrained=pretrained and weights is None)
    model = model.to(device)
    return model.to(memory_format=torch.channels_last) if channels_last else model
