"""How well a detector does: average precision as COCO defines it, computed by ``faster-coco-eval``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ifso.common.distributed import collective_device, gathered, is_distributed, rank, sum_over_ranks, together
from ifso.common.torch_state import eval_mode
from ifso.data.coco_batches import Annotations
from ifso.data.compatibility import is_detections
from ifso.errors import DataError, DivergedError, required
from ifso.tasks.detection import float32_heads

FIFTY, SEVENTY_FIVE = 0, 5
"""Indices among the thresholds 0.5, 0.55, … 0.95 of the overlap."""


@dataclass(frozen=True)
class AveragePrecision:
    """Average precision in percent, as a mean over categories; None where there is no true box.

    ``map`` is the mean over ten thresholds of the overlap (intersection over union) from 0.5 to 0.95, ``map50`` and
    ``map75`` are at one threshold, ``map_small``, ``map_medium`` and ``map_large`` are ``map`` for boxes whose
    annotated area is up to 32² pixels, up to 96² and beyond. ``by_category`` holds ``map`` by the name of the category.
    """

    map: float | None
    map50: float | None
    map75: float | None
    map_small: float | None
    map_medium: float | None
    map_large: float | None
    by_category: Mapping[str, float | None]
    images: int


def evaluate_detector(
    model: nn.Module, batches: Iterable[Any], truth: Annotations | None = None, *, over_ranks: bool = False
) -> AveragePrecision:
    """The average precision of ``model`` in eval mode over batches of (images, targets); its modes are then restored.

    ``truth`` (``batches.truth`` unless given) are the true boxes in pixels of the original images: boxes predicted for
    resized images are scaled back. Without it the targets of the batches count, which may have ``area`` and
    ``iscrowd`` too. With ``over_ranks`` every process of ``torch.distributed`` brings batches of its own, and all
    return the joint result; an image that several of them bring counts once.
    """
    check_evaluator()
    truth = getattr(batches, "truth", None) if truth is None else truth
    if over_ranks and is_distributed():
        seen = _joined(together(lambda: _predict(model, batches, truth)))
    else:
        seen = _predict(model, batches, truth)
    if not len(seen.images):
        raise DataError("there is nothing to evaluate on: the batches ran out before the first one")
    truth = _targets_as_truth(seen) if truth is None else truth
    return average_precision(seen.detections, truth, seen.images[:, 0].long().tolist())


def check_evaluator() -> None:
    """Raise if ``faster-coco-eval`` cannot be imported."""
    required("faster_coco_eval", "average precision is computed by faster-coco-eval", "detection")


def average_precision(detections: Tensor, truth: Annotations, images: Sequence[int]) -> AveragePrecision:
    """The average precision of ``detections`` [n, 7] (image id, x1, y1, x2, y2, score, label) on images by their ids.

    One detection that covers half of the only box:

    >>> truth = Annotations(
    ...     image_ids=torch.tensor([5]), sizes=torch.tensor([[50, 50]]), first=torch.tensor([0, 1]),
    ...     boxes=torch.tensor([[0.0, 0.0, 40.0, 40.0]]), labels=torch.tensor([1]), areas=torch.tensor([1600.0]),
    ...     crowd=torch.tensor([False]), categories={1: "cell"},
    ... )
    >>> found = average_precision(torch.tensor([[5, 0, 0, 40, 20, 0.9, 1]]), truth, [5])
    >>> round(found.map, 6), found.map50, found.map75, found.map_small, found.by_category["cell"] == found.map
    (10.0, 100.0, 0.0, None, True)
    """
    from faster_coco_eval import COCO, COCOeval_faster

    coco, rows = COCO(truth.as_coco()), detections.double()
    of_sizes = torch.cat([rows[:, :3], rows[:, 3:5] - rows[:, 1:3], rows[:, 5:]], 1)  # left, top, width, height
    evaluator = COCOeval_faster(coco, coco.loadRes(of_sizes.cpu().numpy()), iouType="bbox")
    evaluator.params.imgIds = sorted(images)
    evaluator.evaluate()
    evaluator.accumulate()
    # Axes: thresholds of the overlap, recall, categories, areas, most detections of an image (1, 10, 100).
    precision = np.asarray(evaluator.eval["precision"])[..., -1]
    whole = precision[..., 0]
    overall, small, medium, large = (_mean(precision[..., area]) for area in range(4))
    by_category = {truth.categories[label]: _mean(whole[:, :, k]) for k, label in enumerate(sorted(truth.categories))}
    at_fifty, at_seventy_five = _mean(whole[FIFTY]), _mean(whole[SEVENTY_FIVE])
    return AveragePrecision(overall, at_fifty, at_seventy_five, small, medium, large, by_category, len(images))


@dataclass
class _Seen:
    """``images`` [k, 3]: id, height, width; ``detections`` [n, 7] as in :func:`average_precision`.

    ``targets`` [m, 8]: image id, x1, y1, x2, y2, label, area, crowd. All in float64, on the CPU.
    """

    images: Tensor
    detections: Tensor
    targets: Tensor


@torch.no_grad()
def _predict(model: nn.Module, batches: Iterable[Any], truth: Annotations | None) -> _Seen:
    """The network's detections on all batches, and their targets if there is no ``truth``."""
    ids: list[Tensor] = []
    sizes: list[tuple[int, int]] = []
    predicted: list[Tensor] = []
    true: list[Tensor] = []
    with eval_mode(model), float32_heads(model):
        for images, targets in map(_images_and_targets, batches):
            if not len(images):
                continue
            outputs = model(images)
            if not is_detections(outputs, len(images)):
                raise DataError(
                    f"the network gave {type(outputs).__name__} for {len(images)} images; a detector in eval mode "
                    "gives a list of dicts with boxes, scores and labels, one for each image"
                )
            ids.extend(target["image_id"].reshape(()) for target in targets)
            sizes.extend((int(image.shape[-2]), int(image.shape[-1])) for image in images)
            predicted.extend(map(_rows, outputs))
            if truth is None:
                true.extend(map(_target_rows, targets))
    if not ids:
        return _Seen(*(torch.zeros(0, columns, dtype=torch.float64) for columns in (3, 7, 8)))
    numbers = torch.stack(ids).cpu()
    images_seen = torch.cat([numbers[:, None].double(), torch.tensor(sizes).double()], 1)
    seen = _Seen(images_seen, _numbered(predicted, numbers, 6), _numbered(true, numbers, 7))
    _check_ids_and_numbers(seen)
    if truth is not None:
        _to_original_pixels_(seen, truth)
        seen.detections = _of_known_labels(seen.detections, truth)
    return seen


def _images_and_targets(batch: Any) -> tuple[Any, Any]:
    if (
        not isinstance(batch, (tuple, list))
        or len(batch) != 2
        or isinstance(batch[1], Tensor)
        or len(batch[0]) != len(batch[1])
        or not all(isinstance(target, Mapping) and "image_id" in target for target in batch[1])
    ):
        raise DataError(
            "a detector is evaluated on batches of (images, targets), a target for each image, with image_id, boxes "
            "and labels; give such batches"
        )
    return batch[0], batch[1]


def _rows(output: Mapping[str, Tensor]) -> Tensor:
    """Boxes, scores and labels of an image [n, 6], on the device."""
    boxes, scores, labels = (output[name].detach().float() for name in ("boxes", "scores", "labels"))
    return torch.cat([boxes.reshape(-1, 4), scores[:, None], labels[:, None]], 1)


def _target_rows(target: Mapping[str, Tensor]) -> Tensor:
    """Boxes, labels, areas and crowds of a target [m, 7]."""
    boxes = target["boxes"].detach().float().reshape(-1, 4)
    area = target.get("area", (boxes[:, 2:] - boxes[:, :2]).prod(1)).float()
    crowd = target.get("iscrowd", torch.zeros(len(boxes), device=boxes.device)).float()
    return torch.cat([boxes, target["labels"].float()[:, None], area[:, None], crowd[:, None]], 1)


def _numbered(parts: Sequence[Tensor], numbers: Tensor, columns: int) -> Tensor:
    """The rows of all images in float64, each with the id of its image in front."""
    if not parts:
        return torch.zeros(0, columns + 1, dtype=torch.float64)
    counts = torch.tensor([len(part) for part in parts])
    return torch.cat([numbers.double().repeat_interleave(counts)[:, None], torch.cat(list(parts)).cpu().double()], 1)


def _check_ids_and_numbers(seen: _Seen) -> None:
    ids, counts = seen.images[:, 0].unique(return_counts=True)
    if bool((counts > 1).any()):
        twice = int(ids[counts > 1][0])
        raise DataError(f"image {twice} comes twice in the batches to evaluate on; give every image an id of its own")
    bad = ~seen.detections.isfinite().all(1)
    if bool(bad.any()):
        raise DivergedError(
            f"the network gives boxes or scores that are not finite for image {int(seen.detections[bad][0, 0])}; "
            "its weights have diverged"
        )


def _to_original_pixels_(seen: _Seen, truth: Annotations) -> None:
    """Scale boxes that were predicted in resized images."""
    rows = {number: row for row, number in enumerate(truth.image_ids.tolist())}
    numbers = seen.images[:, 0].long().tolist()
    unknown = [number for number in numbers if number not in rows]
    if unknown:
        raise DataError(f"image {unknown[0]} of the batches is not among the {len(truth)} images with known boxes")
    original = truth.sizes[[rows[number] for number in numbers]].double()
    down, across = (original / seen.images[:, 1:]).unbind(1)
    order = seen.images[:, 0].argsort()
    own = order[torch.searchsorted(seen.images[order, 0], seen.detections[:, 0].contiguous())]
    seen.detections[:, 1:5] *= torch.stack([across, down, across, down], 1)[own]


def _of_known_labels(detections: Tensor, truth: Annotations) -> Tensor:
    """The detections without unused labels between those of two categories; labels outside them are refused."""
    labels, highest = detections[:, 6].long(), max(truth.categories)
    strange = labels[(labels < 1) | (labels > highest)]
    if len(strange):
        raise DataError(
            f"the network predicts label {int(strange[0])}, but the data has the labels 1 to {highest}; "
            "give the data that the network was trained for"
        )
    return detections[torch.isin(labels, torch.tensor(sorted(truth.categories)))]


def _joined(seen: _Seen) -> _Seen:
    """What all ranks have seen; of an image that several have seen, what the first of them has."""
    own = torch.cat([seen.images, torch.full((len(seen.images), 1), float(rank()), dtype=torch.float64)], 1)
    images = _gathered(own)
    numbers, ranks = images[:, 0].tolist(), images[:, 3].tolist()
    first: dict[float, float] = {}
    kept = [first.setdefault(number, owner) == owner for number, owner in zip(numbers, ranks, strict=True)]
    mine = torch.tensor([number for number, owner in first.items() if owner == rank()], dtype=torch.float64)
    rows = (_gathered(part[torch.isin(part[:, 0], mine)]) for part in (seen.detections, seen.targets))
    return _Seen(images[torch.tensor(kept, dtype=torch.bool)][:, :3], *rows)


def _gathered(rows: Tensor) -> Tensor:
    """The rows of all ranks, one rank after the other."""
    counts = gathered(len(rows))
    start = sum(counts[: rank()])
    whole = rows.new_zeros(sum(counts), rows.shape[1])
    whole[start : start + len(rows)] = rows
    return sum_over_ranks(whole.to(collective_device())).cpu()


def _targets_as_truth(seen: _Seen) -> Annotations:
    """The boxes of the targets; a category is called by its number."""
    images, targets = seen.images[seen.images[:, 0].argsort()], seen.targets[seen.targets[:, 0].argsort(stable=True)]
    labels = torch.cat([targets[:, 5], seen.detections[:, 6]]).long().unique().tolist()
    first = torch.searchsorted(targets[:, 0].contiguous(), images[:, 0].contiguous())
    return Annotations(
        image_ids=images[:, 0].long(),
        sizes=images[:, 1:].long(),
        first=torch.cat([first, torch.tensor([len(targets)])]),
        boxes=targets[:, 1:5],
        labels=targets[:, 5].long(),
        areas=targets[:, 6],
        crowd=targets[:, 7] != 0,
        categories={label: str(label) for label in labels},
    )


def _mean(precision: Any) -> float | None:
    """The mean in percent over what is defined: −1 stands for no box."""
    defined = precision[precision > -1]
    return 100 * float(defined.mean()) if defined.size else None
