"""Anchors, losses and boxes of a detector in float32, while its layers compute in half precision.

torchvision's detectors make anchors in the dtype of the feature maps, and boxes in the dtype of what the heads say.
In bfloat16 that is a grid of 4 pixels at the far end of an image 1000 pixels wide, for the targets of training as well
as for what is found, and the anchors stay so rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

HEADS = ("head", "rpn.head", "roi_heads.box_predictor", "roi_heads.mask_predictor", "roi_heads.keypoint_predictor")
"""Modules whose outputs losses and boxes are made from."""

ANCHORS = ("anchor_generator", "rpn.anchor_generator")
"""Modules that ask feature maps for their sizes and their dtype, and nothing else."""

DEVICES = ("cpu", "cuda", "mps", "xpu")
"""Where autocast may be on."""


def unwrapped(model: nn.Module) -> nn.Module:
    """The network itself, where it is compiled or exchanges gradients with other processes."""
    model = getattr(model, "_orig_mod", model)
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


@contextmanager
def wide_heads(model: nn.Module) -> Iterator[None]:
    """Within it heads give float32, and anchors are made in it. Without autocast nothing changes.

    The parameters are not asked for their device: while scores are computed, each that is asked anything is copied.
    """
    if not any(torch.is_autocast_enabled(kind) for kind in DEVICES):
        yield
        return
    with ExitStack() as stack:
        for module in _named(model, HEADS):
            stack.enter_context(module.register_forward_hook(_widened))
        for module in _named(model, ANCHORS):
            stack.enter_context(module.register_forward_pre_hook(_sized))
        yield


def _named(model: nn.Module, names: tuple[str, ...]) -> list[nn.Module]:
    network, found = unwrapped(model), []
    for name in names:
        with suppress(AttributeError):
            found.append(network.get_submodule(name))
    return found


def _widened(_module: nn.Module, _inputs: Any, outputs: Any) -> Any:
    return tree_map(wide, outputs)


def wide(leaf: Any) -> Any:
    """A tensor of half precision as float32; whatever else it is, as it is."""
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in (torch.bfloat16, torch.float16) else leaf


def _sized(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Feature maps of the same sizes in float32, which take no memory."""
    images, features = inputs
    return images, [feature.new_empty((), dtype=torch.float32).expand(feature.shape) for feature in features]
