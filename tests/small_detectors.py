"""Detectors of torchvision's kinds that train on a CPU in seconds, also as MODEL ``small_detectors.py:retina``."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torchvision.io import write_png
from torchvision.models.detection import FCOS, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import FrozenBatchNorm2d

from ifso.data.coco import CocoData
from ifso.data.generated import generated_boxes

CLASSES, SIDE = 4, 64


def boxes(train: int = 12, test: int = 6) -> CocoData:
    """Images of 64×64 pixels with squares, discs and crosses."""
    return generated_boxes(train=train, test=test, size=(SIDE, SIDE))


def write_coco(folder: Path, data: CocoData) -> Path:
    """The images and boxes of the data as files, ``coco:FOLDER``; those of the test are for validation, too."""
    (folder / "images").mkdir(parents=True)
    categories = [{"id": label, "name": name} for label, name in enumerate(data.categories, 1)]
    for part, samples in (("train", data.train), ("val", data.test), ("test", data.test)):
        images, annotations = [], []
        for place, pixels in enumerate(samples.pixels):
            number, name = place + 1, f"{part}{place}.png"
            write_png(pixels, str(folder / "images" / name), compression_level=1)
            images.append({"id": number, "file_name": name, "height": SIDE, "width": SIDE})
            target = samples.target(place)
            for (left, top, right, bottom), label in zip(
                target["boxes"].tolist(), target["labels"].tolist(), strict=True
            ):
                box = [left, top, right - left, bottom - top]
                facts = {"image_id": number, "category_id": label, "bbox": box, "area": box[2] * box[3], "iscrowd": 0}
                annotations.append({"id": len(annotations) + 1, **facts})
        document = {"images": images, "annotations": annotations, "categories": categories}
        (folder / f"instances_{part}.json").write_text(json.dumps(document))
    return folder


class Pyramid(nn.Module):
    """Two levels, of strides 8 and 16, with norms that learn and one that is frozen."""

    def __init__(self, width: int, normed: bool = True) -> None:
        super().__init__()
        self.out_channels = width
        norm = nn.BatchNorm2d(12) if normed else FrozenBatchNorm2d(12)
        self.stem = nn.Sequential(nn.Conv2d(3, 12, 5, 4, 2), norm, nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(12, width, 3, 2, 1), FrozenBatchNorm2d(width), nn.ReLU())
        self.inner = nn.Conv2d(width, width, 1)
        self.outer = nn.Conv2d(width, width, 3, 2, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        deep = self.deep(self.stem(x))
        return {"0": self.inner(deep), "1": self.outer(deep)}


def retina(classes: int = CLASSES, width: int = 8, normed: bool = True, side: int = SIDE) -> RetinaNet:
    """RetinaNet for images of 64×64 pixels."""
    anchors = AnchorGenerator(((12, 18), (24, 32)), ((1.0,), (1.0,)))
    return _lively(RetinaNet(Pyramid(width, normed), classes, min_size=side, max_size=side, anchor_generator=anchors))


def fcos(classes: int = CLASSES) -> FCOS:
    """FCOS for images of 64×64 pixels; its group norms want 32 channels."""
    anchors = AnchorGenerator(((8,), (16,)), ((1.0,), (1.0,)))
    return FCOS(Pyramid(32), classes, min_size=SIDE, max_size=SIDE, anchor_generator=anchors)


def frozen() -> RetinaNet:
    """RetinaNet whose images do not see each other: no norm learns."""
    return retina(normed=False)


def for_one_category() -> RetinaNet:
    """RetinaNet with too few classes."""
    return retina(classes=2)


def _lively(model: RetinaNet) -> RetinaNet:
    """Heads whose signal does not fade: torchvision's small weights are for 256 channels."""
    with torch.no_grad():
        for module in model.head.modules():
            if isinstance(module, nn.Conv2d) and module.out_channels == module.in_channels:
                nn.init.kaiming_normal_(module.weight)
    return model
