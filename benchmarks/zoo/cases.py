"""A network of the zoo with random data that it accepts: batches, a loss, inputs to trace it with."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import MappingKey, tree_leaves, tree_map_with_path

from benchmarks.zoo.lively import calibrate_, perturb_
from benchmarks.zoo.networks import Entry
from ifso.common.loss_fn import LossFn, is_random
from ifso.common.text import one_line
from ifso.errors import IfsoError
from ifso.models import create_model, default_inputs
from ifso.models.detectors import is_detector
from ifso.tasks.detection import detection_loss

SEED = 0
SMALL_BATCH = 4
SMALL_SIZES = (64, 96, 112, 128, 160, 192, 224, 256)
DETECTOR_SIZE, SMALL_DETECTOR_SIZE = 320, 128
BOXES, KEYPOINTS = 3, 17
SMOOTH = 1e-3
"""Gradients in float32 that are off by less are good enough for ranks."""

MOST_SIZES = 3
"""So many sizes are tried for that."""

ALL_REGIONS = {
    "rpn_post_nms_top_n_train": 50,
    "rpn_batch_size_per_image": 2**20,
    "box_batch_size_per_image": 2**10,
}
"""All of few regions count for the loss, so that none are drawn by lot: every device would draw others."""


@dataclass(frozen=True)
class Case:
    """A network with ``feed(seed)``, which gives batches on the CPU for ``loss_fn``; ``options`` it was built with."""

    model: nn.Module
    feed: Callable[[int], Any]
    loss_fn: LossFn
    example: Callable[[Any], Any]
    """What to trace the network with, from a batch."""
    words: str
    """The shape of a batch: ``8x3x224x224``."""
    options: dict[str, Any] = field(default_factory=dict)


def native_case(entry: Entry, batch: int, device: torch.device, model: nn.Module | None = None) -> Case:
    """The network on a device, at the size of its own input; ``model`` is one that was made for small inputs before."""
    made = _built(entry, native_options(entry), "cpu") if model is None else model
    feed = _feed(entry, made, batch, None)
    if model is None:
        enliven_(made, feed, device)
    return _case(moved_(made, device), feed, native_options(entry))


def small_case(entry: Entry, device: torch.device) -> Case:
    """The network, lively, with the smallest inputs on which its gradient in float32 says what it says in float64.

    Batch norms over few numbers make a deep network chaotic: then scores in float32 could not be those in float64, and
    of all inputs tried those are taken on which the two gradients agree best.
    """
    problems, found = ["nothing was tried"], list[tuple[float, Case]]()
    for size, options in _small_ways(entry):
        try:
            _try_on_meta(entry, size, options)
            model = _built(entry, options, "cpu")
            feed = _feed(entry, model, SMALL_BATCH, size)
            enliven_(model, feed, torch.device("cpu"))
            case = _case(model, feed, options)
            found.append((_rounding(case, device), case))
        except Exception as error:  # whatever a network raises on a size that it does not accept
            problems.append(f"{type(error).__name__}: {one_line(error)}")
        if found and (found[-1][0] < SMOOTH or len(found) == MOST_SIZES):
            break
    if found:
        return min(found, key=itemgetter(0))[1]
    raise IfsoError(f"the network itself runs on none of the inputs tried; last: {problems[-1]}")


def _rounding(case: Case, device: torch.device) -> float:
    """The largest relative error, of a parameter, of the gradient in float32."""
    model, grads = still_(case.model), list[list[Tensor]]()
    for dtype in (torch.float32, torch.float64):
        moved_(model, device, dtype)
        loss = case.loss_fn(model, on(device, case.feed(SEED), dtype))
        if not bool(loss.isfinite()):
            raise IfsoError("the loss is not finite")
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        found = torch.autograd.grad(loss, weights, allow_unused=True)
        grads.append([grad.double() for grad in found if grad is not None])
    moved_(model, "cpu", torch.float32)
    size = max(float(grad.norm()) for grad in grads[1])
    return max(float((one - other).norm()) / size for one, other in zip(*grads, strict=True))


def _case(model: nn.Module, feed: Callable[[int], Any], options: dict[str, Any]) -> Case:
    detects = is_detector(model)
    shapes = ["x".join(map(str, leaf.shape)) for leaf in tree_leaves(feed(SEED)[0])]
    words = f"{len(shapes)} of {shapes[0]}" if detects else shapes[0]
    return Case(
        model, feed, detection_loss if detects else logits_loss,
        (lambda batch: (batch[0][:1],)) if detects else (lambda batch: batch[0][:2]), words, options,
    )  # fmt: skip


def logits_loss(model: nn.Module, batch: Any) -> Tensor:
    """The cross entropy of all outputs [N, classes, …] of the model added up, heads that only train among them.

    A batch is images and numbers in [0, 1) [N, H, W], from which labels are made for as many classes as there are.

    >>> batch = torch.zeros(2, 4), torch.rand(2, 8, 8)
    >>> round(float(logits_loss(nn.Flatten(), batch)), 4)
    1.3863
    """
    images, numbers = batch
    outputs = [leaf for leaf in tree_leaves(_plain(model(images))) if isinstance(leaf, Tensor) and leaf.dim() > 1]
    if not outputs:
        raise IfsoError(f"{type(model).__name__} returns no tensor [N, classes, …]")
    losses = []
    for logits in outputs:
        positions = logits[0, 0].numel()
        drawn = numbers.flatten(1)[:, :positions].reshape(len(logits), *logits.shape[2:])
        labels = (drawn.double() * logits.shape[1]).long()  # in float32 a product may round up to the next label
        losses.append(F.cross_entropy(logits, labels))
    return torch.stack(losses).sum()


def _plain(output: Any) -> Any:
    """Named tuples and dicts of the libraries' own kinds as plain ones."""
    if isinstance(output, dict):
        return {key: _plain(value) for key, value in output.items()}
    return [_plain(value) for value in output if value is not None] if isinstance(output, (list, tuple)) else output


def still_(model: nn.Module) -> nn.Module:
    """Train mode, but nothing is left out at random: every device and precision would draw something else."""
    model.train()
    for module in model.modules():
        if is_random(module):
            module.eval()
        if isinstance(getattr(module, "drop_rate", None), float):  # of a dropout in a ``forward``, as timm has them
            module.drop_rate = 0.0  # type: ignore[assignment]
    return model


def enliven_(model: nn.Module, feed: Callable[[int], Any], device: torch.device) -> None:
    """Weights on which scores show something, see :mod:`benchmarks.zoo.lively`; the model stays there, in eval mode."""
    perturb_(model.eval(), SEED)
    moved_(model, device)
    images = on(device, feed(SEED)[0])

    def run() -> Any:
        torch.manual_seed(SEED)
        return model(images)

    calibrate_(model, run)


def on(device: torch.device | str, batch: Any, dtype: torch.dtype | None = None) -> Any:
    """A batch on a device, its numbers in another precision if asked for; torchvision wants keypoints in float32."""

    def moved(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        other = dtype is not None and leaf.is_floating_point() and MappingKey("keypoints") not in path
        return leaf.to(device, dtype if other else leaf.dtype)

    return tree_map_with_path(moved, batch)


def moved_(model: nn.Module, device: torch.device | str, dtype: torch.dtype | None = None) -> nn.Module:
    """The model on a device and in a precision, with the tensors that its modules keep from run to run on their own."""
    model.to(device, dtype)
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor):
                setattr(module, name, on(device, value, dtype))
    return model


def _built(entry: Entry, options: dict[str, Any], device: str) -> nn.Module:
    torch.manual_seed(SEED)
    with warnings.catch_warnings(), torch.device(device):
        warnings.simplefilter("ignore")
        return create_model(entry.key, **options)


def _try_on_meta(entry: Entry, size: int | None, options: dict[str, Any]) -> None:
    """Raise if the network refuses the inputs; those that look at values pass, and are only tried for real."""
    if entry.kind == "detection" or size is None:
        return
    try:
        with torch.device("meta"), torch.no_grad():
            _built(entry, options, "meta").train()(torch.empty(SMALL_BATCH, 3, size, size))
    except (RuntimeError, NotImplementedError) as error:
        if "meta" not in str(error).lower():
            raise


def _small_ways(entry: Entry) -> Iterator[tuple[int | None, dict[str, Any]]]:
    """Sizes with the options that the network needs for them, the smallest first."""
    own = native_options(entry)
    if entry.kind == "detection":
        regions = ALL_REGIONS if "rcnn" in entry.name else {}
        fixed = entry.name.startswith("ssd")
        sides = {} if fixed else {"min_size": SMALL_DETECTOR_SIZE, "max_size": SMALL_DETECTOR_SIZE}
        yield None if fixed else SMALL_DETECTOR_SIZE, {**own, **sides, **regions}
        return
    if entry.source not in ("torchvision", "timm"):
        yield None, own
        return
    for size in SMALL_SIZES:
        if entry.source == "timm":
            yield size, {**own, "img_size": size}
        yield size, {**own, "image_size": size} if entry.name.startswith("vit_") and entry.source != "timm" else own
    yield None, own


def native_options(entry: Entry) -> dict[str, Any]:
    """What the network is built with at its own size."""
    if entry.name in ("googlenet", "inception_v3") and entry.source == "torchvision":
        return {"init_weights": False}
    if entry.kind == "detection" and not entry.name.startswith("ssd"):
        return {"min_size": DETECTOR_SIZE, "max_size": DETECTOR_SIZE}
    return {}


def _feed(entry: Entry, model: nn.Module, batch: int, size: int | None) -> Callable[[int], Any]:
    """Batches by their seeds; of images of that size, or of the network's own if None."""
    if is_detector(model):
        sizes = [(size or DETECTOR_SIZE,) * 2] * batch
        return lambda seed: scenes(entry.name, sizes, _random(seed))
    shape = default_inputs(entry.key, model).shape[1:]
    if size is not None:
        shape = (*shape[:-2], size, size)

    def images(seed: int) -> tuple[Tensor, Tensor]:
        random = _random(seed)
        return torch.randn(batch, *shape, generator=random), torch.rand(batch, *shape[-2:], generator=random)

    return images


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(SEED + seed)


def scenes(
    name: str, sizes: Sequence[tuple[int, int]], random: torch.Generator
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Images of these heights and widths with a few boxes each, and what the network wants to know about these."""
    images, targets = [], []
    for height, width in sizes:
        images.append(torch.rand(3, height, width, generator=random))
        corners = 0.5 * torch.rand(BOXES, 2, generator=random)
        shares = torch.cat([corners, corners + 0.15 + 0.35 * torch.rand(BOXES, 2, generator=random)], 1)
        boxes = shares * torch.tensor([width, height, width, height])
        labels = torch.ones(BOXES).long() if "keypoint" in name else torch.randint(1, 20, (BOXES,), generator=random)
        target = {"boxes": boxes, "labels": labels}
        if "mask" in name:
            target["masks"] = (torch.rand(BOXES, height, width, generator=random) > 0.5).to(torch.uint8)
        if "keypoint" in name:
            inside = torch.rand(BOXES, KEYPOINTS, 2, generator=random) * (boxes[:, None, 2:] - boxes[:, None, :2])
            places = torch.cat([boxes[:, None, :2] + inside, torch.ones(BOXES, KEYPOINTS, 1)], 2)
            target["keypoints"] = places.float()
        targets.append(target)
    return images, targets
