"""MODEL names: ``torchvision:NAME``, ``timm:NAME``, ``ifso:NAME`` or ``path/file.py:factory``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import nn

from ifso.errors import ModelNotFound
from ifso.models.from_file import build_from_file
from ifso.models.providers import PROVIDERS
from ifso.models.weights import load_weights

FORMS = "torchvision:NAME, timm:NAME, ifso:NAME or file.py:factory"


def create_model(
    name: str, *, weights: str | Path | None = None, num_classes: int | None = None, **options: Any
) -> nn.Module:
    """The network called ``name``, randomly initialised or with ``weights`` from a file.

    ``options`` go to the network's builder. Nothing is downloaded.

    >>> create_model("ifso:resnet20", num_classes=100).fc.out_features
    100
    """
    if num_classes is not None:
        options["num_classes"] = num_classes
    model = _build(name, options)
    if weights is not None:
        load_weights(model, weights)
    return model


def _build(name: str, options: dict[str, Any]) -> nn.Module:
    prefix, _, inner = name.partition(":")
    if prefix in PROVIDERS:
        provider = PROVIDERS[prefix]
        names = provider.names()
        if inner not in names:
            some = f"; there are {', '.join(names[:3])} and {len(names) - 3} more"
            raise ModelNotFound(f"no model {name!r}{_suggest(inner, {prefix: names}) or some}")
        return provider.build(inner, **options)
    path, _, factory = name.rpartition(":")
    if path.endswith(".py"):
        return build_from_file(path, factory, **options)
    raise ModelNotFound(f"{name!r} is no model name; write {FORMS}{_suggest(inner or prefix, _all_names())}")


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
