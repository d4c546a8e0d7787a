"""Images, with labels or boxes, made up by a seed: to see that things run, where no real ones are wanted."""

from __future__ import annotations

import torch
from torch import Tensor

from ifso.common.devices import usable_device
from ifso.data.base import ImageData
from ifso.data.batches import WHOLE, Augmentation, Images, Shard, generator
from ifso.data.coco import CocoData
from ifso.data.coco_batches import Annotations, BoxLoading, BoxSamples, Size

CLASSES = {"cifar10": 10, "cifar100": 100, "imagenet": 1000}

SIDES = {"cifar10": 32, "cifar100": 32, "imagenet": 64}

TRAIN, TEST = 128, 64

NOISE = 40.0


def generated_images(kind: str, *, device: torch.device | str = "cpu", seed: int = 0) -> ImageData:
    """128 training and 64 test images with as many classes as the real set of that name has outputs.

    An image is the pattern of its class, one of ten, with noise on it.

    >>> data = generated_images("cifar100")
    >>> data.num_classes, data.input_shape, len(data.x_train), int(data.y_train.max()) < 10
    (100, (3, 32, 32), 128, True)
    """
    random, side = generator(0, f"generated {kind}"), SIDES[kind]
    patterns = torch.rand(10, 3, side // 8, side // 8, generator=random) * 255
    patterns = patterns.repeat_interleave(8, 2).repeat_interleave(8, 3)
    train, test = (_images(patterns, count, random).to(device) for count in (TRAIN, TEST))
    return ImageData(f"generated {kind}", CLASSES[kind], train, None, test, Augmentation(shift=4, mirror=True), seed)


def _images(patterns: Tensor, count: int, random: torch.Generator) -> Images:
    labels = torch.randint(len(patterns), (count,), generator=random)
    noise = NOISE * torch.randn(count, *patterns.shape[1:], generator=random)
    pixels = (patterns[labels] + noise).clamp(0, 255).to(torch.uint8)
    middle, spread = torch.full((3, 1, 1), 127.5), torch.full((3, 1, 1), 75.0)
    return Images(pixels, labels, middle, spread)


CATEGORIES = ("square", "disc", "cross")

COLOURS = ((230, 60, 60), (60, 220, 60), (70, 90, 240))

BACKGROUND, NOISE = 90.0, 20.0

MOST = 3
"""Shapes in an image, none of which lies in another's quarter of it."""


def generated_boxes(
    *,
    train: int = 32,
    test: int = 16,
    size: Size = (96, 128),
    device: torch.device | str = "cpu",
    seed: int = 0,
    shard: Shard = WHOLE,
) -> CocoData:
    """Squares, discs and crosses on noise, one to three in an image of ``size`` (height, width), each with its box.

    ``seed`` is for the order of training alone: the images are always the same.

    >>> data = generated_boxes(train=4, test=2)
    >>> data.num_classes, data.input_shape, data.categories
    (4, (3, 96, 128), ('square', 'disc', 'cross'))
    >>> images, targets = next(iter(data.train_batches(2)))
    >>> len(images), images[0].shape, targets[0]["boxes"].shape[1]
    (2, torch.Size([3, 96, 128]), 4)
    """
    device = usable_device(device)
    learned, tested = (_samples(name, count, size, device) for name, count in (("train", train), ("test", test)))
    return CocoData("generated boxes", CATEGORIES, learned, None, tested, seed, BoxLoading(device, 0), shard)


def _samples(name: str, count: int, size: Size, device: torch.device) -> BoxSamples:
    """So many images, held on the device."""
    random = generator(0, f"generated boxes {name}")
    pixels = BACKGROUND + NOISE * torch.randn(count, 3, *size, generator=random)
    boxes: list[Tensor] = []
    labels: list[int] = []
    counts = torch.randint(1, MOST + 1, (count,), generator=random)
    for image, shapes in zip(pixels, counts.tolist(), strict=True):
        for quarter in torch.randperm(4, generator=random)[:shapes].tolist():
            label = int(torch.randint(len(CATEGORIES), (), generator=random))
            boxes.append(_draw_(image, quarter, label, random))
            labels.append(label + 1)
    corners = torch.stack(boxes).double()
    return BoxSamples(
        f"generated boxes {name}",
        Annotations(
            image_ids=torch.arange(1, count + 1),
            sizes=torch.tensor([size] * count),
            first=torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
            boxes=corners,
            labels=torch.tensor(labels),
            areas=(corners[:, 2:] - corners[:, :2]).prod(1),
            crowd=torch.zeros(len(boxes), dtype=torch.bool),
            categories=dict(enumerate(CATEGORIES, 1)),
        ),
        None,
        pixels=pixels.clamp(0, 255).to(device, torch.uint8).unbind(),
    )


def _draw_(image: Tensor, quarter: int, label: int, random: torch.Generator) -> Tensor:
    """A shape in a quarter of the image [3, H, W]; its box [4]."""
    height, width = image.shape[1] // 2, image.shape[2] // 2
    least = min(height, width)
    side = int(torch.randint(max(least // 3, 1), max(least * 9 // 10, 2), (), generator=random))
    top, left = (int(torch.randint(room - side + 1, (), generator=random)) for room in (height, width))
    top, left = top + height * (quarter // 2), left + width * (quarter % 2)
    window = image[:, top : top + side, left : left + side]
    colour = torch.tensor(COLOURS[label], dtype=image.dtype)[:, None, None]
    window.copy_(torch.where(_shape(label, side), colour, window))
    return torch.tensor([left, top, left + side, top + side])


def _shape(label: int, side: int) -> Tensor:
    """Which pixels [side, side] are of the shape."""
    middles = (torch.arange(side) + 0.5) / side * 2 - 1
    down, across = torch.meshgrid(middles, middles, indexing="ij")
    if CATEGORIES[label] == "square":
        return torch.ones(side, side, dtype=torch.bool)
    if CATEGORIES[label] == "disc":
        return down**2 + across**2 <= 1
    return (down.abs() < 0.35) | (across.abs() < 0.35)
