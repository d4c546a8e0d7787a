"""Images in folders of classes (``imagenet:PATH``, ``folder:PATH``), and JPEGs in one .npz (``jpegs:FILE``)."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ifso.common.text import one_line
from ifso.data.base import FolderOptions, Opening, read_options, split
from ifso.data.batches import Batch, Shard, every_nth, generator
from ifso.data.cifar import as_labels, read_npz
from ifso.data.decoding import DecodedData, DecodedDataset, ImageFiles, Loading, need_torchvision, workers_for
from ifso.errors import DataError

ENDINGS = (".jpeg", ".jpg", ".png", ".webp")

LAYOUT = "train/CLASS/*.JPEG and val/CLASS/*.JPEG"


MOST_CLASSES = 2**20

CROP = 224
"""Pixels of an image of ImageNet in width and height."""


@dataclass(frozen=True, eq=False)
class ImageFolders:
    """The names of the classes, the files for training and for the test, and ``notes`` on what was left out."""

    classes: tuple[str, ...]
    train: Files
    test: Files
    notes: tuple[str, ...]


def find_image_folders(root: Path, tested: str = "val", missing: str = "") -> ImageFolders:
    """What is in the folders ``train`` and ``tested`` of ``root``; ``missing`` is added where there is none.

    Classes are the folders of ``train`` in the order of their names, which for ImageNet is that of published weights.
    Of the files in them, those that end like an image count (.jpeg, .jpg, .png or .webp).
    """
    if not root.is_dir():
        raise DataError(f"there is no folder {root}; give the one that holds {LAYOUT}{missing}")
    for part in ("train", tested):
        if not (root / part).is_dir():
            raise DataError(f"{root} holds no folder {part}; give the one that holds {LAYOUT}")
    notes: list[str] = []
    with _readable(root):
        classes, present = _classes(root / "train"), _classes(root / tested)
        strange = sorted(set(present) - set(classes))
        if strange:
            raise DataError(
                f"{one_line(str(root / tested / strange[0]))} is of a class that {root / 'train'} lacks"
                f"{f' ({len(strange) - 1} more like it)' if strange[1:] else ''}; both need the same class folders"
            )
        train = _files(root / "train", classes, classes, notes)
        return ImageFolders(classes, train, _files(root / tested, present, classes, notes), tuple(notes))


@contextmanager
def _readable(root: Path) -> Iterator[None]:
    """DataError where the system does not let a folder be read."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{root} cannot be read: {one_line(error)}; make all its folders readable") from error


def _classes(folder: Path) -> tuple[str, ...]:
    """The names of the folders in ``folder``."""
    with os.scandir(folder) as entries:
        is_folder = {entry.name: entry.is_dir() for entry in entries if not entry.name.startswith(".")}
    classes = tuple(sorted(name for name in is_folder if is_folder[name]))
    if not classes:
        raise DataError(
            f"{folder} holds {'images but ' if any(map(_is_image, is_folder)) else ''}no class folders; "
            f"put the images of each class into a folder of their own, {folder.name}/CLASS/*.JPEG"
        )
    return classes


def _files(folder: Path, present: Sequence[str], classes: Sequence[str], notes: list[str]) -> ImageFiles:
    """The images in the folders ``present``, in the order of their names; what else is there goes into a note."""
    inside = {name: sorted(os.listdir(folder / name)) for name in present}  # noqa: PTH208 (quicker)
    images = {name: [*filter(_is_image, files)] for name, files in inside.items()}
    empty = [name for name in present if not images[name]]
    endings = ", ".join(ENDINGS)
    if len(empty) == len(present):
        raise DataError(f"{folder} holds not a single image ({endings}) in its {len(present)} class folders")
    if empty:
        raise DataError(f"{one_line(str(folder / empty[0]))} holds no image ({endings}); fill the folder or remove it")
    others = [f"{name}/{file}" for name in present for file in inside[name] if not _is_image(file) and file[:1] != "."]
    if others:
        notes.append(
            f"{folder}: {len(others)} files or folders that do not end like an image ({endings}) are left "
            f"out, the first is {one_line(others[0])}"
        )
    names = np.array([os.fsencode(f"{name}/{file}") for name in present for file in images[name]])
    number = {name: label for label, name in enumerate(classes)}
    return ImageFiles(folder, names, torch.tensor([number[name] for name in present for _ in images[name]]))


def _is_image(name: str) -> bool:
    return name.lower().endswith(ENDINGS) and not name.startswith(".")


@dataclass(frozen=True, eq=False)
class JpegBytes:
    """Image i is ``data[starts[i]:ends[i]]``; ``numbers`` [N] are those of the file, ``labels`` [N] in int64."""

    path: Path
    data: Tensor
    starts: Tensor
    ends: Tensor
    numbers: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, indices: Tensor | slice) -> JpegBytes:
        """The images at ``indices``; the bytes are shared."""
        some = (tensor[indices] for tensor in (self.starts, self.ends, self.numbers, self.labels))
        return JpegBytes(self.path, self.data, *some)

    def read(self, index: int) -> Tensor:
        """One image [3, 224, 224] in uint8; its size is looked at before anything is decoded."""
        from PIL import Image, UnidentifiedImageError
        from torchvision.io import ImageReadMode, decode_jpeg

        data = self.data[int(self.starts[index]) : int(self.ends[index])].clone()
        try:
            with Image.open(io.BytesIO(data.numpy().tobytes()), formats=("JPEG",)) as image:
                width, height = image.size
            if (width, height) != (CROP, CROP):
                raise DataError(f"it has {width}×{height} pixels; give {CROP}×{CROP}")
            return decode_jpeg(data, ImageReadMode.RGB)
        except Exception as error:
            strange = isinstance(error, UnidentifiedImageError)
            reason = "it is no JPEG" if strange else one_line(error) or type(error).__name__
            raise DataError(f"{self.path}: image {int(self.numbers[index])} cannot be used: {reason}") from error


Files = ImageFiles | JpegBytes


class DecodedImages(DecodedDataset):
    """Batches are pixels [N, 3, H, W] in uint8 and labels [N]; ``cut`` makes images of one size."""

    def __init__(self, files: Files, cut: Callable[[Tensor], Tensor], seed: int) -> None:
        self.files, self.cut, self.seed = files, cut, seed

    def __len__(self) -> int:
        return len(self.files)

    def batch(self, epoch: int, indices: list[int]) -> Batch:
        """The images, each cut in a way of its own."""
        cut = []
        for index in indices:
            image = self.files.read(index)
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(generator(self.seed, f"{epoch}/{index}").initial_seed())
                cut.append(self.cut(image))
        return torch.stack(cut), self.files.labels[indices]


@dataclass(frozen=True, eq=False)
class ImageFolderData(DecodedData):
    """Images with a label each, in folders of classes or in one file."""

    name: str
    classes: tuple[str, ...]
    train: Files
    validation: Files | None
    test: Files
    seed: int
    shard: Shard
    loading: Loading
    notes: tuple[str, ...] = ()
    size: int = CROP

    @property
    def input_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Of one image: 3, height, width."""
        return 3, self.size, self.size

    @property
    def num_classes(self) -> int:  # type: ignore[override]
        """As many as there are class folders."""
        return len(self.classes)

    def decoded(self, samples: Files, augment: bool) -> DecodedImages:
        """Of each image the middle, of 7/8 of the shorter edge, or what was cut out already.

        If ``augment``, a random window of 8 to 100 % of it, up to 4:3 or 3:4, mirrored in half of all cases.
        """
        from torchvision.transforms import v2

        if augment:
            cut = v2.Compose([v2.RandomResizedCrop(self.size, antialias=True), v2.RandomHorizontalFlip()])
        elif isinstance(samples, JpegBytes):
            cut = nn.Identity()
        else:
            cut = v2.Compose([v2.Resize(self.size * 8 // 7, antialias=True), v2.CenterCrop(self.size)])
        return DecodedImages(samples, cut, self.seed)

    def example_inputs(self) -> Tensor:
        """The first test image [1, 3, H, W], normalised."""
        return self._first(self.test, 1)[0]


def open_imagenet(path: str, opening: Opening) -> ImageFolderData:
    """The images in the folders of ``path``; they are decoded with torchvision whenever they are needed."""
    name = f"imagenet:{path}"
    need_torchvision(name, "vision")
    folders = find_image_folders(Path(path), missing=" (it is not downloaded for you: https://image-net.org/download)")
    return _opened(name, folders, opening)


def open_folder(path: str, opening: Opening) -> ImageFolderData:
    """The images in class folders in ``path``, or in its folders ``train`` and ``val`` or ``test``.

    Options of :class:`~ifso.data.base.FolderOptions` may follow the path after commas. Of class folders without
    ``train``, the share ``test`` is for the test: the same images whatever the seed. Where there are ``val`` and
    ``test``, the first is for validation, unless ``validation`` asks for a part of the training set.
    """
    name = f"folder:{path}"
    need_torchvision(name, "vision")
    folder, options = read_options(FolderOptions, path, opening.options)
    root = Path(folder)
    has_test = (root / "test").is_dir()
    if (root / "train").is_dir() or not root.is_dir():
        folders = find_image_folders(root, "test" if has_test else "val", missing=", or class folders of images")
    else:
        folders = _split_folder(root, options.test)
    has_both = has_test and (root / "train").is_dir() and (root / "val").is_dir()
    usual = find_image_folders(root, "val").test if has_both and not opening.validation else None
    colours = {name: tuple(255 * each for each in options.colours(name)) for name in ("mean", "deviation")}
    return _opened(name, folders, opening, usual, options.size, **colours)


def _opened(
    name: str,
    folders: ImageFolders,
    opening: Opening,
    usual: Files | None = None,
    size: int = CROP,
    **colours: tuple[float, ...],
) -> ImageFolderData:
    """The data, with the part of the training set for validation that was asked for, otherwise the ``usual`` one."""
    train, held_out = split(folders.train, opening.validation, opening.seed)
    loading = Loading(opening.device, workers_for(opening.workers), **colours)
    return ImageFolderData(
        name, folders.classes, train, usual if held_out is None else held_out, folders.test, opening.seed,
        opening.shard, loading, folders.notes, size,
    )  # fmt: skip


def _split_folder(root: Path, share: float) -> ImageFolders:
    """The class folders in ``root``, of which a share of the images is for the test."""
    notes: list[str] = []
    with _readable(root):
        classes = _classes(root)
        files = _files(root, classes, classes, notes)
    train, test = split(files, share, seed=0)
    if test is None:
        raise DataError(f"{root} holds {len(files)} image; give two at least, one of them to measure on")
    notes.append(
        f"{root} has no folder train: {len(test)} of its {len(files)} images are for the test (test={share:g})"
    )
    return ImageFolders(classes, train, test, tuple(notes))


def open_jpegs(path: str, opening: Opening) -> ImageFolderData:
    """The images of an .npz with ``data`` (the bytes of all files), ``offsets`` [N + 1] and ``labels`` [N].

    Of each class, in the order of the file, every second image is for the test and the others are for training.
    """
    name = f"jpegs:{path}"
    need_torchvision(name, "vision")
    images = _read_jpegs(Path(path))
    tested = every_nth(images.labels, 2)
    if not bool(tested.any()):
        raise DataError(f"{path} has one image of each class; give two at least, one of them to measure on")
    classes = tuple(map(str, range(int(images.labels.max()) + 1)))
    return _opened(name, ImageFolders(classes, images.part(~tested), images.part(tested), ()), opening)


def _read_jpegs(path: Path) -> JpegBytes:
    """The arrays of the file, checked."""
    data, offsets, labels = read_npz(path, ("data", "offsets", "labels"))
    kind = {name: f"{one_line(a.dtype.name)} of shape {a.shape}" for name, a in (("data", data), ("offsets", offsets))}
    if data.dtype != np.uint8 or data.ndim != 1:
        raise DataError(f"{path}: data is {kind['data']}; give the bytes of all JPEG files as one row of uint8")
    if offsets.dtype.kind not in "ui" or offsets.ndim != 1 or len(offsets) < 2:
        raise DataError(f"{path}: offsets is {kind['offsets']}; give where each image begins, and the end of the last")
    edges = torch.from_numpy(offsets.astype(np.int64))
    if int(edges[0]) < 0 or int(edges[-1]) > len(data) or not bool((edges.diff() > 0).all()):
        raise DataError(f"{path}: offsets do not grow from 0 to {len(data)}, the number of bytes in data")
    count = len(edges) - 1
    checked = as_labels(labels, count, MOST_CLASSES, f"{path}: labels")
    return JpegBytes(path, torch.from_numpy(data), edges[:-1], edges[1:], torch.arange(count), checked)
