"""Which data something was made with: a short digest, the same on every device and wherever the files lie."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ifso.data.batches import Images
from ifso.data.coco_batches import BoxSamples
from ifso.data.decoding import ImageFiles

DIGITS = 16
PARTS = ("train", "validation", "test")
ANNOTATIONS = ("image_ids", "sizes", "first", "boxes", "labels", "areas", "crowd")
Part = Images | ImageFiles | BoxSamples
_KNOWN: WeakKeyDictionary[Part, bytes] = WeakKeyDictionary()


def identity(data: Any) -> str:
    """The beginning of a SHA-256 over the classes and all parts of a data set; seeds and augmentation do not count.

    Of images that are held in memory it is over pixels and labels, of those in files over their names and labels or
    boxes: pixels of files are not read.
    """
    digest = hashlib.sha256(f"{data.num_classes}".encode())
    for name in PARTS:
        digest.update(f"\n{name} ".encode() + _part(getattr(data, name)))
    return digest.hexdigest()[:DIGITS]


def _part(part: Part | None) -> bytes:
    """The digest of a part, computed once: data sets that differ in their seed share it."""
    if part is None:
        return b""
    if part not in _KNOWN:
        digest = hashlib.sha256()
        for piece in _pieces(part):
            digest.update(f"{len(piece)} ".encode() + piece)
        _KNOWN[part] = digest.digest()
    return _KNOWN[part]


def _pieces(part: Part) -> Iterator[bytes]:
    """What tells one part of a data set from another."""
    if isinstance(part, Images):
        yield from (_told(part.labels), _told(part.pixels), _told(part.mean), _told(part.deviation))
    elif isinstance(part, ImageFiles):
        yield from (b"\0".join(part.names.tolist()), _told(part.labels))
    else:
        yield from (_told(getattr(part.annotations, name)) for name in ANNOTATIONS)
        yield f"{sorted(part.annotations.categories.items())} {part.resizing}".encode()
        if part.files is not None:
            yield b"\0".join(part.files.names.tolist())
        else:
            yield from map(_told, part.pixels if part.pixels is not None else ())


def _told(tensor: Tensor) -> bytes:
    """Dtype, shape and a check sum of all values.

    >>> _told(torch.zeros(2, 3)) == _told(torch.zeros(3, 2)), _told(torch.zeros(2)) == _told(torch.zeros(2))
    (False, True)
    """
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return f"{tensor.dtype} {tuple(tensor.shape)} {zlib.crc32(values):08x}".encode()
