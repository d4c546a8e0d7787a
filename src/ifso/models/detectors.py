"""Detectors: their batch norms, a backbone's weights from a file, and a RetinaNet smaller than torchvision's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ifso.errors import ModelNotFound, WeightsError
from ifso.models.weights import COUNTER, check_fit, read_state

NORMS = ("batch", "frozen")
BODIES = ("backbone.body", "backbone.0", "backbone.features", "backbone")
"""Where torchvision's detectors keep the network that was a classifier, the innermost first."""

SMALL = {"retinanet_resnet18_fpn": "resnet18", "retinanet_resnet34_fpn": "resnet34"}


def small_retinanet(name: str, num_classes: int = 91, **options: Any) -> nn.Module:
    """RetinaNet with an FPN on a ResNet-18 or -34, put together from torchvision's parts as its ResNet-50 one is.

    ``num_classes`` counts the background; ``options`` are those of ``torchvision.models.detection.RetinaNet``.
    """
    from torchvision.models.detection import RetinaNet
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
    from torchvision.ops.feature_pyramid_network import LastLevelP6P7

    backbone = resnet_fpn_backbone(
        backbone_name=SMALL[name],
        weights=None,
        norm_layer=nn.BatchNorm2d,
        trainable_layers=5,
        returned_layers=[2, 3, 4],
        extra_blocks=LastLevelP6P7(256, 256),
    )
    return RetinaNet(backbone, num_classes, **options)


def is_detector(model: nn.Module) -> bool:
    """Return whether it is a detector of torchvision, or made of their parts."""
    return any(map(is_torchvisions, type(model).__mro__))


def is_torchvisions(kind: type) -> bool:
    """Return whether it is a class of ``torchvision.models.detection``."""
    return kind.__module__.startswith("torchvision.models.detection.")


def refuse_unknown(model: nn.Module, name: str, builder: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """ModelNotFound for an option that a detector of torchvision does not know, and would leave out without a word."""
    makers: list[Callable[..., Any]] = [builder, *filter(is_torchvisions, type(model).__mro__)]
    known = sorted({option for maker in makers for option in inspect.signature(maker).parameters} - {"self", "kwargs"})
    for option in options:
        if option not in known:
            close = get_close_matches(option, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(known)}"
            raise ModelNotFound(f"{name} has no option {option}; {hint}")


def prepare_(model: nn.Module, name: str, *, norms: str = "batch", backbone: str | Path | None = None) -> nn.Module:
    """The detector with its backbone's weights from a file, and its backbone's batch norms frozen if asked for.

    ``norms="frozen"`` is for batches of few images and for published weights: statistics, scales and shifts stay what
    they are, in train mode too. ``backbone`` is a file with the weights of the classifier that the backbone is part of,
    such as torchvision's ResNet-50 for ImageNet; its classes are left out.
    """
    if norms not in NORMS:
        raise ModelNotFound(f"{name}: norms={norms!r} is unknown; choose {' or '.join(NORMS)}")
    if backbone is not None:
        load_backbone_(model, backbone)
    if norms == "frozen" and not freeze_norms_(model.get_submodule("backbone")):
        raise ModelNotFound(f"{name}: norms=frozen, but its backbone has no batch norms; leave that out")
    return model


def freeze_norms_(module: nn.Module) -> int:
    """Exchange every batch norm for torchvision's FrozenBatchNorm2d with the same numbers; how many there were.

    >>> net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    >>> freeze_norms_(net), type(net[1]).__name__, [name for name, _ in net.named_parameters()]
    (1, 'FrozenBatchNorm2d', ['0.weight', '0.bias'])
    """
    from torchvision.ops import FrozenBatchNorm2d

    norms = [
        (parent, key, child)
        for parent in module.modules()
        for key, child in parent.named_children()
        if isinstance(child, nn.BatchNorm2d)
    ]
    for parent, key, norm in norms:
        frozen = FrozenBatchNorm2d(norm.num_features, eps=norm.eps).to(norm.weight)
        state = {name: value for name, value in norm.state_dict().items() if name != COUNTER}
        frozen.load_state_dict(state)
        setattr(parent, key, frozen.train(norm.training))
    return len(norms)


def load_backbone_(model: nn.Module, path: str | Path) -> None:
    """Load a classifier's weights into the backbone of a detector; all that the backbone has must be there and fit."""
    state = read_state(Path(path))
    renamed = {key.removeprefix("features."): value for key, value in state.items()}
    modules = dict(model.named_modules())
    bodies = {name: modules[name].state_dict() for name in BODIES if name in modules}
    body = max(bodies, key=lambda name: len(renamed.keys() & bodies[name].keys()), default="")
    target = bodies.get(body, {})
    if not renamed.keys() & target.keys():
        raise WeightsError(
            f"{path} holds no weights of the backbone of {type(model).__name__}: it has {_some(state)}, "
            f"the backbone {_some(target)}"
        )
    counters = {key: value for key, value in target.items() if key.endswith(COUNTER)}
    fitting = {**counters, **{key: value for key, value in renamed.items() if key in target}}
    check_fit(fitting, target, path)
    model.get_submodule(body).load_state_dict(fitting)


def _some(keys: Mapping[str, Tensor]) -> str:
    return f"{', '.join(list(keys)[:2]) or 'nothing'}{', …' if len(keys) > 2 else ''}"


def refuse_thawed(model: nn.Module, name: str, path: str | Path) -> None:
    """WeightsError if the file is of frozen batch norms (it has no counters of them) and those of the model are not."""
    if any(key.endswith(COUNTER) for key in model.state_dict()):
        state = read_state(Path(path))
        if not any(key.endswith(COUNTER) for key in state):
            raise WeightsError(
                f"{path} was trained with frozen batch norms, and those of {name} are not; "
                f"write the model as {name},norms=frozen"
            )


def example_images(count: int, height: int, width: int, *, device: torch.device | str = "cpu") -> tuple[Any, ...]:
    """What a detector takes in eval mode: a list of ``count`` images [3, height, width] with values from 0 to 1.

    Always the same images: how many regions a two-stage detector looks at, and so its cost, depends on them.
    """
    random = torch.Generator().manual_seed(0)
    return ([torch.rand(3, height, width, generator=random).to(device) for _ in range(count)],)
