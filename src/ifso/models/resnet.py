"""The CIFAR ResNets of He et al. (2016), with 1×1-conv shortcuts or parameter-free padded ones (option A)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

DEPTHS = (20, 32, 44, 56, 110)
WIDTHS = (16, 32, 64)


class PaddedShortcut(nn.Module):
    """Option A: every second pixel, and zero channels ``front`` and ``back`` of the ones there are.

    >>> import torch
    >>> PaddedShortcut(front=8, back=8)(torch.ones(1, 16, 32, 32)).shape
    torch.Size([1, 32, 16, 16])
    """

    def __init__(self, front: int, back: int) -> None:
        super().__init__()
        self.front = front
        self.back = back

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] → [N, front + C + back, ⌈H/2⌉, ⌈W/2⌉]."""
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.front, self.back))

    def extra_repr(self) -> str:
        """The channels added, as ``print(model)`` shows them."""
        return f"front={self.front}, back={self.back}"


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut around them."""

    def __init__(self, inputs: int, planes: int, *, padded: bool) -> None:
        super().__init__()
        stride = 1 if inputs == planes else 2
        self.conv1 = nn.Conv2d(inputs, planes, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = nn.Identity() if stride == 1 else _shortcut(inputs, planes, padded=padded)

    def forward(self, x: Tensor) -> Tensor:
        """[N, inputs, H, W] → [N, planes, H', W']."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.downsample(x))


class CifarResNet(nn.Module):
    """Three stages of ``blocks`` blocks with 16, 32 and 64 channels: depth = 6 · blocks + 2. ``padded`` is option A.

    >>> sum(p.numel() for p in CifarResNet(3, padded=True).parameters())
    269722
    """

    def __init__(self, blocks: int, num_classes: int = 10, *, padded: bool = False, colours: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(colours, WIDTHS[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(WIDTHS[0])
        self.layer1 = _stage(WIDTHS[0], WIDTHS[0], blocks, padded=padded)
        self.layer2 = _stage(WIDTHS[0], WIDTHS[1], blocks, padded=padded)
        self.layer3 = _stage(WIDTHS[1], WIDTHS[2], blocks, padded=padded)
        self.fc = nn.Linear(WIDTHS[2], num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """[N, colours, H, W] → [N, num_classes]."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


def _stage(inputs: int, planes: int, blocks: int, *, padded: bool) -> nn.Sequential:
    widths = [inputs] + [planes] * (blocks - 1)
    return nn.Sequential(*(BasicBlock(width, planes, padded=padded) for width in widths))


def _shortcut(inputs: int, planes: int, *, padded: bool) -> nn.Module:
    if padded:
        return PaddedShortcut(front=planes // 4, back=planes // 4)
    return nn.Sequential(nn.Conv2d(inputs, planes, 1, stride=2, bias=False), nn.BatchNorm2d(planes))
