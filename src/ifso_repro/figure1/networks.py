"""Networks small enough to be trained to convergence again and again, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifso.graph.channel_graph import ChannelGraph
from ifso.graph.tracing import trace
from ifso_repro.figure1.settings import CIFAR_NETWORK, Batch, Settings, Stop, cifar_images, digit_images


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


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    """The loss of the images alone."""
    return F.cross_entropy(model(batch[0]), batch[1])


@dataclass(frozen=True)
class Problem:
    """A network, its loss on one full batch, and how long it is trained."""

    name: str
    seed: int
    model: nn.Module
    graph: ChannelGraph
    batch: Batch
    l2: float
    adam_steps: int
    train: Stop
    retrain: Stop
    masks: int
    subset_sizes: tuple[int, ...]
    path_steps: tuple[int, ...]

    @property
    def label(self) -> str:
        """What files and progress lines call it."""
        return f"{self.name}-seed{self.seed}"

    @property
    def weights(self) -> int:
        """How many numbers are trained."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def loss_fn(self, model: nn.Module, batch: Any) -> Tensor:
        """Cross entropy and λ Σ w² over all that is trained."""
        squares = [parameter.square().sum() for parameter in model.parameters() if parameter.requires_grad]
        return cross_entropy(model, batch) + self.l2 * torch.stack(squares).sum()


def create(name: str, seed: int, settings: Settings, data: Path | None) -> Problem:
    """The network of that name, not trained yet; batch norm stays in eval mode but for its first statistics."""
    if name == CIFAR_NETWORK:
        assert data is not None
        batch = cifar_images(data, settings.cifar_images)
    else:
        batch = digit_images(2 * settings.images if name == "convex" else settings.images)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _build(name, settings).double()
    _take_statistics_(model, batch[0])
    plan = _plan(name, settings)
    return Problem(name, seed, model, trace(model, batch[0][:1]), batch, settings.l2, **plan)


def _build(name: str, settings: Settings) -> nn.Module:
    makers: dict[str, Callable[[], nn.Module]] = {
        "convex": lambda: FixedFeatures(settings.features),
        "digits-relu": lambda: plain_cnn(nn.ReLU, *settings.widths),
        "digits-gelu": lambda: plain_cnn(nn.GELU, *settings.widths),
        "digits-residual": lambda: ResidualCnn(*settings.widths),
        CIFAR_NETWORK: NarrowResNet,
    }
    return makers[name]()


def _plan(name: str, settings: Settings) -> dict[str, Any]:
    """How the network is trained and which masks it gets."""
    plan: dict[str, Any] = {"adam_steps": settings.adam_steps, "train": settings.train, "retrain": settings.retrain}
    plan |= {"masks": settings.masks, "subset_sizes": settings.subset_sizes, "path_steps": settings.path_steps}
    if name == "convex":
        plan |= {"adam_steps": 0, "train": settings.convex, "retrain": settings.convex}
        plan |= {"masks": min(settings.masks, settings.features), "subset_sizes": ()}
    if name == CIFAR_NETWORK:
        plan |= {"train": _fixed(settings.cifar_train), "retrain": _fixed(settings.cifar_retrain)}
        plan |= {"masks": settings.cifar_masks, "path_steps": settings.cifar_path_steps}
    return plan


def _fixed(evaluations: int) -> Stop:
    return Stop(gradient=0.0, fall=0.0, patience=evaluations, most=evaluations)


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
