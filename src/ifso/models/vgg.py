"""The VGG-16 used for CIFAR in the pruning literature: 13 convolutions with BatchNorm and one linear layer."""

from __future__ import annotations

from torch import Tensor, nn

LAYOUT = (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512)


class CifarVGG16(nn.Module):
    """VGG-16 for small images: ``features`` halves the image four times, ``classifier`` reads its mean.

    >>> sum(isinstance(module, nn.Conv2d) for module in CifarVGG16().modules())
    13
    """

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.features = _features()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(512, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, H, W] → [N, num_classes]."""
        return self.classifier(self.pool(self.features(x)).flatten(1))


def _features() -> nn.Sequential:
    layers: list[nn.Module] = []
    width = 3
    for item in LAYOUT:
        if isinstance(item, int):
            layers += [nn.Conv2d(width, item, 3, padding=1, bias=False), nn.BatchNorm2d(item), nn.ReLU()]
            width = item
        else:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)
