"""Regions of interest: linear in the feature map, but PyTorch has no second derivative for them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torchvision.ops import deform_conv2d, roi_align

import ifso
from ifso.curvature.products import Products

BOXES = torch.tensor([[0, 0.5, 0.5, 4.0, 5.0], [1, 1.0, 0.0, 5.0, 3.0]], dtype=torch.float64)


class Regions(nn.Module):
    """What torchvision computes."""

    def forward(self, x):
        return roi_align(x, BOXES, (2, 2), 1.0, 2)


class RegionsByMatrix(nn.Module):
    """The same as a matrix product [channels, pixels] · [pixels, 4] for each box."""

    def __init__(self) -> None:
        super().__init__()
        basis = torch.eye(36, dtype=torch.float64).view(36, 1, 6, 6)
        numbers = torch.arange(36, dtype=torch.float64)[:, None]
        boxes = [torch.cat([numbers, box[1:].expand(36, 4)], 1) for box in BOXES]
        self.matrices = [roi_align(basis, own, (2, 2), 1.0, 2).reshape(36, 4) for own in boxes]

    def forward(self, x):
        pairs = zip(BOXES[:, 0].long().tolist(), self.matrices, strict=True)
        return torch.stack([(x[image].flatten(1) @ matrix).view(-1, 2, 2) for image, matrix in pairs])


def loss_fn(model, batch):
    return model(batch).square().mean()


def test_products_through_regions():
    first, last = nn.Conv2d(2, 4, 3, padding=1).double(), nn.Conv2d(4, 3, 1).double()
    nets = [nn.Sequential(first, nn.Tanh(), middle, nn.Tanh(), last) for middle in (Regions(), RegionsByMatrix())]
    x = torch.randn(2, 2, 6, 6).double()
    graph = ifso.trace(nets[0], x)
    found, wanted = (Products(net, graph, loss_fn) for net in nets)
    v = wanted.mixed(x)
    assert float((found.mixed(x) - v).norm() / v.norm()) < 1e-12
    s = wanted.sensitivity(x, v)
    assert graph.num_units == 4
    assert float((found.sensitivity(x, v) - s).norm() / s.norm()) < 1e-12


def test_boxes_have_no_gradient_even_if_they_move():
    class Moving(nn.Module):
        def __init__(self, detached: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.make, self.read = nn.Conv2d(2, 4, 3, padding=1).double(), nn.Conv2d(4, 3, 1).double()
            self.detached = detached

        def forward(self, x):
            y = self.make(x)
            shift = y.mean().detach() if self.detached else y.mean()
            boxes = torch.cat([BOXES[:, :1], BOXES[:, 1:] + shift], 1)
            return self.read(roi_align(y, boxes, (2, 2), 1.0, 2).tanh())

    x = torch.randn(2, 2, 6, 6).double()
    found, wanted = (Products(net, ifso.trace(net, x), loss_fn) for net in (Moving(False), Moving(True)))
    v = wanted.mixed(x)
    assert torch.equal(found.mixed(x), v)
    assert torch.equal(found.sensitivity(x, v), wanted.sensitivity(x, v))


def test_an_operator_that_cannot_carry_a_tangent_is_gone_around():
    """Also before the first masked layer, where the tangent is zero: it would be lost on the way back."""

    class Deformed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.make, self.read = nn.Conv2d(2, 4, 3, padding=1).double(), nn.Conv2d(4, 3, 1).double()
            self.offset = torch.zeros(2, 18, 6, 6, dtype=torch.float64)
            self.kernel = torch.ones(4, 4, 3, 3, dtype=torch.float64)

        def forward(self, x):
            return self.read(deform_conv2d(self.make(x), self.offset, self.kernel, padding=1).tanh())

    net, x = Deformed(), torch.randn(2, 2, 6, 6).double()
    graph = ifso.trace(nn.Sequential(net.make, nn.Tanh(), net.read), x)
    products = Products(net, _renamed(graph, {"0": "make", "2": "read"}), loss_fn)
    products.mixed(x)
    assert "central differences" in products.note


def _renamed(graph, names):
    """The graph of a network whose layers have other names."""

    def new(parameter):
        layer, _, key = parameter.partition(".")
        return f"{names.get(layer, layer)}.{key}"

    groups = tuple(
        replace(group, members=tuple(replace(one, parameter=new(one.parameter)) for one in group.members))
        for group in graph.groups
    )
    return replace(graph, groups=groups, layouts={new(name): layout for name, layout in graph.layouts.items()})
