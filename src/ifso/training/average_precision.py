"""How well a detector does: average precision as COCO defines it, computed by ``faster-coco-eval``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ifso.common.distributed import collective_device, rank, several, sum_over_ranks, together
from ifso.common.torch_state import eval_mode
from ifso.data.coco_batches import Annotations
from ifso.errors import DataError, DivergedError, IfsoError
from ifso.tasks.detection import wide_heads

AREAS = ("all", "small", "medium", "large")
"""Up to 32² pixels, up to 96², and beyond; of the area that the annotation gives."""

FIFTY, SEVENTY_FIVE = 0, 5
"""Places among the thresholds 0.5, 0.55, … 0.95 of the overlap."""


@dataclass(frozen=True)
class AveragePrecision:
    """Average precision in percent, the mean over categories; None where there is no box to find.

    ``map`` is the mean over ten thresholds of the overlap (intersection over union) from 0.5 to 0.95, ``map50`` and
    ``map75`` are at one threshold, ``map_small``, ``map_medium`` and ``map_large`` as ``map`` for boxes of up to 32²
    pixels, up to 96² and beyond. ``by_category`` holds ``map`` by the name of the category.
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
    """Average precision of ``model`` in eval mode over batches of (images, targets); modules then have their mode back.

    ``truth`` is what is to be found, ``batches.truth`` unless given. It is in the pixels of the original images: boxes
    that are found in resized ones are brought back to them. Batches without it are measured by their own targets,
    which may have ``area`` and ``iscrowd`` too.

    With ``over_ranks`` every process of ``torch.distributed`` brings batches of its own, and all are told what they
    found together. An image that several of them bring counts once.
    """
    check_evaluator()
    truth = getattr(batches, "truth", None) if truth is None else truth
    seen = together(lambda: _look(model, batches, truth)) if over_ranks else _look(model, batches, truth)
    if over_ranks and several():
        seen = _joined(seen)
    if not len(seen.images):
        raise DataError("there is nothing to evaluate on: the batches ran out before the first one")
    if truth is None:
        truth = _truth_of(seen)
    return average_precision(seen.detections, truth, seen.images[:, 0].long().tolist())


def check_evaluator() -> None:
    """One clear line if ``faster-coco-eval`` is not there."""
    try:
        import faster_coco_eval  # noqa: F401
    except ImportError as error:
        raise IfsoError(
            f"average precision is computed by faster-coco-eval, which cannot be imported ({error}); "
            'pip install "ifso[detection]"'
        ) from error


def average_precision(detections: Tensor, truth: Annotations, images: Sequence[int]) -> AveragePrecision:
    """Of ``detections`` [n, 7] (image id, x1, y1, x2, y2, score, label) on the ``images`` with these ids.

    Half of this box is found, and nothing else:

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

    coco = COCO(truth.as_coco())
    evaluator = COCOeval_faster(coco, coco.loadRes(_results(detections)), iouType="bbox")
    evaluator.params.imgIds = sorted(images)
    evaluator.evaluate()
    evaluator.accumulate()
    # Axes: thresholds of the overlap, recall, categories, areas, most detections of an image (1, 10, 100).
    precision = np.asarray(evaluator.eval["precision"])[..., -1]
    whole, areas = precision[..., 0], {area: _mean(precision[..., place]) for place, area in enumerate(AREAS)}
    return AveragePrecision(
        map=areas["all"],
        map50=_mean(whole[FIFTY]),
        map75=_mean(whole[SEVENTY_FIVE]),
        map_small=areas["small"],
        map_medium=areas["medium"],
        map_large=areas["large"],
        by_category={
            truth.categories[label]: _mean(whole[:, :, k]) for k, label in enumerate(sorted(truth.categories))
        },
        images=len(images),
    )


@dataclass
class _Seen:
    """``images`` [k, 3]: id, height, width; ``detections`` [n, 7] as in :func:`average_precision`.

    ``targets`` [m, 8]: image id, x1, y1, x2, y2, label, area, crowd. All in float64, on the CPU.
    """

    images: Tensor
    detections: Tensor
    targets: Tensor


@torch.no_grad()
def _look(model: nn.Module, batches: Iterable[Any], truth: Annotations | None) -> _Seen:
    """What the network finds on all batches."""
    ids: list[Tensor] = []
    sizes: list[tuple[int, int]] = []
    found: list[Tensor] = []
    asked: list[Tensor] = []
    with eval_mode(model), wide_heads(model):
        for batch in batches:
            images, targets = _pair(batch)
            if not len(images):
                continue
            outputs = model(images)
            _check_outputs(outputs, len(images))
            ids.extend(target["image_id"].reshape(()) for target in targets)
            sizes.extend((int(image.shape[-2]), int(image.shape[-1])) for image in images)
            found.extend(map(_rows, outputs))
            if truth is None:
                asked.extend(map(_target_rows, targets))
    if not ids:
        return _Seen(*(torch.zeros(0, columns, dtype=torch.float64) for columns in (3, 7, 8)))
    numbers = torch.stack(ids).cpu()
    images_seen = torch.cat([numbers[:, None].double(), torch.tensor(sizes).double()], 1)
    seen = _Seen(images_seen, _numbered(found, numbers, 6), _numbered(asked, numbers, 7))
    _refuse_twice(numbers.tolist())
    _refuse_infinite(seen.detections)
    if truth is not None:
        _to_original_pixels_(seen, truth)
        seen.detections = _of_known_labels(seen.detections, truth)
    return seen


def _pair(batch: Any) -> tuple[Any, Any]:
    """Images and targets."""
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


def _check_outputs(outputs: Any, count: int) -> None:
    good = isinstance(outputs, (list, tuple)) and len(outputs) == count
    if not good or not all(isinstance(o, Mapping) and {"boxes", "scores", "labels"} <= set(o) for o in outputs):
        raise DataError(
            f"the network gave {type(outputs).__name__} for {count} images; a detector in eval mode gives a list of "
            "dicts with boxes, scores and labels, one for each image"
        )


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


def _refuse_twice(numbers: Sequence[int]) -> None:
    if len(set(numbers)) < len(numbers):
        twice = next(number for place, number in enumerate(numbers) if number in numbers[:place])
        raise DataError(f"image {twice} comes twice in the batches to evaluate on; give every image an id of its own")


def _refuse_infinite(detections: Tensor) -> None:
    bad = ~detections.isfinite().all(1)
    if bool(bad.any()):
        raise DivergedError(
            f"the network gives boxes or scores that are not finite for image {int(detections[bad][0, 0])}; "
            "its weights have diverged"
        )


def _to_original_pixels_(seen: _Seen, truth: Annotations) -> None:
    """Scale boxes that were found in resized images."""
    places = {number: place for place, number in enumerate(truth.image_ids.tolist())}
    unknown = [number for number in seen.images[:, 0].long().tolist() if number not in places]
    if unknown:
        raise DataError(f"image {unknown[0]} of the batches is not among the {len(truth)} images with known boxes")
    original = truth.sizes[[places[number] for number in seen.images[:, 0].long().tolist()]].double()
    down, across = (original / seen.images[:, 1:]).unbind(1)
    order = seen.images[:, 0].argsort()
    own = order[torch.searchsorted(seen.images[order, 0], seen.detections[:, 0].contiguous())]
    seen.detections[:, 1:5] *= torch.stack([across, down, across, down], 1)[own]


def _of_known_labels(detections: Tensor, truth: Annotations) -> Tensor:
    """Without labels that stand for nothing between those of two categories; others are refused."""
    labels, highest = detections[:, 6].long(), max(truth.categories)
    strange = labels[(labels < 1) | (labels > highest)]
    if len(strange):
        raise DataError(
            f"the network found label {int(strange[0])}, but the data has the labels 1 to {highest}; "
            "give the data that the network was trained for"
        )
    return detections[torch.isin(labels, torch.tensor(sorted(truth.categories)))]


def _joined(seen: _Seen) -> _Seen:
    """What all ranks have seen, on each of them; of an image that several have seen, what the first of them has."""
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
    counts = torch.zeros(torch.distributed.get_world_size(), dtype=torch.int64, device=collective_device())
    counts[rank()] = len(rows)
    counts = sum_over_ranks(counts).cpu()
    start = int(counts[: rank()].sum())
    whole = rows.new_zeros(int(counts.sum()), rows.shape[1])
    whole[start : start + len(rows)] = rows
    return sum_over_ranks(whole.to(collective_device())).cpu()


def _truth_of(seen: _Seen) -> Annotations:
    """The boxes of the targets themselves; a category is called by its number."""
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


def _results(detections: Tensor) -> list[dict[str, Any]]:
    """The detections as the evaluator takes them, with boxes of left, top, width, height."""
    rows = detections.double()
    rows = torch.cat([rows[:, :3], rows[:, 3:5] - rows[:, 1:3], rows[:, 5:]], 1)
    return [
        {"image_id": int(image), "bbox": box, "score": score, "category_id": int(label)}
        for image, *box, score, label in rows.tolist()
    ]


def _mean(precision: Any) -> float | None:
    """In percent, over all that is defined: −1 stands for no box."""
    defined = precision[precision > -1]
    return 100 * float(defined.mean()) if defined.size else None
