"""MODEL names: ``torchvision:NAME``, ``timm:NAME``, ``ifso:NAME`` or ``path/file.py:factory``, with options."""

from __future__ import annotations

import inspect
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import nn

from ifso.common.files import is_folder
from ifso.common.text import literal, one_line
from ifso.errors import IfsoError, ModelNotFound, TraceError, required
from ifso.models.detectors import (
    SMALL,
    example_images,
    is_detector,
    prepare_,
    refuse_thawed,
    refuse_unknown,
    small_retinanet,
)
from ifso.models.from_file import build_from_file
from ifso.models.resnet import DEPTHS, CifarResNet
from ifso.models.vgg import CifarVGG16
from ifso.models.weights import load_weights
from ifso.surgery.store import load

FORMS = "torchvision:NAME, timm:NAME, ifso:NAME or file.py:factory"

Builder = Callable[..., nn.Module]

OWN: dict[str, Builder] = {
    **{f"resnet{depth}": partial(CifarResNet, depth // 6) for depth in DEPTHS},
    **{f"resnet{depth}-padded": partial(CifarResNet, depth // 6, padded=True) for depth in DEPTHS},
    "vgg16": CifarVGG16,
    "resnet8-digits": partial(CifarResNet, 1, colours=1),
}

OWN_IMAGES = {"resnet8-digits": (1, 8, 8)}
"""The image (C, H, W) that a network of ours is made for, where it is not one of CIFAR."""

OF_DETECTORS = ("norms", "backbone")

LOADING = (
    "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained_strict", "checkpoint_path", "cache_dir",
    "weights", "weights_backbone",
)  # fmt: skip
"""Options with which torchvision and timm load files or download."""

PUBLISHED: dict[str, dict[str, Any]] = {"torchvision": {"weights": "DEFAULT"}, "timm": {"pretrained": True}}
"""By provider: the option that asks for published weights."""

ELSEWHERE = "; if there is no network here, fetch the weights where there is one, and give their file with --weights"

FRAMES = 16

DEFAULT_SIZE = 224


class Provider(NamedTuple):
    """``names()`` are the networks it has; ``build(name, **options)`` makes one, without pretrained weights."""

    names: Callable[[], Sequence[str]]
    build: Builder


def _build_own(name: str, **options: Any) -> nn.Module:
    if name not in SMALL:
        return OWN[name](**options)
    _package("torchvision")
    model = small_retinanet(name, **options)
    refuse_unknown(model, f"ifso:{name}", small_retinanet, options)
    return model


def _build_torchvision(name: str, **options: Any) -> nn.Module:
    models = _package("torchvision.models")
    builder = models.get_model_builder(name)
    accepted = inspect.signature(builder).parameters
    no_weights = {key: None for key in ("weights", "weights_backbone") if key in accepted}
    options = {**no_weights, **options}
    if options.get("weights") and "num_classes" in options and "weights_backbone" not in accepted:
        return _with_head_for(models, name, **options)
    model = models.get_model(name, **options)
    if is_detector(model):
        refuse_unknown(model, f"torchvision:{name}", builder, options)
    return model


def _with_head_for(models: ModuleType, name: str, num_classes: int, **options: Any) -> nn.Module:
    """The classifier with published weights; layers that hang on the number of classes are new if that is another."""
    model = models.get_model(name, **options)
    fresh = models.get_model(name, **{**options, "weights": None}, num_classes=num_classes)
    shapes = {key: tensor.shape for key, tensor in fresh.state_dict().items()}
    mine = model.state_dict().items()
    for layer in {key.rpartition(".")[0] for key, tensor in mine if shapes.get(key, tensor.shape) != tensor.shape}:
        model.set_submodule(layer, fresh.get_submodule(layer))
    return model


def _build_timm(name: str, **options: Any) -> nn.Module:
    timm = _package("timm")
    with _cached_only() if options.get("pretrained") and _is_alone() else nullcontext():
        return timm.create_model(name, **{"pretrained": False, **options})


def _is_alone() -> bool:
    """Return whether the name of the Hugging Face hub cannot be looked up, and no proxy would do that."""
    try:
        return not getproxies() and not socket.getaddrinfo(urlsplit(_hub().ENDPOINT).hostname, 443)
    except OSError:
        return True


def _hub() -> Any:
    """The constants of the package that timm downloads with."""
    return _package("huggingface_hub.constants")


@contextmanager
def _cached_only() -> Iterator[None]:
    """Within it timm takes published weights from its cache, or fails at once; it would ask for a minute otherwise."""
    hub = _hub()
    before, hub.HF_HUB_OFFLINE = hub.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        hub.HF_HUB_OFFLINE = before


def _package(name: str) -> ModuleType:
    package = name.partition(".")[0]
    return required(name, f"{package}: models need {package}", "vision", ModelNotFound)


PROVIDERS = {
    "ifso": Provider(lambda: [*OWN, *SMALL], _build_own),
    "torchvision": Provider(lambda: _package("torchvision.models").list_models(), _build_torchvision),
    "timm": Provider(
        lambda: [*_package("timm").list_models(), *_package("timm").list_pretrained()],
        _build_timm,
    ),
}


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
    program, mark, rest = text.partition(".py:")
    whole, *given = (rest if mark else text).split(",")
    if mark:
        whole = f"{program}{mark}{whole}"
    source, _, inner = whole.rpartition(":") if whole.rpartition(":")[0].endswith(".py") else whole.partition(":")
    return ModelName(source, inner, dict(_option(part, text) for part in given))


def _option(part: str, text: str) -> tuple[str, Any]:
    """The name and value of an option: a constant, a literal of Python, or the text itself."""
    key, equals, value = part.partition("=")
    if not equals or not key.isidentifier():
        shown, of = (repr(each if len(each) <= 200 else f"{each[:199]}…") for each in (part, text))
        raise ModelNotFound(f"{of}: {shown} is no option; write them as NAME,KEY=VALUE,KEY=VALUE")
    return key, literal(value)


def is_program(name: str) -> bool:
    """Return whether ``name`` is a function of a Python file."""
    return read_name(name).source.endswith(".py")


def loading(name: str) -> list[str]:
    """The options in a MODEL of torchvision or timm that would load a file or download; a program is its own affair.

    >>> loading("timm:resnet18,pretrained=True,num_classes=3"), loading("timm:resnet18,pretrained=False")
    (['pretrained'], [])
    """
    written = read_name(name)
    return [] if is_program(name) else [key for key in LOADING if written.options.get(key)]


def without_loading(name: str) -> str:
    """The same network, randomly initialised.

    >>> without_loading("timm:resnet18,pretrained=True,num_classes=3")
    'timm:resnet18,num_classes=3'
    """
    if not loading(name):
        return name
    whole, *given = name.split(",")
    return ",".join([whole, *(part for part in given if part.partition("=")[0] not in LOADING)])


def create_model(
    name: str,
    *,
    weights: str | Path | None = None,
    num_classes: int | None = None,
    pretrained: bool = False,
    **options: Any,
) -> nn.Module:
    """The network called ``name``, randomly initialised or with ``weights`` from a file.

    Args:
        name: any MODEL of the command line, such as ``"ifso:resnet32"`` or ``"timm:resnet18,in_chans=1"``.
        weights: a file of weights; or a folder that :func:`ifso.save` or a run wrote: the network is then the smaller
            one of that folder.
        num_classes: outputs of a classifier; by default what its builder has.
        pretrained: let torchvision and timm load published weights, or those that options in the name ask for, and
            download them if need be.
        options: go to the network's builder, as do those that follow the name after commas. Detectors also take
            ``norms`` and ``backbone`` (see :func:`ifso.models.detectors.prepare_`).

    Returns:
        The network on the CPU.

    Raises:
        ModelNotFound: no network has that name or takes these options.
        WeightsError: weights that do not fit it.
        RecipeError: a folder whose network is not of this one.

    >>> create_model("ifso:resnet20", num_classes=100).fc.out_features
    100
    >>> create_model("ifso:resnet20,num_classes=7").fc.out_features
    7
    """
    written = read_name(name)
    if num_classes is not None:
        other = written.options.get("num_classes", num_classes)
        if other != num_classes:
            raise ModelNotFound(
                f"{name} says num_classes={other}, but {num_classes} are needed; leave that out of the name"
            )
        options["num_classes"] = num_classes
    if pretrained and written.source not in PUBLISHED:
        raise ModelNotFound(f"{name} has no published weights; leave --pretrained out, and give a file with --weights")
    if pretrained:
        options |= {} if loading(name) else PUBLISHED[written.source]
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
    return model if weights is None else _filled(model, name, weights)


def _filled(model: nn.Module, name: str, weights: str | Path) -> nn.Module:
    """The network with the weights of a file; or made smaller, and with the weights, as a folder has it."""
    if is_folder(weights):
        return load(weights, model)
    if is_detector(model):
        refuse_thawed(model, name, weights)
    load_weights(model, weights)
    return model


def _build(written: ModelName, name: str, options: dict[str, Any]) -> nn.Module:
    """The network, made by its provider or by the user's file."""
    prefix, inner = written.source, written.inner
    if prefix.endswith(".py"):
        return build_from_file(prefix, inner, **options)
    if prefix not in PROVIDERS:
        raise ModelNotFound(f"{name!r} is no model name; write {FORMS}{_suggest(inner or prefix, PROVIDERS)}")
    names = PROVIDERS[prefix].names()
    if inner not in names:
        some = f"; there are {', '.join(names[:3])} and {len(names) - 3} more"
        raise ModelNotFound(f"no model {name!r}{_suggest(inner, {prefix: PROVIDERS[prefix]}) or some}")
    try:
        return PROVIDERS[prefix].build(inner, **options)
    except IfsoError:
        raise
    except Exception as error:
        given = ", ".join(f"{key}={value!r}" for key, value in options.items()) or "no options"
        kind = "" if isinstance(error, (TypeError, ValueError)) else f"{type(error).__name__}: "
        asked = any(options.get(key) for key in LOADING) and isinstance(error, OSError)
        remedy = ELSEWHERE if asked else ""
        raise ModelNotFound(f"{name} cannot be built with {given}: {kind}{one_line(error)}{remedy}") from error


def _suggest(inner: str, providers: Mapping[str, Provider]) -> str:
    """``; did you mean …?`` with the names closest to ``inner``, or nothing."""
    close: list[str] = []
    for prefix, provider in providers.items():
        with suppress(ModelNotFound):
            matches = get_close_matches(inner, provider.names(), n=3 if len(providers) == 1 else 1)
            close += [f"{prefix}:{match}" for match in matches]
    return f"; did you mean {', '.join(close)}?" if close else ""


def default_inputs(name: str, model: nn.Module) -> Any:
    """Inputs that ``model``, made from the MODEL ``name``, runs on: a tensor, or a tuple of positional arguments.

    Detection models take one image in a list and have to be in eval mode.

    >>> default_inputs("ifso:resnet20", create_model("ifso:resnet20")).shape
    torch.Size([1, 3, 32, 32])
    """
    prefix, inner, _ = read_name(name)
    if is_detector(model):
        return example_images(1, DEFAULT_SIZE, DEFAULT_SIZE)
    if prefix == "ifso":
        return torch.randn(1, *OWN_IMAGES.get(inner, (3, 32, 32)))
    if prefix == "timm":
        from timm.data import resolve_model_data_config

        return torch.randn(1, *resolve_model_data_config(model)["input_size"])
    if prefix == "torchvision":
        return _torchvision_inputs(inner, model)
    raise TraceError(f"no example input is known for {name}; give its shape, for example 1,3,224,224")


def _torchvision_inputs(inner: str, model: nn.Module) -> Any:
    """Of the size the model insists on, else of the one its first published weights were trained with."""
    family = type(model).__module__.removeprefix("torchvision.models.").partition(".")[0]
    if family == "optical_flow":
        return torch.randn(1, 3, 128, 128), torch.randn(1, 3, 128, 128)
    size: Any = getattr(model, "image_size", None)
    if not isinstance(size, int):
        from torchvision.models import get_model_weights

        published = next(iter(get_model_weights(inner)), None)
        size = getattr(getattr(published, "transforms", None), "keywords", {}).get("crop_size", DEFAULT_SIZE)
    height, width = (size, size) if isinstance(size, int) else size
    return torch.randn(1, 3, *([FRAMES] if family == "video" else []), height, width)


def network_for(
    name: str,
    num_classes: int | None,
    *,
    weights: str | None = None,
    pretrained: bool = False,
    device: str = "cpu",
    channels_last: bool = False,
    seed: int | None = None,
) -> nn.Module:
    """The MODEL ``name`` with ``num_classes`` outputs; a user's own ``file.py:factory`` is called as it is.

    ``pretrained`` allows published weights where ``weights`` names no file. With a ``seed`` it fixes what is random in
    the network, and torch's random state on the CPU stays as it was.

    >>> network_for("ifso:resnet20", 7).fc.out_features
    7
    """
    classes = None if is_program(name) else num_classes
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        model = create_model(name, weights=weights, num_classes=classes, pretrained=pretrained and weights is None)
    model = model.to(device)
    return model.to(memory_format=torch.channels_last) if channels_last else model
