"""MODEL names: ``torchvision:NAME``, ``timm:NAME``, ``ifso:NAME`` or ``path/file.py:factory``, with options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import nn

from ifso.common.text import one_line
from ifso.errors import IfsoError, ModelNotFound
from ifso.models.detectors import is_detector, prepare_, refuse_thawed
from ifso.models.from_file import build_from_file
from ifso.models.names import ModelName, loading, read_name
from ifso.models.providers import PROVIDERS, Provider
from ifso.models.weights import load_weights

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
