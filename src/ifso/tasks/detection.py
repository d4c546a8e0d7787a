"""The loss of a detector: ``loss_fn(model, batch)`` with a batch of (images, targets), in float32 where it must be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ifso.common.loss_fn import is_random
from ifso.common.module_state import unwrapped
from ifso.common.tensors import to_float32
from ifso.common.torch_state import same_modes
from ifso.errors import ScoreError


def detection_loss(model: nn.Module, batch: Any) -> Tensor:
    """The sum of the losses that a detector returns for (images, targets).

    ``images`` is a list of tensors [3, H, W], ``targets`` a list of dicts with ``boxes`` [n, 4] (x1, y1, x2, y2),
    ``labels`` [n] and whatever else the model asks for. A model of your own takes ``model(images, targets)`` in train
    mode and returns a dict of scalars, or of lists of scalars.

    A model in eval mode is asked for its losses too, with batch norms and dropout as in eval mode: whether the
    statistics are those of the batch or the running ones is the model's mode, as for a classifier.

    >>> class Half(nn.Module):
    ...     def forward(self, images, targets):
    ...         return {"class": images[0].mean(), "boxes": [targets[0]["boxes"].mean()]}
    >>> batch = [torch.full((3, 2, 2), 0.5)], [{"boxes": torch.ones(1, 4), "labels": torch.ones(1)}]
    >>> float(detection_loss(Half(), batch))
    1.5
    """
    return torch.stack(list(detection_losses(model, batch).values())).sum()


def detection_losses(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """The losses that :func:`detection_loss` sums, by name: scalars in float32 or better."""
    images, targets = _images_and_targets(batch)
    with loss_mode(model), float32_heads(model):
        found = model(images, targets)
    if not isinstance(found, Mapping) or not found:
        raise ScoreError(
            f"{type(model).__name__} returned {_words(found)} for (images, targets); "
            "a detector must return a dict of losses in train mode"
        )
    return {str(name): _scalar(str(name), loss) for name, loss in found.items()}


@contextmanager
def loss_mode(model: nn.Module) -> Iterator[None]:
    """Put a model that is in eval mode into train mode for a while, except its batch norms and dropout."""
    if model.training:
        yield
        return
    with same_modes(model):
        for module in model.modules():
            if not isinstance(module, nn.modules.batchnorm._NormBase) and not is_random(module):
                module.training = True
        yield


def _images_and_targets(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        kind = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, (tuple, list)) else type(batch).__name__
        raise ScoreError(f"a batch for a detector must be (images, targets), got {kind}")
    images, targets = batch
    if len(images) != len(targets):
        raise ScoreError(f"a batch has {len(images)} images and targets for {len(targets)}; give one dict for each")
    return images, targets


def _scalar(name: str, loss: Any) -> Tensor:
    if isinstance(loss, (list, tuple)) and loss:
        return torch.stack([_scalar(name, part) for part in loss]).sum()
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise ScoreError(f"the loss {name!r} of the detector must be a floating-point scalar, got {_words(loss)}")
    return loss.reshape(()).to(torch.promote_types(loss.dtype, torch.float32))


def _words(found: Any) -> str:
    if isinstance(found, Tensor):
        return f"a {found.dtype} tensor of shape {tuple(found.shape)}"
    return f"an empty {type(found).__name__}" if hasattr(found, "__len__") and not len(found) else type(found).__name__


HEADS = ("head", "rpn.head", "roi_heads.box_predictor", "roi_heads.mask_predictor", "roi_heads.keypoint_predictor")
"""Modules whose outputs losses and boxes are made from."""

ANCHORS = ("anchor_generator", "rpn.anchor_generator")
"""Modules that read nothing but the sizes and the dtype of feature maps."""

AUTOCAST_DEVICES = ("cpu", "cuda", "mps", "xpu")


@contextmanager
def float32_heads(model: nn.Module) -> Iterator[None]:
    """Under autocast, let heads return float32 and anchors be made in float32 for a while.

    Parameters are not asked for their device: while scores are computed, each that is asked anything is copied.
    """
    if not any(torch.is_autocast_enabled(kind) for kind in AUTOCAST_DEVICES):
        yield
        return
    with ExitStack() as stack:
        for module in _named(model, HEADS):
            stack.enter_context(module.register_forward_hook(lambda _, _inputs, outputs: tree_map(to_float32, outputs)))
        for module in _named(model, ANCHORS):
            stack.enter_context(module.register_forward_pre_hook(_features_to_float32))
        yield


def _named(model: nn.Module, names: tuple[str, ...]) -> list[nn.Module]:
    network, found = unwrapped(model), []
    for name in names:
        with suppress(AttributeError):
            found.append(network.get_submodule(name))
    return found


def _features_to_float32(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Feature maps of the same sizes in float32, which take no memory."""
    images, features = inputs
    return images, [feature.new_empty((), dtype=torch.float32).expand(feature.shape) for feature in features]
