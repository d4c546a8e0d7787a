"""Operators that forward mode lacks, spelt out: against PyTorch's own, and by passes over networks in test_products."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from test_products import build, direction, error, images, squares
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import ifso
from ifso.curvature.decompositions import grid_sample
from ifso.curvature.products import Products

INTERPOLATIONS, PADDINGS = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")


@pytest.mark.parametrize("align_corners", [True, False])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize(
    ("dims", "interpolation"), [*product((2,), INTERPOLATIONS), *product((3,), INTERPOLATIONS[:2])]
)
def test_sampling_at_a_grid_is_pytorchs(dims, interpolation, padding, align_corners):
    random = torch.Generator().manual_seed(0)
    image = torch.randn(2, 3, *(5, 4, 3)[:dims], generator=random, dtype=torch.float64).requires_grad_()
    grid = 1.5 * torch.randn(2, *(4, 5, 2)[:dims], dims, generator=random, dtype=torch.float64)
    grid[0, 0, 0] = 1e6 if padding != "reflection" else 3.3
    grid.requires_grad_()
    wanted = F.grid_sample(image, grid, interpolation, padding, align_corners)
    numbers = INTERPOLATIONS.index(interpolation), PADDINGS.index(padding)
    found = grid_sample(image, grid, *numbers, align_corners)
    assert error(found.detach(), wanted.detach()) < 1e-13
    back = torch.randn(wanted.shape, generator=random, dtype=torch.float64)
    grads = torch.autograd.grad(found, (image, grid), back, allow_unused=True)
    for one, other in zip(grads, torch.autograd.grad(wanted, (image, grid), back), strict=True):
        assert error(torch.zeros_like(other) if one is None else one, other) < 1e-12


class Attending(nn.Module):
    """Attention by a kernel of the model's choice."""

    def __init__(self, kernel: SDPBackend) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Linear(5, 8), nn.Linear(8, 24), nn.Linear(8, 3)
        self.kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(self.embed(x).tanh()).chunk(3, -1))
        with sdpa_kernel(self.kernel):
            y = F.scaled_dot_product_attention(q, k, v)
        return self.head(y.transpose(1, 2).flatten(2))


class Remembering(nn.Module):
    """A recurrent layer behind one that can be pruned."""

    def __init__(self, kind: type[nn.RNNBase], **options: int) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 6), nn.Linear(6, 4), nn.Linear(6, 3)
        self.memory = kind(4, 3, bidirectional=True, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.memory(self.second(self.first(x).tanh()))[0])


def products_of(model: nn.Module, x: Tensor, graph: ifso.ChannelGraph | None = None) -> tuple[Tensor, Tensor, Tensor]:
    products = Products(model, graph or ifso.trace(model, x), squares)
    u = direction(products.space.size).to(x.dtype)
    found = products.mixed(x), products.hessian(x, u), products.sensitivity(x, u)
    assert products.note == ""
    return found


class Activated(nn.Module):
    """Two layers and a residual sum, each followed by an activation."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.norm, self.two, self.head = (
            nn.Conv2d(3, 6, 3),
            nn.BatchNorm2d(6),
            nn.Conv2d(6, 6, 1),
            nn.Linear(6, 2),
        )
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.one(x)))
        y = self.two(x)
        y += x
        return self.head(self.act(y).mean((2, 3)))


def written_over(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The function on a new tensor that it writes over; what it returns is thrown away."""

    def act(x: Tensor) -> Tensor:
        y = x * 1
        function(y)
        return y

    return act


ACTIVATIONS = {
    "relu": F.relu, "relu6": F.relu6, "silu": F.silu, "gelu": F.gelu, "hardtanh": lambda x: F.hardtanh(x, -0.3, 0.4),
    "relu, in place": nn.ReLU(inplace=True), "relu_": Tensor.relu_, "relu6, in place": nn.ReLU6(inplace=True),
    "hardtanh, in place": nn.Hardtanh(-0.3, 0.4, inplace=True), "silu, in place": nn.SiLU(inplace=True),
    "relu, thrown away": written_over(torch.relu_), "silu, thrown away": written_over(nn.SiLU(inplace=True)),
    "relu of a view": lambda x: F.relu(x[:, :], inplace=True),
    "silu of a view": lambda x: F.silu(x[:, :], inplace=True),
    "sum with itself": lambda x: x.add_(x), "sum with more": lambda x: (x * 1).add_(x.tanh(), alpha=3),
    "sum with means": lambda x: (x * 2).add_(x.mean((2, 3), keepdim=True)),
    "sum with a number": lambda x: (x * x).add_(2), "sum, thrown away": written_over(lambda x: x.add_(x * 2)),
    "sum, used later": lambda x: (x * 1).add_(x.tanh()) * x,
    "relu6, written into": lambda x: F.relu6(x).mul_(2), "silu, written into": lambda x: F.silu(x).mul_(2),
    "softmax": lambda x: F.softmax(x, 1), "softmax, last": lambda x: x.softmax(-1) * x,
    "softmax, twice": lambda x: torch.softmax(torch.softmax(x, 2), 1), "softmax, cast": lambda x: x.softmax(1, x.dtype),
    "relu of a part": written_over(lambda x: F.relu(x[:, :3], inplace=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_and_those_that_write_over_their_input(name):
    """By formulas of ours, and by PyTorch's forward mode over its backward pass."""
    model, x = build(lambda: Activated(ACTIVATIONS[name])).train(), images(3, 3, 6, 6)
    graph = ifso.trace(model, x)
    found = products_of(model, x, graph)
    plain = Products(model, graph, squares, fused=False)
    u = direction(plain.space.size).to(x.dtype)
    assert max(map(error, found, (plain.mixed(x), plain.hessian(x, u), plain.sensitivity(x, u)))) < 1e-12
    loss = squares(model, x)
    assert torch.equal(loss, squares(model, x))  # nothing was left behind


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_by_a_fused_kernel(dtype):
    plain, fused = (build(lambda kind=kind: Attending(kind)) for kind in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION))
    wanted = products_of(plain, images(3, 6, 5))
    found = products_of(fused.to(dtype), images(3, 6, 5).to(dtype))
    assert max(map(error, found, wanted)) < (1e-12 if dtype == torch.float64 else 1e-4)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_in_one_kernel(kind):
    """In float64 they run step by step anyway, in float32 an LSTM does not."""
    model, x = build(lambda: Remembering(kind, num_layers=2)).train(), images(3, 6, 5)
    graph = ifso.trace(model, x)
    wanted = products_of(model, x, graph)
    found = products_of(copy.deepcopy(model).float(), x.float(), graph)
    assert max(map(error, found, wanted)) < 1e-4
    assert torch.backends.mkldnn.enabled
    assert torch.backends.cudnn.enabled


def test_attention_that_drops_as_on_a_gpu(monkeypatch):
    """The dropout inside of attention is met below all torch functions."""
    monkeypatch.setattr(
        F, "dropout", lambda x, p=0.5, training=True, inplace=False: torch.native_dropout(x, p, True)[0]
    )
    attention = build(lambda: nn.Sequential(nn.Linear(5, 8), nn.TransformerEncoderLayer(8, 2, 6, 0.3), nn.Linear(8, 3)))
    model, x = attention.train(), images(3, 6, 5)
    first, again = products_of(model, x), products_of(model, x)
    assert all(map(torch.equal, first, again))
    assert float(first[0].norm()) > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["mobilenet_v2", "convnext_tiny"])
def test_networks_in_train_mode_on_a_gpu(name, dtype):
    models = pytest.importorskip("torchvision").models
    torch.manual_seed(0)
    model = getattr(models, name)(num_classes=4).to("cuda", dtype).train()
    x = torch.randn(4, 3, 64, 64, device="cuda", dtype=dtype)
    graph = ifso.trace(model, x[:1])

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return F.cross_entropy(model(x), torch.arange(4, device="cuda"))

    products = Products(model, graph, loss_fn)
    assert bool(products.sensitivity(x, products.mixed(x)).isfinite().all())
    assert products.note == "" or (name, dtype) == ("convnext_tiny", torch.float64), products.note
