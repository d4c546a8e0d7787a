"""ImageNet, or any images in ``train/CLASS`` and ``val/CLASS`` folders, in the customary crops of 224×224 pixels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ifso.data.batches import Batch
from ifso.data.decoding import Decoded, Loading, Pictures, TestFiles, TrainFiles, need_torchvision, workers_for
from ifso.data.image_files import find_images
from ifso.data.sets import Data, split
from ifso.data.shares import Share
from ifso.errors import DataError

CROP, EDGE = 224, 256
"""Pixels of an image, and of the shorter edge before a test image's middle is cut out."""


@dataclass(frozen=True, eq=False)
class ImageNet(Data):
    """Images in folders. ``train`` is without ``validation``, which is None if none was asked for."""

    name: str
    classes: tuple[str, ...]
    train: Pictures
    validation: Pictures | None
    test: Pictures
    seed: int
    share: Share
    loading: Loading
    notes: tuple[str, ...] = ()

    input_shape = (3, CROP, CROP)

    @property
    def num_classes(self) -> int:  # type: ignore[override]
        """As many as ``train`` has folders."""
        return len(self.classes)

    def train_batches(self, batch_size: int = 128, augment: bool = True, drop_last: bool = True) -> TrainFiles:
        """Shuffled batches of (images [N, 3, 224, 224], labels [N]); a random window of each image, mirrored or not."""
        source = Decoded(self.train, _augmented() if augment else self._whole(), self.seed)
        return TrainFiles(source, batch_size=batch_size, drop_last=drop_last, share=self.share, loading=self.loading)

    def validation_batches(self, batch_size: int = 500) -> TestFiles:
        """What was set apart, in a fixed order; of each image the middle."""
        if self.validation is None:
            raise DataError(f"{self.name} was opened without a validation part; use open_data(…, validation=0.1)")
        return self._tested(self.validation, batch_size)

    def test_batches(self, batch_size: int = 500) -> TestFiles:
        """The images of ``val`` in the order of their names; of each image the middle."""
        return self._tested(self.test, batch_size)

    def example_inputs(self) -> Tensor:
        """The first test image [1, 3, 224, 224], normalised."""
        return self._few(self.test, 1)[0]

    def first_batch(self) -> Batch:
        """Two training images and their labels, without augmentation."""
        return self._few(self.train, 2)

    def _whole(self) -> Callable[[Tensor], Tensor]:
        """How an image is cut to size where nothing is left to chance."""
        return _middle()

    def _few(self, files: Pictures, count: int) -> Batch:
        cut, files = self._whole(), files.part(slice(count))
        pixels = torch.stack([cut(files.read(place)) for place in range(len(files))])
        return self.loading.to_device(pixels, files.labels)

    def _tested(self, files: Pictures, batch_size: int) -> TestFiles:
        source = Decoded(files, self._whole(), self.seed)
        return TestFiles(source, batch_size=batch_size, share=self.share, loading=self.loading)


def open_imagenet(
    path: str, *, device: torch.device, seed: int, validation: float | int, share: Share, workers: int | None
) -> ImageNet:
    """The images in the folders of ``path``; they are decoded with torchvision whenever they are needed."""
    name = f"imagenet:{path}"
    need_torchvision(name, "vision")
    found = find_images(Path(path))
    train, held_out = split(found.train, validation, seed)
    loading = Loading(device, workers_for(workers))
    return ImageNet(name, found.classes, train, held_out, found.test, seed, share, loading, found.notes)


def _augmented() -> Callable[[Tensor], Tensor]:
    """A random window of 8 to 100 % of the image, up to 4:3 or 3:4, mirrored in half of all cases."""
    from torchvision.transforms import v2

    return v2.Compose([v2.RandomResizedCrop(CROP, antialias=True), v2.RandomHorizontalFlip()])


def _middle() -> Callable[[Tensor], Tensor]:
    """The middle of the image, made so small that its shorter edge has 256 pixels."""
    from torchvision.transforms import v2

    return v2.Compose([v2.Resize(EDGE, antialias=True), v2.CenterCrop(CROP)])
