"""What forward mode cannot differentiate, by double backward or by differences, against float64 truth."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_products import LABELS, Called, build, compare, direction, error, images, squares
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ifso
from ifso.criteria.scorer import ScoreWarning
from ifso.curvature.products import Products
from ifso.errors import ScoreError


class Sine(torch.autograd.Function):
    """Has a backward pass that can be differentiated, but no derivative for forward mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].cos()


class OnceSine(Sine):
    """Says that its backward pass cannot be differentiated."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].cos()


class SilentSine(Sine):
    """Its backward pass cannot be differentiated, and does not say so: as a kernel of somebody's own."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return (grad.detach() * ctx.saved_tensors[0].detach().cos()).detach()


class SingleSine(OnceSine):
    """Takes float32 alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise RuntimeError(f"expected scalar type Float but found {x.dtype}")
        return Sine.forward(ctx, x)


def network(function: Any) -> nn.Module:
    return build(lambda: Called(function, a=nn.Linear(5, 4), b=nn.Linear(4, 3)))


def through(sine: type[torch.autograd.Function]) -> nn.Module:
    return network(lambda net, x: net.b(sine.apply(net.a(x))))


def written() -> nn.Module:
    return network(lambda net, x: net.b(net.a(x).sin()))


def products_of(model: nn.Module, x: Tensor) -> tuple[Products, tuple[Tensor, Tensor, Tensor]]:
    products = Products(model, ifso.trace(written().to(x.dtype), x), squares)
    u = direction(products.space.size).to(x.dtype)
    return products, (products.mixed(x), products.hessian(x, u), products.sensitivity(x, u))


@pytest.mark.parametrize(
    ("sine", "way", "tolerance"),
    [
        (Sine, r"scored by double backward, as a custom autograd\.Function has no jvp; .* agree to \de-", 1e-12),
        (OnceSine, r"central differences of gradients in float64, as .* estimated relative error \de-", 1e-8),
        (SilentSine, r"central differences of gradients in float64, as .* estimated relative error \de-", 1e-8),
    ],
)
def test_a_function_without_forward_mode(sine, way, tolerance):
    x = images(3, 5)
    products, found = products_of(through(sine), x)
    _, wanted = products_of(written(), x)
    assert max(map(error, found, wanted)) < tolerance
    with pytest.warns(ScoreWarning, match=way):
        ifso.score(through(sine), ifso.trace(written(), x), squares, [x])
    assert way.split(",")[0].removeprefix("scored by ") in products.note


@pytest.mark.parametrize("sine", [OnceSine, SingleSine])
def test_differences_of_a_network_in_float32(sine):
    """In float64 where that is possible: then they are as good as float32 can be."""
    x = images(3, 5)
    _, wanted = products_of(written(), x)
    products, found = products_of(through(sine).float(), x.float())
    assert all(one.dtype == torch.float32 for one in found)
    assert max(map(error, found, wanted)) < (1e-6 if sine is OnceSine else 1e-3)
    assert f"in float{64 if sine is OnceSine else 32}" in products.note


PLAIN = {
    "checkpointed producer": lambda net, x: net.b(checkpoint(net.a, x, use_reentrant=False).tanh()),
    "checkpointed reader": lambda net, x: checkpoint(net.b, net.a(x).tanh(), use_reentrant=False),
    "reentrant checkpoint": lambda net, x: checkpoint(lambda h: net.b(h.tanh()), net.a(x), use_reentrant=True),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_checkpoints_are_passed_over(name):
    x = images(3, 5)
    plain = network(lambda net, x: net.b(net.a(x).tanh()))
    products, _ = compare(plain, x)
    u = direction(products.space.size)
    same = Products(network(PLAIN[name]), ifso.trace(plain, x), squares)
    for one, other in [
        (same.gradient(x)[1], products.gradient(x)[1]),
        (same.mixed(x), products.mixed(x)),
        (same.hessian(x, u), products.hessian(x, u)),
        (same.sensitivity(x, u), products.sensitivity(x, u)),
    ]:
        assert error(one, other) < 1e-12
    assert same.note == ""


OTHERS = {
    "vmap": (lambda net, x: torch.vmap(lambda row: net.b(net.a(row).tanh()))(x), squares, "forward mode failed"),
    "no second derivative": (
        lambda net, x: net.b(net.a(x).tanh()),
        lambda model, x: F.multi_margin_loss(model(x), LABELS),
        "no forward mode for multi_margin_loss",
    ),
    "distances": (
        lambda net, x: net.b(net.a(x).tanh()),
        lambda model, x: torch.cdist(model(x), model(x) + 1).square().mean(),
        "no forward mode for _cdist_forward",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_ways(name):
    function, loss_fn, words = OTHERS[name]
    products, _ = compare(network(function), images(3, 5), loss_fn)
    assert words in products.note


def test_frozen_weights_and_removed_units():
    x, graph = images(3, 5), ifso.trace(written(), images(3, 5))
    kept = graph.kept({"a": torch.tensor([True, False, True, True])})
    for frozen in ("a", "b"):
        found = []
        for make in (lambda: through(OnceSine), lambda: through(Sine), written):
            model = make()
            getattr(model, frozen).weight.requires_grad_(False)
            products = Products(model, graph, squares, kept=kept)
            u = direction(products.space.size)
            found.append((products.mixed(x), products.sensitivity(x, u)))
            assert getattr(model, frozen).weight.requires_grad is False
        assert max(map(error, found[0], found[2])) < 1e-8
        assert max(map(error, found[1], found[2])) < 1e-12


def test_nothing_is_left_behind():
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return OnceSine.apply(x) * torch.rand_like(x)

    middle = (nn.BatchNorm1d(4), Noisy(), nn.Dropout(0.3))
    model = build(lambda: nn.Sequential(nn.Linear(5, 4), *middle, nn.Linear(4, 3))).float().train()
    x = images(6, 5).float()
    plain = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, 3))
    graph = ifso.trace(plain, x)
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    places = [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]
    products = Products(model, graph, lambda model, x: squares(model, x.to(model[0].weight.dtype)))
    first, again = products.mixed(x), products.mixed(x)
    assert "central differences" in products.note
    assert torch.equal(first, again)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())] == places
    assert torch.equal(torch.get_rng_state(), random)


def test_a_loss_without_gradient_is_refused_with_its_own_words():
    def fails(model: nn.Module, x: Tensor) -> Tensor:
        raise KeyError("label")

    graph = ifso.trace(written(), images(3, 5))
    products = Products(written(), graph, fails)
    with pytest.raises(KeyError, match="label"):
        products.mixed(images(3, 5))
    assert products.note == ""
    with pytest.raises(ScoreError, match="loss_fn failed on batch 1: KeyError: 'label'") as caught:
        ifso.score(written(), graph, fails, [images(3, 5)])
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_ordinary_score_takes_two_passes():
    calls = 0

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return squares(model, x)

    model, x = written(), images(3, 5)
    ifso.score(model, ifso.trace(model, x), loss_fn, [x, x])
    assert calls == 4


@pytest.mark.parametrize("criterion", ["taylor", "group-fisher", "true-loss"])
@pytest.mark.parametrize("name", PLAIN)
def test_checkpoints_under_criteria_of_first_order(name, criterion):
    x, plain = images(3, 5), network(lambda net, x: net.b(net.a(x).tanh()))
    graph = ifso.trace(plain, x)
    found, wanted = (ifso.score(one, graph, squares, [x], criterion) for one in (network(PLAIN[name]), plain))
    assert error(found["a"], wanted["a"]) < 1e-12


class Interrupted(TorchDispatchMode):
    """Ctrl-C comes when an operation is about to run."""

    def __init__(self, operation: Any) -> None:
        super().__init__()
        self.operation = operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self.operation:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


def test_ctrl_c_within_torchscript_is_no_reason_to_fall_back() -> None:
    """PyTorch spells some forward derivatives out in TorchScript, which makes a RuntimeError of every exception."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 3)).double()

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch), torch.tensor([0, 2]))

    batch = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    products = Products(model, ifso.trace(model, batch), loss_fn)
    with pytest.raises(KeyboardInterrupt) as caught, Interrupted(torch.ops.aten.scatter.value):
        products.mixed(batch)
    assert "TorchScript" in str(caught.value.__cause__)
