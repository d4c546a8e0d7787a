"""A network for 8×8 digits with all that makes coupling hard and few weights: MODEL ``small_net.py:small``."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor, nn


class Small(nn.Module):
    """A stem, a residual branch, a grouped convolution, a concatenation, and a layer norm before the classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.branch = nn.Conv2d(8, 8, 3, padding=1)
        self.grouped = nn.Conv2d(8, 12, 3, stride=2, groups=2)
        self.pointwise = nn.Conv2d(8, 6, 1, stride=2)
        self.layer_norm = nn.LayerNorm(18)
        self.classes = nn.Linear(18, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [N, 10] of images [N, 1, 8, 8]."""
        found = torch.relu(self.norm(self.stem(images)))
        found = found + torch.relu(self.branch(found))
        sides = [torch.relu(part).mean((2, 3)) for part in (self.grouped(found), self.pointwise(found))]
        return self.classes(self.layer_norm(torch.cat(sides, 1)))


@torch.no_grad()
def small() -> Small:
    """The network, always with the same weights: numpy draws the same bits on every processor."""
    model, generator = Small(), numpy.random.Generator(numpy.random.PCG64(11))
    for name, parameter in model.named_parameters():
        spread = 1 / parameter[0].numel() ** 0.5 if parameter.ndim > 1 else 0.1
        drawn = generator.uniform(-spread, spread, tuple(parameter.shape)) + ("norm.weight" in name)
        parameter.copy_(torch.from_numpy(drawn.astype("float32")))
    return model
