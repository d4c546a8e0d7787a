"""1,797 handwritten digits of 8×8 pixels, shipped with the package: real data that needs no download.

They are the test part of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (1998), UCI Machine
Learning Repository, https://doi.org/10.24432/C50P49, licensed under CC BY 4.0 (see ``LICENSE-digits.txt``).
"""

from __future__ import annotations

from importlib.resources import files
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ifso.data.batches import Augmentation, Images, every_nth

GREYS = 16
"""The largest value of a pixel in the file: how many of 4×4 dots were black."""

TEST_EVERY = 5
"""Of each digit's images, in the order of the file, every fifth is a test image."""

AUGMENTATION = Augmentation(shift=1, mirror=False)


class Digits(NamedTuple):
    """Images [N, 1, 8, 8] in float32 from 0 (white) to 1, and labels [N] in int64 from 0 to 9."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor


def digits() -> Digits:
    """The digits in a fixed split: of each class every fifth image is for the test, the others are for training.

    >>> data = digits()
    >>> tuple(data.x_train.shape), tuple(data.x_test.shape)
    ((1442, 1, 8, 8), (355, 1, 8, 8))
    >>> data.y_test[:5].tolist()
    [5, 0, 9, 8, 7]
    """
    with files("ifso.data").joinpath("digits.npz").open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        images, labels = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"]).long()
    x = images.float().div(GREYS).unsqueeze(1)
    test = every_nth(labels, TEST_EVERY)
    return Digits(x[~test], labels[~test], x[test], labels[test])


def open_digits() -> tuple[Images, Images]:
    """Training and test images, with pixels from −0.5 to 0.5 after normalisation."""
    data, middle, one = digits(), torch.full((1, 1, 1), 0.5), torch.ones(1, 1, 1)
    return Images(data.x_train, data.y_train, middle, one), Images(data.x_test, data.y_test, middle, one)
