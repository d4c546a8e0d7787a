"""True loss changes against dense matrices and against retraining to convergence, in float64."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from reference import gauss_newton as dense
from torch import Tensor, nn

import ifso
from ifso.curvature.continuation import ContinuationOptions, MaskedModel
from ifso.curvature.loss_change import true_loss_change
from ifso.curvature.objective import Objective
from ifso.curvature.products import Products
from ifso.curvature.solvers import SOLVERS
from ifso.errors import KeepError, ScoreError
from ifso_repro.error_bounds import error_bounds

CLOSE = 1e-6


def network(name="residual", train=False) -> tuple[nn.Module, ifso.ChannelGraph, list]:
    torch.manual_seed(2)
    net = {"plain": dense.Plain, "residual": dense.Residual}[name](4).double()
    if name == "residual":
        net.norm.running_mean.uniform_(-0.3, 0.3)
        net.norm.running_var.uniform_(0.5, 1.5)
    data = dense.batches((6, 5))
    graph = ifso.trace(copy.deepcopy(net).eval(), data[0][0])
    return net.train(train), graph, data


def removal_of(graph: ifso.ChannelGraph, *units: tuple[int, int]) -> dict[str, Tensor]:
    keep = graph.keep_all()
    for group, unit in units:
        keep[graph.groups[group].name][unit] = False
    return keep


def mean_loss(model, loss_fn, data) -> float:
    with torch.no_grad():
        return float(sum(loss_fn(copy.deepcopy(model), batch) for batch in data)) / len(data)


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(before: dict[str, Tensor], model: nn.Module) -> bool:
    return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def retrained(model, graph, keep, loss_fn, data) -> tuple[nn.Module, float]:
    """The loss change after L-BFGS under the mask until the gradient is tiny."""
    before = mean_loss(model, loss_fn, data)
    model = copy.deepcopy(model)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with ifso.masked(model, graph, keep):
        for _ in range(4):
            optimizer = torch.optim.LBFGS(
                parameters, max_iter=600, history_size=60, tolerance_grad=1e-8, tolerance_change=0,
                line_search_fn="strong_wolfe",
            )  # fmt: skip

            def closure(optimizer=optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = sum(loss_fn(model, batch) for batch in data) / len(data)
                loss.backward()
                return loss

            optimizer.step(closure)
        after = float(closure().detach())
        left = max(float(parameter.grad.abs().max()) for parameter in parameters)
    assert left < 1e-5, f"retraining did not converge: {left}"
    return model, after - before


def settle_(model: nn.Module, loss_fn, data) -> None:
    """Train to the optimum."""
    graph = ifso.trace(copy.deepcopy(model).eval(), data[0][0])
    trained, _ = retrained(model, graph, graph.keep_all(), loss_fn, data)
    model.load_state_dict(trained.state_dict())


@pytest.mark.parametrize("mask", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", ["plain", "residual"])
def test_the_mask_scales_what_reads_the_removed_units(name, mask):
    net, graph, data = network(name)
    before, keep = snapshot(net), removal_of(graph, (0, 1), (1, 0))
    removal = MaskedModel(Products(net, graph, dense.cross_entropy, weights="all"), graph, keep)
    by_hand = copy.deepcopy(net)
    for group in graph.groups:
        for member in group.members:
            if member.role == "consumes":
                weight = by_hand.get_parameter(member.parameter).data
                for unit, places in enumerate(member.index):
                    if not keep[group.name][unit]:
                        weight.index_copy_(
                            member.dim,
                            torch.tensor(places),
                            mask * weight.index_select(member.dim, torch.tensor(places)),
                        )
    with removal.at(mask):
        found = net(data[0][0])
    torch.testing.assert_close(found, by_hand(data[0][0]), rtol=1e-12, atol=1e-12)
    if mask == 0:
        with ifso.masked(by_hand, graph, keep):
            assert torch.equal(found, by_hand(data[0][0]))
    assert same(before, net)


def test_direction_is_the_derivative_of_the_weights_by_the_mask():
    net, graph, data = network()
    products = Products(net, graph, dense.regularised, weights="all")
    removal, objective = MaskedModel(products, graph, removal_of(graph, (0, 1), (1, 0))), Objective(products, data)

    def gradient(mask: float) -> Tensor:
        with removal.at(mask):
            return objective.gradient()[1] * removal.support

    with removal.at(0.5):
        found = objective.hessian(removal.direction()) * removal.support
    slope = (gradient(0.5 + 1e-5) - gradient(0.5 - 1e-5)) / 2e-5
    assert float((found - slope).norm() / slope.norm()) < 1e-8


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
@pytest.mark.parametrize(("name", "train"), [("plain", False), ("residual", False), ("residual", True)])
def test_one_step_is_proposition_1(name, train, curvature):
    net, graph, data = network(name, train)
    keep = removal_of(graph, (0, 1))
    gone = copy.deepcopy(net)
    tensors = dict(gone.named_parameters())
    products = Products(net, graph, dense.regularised, weights="all")
    alive = MaskedModel(products, graph, keep).support.bool()
    with ifso.masked(gone, graph, keep):
        matrix = (
            dense.hessian(gone, tensors, dense.regularised, data)
            if curvature == "hessian"
            else dense.gauss_newton(gone, tensors, data, dense.L2)
        )[alive][:, alive]
        gradient = dense.gradient(gone, tensors, dense.regularised, data)[alive]
        existing = mean_loss(gone, dense.regularised, data) - mean_loss(net, dense.regularised, data)
    damping = 0.01 + max(0.0, -float(torch.linalg.eigvalsh(matrix)[0]))
    step = torch.linalg.solve(matrix + damping * dense.eye(len(matrix)), gradient)
    change = true_loss_change(
        net, graph, keep, dense.regularised, data, path_steps=1, curvature=curvature, damping=damping
    )
    assert change.existing == pytest.approx(existing, rel=1e-10)
    assert change.true == pytest.approx(existing - 0.5 * float(gradient @ step), rel=CLOSE)
    update = products.space.flat(change.weight_update)
    assert float((update[alive] + step).norm() / step.norm()) < CLOSE
    assert bool((update[~alive] == 0).all())


def test_an_indefinite_hessian_is_damped_and_that_is_said():
    net, graph, data = network("plain")
    keep = removal_of(graph, (0, 1))
    change = true_loss_change(
        net, graph, keep, dense.cross_entropy, data, "cg", path_steps=1, curvature="hessian", damping=1e-4
    )
    damping = float(change.notes[0].removeprefix("hessian matrix damped by "))
    assert damping > 1e-4
    with ifso.masked(net, graph, keep):
        matrix = dense.hessian(net, dict(net.named_parameters()), dense.cross_entropy, data)
    assert -damping < float(torch.linalg.eigvalsh(matrix)[0]) < -1e-4


class Features(nn.Module):
    """Hidden features by a fixed layer, read by the only layer that learns: softmax regression."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.fixed(x)))


@pytest.fixture(scope="module")
def regression() -> tuple[nn.Module, ifso.ChannelGraph, list, object]:
    """Softmax regression at its optimum."""
    torch.manual_seed(5)
    net = Features().double()
    x = torch.randn(240, 8).double()
    y = (x @ torch.randn(8, 3).double() + torch.randn(240, 3).double()).argmax(1)
    data = [(x[:120], y[:120]), (x[120:], y[120:])]

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1]) + 1e-3 * sum(
            p.square().sum() for p in model.head.parameters()
        )

    settle_(net, loss_fn, data)
    return net, ifso.trace(net, x[:2]), data, loss_fn


def test_softmax_regression_within_five_per_cent_of_retraining(regression):
    net, graph, data, loss_fn = regression
    for unit in range(8):
        keep = removal_of(graph, (0, unit))
        _, truth = retrained(net, graph, keep, loss_fn, data)
        for solver in ("auto", "cg"):
            change = true_loss_change(net, graph, keep, loss_fn, data, solver, path_steps=4)
            assert change.true == pytest.approx(truth, rel=0.05)
        assert set(change.weight_update) == {"head.weight", "head.bias"}


@pytest.fixture(scope="module")
def cnn() -> tuple[nn.Module, ifso.ChannelGraph, list, object]:
    """A small convolutional network at an optimum."""
    torch.manual_seed(3)
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.GELU(), nn.Conv2d(3, 3, 3, stride=2), nn.GELU(),
        nn.Flatten(), nn.Linear(12, 3),
    ).double()  # fmt: skip
    random = torch.Generator().manual_seed(1)
    labels = torch.arange(60) % 3
    images = torch.randn(3, 1, 6, 6, generator=random)[labels] + 1.5 * torch.randn(60, 1, 6, 6, generator=random)
    data = [(images[start::2].double(), labels[start::2]) for start in (0, 1)]

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1]) + 1e-3 * sum(p.square().sum() for p in model.parameters())

    settle_(net, loss_fn, data)
    return net, ifso.trace(net, data[0][0]), data, loss_fn


def test_the_path_finds_what_retraining_finds_where_one_quadratic_does_not(cnn):
    net, graph, data, loss_fn = cnn
    masks = [removal_of(graph, *units) for units in ([(0, 1)], [(0, 2)], [(1, 1)], [(1, 2)], [(0, 1), (0, 2)])]
    truth = torch.tensor([retrained(net, graph, keep, loss_fn, data)[1] for keep in masks])
    with_path = [true_loss_change(net, graph, keep, loss_fn, data) for keep in masks]
    literal = [true_loss_change(net, graph, keep, loss_fn, data, path_steps=1) for keep in masks]

    def error(found: list[float]) -> float:
        return float((torch.tensor(found) - truth).abs().mean() / truth.abs().mean())

    assert error([change.true for change in with_path]) < 0.3
    assert error([change.existing for change in with_path]) > 10
    assert error([change.true for change in literal]) > 10
    assert max(change.gradients_spent for change in with_path) < 80
    assert min(change.trust for change in with_path) > max(change.trust for change in literal)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("train", [False, True])
def test_the_model_is_left_as_it_was(steps, train):
    net, graph, data = network(train=train)
    before, random = snapshot(net), torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        true_loss_change(net, graph, removal_of(graph, (0, 1), (1, 1)), dense.regularised, data, path_steps=steps)
    assert same(before, net)
    assert torch.equal(random, torch.get_rng_state())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in net.parameters())
    assert not any(parameter._backward_hooks for parameter in net.parameters())
    assert all(module.training == train for module in net.modules())


def test_the_model_is_left_as_it_was_even_after_an_error():
    net, graph, data = network()
    before, calls = snapshot(net), []

    def failing(model, batch):
        calls.append(1)
        return dense.cross_entropy(model, batch) * (float("nan") if len(calls) > 12 else 1)

    with pytest.raises(ScoreError, match="nan"):
        true_loss_change(net, graph, removal_of(graph, (0, 1)), failing, data, path_steps=3)
    assert same(before, net)


@pytest.mark.parametrize("steps", [1, 3])
def test_apply_leaves_the_update_in_the_surviving_weights(steps):
    net, graph, data = network()
    keep, before = removal_of(graph, (0, 1), (1, 0)), snapshot(net)
    start = mean_loss(net, dense.regularised, data)
    change = true_loss_change(net, graph, keep, dense.regularised, data, path_steps=steps, damping=0.1, apply=True)
    with ifso.masked(net, graph, keep):
        assert mean_loss(net, dense.regularised, data) - start == pytest.approx(change.reached, abs=1e-12)
    for name, update in change.weight_update.items():
        torch.testing.assert_close(net.state_dict()[name], before[name] + update, rtol=1e-12, atol=1e-12)
    small = copy.deepcopy(net)
    ifso.compact_(small, graph, keep)
    assert float(dense.cross_entropy(small, data[0])) > 0


@pytest.mark.parametrize("solver", sorted(SOLVERS))
def test_every_solver_walks_the_path(solver, cnn):
    net, graph, data, loss_fn = cnn
    keep, effort = removal_of(graph, (0, 1)), ContinuationOptions(lbfgs_steps=3)
    change = true_loss_change(net, graph, keep, loss_fn, data, solver, path_steps=2, effort=effort)
    assert change.reached < change.existing
    assert [point.mask for point in change.path][-1] == 0
    assert 0 <= change.trust <= 1


def test_nothing_removed_is_no_change(cnn):
    net, graph, data, loss_fn = cnn
    change = true_loss_change(net, graph, graph.keep_all(), loss_fn, data)
    assert change.existing == 0
    assert abs(change.true) < 1e-6


def test_batch_norm_in_train_mode_falls_back_to_cg_and_says_so():
    net, graph, data = network(train=True)
    change = true_loss_change(net, graph, removal_of(graph, (0, 1)), dense.regularised, data, path_steps=2)
    assert change.notes == ("solver 'cg', since batch norm in train mode mixes the samples",)


def test_rows_that_take_too_much_memory_fall_back_to_cg_and_say_so(monkeypatch):
    model, graph, data = network("plain")
    keep = removal_of(graph, (0, 0))
    assert true_loss_change(model, graph, keep, dense.regularised, data, path_steps=2).notes == ()
    monkeypatch.setattr("ifso.curvature.solvers.jacobian.MEMORY_LIMIT", 1000)
    change = true_loss_change(model, graph, keep, dense.regularised, data, path_steps=2)
    assert any("GiB" in note for note in change.notes)


def test_what_is_printed(cnn):
    net, graph, data, loss_fn = cnn
    text = str(true_loss_change(net, graph, removal_of(graph, (0, 1)), loss_fn, data, path_steps=2))
    for word in ("existing loss change", "true loss change", "trust", "gradients"):
        assert word in text


def test_bad_input():
    net, graph, data = network()
    keep = removal_of(graph, (0, 1))
    empty = {graph.groups[0].name: torch.zeros(graph.groups[0].size, dtype=torch.bool)}
    with pytest.raises(KeepError, match="removes every channel"):
        true_loss_change(net, graph, empty, dense.cross_entropy, data)
    with pytest.raises(ScoreError, match="path_steps"):
        true_loss_change(net, graph, keep, dense.cross_entropy, data, path_steps=0)
    with pytest.raises(ScoreError, match="no batches"):
        true_loss_change(net, graph, keep, dense.cross_entropy, [])
    with pytest.raises(ScoreError, match="solver 'newton' is unknown"):
        true_loss_change(net, graph, keep, dense.cross_entropy, data, "newton")
    with pytest.raises(ScoreError, match="curvature='fisher' is unknown; choose one of gauss-newton, hessian"):
        true_loss_change(net, graph, keep, dense.cross_entropy, data, curvature="fisher")
    with pytest.raises(ScoreError, match="last_corrections"):
        ContinuationOptions(last_corrections=0)


def test_bounds_hold_on_softmax_regression(regression):
    net, graph, data, loss_fn = regression
    for unit in (0, 5):
        keep = removal_of(graph, (0, unit))
        _, truth = retrained(net, graph, keep, loss_fn, data)
        literal = true_loss_change(net, graph, keep, loss_fn, data, path_steps=1, damping=1e-9)
        bounds = error_bounds(net, graph, keep, loss_fn, data, samples=4)
        step = Products(net, graph, loss_fn, weights="all").space.flat(literal.weight_update)
        assert abs(literal.true - truth) <= bounds.corollary_1 * (1 + 1e-6)
        assert abs(literal.true - truth) <= bounds.corollary_2 * (1 + 1e-6)
        assert float(step.norm()) <= bounds.update
        assert bounds.convexity >= 2e-3 * (1 - 1e-6)


def test_bounds_of_a_quadratic_are_zero(regression):
    net, graph, data = copy.deepcopy(regression[0]), *regression[1:3]

    def square(model, batch):
        error = model(batch[0]) - F.one_hot(batch[1], 3)
        return error.square().mean() + 1e-2 * model.head.weight.square().sum()

    settle_(net, square, data)
    keep = removal_of(graph, (0, 3))
    truth = retrained(net, graph, keep, square, data)[1]
    literal = true_loss_change(net, graph, keep, square, data, path_steps=1, curvature="hessian", damping=1e-9)
    assert literal.true == pytest.approx(truth, rel=CLOSE)
    assert error_bounds(net, graph, keep, square, data, samples=2).corollary_1 < 1e-6


def test_bounds_are_for_small_networks():
    net = nn.Sequential(nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 3)).double()
    graph = ifso.trace(net, torch.zeros(2, 60).double())
    with pytest.raises(ScoreError, match="3843 weights are more than 3000"):
        error_bounds(net, graph, graph.keep_all(), dense.cross_entropy, dense.batches())


def test_bounds_say_nothing_without_convexity():
    net, graph, data = network("plain")
    bounds = error_bounds(net, graph, removal_of(graph, (0, 1)), dense.cross_entropy, data, samples=1)
    assert bounds.convexity < 0
    assert bounds.corollary_1 == float("inf")
    assert "inf" in str(bounds)


def test_gauss_newton_of_a_masked_group_norm_is_that_of_the_smaller_network():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 8, 3), nn.GroupNorm(2, 8), nn.Tanh(), nn.Conv2d(8, 3, 1), nn.Flatten()).double()
    x = torch.randn(4, 2, 5, 5).double()
    graph = ifso.trace(net, x)
    keep = {"0": torch.tensor([True, False, True, True, True, True, True, False])}

    def loss_fn(model, batch):
        return model(batch).square().mean()

    def along_itself(model, graph):
        objective = Objective(Products(model, graph, loss_fn), [x])
        weights = objective.space.current()
        return float(weights @ objective.gauss_newton(weights))

    with ifso.masked(net, graph, keep):
        soft = along_itself(net, graph)
    ifso.compact_(net, graph, keep)
    assert soft == pytest.approx(along_itself(net, ifso.trace(net, x)), rel=1e-10)


def test_an_operation_without_forward_mode():
    """The Hessian goes around it, the Gauss-Newton matrix is refused in one line."""

    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return grad

    model, graph, data = network("plain")

    def loss_fn(model, batch):
        return dense.regularised(model, batch) + Odd.apply(model(batch[0])).square().mean()

    def written_out(model, batch):
        return dense.regularised(model, batch) + model(batch[0]).square().mean()

    removed = removal_of(graph, (0, 0))
    with pytest.raises(ScoreError, match=r"has no jvp|jvp function.*; choose curvature='hessian'") as caught:
        true_loss_change(model, graph, removed, loss_fn, data, solver="cg")
    assert "\n" not in str(caught.value)
    options = {"curvature": "hessian", "solver": "cg", "path_steps": 1, "damping": 1.0}
    found, wanted = (true_loss_change(model, graph, removed, loss, data, **options) for loss in (loss_fn, written_out))
    assert found.true == pytest.approx(wanted.true, rel=1e-9)
