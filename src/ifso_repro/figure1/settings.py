"""What a run of the study is made of. A run can be continued only with the settings it began with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ifso.data.cifar import as_images, read_npz
from ifso.data.digits import digits
from ifso.errors import IfsoError

DIGITS_NETWORKS = ("convex", "digits-relu", "digits-gelu", "digits-residual")

CIFAR_NETWORK = "cifar-resnet"

NETWORKS = (*DIGITS_NETWORKS, CIFAR_NETWORK)


@dataclass(frozen=True)
class Stop:
    """When training ends.

    All gradient entries are at most ``gradient``, or the loss fell by less than ``fall`` over the last ``patience``
    evaluations (both: it has converged), or ``most`` evaluations are spent.
    """

    gradient: float
    fall: float
    patience: int
    most: int


@dataclass(frozen=True)
class Settings:
    """All choices of the study. ``data`` names the CIFAR-10 images by file name and checksum, or is None."""

    smoke: bool = False
    seeds: int = 2
    networks: tuple[str, ...] = DIGITS_NETWORKS
    masks: int = 60
    subset_sizes: tuple[int, ...] = (2, 3, 4, 6)
    path_steps: tuple[int, ...] = (1, 2, 4, 8, 16)
    images: int = 200
    features: int = 24
    widths: tuple[int, int] = (4, 6)
    l2: float = 3e-4
    adam_steps: int = 1000
    train: Stop = field(default_factory=lambda: Stop(1e-6, 1e-7, 500, 10000))
    retrain: Stop = field(default_factory=lambda: Stop(1e-6, 1e-6, 250, 6000))
    convex: Stop = field(default_factory=lambda: Stop(1e-8, 1e-15, 1000, 10000))
    first_order_every: int = 20
    first_order_steps: int = 2000
    within: float = 0.05
    cifar_images: int = 500
    cifar_masks: int = 12
    cifar_path_steps: tuple[int, ...] = (1, 4, 8)
    cifar_train: int = 600
    cifar_retrain: int = 150
    data: str | None = None

    def __post_init__(self) -> None:
        if self.seeds < 1 or self.masks < 2:
            raise IfsoError(f"{self.seeds} seeds and {self.masks} masks: give at least 1 seed and 2 masks")
        for name in self.networks:
            if name not in NETWORKS:
                raise IfsoError(f"no network {name!r} in this study; choose from {', '.join(NETWORKS)}")
        if CIFAR_NETWORK in self.networks and self.data is None:
            raise IfsoError(f"network {CIFAR_NETWORK!r} needs images: give --data cifar10:PATH.npz")

    def document(self) -> dict[str, Any]:
        """As it is written to JSON, without what this run does not use."""
        used = asdict(self)
        if CIFAR_NETWORK not in self.networks:
            used = {name: value for name, value in used.items() if not name.startswith("cifar_")}
        return json.loads(json.dumps(used))


SMOKE = Settings(
    smoke=True,
    seeds=1,
    masks=9,
    subset_sizes=(2, 4),
    path_steps=(1, 2, 4, 8),
    images=60,
    features=8,
    widths=(3, 4),
    adam_steps=200,
    train=Stop(1e-5, 1e-5, 300, 600),
    retrain=Stop(1e-5, 1e-5, 150, 300),
    first_order_every=9,
    first_order_steps=300,
    cifar_images=64,
    cifar_masks=4,
    cifar_train=60,
    cifar_retrain=15,
)


def choose(
    *, smoke: bool, seeds: int | None, networks: Sequence[str] | None, masks: int | None, data: str | None
) -> Settings:
    """The full study or the short one, with what the user wants otherwise."""
    settings = SMOKE if smoke else Settings()
    if networks is None:
        networks = DIGITS_NETWORKS if data is None else NETWORKS
    settings = replace(settings, networks=tuple(dict.fromkeys(networks)), data=data)
    if seeds is not None:
        settings = replace(settings, seeds=seeds)
    if masks is not None:
        settings = replace(settings, masks=masks, cifar_masks=min(masks, settings.cifar_masks))
    return settings


def difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Where two documents of settings differ, in words; empty if nowhere.

    >>> difference({"seeds": 2, "l2": 0.1}, {"seeds": 3, "l2": 0.1})
    'seeds was 2 and is 3'
    """
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return ", ".join(f"{name} was {before.get(name)} and is {now.get(name)}" for name in names)


Batch = tuple[Tensor, Tensor]

CIFAR = "cifar10"

ARRAYS = ("x_train", "y_train")


def digit_images(count: int) -> Batch:
    """The first training digits [count, 1, 8, 8] in float64 from −0.5 to 0.5, and their labels."""
    data = digits()
    return data.x_train[:count].double() - 0.5, data.y_train[:count]


def data_path(data: str) -> Path:
    """The file in ``cifar10:PATH.npz``."""
    kind, colon, path = data.partition(":")
    if kind != CIFAR or not colon or not path.endswith(".npz"):
        raise IfsoError(f"--data {data!r} is not known here; give {CIFAR}:PATH.npz with arrays x_train and y_train")
    if not Path(path).is_file():
        raise IfsoError(f"--data: there is no file {path}")
    return Path(path)


def cifar_images(path: Path, count: int) -> Batch:
    """The first training images, averaged to [count, 3, 16, 16], in float64 with mean 0 and deviation 1, and labels."""
    x, y = read_npz(path, ARRAYS)
    if len(x) < count or len(x) != len(y):
        raise IfsoError(f"{path} has {len(x)} images and {len(y)} labels; {count} of each are needed")
    images = F.avg_pool2d(as_images(x[:count], f"{path}: x_train").double(), 2).contiguous()
    labels = torch.from_numpy(np.ascontiguousarray(y[:count])).long().flatten()
    return (images - images.mean((0, 2, 3), keepdim=True)) / images.std((0, 2, 3), keepdim=True), labels


def checksum(path: Path) -> str:
    """Of the arrays that are used; it names the data in the settings."""
    found = hashlib.sha256()
    for array in read_npz(path, ARRAYS):
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]
