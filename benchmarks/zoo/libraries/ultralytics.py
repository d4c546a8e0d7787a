"""YOLOs from their yaml files, trained by their own losses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.zoo.build import Case

SIZE = 64
NAMES = (
    "yolov3-tiny", "yolov5n", "yolov6n", "yolov8n", "yolov9t", "yolov10n", "yolo11n", "yolo12n", "yolo26n",
    "yolov8n-seg", "yolo11n-seg", "yolo12n-seg", "yolo26n-seg",
    "yolov8n-pose", "yolo11n-pose", "yolo12n-pose", "yolo26n-pose",
    "yolov8n-obb", "yolo11n-obb", "yolo26n-obb",
    "yolov8n-cls", "yolo11n-cls", "yolo12n-cls", "yolo26n-cls",
)  # fmt: skip


def builders() -> dict[str, Callable[[], Case]]:
    """By name."""
    return {name: partial(_yolo, name) for name in NAMES}


def _yolo(name: str) -> Case:
    from ultralytics import YOLO
    from ultralytics.cfg import get_cfg

    yolo = YOLO(f"{name}.yaml", verbose=False)
    yolo.model.args = get_cfg(overrides={"task": yolo.task})
    return Case(yolo.model, (torch.rand(2, 3, SIZE, SIZE),), (_batch(yolo.task),))


def _batch(task: str) -> dict[str, Any]:
    """Two images with two objects each, in the words of the trainer."""
    images = torch.rand(2, 3, SIZE, SIZE)
    if task == "classify":
        return {"img": images, "cls": torch.tensor([1, 2])}
    boxes = torch.tensor([[0.5, 0.5, 0.4, 0.4], [0.3, 0.3, 0.3, 0.5], [0.6, 0.6, 0.5, 0.5], [0.4, 0.6, 0.6, 0.3]])
    batch = {
        "img": images,
        "batch_idx": torch.tensor([0.0, 0.0, 1.0, 1.0]),
        "cls": torch.tensor([[1.0], [2.0], [3.0], [0.0]]) * (task != "pose"),
        "bboxes": torch.cat([boxes, torch.full((4, 1), 0.3)], 1) if task == "obb" else boxes,
    }
    if task == "segment":
        places = torch.arange(SIZE // 4)
        batch["masks"] = (places[:, None] // 6 + places[None] // 9).clamp(max=2).expand(2, -1, -1).float()
        batch["sem_masks"] = batch["masks"].long()
    if task == "pose":
        batch["keypoints"] = torch.cat([torch.rand(4, 17, 2), torch.ones(4, 17, 1)], 2)
    return batch
