"""Products with second derivatives against float64 truth: every kind of layer, loss, mode and calling convention."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, FEW, enliven_, every_case, random_keep, run, tensors
from reference.second_order import Reference, layer_weights
from torch import Tensor, nn

import ifso
from ifso.curvature import dual_layers
from ifso.curvature.primal_cache import CachedCall, is_careful
from ifso.curvature.products import Products
from ifso.errors import ScoreError

TOLERANCE = 1e-7
"""Most agree to 1e-13; PyTorch's gradient of hardsigmoid has a float32 constant in it."""

LossFn = Callable[[nn.Module, Any], Tensor]


def squares(model: nn.Module, batch: Any) -> Tensor:
    """Mean squares of every output, each number with a fixed random factor."""
    total = torch.zeros((), dtype=torch.float64)
    for seed, output in enumerate(tensors(run(model, batch))):
        factors = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        total = total + (output * factors).square().mean()
    return total


def error(found: Tensor, wanted: Tensor) -> float:
    """|found − wanted| / |wanted|; what should be zero must be zero."""
    assert found.shape == wanted.shape
    distance = float((found.double() - wanted).norm())
    return distance / float(wanted.norm()) if bool((wanted != 0).any()) else distance


def direction(size: int, seed: int = 5) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows_by_place(products: Products, found: Tensor, reference: Reference) -> Tensor:
    """The rows of a sensitivity in the order of the reference."""
    assert sorted((reader.parameter, reader.dim) for reader in products.readers) == sorted(reference.places)
    rows = {(reader.parameter, reader.dim): row for reader, row in zip(products.readers, found, strict=True)}
    return torch.stack([rows[place] for place in reference.places]) if rows else found


def compare(
    model: nn.Module, inputs: Any, loss_fn: LossFn = squares, batch: Any = None, *, graph: Any = None, **options: Any
) -> tuple[Products, Reference]:
    """All four products of one model and batch against double backward through M ⊙ W."""
    graph = ifso.trace(model, inputs) if graph is None else graph
    batch = inputs if batch is None else batch
    products = Products(model, graph, loss_fn, **options)
    reference = Reference(model, graph, loss_fn, batch, products.space.tensors)
    kept = options.get("kept", graph.kept(None))[:-1].double()
    u = direction(products.space.size)
    loss, gradient = products.gradient(batch)
    assert error(loss, reference.loss().detach()) < TOLERANCE
    assert error(gradient, reference.gradient) < TOLERANCE
    assert error(products.hessian(batch, u), reference.hessian_times(u)) < TOLERANCE
    there = surviving_weights(graph, options.get("kept"), products)
    assert error(products.mixed(batch), reference.mixed_sum(kept) * there) < TOLERANCE
    found = rows_by_place(products, products.sensitivity(batch, u), reference)
    assert error(found, reference.mixed_times(u) * kept) < TOLERANCE
    return products, reference


def surviving_weights(graph: Any, kept: Tensor | None, products: Products) -> Tensor:
    """1 for every weight of which no slice belongs to a removed unit, found member by member."""
    parts = {name: torch.ones_like(tensor) for name, tensor in products.space.tensors.items()}
    for group in graph.groups if kept is not None else ():
        for member in group.members:
            if member.parameter in parts:
                gone = torch.cat([~kept[group.units], torch.tensor([False])])[member.owner]
                sizes = [1] * parts[member.parameter].dim()
                sizes[member.dim] = gone.shape[-1]
                if gone.dim() > 1:
                    sizes[0] = gone.shape[0]
                parts[member.parameter] = parts[member.parameter] * ~gone.reshape(sizes)
    return products.space.flat(parts)


def build(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return enliven_(make().double())


def images(*shape: int) -> Tensor:
    return torch.randn(*(shape or (3, 2, 6, 6)), generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def between(operation: nn.Module) -> nn.Module:
    """4 channels are made, worked on, and read."""
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), operation, nn.Conv2d(4, 3, 1))


# --- against dense matrices -------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """A stem, a block around a shortcut with a layer that is called twice, and a linear layer.

    ``masks`` scale the channels of the residual stream and of the block where they are read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn0 = nn.Conv2d(2, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.twice, self.conv2, self.fc = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 3, 1), nn.Linear(3, 3)
        self.masks: tuple[Tensor, Tensor] | None = None

    def _masked(self, which: int, x: Tensor) -> Tensor:
        return x if self.masks is None else x * self.masks[which].view(-1, *[1] * (x.dim() - 2))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn0(self.stem(x)))
        y = torch.tanh(self.bn1(self.conv1(self._masked(0, x))))
        y = torch.sigmoid(self.twice(self._masked(1, torch.tanh(self.twice(self._masked(1, y))))))
        return self.fc(self._masked(0, (x + self.conv2(self._masked(1, y))).mean((2, 3))))


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def labelled() -> tuple[Tensor, Tensor]:
    return images(), torch.tensor([0, 2, 1])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_dense_matrices(training, fused):
    model, batch = build(Residual).train(training), labelled()
    graph = ifso.trace(model, batch[0])
    products = Products(model, graph, cross_entropy, fused=fused)
    assert list(products.space.tensors) == layer_weights(model)
    reference = Reference(model, graph, cross_entropy, batch, layer_weights(model))
    hessian, mixed = reference.hessian, reference.mixed
    assert (hessian.shape, mixed.shape) == ((199, 199), (4, 7, 199))
    assert error(hessian, hessian.T) < 1e-12
    assert error(products.mixed(batch), mixed.sum((0, 1))) < TOLERANCE
    for seed in range(5):
        u = direction(199, seed)
        assert error(products.hessian(batch, u), hessian @ u) < TOLERANCE
        found = rows_by_place(products, products.sensitivity(batch, u), reference)
        assert error(found, mixed @ u) < TOLERANCE


@pytest.mark.parametrize("training", [True, False])
def test_masks_written_into_the_network(training):
    """M on the activations where they are read: no channel graph in the truth."""
    model, batch = build(Residual).train(training), labelled()
    graph = ifso.trace(model, batch[0])
    products = Products(model, graph, cross_entropy)
    u = direction(products.space.size)
    masks = [torch.ones(size, dtype=torch.float64, requires_grad=True) for size in (3, 4)]
    model.masks = (masks[0], masks[1])
    weights = list(products.space.tensors.values())
    first = torch.autograd.grad(cross_entropy(model, batch), [*weights, *masks], create_graph=True)
    along = torch.cat([grad.flatten() for grad in first[:-2]]) @ u
    sensitivity = torch.cat(torch.autograd.grad(along, masks, retain_graph=True))
    mixed = torch.autograd.grad(first[-2].sum() + first[-1].sum(), weights)
    model.masks = None
    assert [(group.name, group.units) for group in graph.groups] == [("stem", slice(0, 3)), ("conv1", slice(3, 7))]
    assert error(products.mixed(batch), torch.cat([part.flatten() for part in mixed])) < TOLERANCE
    assert error(products.sensitivity(batch, u).sum(0), sensitivity) < TOLERANCE


def test_the_truth_agrees_with_finite_differences():
    model, batch = build(Residual).eval(), labelled()
    reference = Reference(model, ifso.trace(model, batch[0]), cross_entropy, batch, layer_weights(model))
    u, step = direction(199), 1e-4
    sizes = [tensor.numel() for tensor in reference.w.values()]

    def loss(along: float, entry: tuple[int, int], change: float) -> Tensor:
        pieces = zip(reference.w.items(), u.split(sizes), strict=True)
        mask = torch.ones_like(reference.m)
        mask[entry] += change
        return reference.loss({name: w + along * part.view_as(w) for (name, w), part in pieces}, mask).detach()

    for entry in [(0, 0), (1, 4), (3, 2)]:
        if not bool(reference.mixed[entry].any()):
            continue
        corners = [loss(a * step, entry, b * step) * a * b for a in (1, -1) for b in (1, -1)]
        assert abs(float(sum(corners)) / (4 * step**2) - float(reference.mixed[entry] @ u)) < 1e-6
    middle = loss(0.0, (0, 0), 0.0)
    curvature = (loss(step, (0, 0), 0.0) + loss(-step, (0, 0), 0.0) - 2 * middle) / step**2
    assert abs(float(curvature) - float(u @ reference.hessian @ u)) < 1e-5 * abs(float(curvature))


# --- every network of the other tests ---------------------------------------------------------------------------------


@every_case()
def test_cases(case):
    compare(case.model().train(), case.inputs(), graph=case.graph())


@pytest.mark.parametrize(("training", "fused"), [(True, False), (False, True), (False, False)])
@every_case(few=FEW)
def test_cases_in_other_ways(case, training, fused):
    compare(case.model().train(training), case.inputs(), graph=case.graph(), fused=fused)


@every_case(few=FEW)
def test_cases_over_all_parameters(case):
    compare(case.model(), case.inputs(), graph=case.graph(), weights="all")


# --- layers -----------------------------------------------------------------------------------------------------------


class FusedDropout(nn.Module):
    """What ``F.dropout`` calls on a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, 0.4, self.training)[0]


class Sampled(nn.Module):
    """Images read at places between the pixels and outside, which follow from two channels if they are ``moving``."""

    def __init__(self, moving: bool = False, align_corners: bool = False, **options: Any) -> None:
        super().__init__()
        self.moving, self.options = moving, {"align_corners": align_corners, **options}
        random = torch.Generator().manual_seed(3)
        self.register_buffer("grid", 2.5 * torch.rand(1, 4, 3, 2, generator=random, dtype=torch.float64) - 1.25)

    def forward(self, x: Tensor) -> Tensor:
        grid = self.grid.to(x.dtype).expand(len(x), -1, -1, -1)
        if self.moving:
            grid = grid + 0.1 * x[:, :2, :4, :3].movedim(1, -1).tanh()
        return F.grid_sample(x, grid, **self.options)


class Tokens(nn.Module):
    """A module for [N, positions, channels] between feature maps."""

    def __init__(self, within: nn.Module) -> None:
        super().__init__()
        self.within = within

    def forward(self, x: Tensor) -> Tensor:
        return self.within(x.flatten(2).transpose(1, 2)).transpose(1, 2).view_as(x)


class Attention(nn.Module):
    """Two heads that read the channels; ``options`` are those of ``scaled_dot_product_attention``."""

    def __init__(self, mask: str = "", **options: Any) -> None:
        super().__init__()
        self.qkv, self.mask, self.options = nn.Linear(4, 12), mask, options

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 2)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(-1)  # the first position sees nothing
        masks = {"": None, "bool": seen, "float": seen.to(x.dtype) - 0.3, "moving": (q @ k.mT).detach() + v @ k.mT}
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=masks[self.mask], **self.options)
        return y.transpose(1, 2).flatten(2)


class SelfAttention(nn.MultiheadAttention):
    """PyTorch's, of tokens to themselves or, with ``across``, to later ones."""

    def __init__(self, across: bool = False, weights: bool = False, **options: Any) -> None:
        super().__init__(4, 2, batch_first=True, **options)
        self.across, self.weights = across, weights

    def forward(self, x: Tensor) -> Tensor:
        other = x.roll(1, 1) if self.across else x
        return super().forward(x, other, other, need_weights=self.weights)[0]


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "layer norm over channels": lambda: Tokens(nn.LayerNorm(4)),
    "layer norm without gains": lambda: Tokens(nn.LayerNorm(4, elementwise_affine=False)),
    "layer norm without shifts": lambda: Tokens(nn.LayerNorm(4, bias=False)),
    "layer norm of more than channels": lambda: Tokens(nn.LayerNorm([36, 4])),
    "attention": lambda: Tokens(Attention()),
    "attention, scaled": lambda: Tokens(Attention(scale=0.3)),
    "attention, causal": lambda: Tokens(Attention(is_causal=True)),
    "attention, masked": lambda: Tokens(Attention("bool")),
    "attention, shifted": lambda: Tokens(Attention("float")),
    "attention, shifted by what moves": lambda: Tokens(Attention("moving")),
    "attention with dropout": lambda: Tokens(Attention(dropout_p=0.3)),
    "multi-head attention": lambda: Tokens(SelfAttention()),
    "multi-head attention across": lambda: Tokens(SelfAttention(across=True)),
    "multi-head attention with a bias": lambda: Tokens(SelfAttention(add_bias_kv=True)),
    "multi-head attention with weights": lambda: Tokens(SelfAttention(weights=True)),
    "silu in place after a norm": lambda: nn.Sequential(nn.BatchNorm2d(4), nn.SiLU(inplace=True)),
    "strided": lambda: nn.Conv2d(4, 4, 3, stride=2, padding=1),
    "stride of two numbers": lambda: nn.Conv2d(4, 4, (3, 1), stride=(2, 1), padding=(1, 0)),
    "dilated": lambda: nn.Conv2d(4, 4, 3, dilation=2, padding=2),
    "padding same": lambda: nn.Conv2d(4, 4, 3, padding="same"),
    "padding same, even kernel": lambda: nn.Conv2d(4, 4, 2, padding="same"),
    "padding valid": lambda: nn.Conv2d(4, 4, 3, padding="valid"),
    "circular padding": lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
    "reflected padding": lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
    "grouped": lambda: nn.Conv2d(4, 4, 3, padding=1, groups=2),
    "grouped, strided, dilated": lambda: nn.Conv2d(4, 8, 3, stride=2, padding=2, dilation=2, groups=2),
    "depthwise": lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4),
    "depthwise, two each": lambda: nn.Conv2d(4, 8, 3, padding=1, groups=4),
    "transposed": lambda: nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1, output_padding=1),
    "transposed, grouped": lambda: nn.ConvTranspose2d(4, 4, 2, stride=2, groups=2),
    "no bias": lambda: nn.Conv2d(4, 4, 3, bias=False),
    "shuffled": lambda: nn.ChannelShuffle(2),
    "local response norm": lambda: nn.LocalResponseNorm(2),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "group norm without gains": lambda: nn.GroupNorm(2, 4, affine=False),
    "instance norm": lambda: nn.InstanceNorm2d(4, affine=True),
    "instance norm with statistics": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    "layer norm over positions": lambda: nn.LayerNorm([6, 6]),
    "batch norm without gains": lambda: nn.BatchNorm2d(4, affine=False),
    "batch norm without statistics": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "max pool": lambda: nn.MaxPool2d(2),
    "average pool": lambda: nn.AvgPool2d(3, 2, 1),
    "adaptive max pool": lambda: nn.AdaptiveMaxPool2d(2),
    "adaptive average pool": lambda: nn.AdaptiveAvgPool2d((2, 3)),
    "power pool": lambda: nn.LPPool2d(2, 2),
    "bilinear": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "bicubic": lambda: nn.Upsample(scale_factor=2, mode="bicubic"),
    "nearest": lambda: nn.Upsample(scale_factor=2, mode="nearest"),
    "reflection": lambda: nn.ReflectionPad2d(1),
    "replication": lambda: nn.ReplicationPad2d(1),
    "dropout": lambda: nn.Dropout(0.4),
    "dropout as on a GPU": FusedDropout,
    "sampled at a grid": Sampled,
    "sampled where channels say": lambda: Sampled(moving=True),
    "sampled by cubics": lambda: Sampled(moving=True, mode="bicubic", padding_mode="border"),
    "sampled, nearest, mirrored": lambda: Sampled(mode="nearest", padding_mode="reflection", align_corners=True),
    "dropout of channels": lambda: nn.Dropout2d(0.4),
    "alpha dropout": lambda: nn.AlphaDropout(0.4),
    "relu in place": lambda: nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
    "leaky relu in place": lambda: nn.Sequential(nn.BatchNorm2d(4, affine=False), nn.LeakyReLU(0.2, inplace=True)),
    "hardswish in place": lambda: nn.Sequential(nn.BatchNorm2d(4), nn.Hardswish(inplace=True)),
    "in place on a layer's output": lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(inplace=True)),
}

ACTIVATIONS = {
    "celu": nn.CELU(0.7), "elu": nn.ELU(0.7), "gelu": nn.GELU(), "gelu tanh": nn.GELU("tanh"),
    "hardshrink": nn.Hardshrink(), "hardsigmoid": nn.Hardsigmoid(), "hardswish": nn.Hardswish(),
    "hardtanh": nn.Hardtanh(), "leaky relu": nn.LeakyReLU(0.1), "log sigmoid": nn.LogSigmoid(), "mish": nn.Mish(),
    "prelu": nn.PReLU(), "relu": nn.ReLU(), "relu6": nn.ReLU6(), "rrelu": nn.RReLU(), "selu": nn.SELU(),
    "sigmoid": nn.Sigmoid(), "silu": nn.SiLU(), "silu in place": nn.SiLU(inplace=True), "softmax": nn.Softmax(1),
    "log softmax": nn.LogSoftmax(1), "softmax over positions": nn.Softmax2d(), "softplus": nn.Softplus(2.0),
    "softshrink": nn.Softshrink(), "softsign": nn.Softsign(), "tanh": nn.Tanh(), "tanhshrink": nn.Tanhshrink(),
    "threshold": nn.Threshold(0.1, 0.2),
}  # fmt: skip


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, training):
    def make() -> nn.Module:
        middle = LAYERS[name]()
        last = nn.LazyConv2d(3, 1)
        model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), middle, last)
        model(torch.zeros(2, 2, 6, 6))
        return model

    compare(build(make).train(training), images())
    compare(build(make).train(training), images(), weights="all")


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    compare(build(lambda: between(copy.deepcopy(ACTIVATIONS[name]))).train(), images(), weights="all")


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dims", [1, 3])
def test_other_dimensions(dims, training):
    conv = {1: nn.Conv1d, 3: nn.Conv3d}[dims]
    transposed = {1: nn.ConvTranspose1d, 3: nn.ConvTranspose3d}[dims]
    norm = {1: nn.BatchNorm1d, 3: nn.BatchNorm3d}[dims]

    def make() -> nn.Module:
        return nn.Sequential(
            conv(2, 4, 3, stride=2, padding=1), norm(4), nn.Tanh(), conv(4, 4, 3, padding=1, groups=2), nn.Tanh(),
            transposed(4, 4, 2, stride=2), nn.Flatten(), nn.Linear(4 * 4**dims, 3),
        )  # fmt: skip

    compare(build(make).train(training), images(3, 2, *[4] * dims))


def test_inputs_without_a_batch_dimension():
    compare(build(lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 3, 3))), images(2, 6, 6))
    compare(build(lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))), images(5))


def test_a_norm_before_anything_moves():
    """Its input has no tangent, and its output only that of its own gain."""
    norms = (nn.BatchNorm2d(2), nn.BatchNorm2d(4))
    model = build(lambda: nn.Sequential(norms[0], nn.Conv2d(2, 4, 3), norms[1], nn.ReLU(), nn.Conv2d(4, 3, 1))).train()
    compare(model, images(), weights="all")
    compare(model, images())


def test_channels_last():
    model = build(lambda: between(nn.Sequential(nn.BatchNorm2d(4), nn.ReLU())))
    model = model.to(memory_format=torch.channels_last).train()
    compare(model, images().contiguous(memory_format=torch.channels_last))


class Called(nn.Module):
    """A network from parts and a function."""

    def __init__(self, function: Callable[..., Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def _tied(net: Any, x: Tensor) -> Tensor:
    return F.linear(torch.tanh(net.a(x)), net.a.weight.t())


def _under_no_grad(net: Any, x: Tensor) -> Tensor:
    y = torch.tanh(net.a(x))
    with torch.no_grad():
        scale = y.abs().mean()
    return net.b(y / scale)


def _one_parameter_in_two_layers(net: Any, x: Tensor) -> Tensor:
    return net.b(torch.tanh(F.linear(torch.tanh(net.c(torch.tanh(net.a(x)))), net.c.weight)))


UNUSUAL: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "scaled weight": lambda net, x: F.linear(torch.tanh(F.linear(x, net.a.weight * 2)), net.b.weight * 3),
    "transposed weight": _tied,
    "matrix product": lambda net, x: torch.tanh(x @ net.a.weight.t() + net.a.bias) @ net.b.weight.t(),
    "addmm": lambda net, x: torch.addmm(net.b.bias, torch.tanh(net.a(x)), net.b.weight.t()),
    "einsum": lambda net, x: torch.einsum("bi,oi->bo", torch.tanh(net.a(x)), net.b.weight),
    "scaled bias": lambda net, x: F.linear(torch.tanh(F.linear(x, net.a.weight, net.a.bias * 2)), net.b.weight),
    "bias from the input": lambda net, x: F.linear(torch.tanh(net.a(x)), net.b.weight, net.a(x).mean(0)[:3]),
    "standardised weight": lambda net, x: F.linear(torch.tanh(net.a(x)), F.layer_norm(net.b.weight, (4,))),
    "normalised weight": lambda net, x: F.linear(
        torch.tanh(net.a(x)), net.b.weight / (1 + net.b.weight.norm(dim=1, keepdim=True))
    ),
    "a weight twice in a layer": lambda net, x: torch.tanh(net.a(x)) @ (net.c.weight @ net.c.weight),
    "one parameter in two layers": _one_parameter_in_two_layers,
    "part of a weight": lambda net, x: F.linear(torch.tanh(net.a(x)), net.b.weight[:2]),
    "weight and its detached self": lambda net, x: F.linear(net.a(x).tanh(), net.b.weight.detach() + net.b.weight),
    "weight through .data": lambda net, x: F.linear(net.a(x).tanh(), net.b.weight.data) + net.b(net.a(x).tanh()),
    "detached features": lambda net, x: net.b(torch.tanh(net.a(x)) * net.a(x).detach()),
    "features under no_grad": _under_no_grad,
}  # fmt: skip


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_uses_of_weights(name, fused):
    model = build(lambda: Called(UNUSUAL[name], a=nn.Linear(5, 4), b=nn.Linear(4, 3), c=nn.Linear(4, 4)))
    compare(model, images(6, 5), weights="all", fused=fused)
    compare(model, images(6, 5), fused=fused)


PARAMETRISED = {
    "weight norm": nn.utils.parametrizations.weight_norm,
    "spectral norm": nn.utils.parametrizations.spectral_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
}


@pytest.mark.parametrize("name", PARAMETRISED)
def test_parametrised_weights(name):
    how = PARAMETRISED[name]
    model = build(lambda: nn.Sequential(how(nn.Conv2d(2, 4, 3)), nn.Tanh(), how(nn.Conv2d(4, 3, 1)))).eval()
    compare(model, images(), weights="all")


def test_frozen_layers():
    model = build(
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.Tanh(), nn.Conv2d(4, 3, 1))
    )
    model[2].weight.requires_grad_(False)
    products, _ = compare(model, images())
    assert list(products.space.tensors) == ["0.weight", "4.weight"]
    model.requires_grad_(False)[4].requires_grad_(True)
    compare(model, images())


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_layers(kind):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.cell, self.head = nn.Linear(5, 4), kind(4, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.cell(torch.tanh(self.embed(x)))[0]))

    compare(build(Net), images(2, 3, 5), weights="all")


# --- losses -----------------------------------------------------------------------------------------------------------


def classifier() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


LABELS = torch.tensor([0, 2, 1])
SOFT = torch.rand(3, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64).softmax(1)
SIGNS = torch.tensor([1, -1, 1], dtype=torch.float64)


def _penalised(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x), LABELS) + 0.1 * sum(p.square().sum() for p in model.parameters())


def _consistent(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x), LABELS) + F.mse_loss(model(x.flip(-1)).softmax(1), model(x).softmax(1))


def _pseudo_labels(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        teacher = model(x.flip(-1)).softmax(1)
    return F.cross_entropy(model(x), teacher)


def _distilled(model: nn.Module, x: Tensor) -> Tensor:
    return F.kl_div((model(x) / 4).log_softmax(1), SOFT, reduction="batchmean") * 16


def _focal(model: nn.Module, x: Tensor) -> Tensor:
    log_p = model(x).log_softmax(1).gather(1, LABELS[:, None])
    return -((1 - log_p.exp()) ** 2 * log_p).mean()


LOSSES: dict[str, LossFn] = {
    "cross entropy": lambda model, x: F.cross_entropy(model(x), LABELS),
    "cross entropy, summed": lambda model, x: F.cross_entropy(model(x), LABELS, reduction="sum"),
    "label smoothing": lambda model, x: F.cross_entropy(model(x), LABELS, label_smoothing=0.1),
    "class weights": lambda model, x: F.cross_entropy(model(x), LABELS, weight=SOFT[0], ignore_index=2),
    "soft targets": lambda model, x: F.cross_entropy(model(x), SOFT),
    "nll": lambda model, x: F.nll_loss(model(x).log_softmax(1), LABELS),
    "mse": lambda model, x: F.mse_loss(model(x), SOFT),
    "mse by position": lambda model, x: F.mse_loss(model(x), SOFT, None, None, "sum"),
    "mse by keywords": lambda model, x: F.mse_loss(input=model(x), target=SOFT, reduction="none").mean(),
    "mse, summed by an old argument": lambda model, x: F.mse_loss(model(x), SOFT, size_average=False),
    "mse module": lambda model, x: nn.MSELoss()(model(x), SOFT),
    "weighted mse": lambda model, x: F.mse_loss(model(x), SOFT, weight=SOFT + 1),
    "l1": lambda model, x: F.l1_loss(model(x), SOFT),
    "smooth l1": lambda model, x: F.smooth_l1_loss(model(x), SOFT),
    "huber": lambda model, x: F.huber_loss(model(x), SOFT, delta=0.3),
    "bce with logits": lambda model, x: F.binary_cross_entropy_with_logits(model(x), SOFT),
    "bce, positive weight": lambda model, x: F.binary_cross_entropy_with_logits(model(x), SOFT, pos_weight=SOFT[0]),
    "bce": lambda model, x: F.binary_cross_entropy(model(x).sigmoid(), SOFT),
    "kl": _distilled,
    "kl of logarithms": lambda model, x: F.kl_div(model(x).log_softmax(1), SOFT.log(), log_target=True),
    "poisson": lambda model, x: F.poisson_nll_loss(model(x), SOFT),
    "gaussian": lambda model, x: F.gaussian_nll_loss(model(x), SOFT, model(x).exp()),
    "cosine": lambda model, x: F.cosine_embedding_loss(model(x), SOFT, SIGNS),
    "soft margin": lambda model, x: F.soft_margin_loss(model(x)[:, 0], SIGNS),
    "margin ranking": lambda model, x: F.margin_ranking_loss(model(x)[:, 0], model(x)[:, 1], SIGNS, margin=0.5),
    "triplet": lambda model, x: F.triplet_margin_loss(model(x), model(x.flip(-1)), SOFT, margin=5.0),
    "log of a sum": lambda model, x: model(x).logsumexp(1).mean(),
    "largest": lambda model, x: model(x).max(1).values.square().mean() + model(x).topk(2).values.sum(),
    "norm": lambda model, x: model(x).norm() + model(x).std() + model(x).prod(1).mean(),
    "focal": _focal,
    "with an L2 term": _penalised,
    "two calls": _consistent,
    "pseudo labels under no_grad": _pseudo_labels,
    "of shape [1]": lambda model, x: F.cross_entropy(model(x), LABELS).reshape(1),
}  # fmt: skip


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name, training):
    compare(build(classifier).train(training), images(), LOSSES[name])
    compare(build(classifier).train(training), images(), LOSSES[name], fused=False)


def test_two_calls_update_the_statistics_of_neither():
    model = build(classifier).train()
    before = copy.deepcopy(model.state_dict())
    compare(model, images(), _consistent)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# --- units that are gone ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("name", ["residual", "concat", "grouped", "depthwise", "transposed", "flatten", "fpn", "vit"])
def test_removed_units_leave_the_masks(name, fused):
    case = CASES[name]
    model, graph, batch = case.model(), case.graph(), case.inputs()
    kept = graph.kept(random_keep(graph, seed=1))
    assert 0 < int((~kept).sum()) < graph.num_units
    products, _ = compare(model, batch, graph=graph, kept=kept, fused=fused)
    assert not products.sensitivity(batch, direction(products.space.size))[:, ~kept[:-1]].any()


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    "name", ["residual", "concat", "grouped", "depthwise", "flatten", "shared-module", "attention", "layer-norm", "vit"]
)
def test_masked_network_gives_what_the_smaller_one_gives(name, training):
    """S along W of the units that are left, and the sum of W·v, as after physical removal."""
    case = CASES["channels-first-norm" if name == "layer-norm" else name]
    graph, batch = case.graph(), case.inputs()
    keep = random_keep(graph, seed=2, share=0.3)
    small = case.model().train(training)
    ifso.compact_(small, graph, keep)
    small_products = Products(small, ifso.trace(small, batch), squares)
    w = small_products.space.current()
    wanted = small_products.sensitivity(batch, w).sum(0)
    model = case.model().train(training)
    kept = graph.kept(keep)
    with ifso.masked(model, graph, keep):
        products = Products(model, graph, squares, kept=kept)
        found = products.sensitivity(batch, products.space.current()).sum(0)
        assert error(found[kept[:-1]], wanted) < TOLERANCE
        both = products.mixed(batch) @ products.space.current()
        assert error(both, small_products.mixed(batch) @ w) < TOLERANCE


# --- precision and side effects ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    "name", ["residual", "grouped", "transposed", "mlp-batch-norm", "attention", "multihead", "vit"]
)
def test_autocast(name, training):
    case = CASES[name]
    model, batch, graph = case.model().float().train(training), case.inputs().float(), case.graph()

    def rough_squares(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(batch)
        return squares(lambda _: outputs.float(), batch).float()

    rough, exact = Products(model, graph, rough_squares), Products(model, graph, squares)
    u = exact.space.current()
    for found, wanted in [
        (rough.gradient(batch)[1], exact.gradient(batch)[1]),
        (rough.mixed(batch), exact.mixed(batch)),
        (rough.hessian(batch, u), exact.hessian(batch, u)),
        (rough.sensitivity(batch, u).sum(0), exact.sensitivity(batch, u).sum(0)),
    ]:
        assert found.dtype == torch.float32
        correlation = float(torch.corrcoef(torch.stack([found, wanted]))[0, 1])
        assert 0.98 < correlation < 1


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_float32_is_close_to_float64(fused):
    model, batch = build(classifier).train(), (images(), LABELS)
    graph = ifso.trace(model, batch[0])
    exact = Products(model, graph, cross_entropy)
    u = direction(exact.space.size)
    wanted = (exact.mixed(batch), exact.hessian(batch, u), exact.sensitivity(batch, u))
    single = Products(copy.deepcopy(model).float(), graph, cross_entropy, fused=fused)
    batch = (batch[0].float(), LABELS)
    found = (single.mixed(batch), single.hessian(batch, u.float()), single.sensitivity(batch, u.float()))
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == torch.float32
        assert error(a, b) < 1e-4


class Counting(nn.Module):
    """Counts its calls in a buffer and in a moving average that takes part in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.average.lerp_(x.detach().abs().mean(), 0.1)
        return x / self.average


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_nothing_is_left_behind(fused):
    middle = (nn.BatchNorm2d(4), nn.ReLU(inplace=True), Counting(), nn.Dropout(0.5))
    model = build(lambda: nn.Sequential(nn.Conv2d(2, 4, 3), *middle, nn.Conv2d(4, 3, 1))).train()
    model[5].weight.grad = torch.ones_like(model[5].weight)
    model[1].eval()
    x = images()
    graph = ifso.trace(model, x)
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    flags = [(module.training, getattr(module, "track_running_stats", None)) for module in model.modules()]
    products = Products(model, graph, squares, fused=fused)
    u = direction(products.space.size)
    first = (products.gradient(x)[1], products.mixed(x), products.hessian(x, u), products.sensitivity(x, u))
    again = (products.gradient(x)[1], products.mixed(x), products.hessian(x, u), products.sensitivity(x, u))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert flags == [(module.training, getattr(module, "track_running_stats", None)) for module in model.modules()]
    assert [name for name, parameter in model.named_parameters() if parameter.grad is not None] == ["5.weight"]
    assert torch.equal(model[5].weight.grad, torch.ones_like(model[5].weight))
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in model.parameters())
    assert all(not tensor.requires_grad for tensor in first)


def test_a_failing_loss_leaves_nothing_behind():
    def fails(model: nn.Module, x: Tensor) -> Tensor:
        model(x)
        raise KeyError("label")

    model = build(lambda: between(nn.Sequential(nn.BatchNorm2d(4), Counting()))).train()
    products = Products(model, ifso.trace(model, images()), fails)
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    for product in (products.gradient, products.mixed, lambda x: products.hessian(x, direction(products.space.size))):
        with pytest.raises(KeyError, match="label"):
            product(images())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert model[1][0].track_running_stats
    compare(model, images())


def test_works_under_no_grad():
    model, batch = build(classifier).train(), (images(), LABELS)
    products = Products(model, ifso.trace(model, batch[0]), cross_entropy)
    wanted = products.mixed(batch)
    with torch.no_grad():
        assert torch.equal(products.mixed(batch), wanted)


# --- bad input --------------------------------------------------------------------------------------------------------

BAD_LOSSES: dict[str, tuple[LossFn, str]] = {
    "not a scalar": (lambda model, x: model(x).mean(0), "shape"),
    "integer": (lambda model, x: model(x).sum().long(), "floating-point"),
    "detached": (lambda model, x: model(x).sum().detach(), "no gradient"),
    "none": (lambda model, x: None, "NoneType"),
    "number": (lambda model, x: float(model(x).sum()), "float"),
    "tuple": (lambda model, x: (model(x).sum(), 1), "tuple"),
    "not of the model": (lambda model, x: x.sum(), "no gradient"),
}


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("name", BAD_LOSSES)
def test_bad_losses(name, fused):
    loss_fn, words = BAD_LOSSES[name]
    model, x = build(classifier), images()
    products = Products(model, ifso.trace(model, x), loss_fn, fused=fused)
    u = direction(products.space.size)
    calls = (products.gradient, products.mixed, lambda x: products.hessian(x, u), lambda x: products.sensitivity(x, u))
    for call in calls:
        with pytest.raises(ScoreError, match=words) as caught:
            call(x)
        assert "\n" not in str(caught.value)


def test_unknown_weights():
    model = build(classifier)
    with pytest.raises(ScoreError, match="'biases' is unknown; choose one of layers, all"):
        Products(model, ifso.trace(model, images()), squares, weights="biases")


def test_nothing_to_train():
    model = build(classifier).requires_grad_(False)
    with pytest.raises(ScoreError, match="no trainable conv or linear layer"):
        Products(model, ifso.trace(model, images()), squares)


# --- precision on a GPU -----------------------------------------------------------------------------------------------


class OnGpu:
    """Stands for a float32 tensor on a GPU."""

    is_cuda = True
    dtype = torch.float32


def test_a_careful_layer_is_not_rounded_and_the_setting_is_put_back():
    conv = torch.backends.cudnn.conv
    before = conv.fp32_precision
    try:
        conv.fp32_precision = "tf32"
        with CachedCall("layer", careful=True).precision(OnGpu()):
            assert conv.fp32_precision == "ieee"
        assert conv.fp32_precision == "tf32"
        with CachedCall("layer", careful=False).precision(OnGpu()):
            assert conv.fp32_precision == "tf32"
    finally:
        conv.fp32_precision = before


def test_narrow_layers_are_careful_unless_told_otherwise():
    narrow, wide = torch.zeros(64, 64, 3, 3), torch.zeros(64, 65, 1, 1)
    assert [is_careful(None, weight) for weight in (narrow, wide)] == [True, False]
    assert [is_careful(choice, wide) for choice in (True, False)] == [True, False]


def test_the_gpu_kernels_that_are_called_exist() -> None:
    """No machine without a GPU runs them."""
    room = Path(dual_layers.__file__).parent
    body = ast.parse((room / "kernels.py").read_text("utf-8")).body
    made = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    called = {
        name for file in room.glob("*.py") for name in re.findall(r"load_kernels\(\)\.(\w+)", file.read_text("utf-8"))
    }
    assert called
    assert called <= made
