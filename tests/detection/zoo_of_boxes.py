"""Every detector of torchvision, small and lively: what it finds and loses depends on all of its units."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from mini import Batch, scene
from torch import Tensor, nn

from ifso.models import create_model
from ifso.models.detectors import SMALL

QUICK = ("ssdlite320_mobilenet_v3_large", "retinanet_resnet18_fpn", "fasterrcnn_mobilenet_v3_large_320_fpn")
SLOW = (
    "retinanet_resnet50_fpn", "retinanet_resnet50_fpn_v2", "fcos_resnet50_fpn", "ssd300_vgg16",
    "fasterrcnn_mobilenet_v3_large_fpn", "fasterrcnn_resnet50_fpn", "fasterrcnn_resnet50_fpn_v2",
    "maskrcnn_resnet50_fpn", "maskrcnn_resnet50_fpn_v2", "keypointrcnn_resnet50_fpn",
)  # fmt: skip
FEW = {"score_thresh": 1e-3, "detections_per_img": 8, "topk_candidates": 40}
REGIONS = {
    "rpn_post_nms_top_n_test": 40,
    "rpn_post_nms_top_n_train": 40,
    "box_batch_size_per_image": 16,
    "box_detections_per_img": 8,
    "box_score_thresh": 1e-3,
}
SIZES = ((64, 80), (72, 64))


def detector(name: str, **options: Any) -> nn.Module:
    """The detector in eval mode and float64, with two categories (one for key points)."""
    few = REGIONS if "rcnn" in name else FEW
    size = {} if name.startswith("ssd") else {"min_size": 64, "max_size": 96}
    classes = 2 if "keypoint" in name else 3
    source = "ifso" if name in SMALL else "torchvision"
    options = {**few, **size, **options}
    model = create_model(f"{source}:{name}", num_classes=classes, **options).double().eval()
    return enlivened_(model, (boxes_for(name)[0],))


def boxes_for(name: str, seed: int = 0) -> Batch:
    """Two images of different sizes in float64, with what the detector wants to know of their boxes."""
    images, targets = scene(SIZES, (2, 3), categories=1 if "keypoint" in name else 2, seed=seed)
    images = [image.double() for image in images]
    random = torch.Generator().manual_seed(seed)
    for image, target in zip(images, targets, strict=True):
        boxes = target["boxes"] = target["boxes"].double()
        if "mask" in name:
            target["masks"] = (torch.rand(len(boxes), *image.shape[-2:], generator=random) > 0.5).to(torch.uint8)
        if "keypoint" in name:
            inside = boxes[:, None, :2] + torch.rand(len(boxes), 17, 2, generator=random) * (
                boxes[:, None, 2:] - boxes[:, None, :2]
            )
            target["keypoints"] = torch.cat([inside, torch.ones(len(boxes), 17, 1)], 2).float()
    return images, targets


@torch.no_grad()
def enlivened_(model: nn.Module, inputs: tuple[Any, ...], seed: int = 0) -> nn.Module:
    """Norms and biases away from one and zero, and every layer's output at size one: nothing dies on the way."""
    random = torch.Generator().manual_seed(seed)
    for module in model.modules():
        norm = "norm" in type(module).__name__.lower()
        for key, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            noise = torch.rand(tensor.shape, generator=random, dtype=torch.float64)
            if key == "running_var" or (norm and key == "weight"):
                tensor.copy_(0.5 + noise)
            elif key in ("bias", "running_mean"):
                tensor.add_(0.2 * (noise - 0.5))
    seen: set[nn.Module] = set()

    def scale(module: nn.Module, _: Any, output: Tensor) -> Tensor | None:
        if module in seen or not output.numel():
            return None
        seen.add(module)
        size = output.square().mean().sqrt()
        for parameter in module.parameters(recurse=False):
            parameter.div_(size)
        return output / size

    kinds = (nn.modules.conv._ConvNd, nn.Linear)
    handles = [module.register_forward_hook(scale) for module in model.modules() if isinstance(module, kinds)]
    model(*inputs)
    for handle in handles:
        handle.remove()
    return model


def relative_error(wanted: Any, found: Any) -> float:
    """max |a − b| / max |a| over all tensors in lists and dicts; infinite where shapes or whole numbers differ."""
    pairs = list(zip(leaves(wanted), leaves(found), strict=True))
    if any(a.shape != b.shape or (not a.is_floating_point() and not torch.equal(a, b)) for a, b in pairs):
        return float("inf")
    numbers = [(a, b) for a, b in pairs if a.is_floating_point() and a.numel()]
    return max((float((a - b).abs().max() / a.abs().max().clamp(min=1e-12)) for a, b in numbers), default=0.0)


def leaves(tree: Any) -> list[Tensor]:
    """Every tensor, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    items = tree.values() if isinstance(tree, Mapping) else tree
    return [leaf for item in items for leaf in leaves(item)]


def seeded(call: Callable[[], Any]) -> Any:
    """What it gives with the same random numbers each time, without gradients."""
    torch.manual_seed(0)
    with torch.no_grad():
        return call()
