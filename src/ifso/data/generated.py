"""Images made up by a seed, in the shape of a real data set: to see that things run where the data is not."""

from __future__ import annotations

import torch
from torch import Tensor

from ifso.data.batches import Augmentation, Images, generator
from ifso.data.sets import ImageData

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
