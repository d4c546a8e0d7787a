"""Networks small enough to be trained to convergence again and again, and the settings of the study."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ifso
from ifso.data.cifar import as_images, read_npz
from ifso.data.digits import digits
from ifso.errors import IfsoError
from ifso.tasks.classification import cross_entropy

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
        """The settings as JSON, without what this run does not use."""
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
    """The full study or the short one, with the changes that are given."""
    settings = SMOKE if smoke else Settings()
    if networks is None:
        networks = DIGITS_NETWORKS if data is None else NETWORKS
    settings = replace(settings, networks=tuple(dict.fromkeys(networks)), data=data)
    if seeds is not None:
        settings = replace(settings, seeds=seeds)
    if masks is not None:
        settings = replace(settings, masks=masks, cifar_masks=min(masks, settings.cifar_masks))
    return settings


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
    """The digest of the arrays that are used; it names the data in the settings."""
    digest = hashlib.sha256()
    for array in read_npz(path, ARRAYS):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


class FixedFeatures(nn.Module):
    """Softmax regression on tanh features of a frozen random layer: only ``head`` learns, and its loss is convex."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.fixed = nn.Linear(64, features).requires_grad_(False)
        self.head = nn.Linear(features, 10)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 1, 8, 8] → [N, 10]."""
        return self.head(torch.tanh(3 * self.fixed(x.flatten(1))))


def plain_cnn(activation: Callable[[], nn.Module], first: int, second: int) -> nn.Sequential:
    """Two convolutions and a linear layer: 512 weights with 4 and 6 channels."""
    return nn.Sequential(
        nn.Conv2d(1, first, 3, stride=2, padding=1), activation(),
        nn.Conv2d(first, second, 3, padding=1), activation(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(4 * second, 10),
    )  # fmt: skip


class ResidualCnn(nn.Module):
    """A stem, a residual block and a linear layer: 652 weights; a unit of the stream is made by two layers."""

    def __init__(self, stream: int, inner: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, stream, 3, stride=2, padding=1)
        self.conv1 = nn.Conv2d(stream, inner, 3, padding=1)
        self.conv2 = nn.Conv2d(inner, stream, 3, padding=1)
        self.fc = nn.Linear(4 * stream, 10)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 1, 8, 8] → [N, 10]."""
        x = F.relu(self.stem(x))
        x = F.relu(x + self.conv2(F.relu(self.conv1(x))))
        return self.fc(F.avg_pool2d(x, 2).flatten(1))


class NarrowResNet(nn.Module):
    """A ResNet-8 of 6, 8 and 12 channels: a stem of stride 2 and three basic blocks, two with 1×1 shortcuts."""

    widths = (6, 8, 12)

    def __init__(self) -> None:
        super().__init__()
        from ifso.models.resnet import BasicBlock

        first, second, third = self.widths
        self.conv1, self.bn1 = nn.Conv2d(3, first, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(first)
        self.layer1 = BasicBlock(first, first, padded=False)
        self.layer2 = BasicBlock(first, second, padded=False)
        self.layer3 = BasicBlock(second, third, padded=False)
        self.fc = nn.Linear(third, 10)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, 16, 16] → [N, 10]."""
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


@dataclass(frozen=True)
class Problem:
    """A network, its loss on one full batch, and the settings of the study for it."""

    name: str
    seed: int
    model: nn.Module
    graph: ifso.ChannelGraph
    batch: Batch
    settings: Settings

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All that is trained."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def weights(self) -> int:
        """How many numbers are trained."""
        return sum(parameter.numel() for parameter in self.parameters)

    def loss_fn(self, model: nn.Module, batch: Any) -> Tensor:
        """Cross entropy and λ Σ w² over all that is trained."""
        squares = [parameter.square().sum() for parameter in model.parameters() if parameter.requires_grad]
        return cross_entropy(model, batch) + self.settings.l2 * torch.stack(squares).sum()

    def loss(self) -> Tensor:
        """The loss of the network as it is."""
        return self.loss_fn(self.model, self.batch)


def create(name: str, seed: int, settings: Settings, data: Path | None) -> Problem:
    """The network of that name, not trained yet; batch norm stays in eval mode but for its first statistics."""
    makers: dict[str, Callable[[], nn.Module]] = {
        "convex": lambda: FixedFeatures(settings.features),
        "digits-relu": lambda: plain_cnn(nn.ReLU, *settings.widths),
        "digits-gelu": lambda: plain_cnn(nn.GELU, *settings.widths),
        "digits-residual": lambda: ResidualCnn(*settings.widths),
        CIFAR_NETWORK: NarrowResNet,
    }
    if name == CIFAR_NETWORK:
        assert data is not None
        batch = cifar_images(data, settings.cifar_images)
    else:
        batch = digit_images(2 * settings.images if name == "convex" else settings.images)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = makers[name]().double()
    _take_statistics_(model, batch[0])
    return Problem(name, seed, model, ifso.trace(model, batch[0][:1]), batch, _settings_of(name, settings))


def _settings_of(name: str, settings: Settings) -> Settings:
    """The settings with what is different for one network: how it is trained, and which masks it gets."""
    if name == "convex":
        changes: dict[str, Any] = {"adam_steps": 0, "train": settings.convex, "retrain": settings.convex}
        return replace(settings, masks=min(settings.masks, settings.features), subset_sizes=(), **changes)
    if name == CIFAR_NETWORK:
        train, retrain = (Stop(0.0, 0.0, count, count) for count in (settings.cifar_train, settings.cifar_retrain))
        changes = {"masks": settings.cifar_masks, "path_steps": settings.cifar_path_steps}
        return replace(settings, train=train, retrain=retrain, **changes)
    return settings


@torch.no_grad()
def _take_statistics_(model: nn.Module, images: Tensor) -> None:
    """Batch norms take the statistics of the images under the first weights, layer after layer, and keep them."""
    model.train()
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None
    if norms:
        model(images)
    model.eval()
