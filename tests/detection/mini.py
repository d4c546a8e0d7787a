"""Detectors small enough for dense float64 matrices, and scenes for them and for torchvision's."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d, batched_nms, generalized_box_iou_loss, roi_align, sigmoid_focal_loss

CLASSES = 3
"""Two categories and the background."""

Batch = tuple[list[Tensor], list[dict[str, Tensor]]]


class MiniRetina(nn.Module):
    """A RetinaNet in small: frozen and plain batch norm, a pyramid of two levels, a head with GroupNorm for both."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, 2, padding=1, bias=False), FrozenBatchNorm2d(4), nn.SiLU())
        self.deep = nn.Sequential(nn.Conv2d(4, 6, 3, 2, padding=1, bias=False), nn.BatchNorm2d(6), nn.SiLU())
        self.lateral = nn.ModuleList([nn.Conv2d(4, 4, 1), nn.Conv2d(6, 4, 1)])
        self.smooth = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)])
        self.tower = nn.Conv2d(4, 4, 3, padding=1)
        self.group_norm = nn.GroupNorm(2, 4)
        self.scores = nn.Conv2d(4, CLASSES - 1, 3, padding=1)
        self.corners = nn.Conv2d(4, 4, 3, padding=1)

    def levels(self, images: Tensor) -> list[Tensor]:
        """The pyramid of images [N, 3, H, W]: strides 2 and 4."""
        fine = self.stem(images)
        coarse = self.lateral[1](self.deep(fine))
        fine = self.lateral[0](fine) + F.interpolate(coarse, scale_factor=2.0, mode="nearest")
        return [conv(level) for conv, level in zip(self.smooth, (fine, coarse), strict=True)]

    def outputs(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Scores [N, places, classes − 1] and boxes [N, places, 4] of both levels."""
        scores, boxes = [], []
        for level, stride in zip(self.levels(images), (2, 4), strict=True):
            x = F.silu(self.group_norm(self.tower(level)))
            height, width = x.shape[2:]
            down, across = (torch.arange(size, dtype=x.dtype) * stride for size in (height, width))
            middles = torch.stack(torch.meshgrid(across, down, indexing="xy"), -1).reshape(-1, 2)
            scores.append(self.scores(x).flatten(2).movedim(1, 2))
            sides = F.softplus(self.corners(x)).flatten(2).movedim(1, 2) * stride + 1
            boxes.append(torch.cat([middles - sides[..., :2], middles + sides[..., 2:]], -1))
        return torch.cat(scores, 1), torch.cat(boxes, 1)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        """A dict of losses in train mode, detections in eval mode."""
        scores, boxes = self.outputs(torch.stack(images))
        if not self.training:
            return [_detections(*each) for each in zip(scores, boxes, strict=True)]
        assert targets is not None
        wanted, places, corners = torch.zeros_like(scores), [], []
        for image, target in enumerate(targets):
            for box, label in zip(target["boxes"], target["labels"], strict=True):
                nearest = int((boxes[image].detach() - box).abs().sum(1).argmin())
                wanted[image, nearest, int(label) - 1] = 1
                places.append((image, nearest))
                corners.append(box)
        found = torch.stack([boxes[place] for place in places]) if places else boxes[:0, 0]
        real = torch.stack(corners) if corners else found
        return {
            "classification": sigmoid_focal_loss(scores, wanted, reduction="sum") / max(len(places), 1),
            "boxes": [generalized_box_iou_loss(found, real, reduction="sum") / max(len(places), 1)],
        }


def _detections(scores: Tensor, boxes: Tensor) -> dict[str, Tensor]:
    best, labels = scores.sigmoid().max(1)
    kept = batched_nms(boxes, best, labels, 0.5)[:5]
    return {"boxes": boxes[kept], "scores": best[kept], "labels": labels[kept] + 1}


class MiniTwoStage(nn.Module):
    """A first stage on whole images and a second one on the regions of the targets, as many as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.Tanh(), nn.Conv2d(5, 4, 3, padding=1), nn.Tanh())
        self.objects = nn.Conv2d(4, 1, 1)
        self.hidden = nn.Linear(4 * 2 * 2, 6)
        self.classes = nn.Linear(6, CLASSES)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Losses."""
        features = self.body(torch.stack(images))
        objects = self.objects(features).square().mean()
        regions = roi_align(features, [target["boxes"] for target in targets], 2, sampling_ratio=2)
        found = self.classes(torch.tanh(self.hidden(regions.flatten(1))))
        labels = torch.cat([target["labels"] for target in targets])
        return {
            "objects": objects,
            "classes": F.cross_entropy(found, labels, reduction="sum") / len(images),
        }


def scene(
    sizes: tuple[tuple[int, int], ...] = ((16, 20), (16, 20)),
    counts: tuple[int, ...] = (2, 3),
    *,
    categories: int = CLASSES - 1,
    seed: int = 0,
) -> Batch:
    """Images of these sizes with so many boxes each, in the present default dtype."""
    random = torch.Generator().manual_seed(seed)
    images = [torch.rand(3, *size, generator=random) for size in sizes]
    targets = []
    for number, ((height, width), count) in enumerate(zip(sizes, counts, strict=True)):
        corner = torch.rand(count, 2, generator=random) * torch.tensor([width, height]) * 0.5
        extent = (0.2 + 0.25 * torch.rand(count, 2, generator=random)) * torch.tensor([width, height])
        labels = torch.randint(1, categories + 1, (count,), generator=random)
        boxes = torch.cat([corner, corner + extent], 1)
        targets.append({"boxes": boxes, "labels": labels, "image_id": torch.tensor(number)})
    return images, targets


def doubled(batch: Batch) -> Batch:
    """The batch in float64."""
    images, targets = batch
    return [image.double() for image in images], [
        {key: value.double() if value.is_floating_point() else value for key, value in target.items()}
        for target in targets
    ]
