"""Solvers and the objective they ask, against whole float64 matrices."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass

import pytest
import torch
from reference import gauss_newton as dense
from torch import Tensor, nn

import ifso
from ifso.curvature.objective import Objective, System
from ifso.curvature.products import Products
from ifso.curvature.solvers import SOLVERS, SolverWarning, create_solver
from ifso.curvature.solvers.iterative import largest_eigenvalue
from ifso.errors import ScoreError

CLOSE = 1e-6


@dataclass
class Problem:
    """A network with its objective."""

    model: nn.Module
    objective: Objective
    loss_fn: object
    data: list

    @property
    def tensors(self) -> dict[str, Tensor]:
        return dict(self.objective.space.tensors)

    def hessian(self) -> Tensor:
        return dense.hessian(self.model, self.tensors, self.loss_fn, self.data)

    def vector(self) -> Tensor:
        return torch.randn(self.objective.size, generator=torch.Generator().manual_seed(3)).double()


def problem(name="plain", weights="all", loss_fn=dense.regularised, train=False, **options) -> Problem:
    torch.manual_seed(1)
    net = {"plain": dense.Plain, "residual": dense.Residual}[name]().double()
    net.train(train)
    if name == "residual":
        net.norm.running_mean.uniform_(-0.3, 0.3)
        net.norm.running_var.uniform_(0.5, 1.5)
    data = dense.batches()
    graph = ifso.trace(copy.deepcopy(net).eval(), data[0][0])
    objective = Objective(Products(net, graph, loss_fn, weights=weights), data, **options)
    return Problem(net, objective, loss_fn, data)


def error(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).norm() / truth.norm())


CASES = [("plain", "all", False), ("residual", "all", False), ("residual", "layers", False), ("residual", "all", True)]


@pytest.mark.parametrize(("name", "weights", "train"), CASES)
def test_objective_is_the_dense_one(name, weights, train):
    p = problem(name, weights, train=train)
    loss, gradient = p.objective.gradient()
    truth = dense.mean_loss(p.model, p.tensors, p.loss_fn, p.data)(dense.flat(p.tensors)).detach()
    assert loss == pytest.approx(float(truth), rel=1e-12)
    assert p.objective.loss() == pytest.approx(float(truth), rel=1e-12)
    assert error(gradient, dense.gradient(p.model, p.tensors, p.loss_fn, p.data)) < 1e-12
    assert error(p.objective.hessian(p.vector()), p.hessian() @ p.vector()) < 1e-12
    matrix = dense.gauss_newton(p.model, p.tensors, p.data, dense.L2)
    assert error(p.objective.gauss_newton(p.vector()), matrix @ p.vector()) < 1e-12


def test_gauss_newton_counts_direct_weights_and_output_together():
    def scaled(model, batch):
        return dense.cross_entropy(model, batch) * (1 + model.head.weight.square().sum())

    p = problem("plain", loss_fn=scaled)
    forward = dense.of_weights(p.model, p.tensors, lambda net, x: net(x))
    flat = dense.flat(p.tensors)
    names = list(p.tensors)
    first = sum(p.tensors[name].numel() for name in names[: names.index("head.weight")])
    total = torch.zeros(flat.numel(), flat.numel(), dtype=torch.float64)
    for x, y in p.data:
        output = forward(flat, x)

        def loss(joint, y=y, output=output):
            logits, w = joint[: output.numel()].view_as(output), joint[output.numel() :]
            head = w[first : first + p.tensors["head.weight"].numel()]
            return nn.functional.cross_entropy(logits, y) * (1 + head.square().sum())

        inner = torch.autograd.functional.hessian(loss, torch.cat([output.flatten(), flat]))
        jacobian = torch.autograd.functional.jacobian(lambda w, x=x: forward(w, x).flatten(), flat)
        both = torch.cat([jacobian, dense.eye(flat.numel())])
        total += both.t() @ inner @ both / len(p.data)
    assert error(p.objective.gauss_newton(p.vector()), total @ p.vector()) < 1e-12


def test_spent_is_counted_in_gradients():
    p = problem()
    for ask, cost in (
        (p.objective.loss, 1 / 3),
        (p.objective.gradient, 1),
        (lambda: p.objective.hessian(p.vector()), 2),
        (lambda: p.objective.gauss_newton(p.vector()), 2),
        (lambda: list(p.objective.sample_gradients()), 1),
    ):
        before = p.objective.spent
        ask()
        assert p.objective.spent - before == pytest.approx(cost)
    half = problem(curvature_batches=1)
    found = half.objective.gauss_newton(half.vector())
    assert half.objective.spent == pytest.approx(1)
    matrix = dense.gauss_newton(half.model, half.tensors, half.data[:1], dense.L2)
    assert error(found, matrix @ half.vector()) < 1e-12


def test_identity():
    p = problem()
    assert torch.equal(create_solver("identity", scale=5.0).solve(System(p.objective), p.vector()).u, 5 * p.vector())


@pytest.mark.parametrize("terms", [0, 1, 2, 7])
def test_neumann_is_the_polynomial(terms):
    p = problem()
    v, step = p.vector(), 0.2
    matrix = dense.gauss_newton(p.model, p.tensors, p.data, dense.L2) + 0.1 * dense.eye(len(v))
    term, total = v, v
    for _ in range(terms):
        term = term - step * matrix @ term
        total = total + term
    found = create_solver("neumann", terms=terms, step=step, damping=0.1, measure=True).solve(System(p.objective), v)
    assert error(found.u, step * total) < CLOSE
    assert found.residual == pytest.approx(float((v - matrix @ found.u).norm() / v.norm()), rel=1e-9)


def test_neumann_estimates_its_step_and_converges():
    p = problem()
    matrix = dense.gauss_newton(p.model, p.tensors, p.data, dense.L2) + 0.3 * dense.eye(p.objective.size)
    largest = float(torch.linalg.eigvalsh(matrix)[-1])
    system = System(p.objective)
    assert 0.9 * largest <= largest_eigenvalue(system, 0.3, 30) <= largest * (1 + 1e-9)
    found = create_solver("neumann", terms=60, damping=0.3).solve(system, p.vector())
    assert error(found.u, torch.linalg.solve(matrix, p.vector())) < CLOSE


@pytest.mark.parametrize(("curvature", "step"), [("gauss-newton", 100.0), ("hessian", None)])
def test_neumann_says_that_it_diverges(curvature, step):
    p = problem(loss_fn=dense.cross_entropy)
    assert float(torch.linalg.eigvalsh(p.hessian())[0]) < -1e-3
    with pytest.warns(SolverWarning, match=r"diverges: term \d+ is .* times v"):
        solution = create_solver("neumann", terms=3000, step=step).solve(System(p.objective, curvature), p.vector())
    assert "diverges" in solution.note


@pytest.mark.parametrize("memory", [2**30, 4000, 1])
def test_sherman_morrison_inverts_the_empirical_fisher(memory):
    p = problem("residual")
    matrix = dense.fisher(p.model, p.tensors, p.loss_fn, p.data) + 0.01 * dense.eye(p.objective.size)
    solution = create_solver("sherman-morrison", damping=0.01, memory=memory).solve(System(p.objective), p.vector())
    assert error(solution.u, torch.linalg.solve(matrix, p.vector())) < CLOSE
    assert solution.residual < 1e-9


def test_samples_need_company_in_train_mode():
    p = problem("residual", train=True)
    with pytest.raises(ScoreError, match="batch norm in train mode"):
        create_solver("sherman-morrison").solve(System(p.objective), p.vector())
    assert create_solver("sherman-morrison", group_size=3).solve(System(p.objective), p.vector()).iterations == 4


@pytest.mark.parametrize("name", ["plain", "residual"])
def test_cg_on_both_matrices(name):
    p = problem(name)
    for curvature, matrix in (
        ("gauss-newton", dense.gauss_newton(p.model, p.tensors, p.data, dense.L2)),
        ("hessian", p.hessian()),
    ):
        damping = 0.01 + max(0.0, -float(torch.linalg.eigvalsh(matrix)[0]))
        solver = create_solver("cg", damping=damping, tolerance=1e-10, iterations=500)
        solution = solver.solve(System(p.objective, curvature), p.vector())
        truth = torch.linalg.solve(matrix + damping * dense.eye(len(matrix)), p.vector())
        assert error(solution.u, truth) < CLOSE
        assert solution.residual <= 1e-10
        assert solution.note == ""


def test_cg_says_when_it_did_not_converge():
    p = problem()
    solver = create_solver("cg", iterations=2, tolerance=1e-9)
    with pytest.warns(SolverWarning, match=r"relative residual .* after 2 iterations"):
        solution = solver.solve(System(p.objective), p.vector())
    matrix = dense.gauss_newton(p.model, p.tensors, p.data, dense.L2) + 1e-3 * dense.eye(p.objective.size)
    real = float((p.vector() - matrix @ solution.u).norm() / p.vector().norm())
    assert solution.residual == pytest.approx(real, rel=1e-9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        create_solver("cg", iterations=2, truncated=True).solve(System(p.objective), p.vector())


def test_cg_reports_negative_curvature():
    p = problem(loss_fn=dense.cross_entropy)
    lowest, vectors = torch.linalg.eigh(p.hessian())
    assert float(lowest[0]) < -1e-3
    with pytest.warns(SolverWarning, match="negative curvature"):
        solution = create_solver("cg", damping=0.0).solve(System(p.objective, "hessian"), vectors[:, 0].clone())
    assert "negative curvature" in solution.note


def _kfac_layers(p: Problem) -> list[tuple[list[str], Tensor, Tensor]]:
    """(names, a [samples, T, in + 1], g [samples, T, out]) of the plain network, written out layer by layer."""
    net, layers = p.model, {"first": [], "second": [], "head": []}
    for x, y in p.data:
        for n in range(len(x)):
            one = net.first(x[n : n + 1])
            two = net.second(torch.tanh(one))
            flat = torch.tanh(two).flatten(1)
            out = net.head(flat)
            loss = nn.functional.cross_entropy(out, y[n : n + 1])
            g1, g2, g3 = torch.autograd.grad(loss, [one, two, out])
            entering = (
                dense.layer_patches(net.first, x[n : n + 1]),
                dense.layer_patches(net.second, torch.tanh(one).detach()),
                flat.detach()[:, None],
            )
            leaving = (g1.flatten(2).transpose(1, 2), g2.flatten(2).transpose(1, 2), g3[:, None])
            for key, a, g in zip(layers, entering, leaving, strict=True):
                layers[key].append((torch.cat([a, torch.ones(*a.shape[:2], 1).double()], 2), g))
    return [
        ([f"{key}.weight", f"{key}.bias"], torch.cat([a for a, _ in pairs]), torch.cat([g for _, g in pairs]))
        for key, pairs in layers.items()
    ]


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_kfac_is_its_kronecker_formula(corrected, masked):
    p = problem(loss_fn=dense.cross_entropy)
    support = torch.ones(p.objective.size, dtype=torch.float64)
    if masked:
        parts = p.objective.space.split(support)
        parts["first.weight"][1], parts["first.bias"][1], parts["second.weight"][:, 1] = 0, 0, 0
    v, damping = p.vector(), 0.02
    found = create_solver("kfac", damping=damping, corrected=corrected).solve(System(p.objective, support=support), v)
    v_parts, u_parts, keep = (p.objective.space.split(t) for t in (v * support, found.u, support))
    for names, a, g in _kfac_layers(p):
        row = torch.cat([keep[name].flatten(1) if keep[name].dim() > 1 else keep[name][:, None] for name in names], 1)
        alive = row.flatten().bool()
        rows, columns = row.amax(1), row.amax(0)
        a, g = a * columns, g * rows
        big_a = sum(torch.outer(t, t) for sample in a for t in sample) / (len(a) * a.shape[1])
        big_g = sum(torch.outer(t, t) for sample in g for t in sample) / len(g)
        matrix = torch.kron(big_g, big_a)
        if corrected:
            basis = torch.kron(torch.linalg.eigh(big_g)[1], torch.linalg.eigh(big_a)[1])
            gradients = torch.stack([(s.t() @ t).flatten() for s, t in zip(g, a, strict=True)])
            matrix = basis @ torch.diag((gradients @ basis).square().mean(0)) @ basis.t()
        right, left = (torch.cat([q[n].reshape(len(rows), -1) for n in names], 1).flatten() for q in (v_parts, u_parts))
        damped = matrix + damping * dense.eye(len(matrix))
        truth = torch.zeros_like(right)
        truth[alive] = torch.linalg.solve(damped[alive][:, alive], right[alive])
        assert error(left, truth) < CLOSE


def test_kfac_gives_other_weights_a_diagonal():
    p = problem("residual", loss_fn=dense.cross_entropy)
    found = create_solver("kfac", damping=0.1).solve(System(p.objective), p.vector())
    squares = sum(
        len(batch[0]) * dense.gradient(p.model, p.tensors, p.loss_fn, [batch]).square() for batch in p.data
    ) / len(p.data)
    truth = p.objective.space.split(p.vector() / (squares + 0.1))["norm.weight"]
    assert error(p.objective.space.split(found.u)["norm.weight"], truth) < CLOSE


@pytest.mark.parametrize("name", ["plain", "residual"])
def test_jacobian_with_full_rank_is_gauss_newton(name):
    p = problem(name)
    matrix = dense.gauss_newton(p.model, p.tensors, p.data, dense.L2) + 0.01 * dense.eye(p.objective.size)
    solution = create_solver("jacobian", damping=0.01, rank=3).solve(System(p.objective), p.vector())
    assert error(solution.u, torch.linalg.solve(matrix, p.vector())) < CLOSE
    assert solution.residual < 1e-9


def test_jacobian_of_low_rank_takes_the_largest_eigenvectors_of_the_output_curvature():
    p = problem("plain")
    forward = dense.of_weights(p.model, p.tensors, lambda net, x: net(x))
    flat = dense.flat(p.tensors)
    matrix = (2 * dense.L2 + 0.01) * dense.eye(p.objective.size)
    for x, _ in p.data:
        jacobian = torch.autograd.functional.jacobian(lambda w, x=x: forward(w, x), flat)
        for row, q in zip(jacobian, forward(flat, x).softmax(1), strict=True):
            values, vectors = torch.linalg.eigh(torch.diag(q) - torch.outer(q, q))
            top = row.t() @ vectors[:, -1]
            matrix += values[-1] * torch.outer(top, top) / (len(x) * len(p.data))
    solution = create_solver("jacobian", damping=0.01, rank=1).solve(System(p.objective), p.vector())
    assert error(solution.u, torch.linalg.solve(matrix, p.vector())) < CLOSE


def test_jacobian_refuses_what_it_cannot_do():
    p = problem("residual", train=True)
    with pytest.raises(ScoreError, match="batch norm in train mode mixes the samples; use solver='cg'"):
        create_solver("jacobian").solve(System(p.objective), p.vector())
    with pytest.raises(ScoreError, match="Gauss-Newton matrix; use solver='cg' for the Hessian"):
        create_solver("jacobian").solve(System(p.objective, "hessian"), p.vector())


@pytest.mark.parametrize("name", sorted(SOLVERS))
def test_every_solver_keeps_to_the_support(name):
    p = problem("plain")
    support = torch.ones(p.objective.size, dtype=torch.float64)
    parts = p.objective.space.split(support)
    parts["first.weight"][0], parts["first.bias"][0], parts["second.weight"][:, 0] = 0, 0, 0
    solution = create_solver(name).solve(System(p.objective, support=support), p.vector())
    assert bool((solution.u[support == 0] == 0).all())
    assert bool((solution.u[support == 1] != 0).all())
    if name == "cg":
        alive = support.bool()
        matrix = dense.gauss_newton(p.model, p.tensors, p.data, dense.L2)[alive][:, alive]
        truth = torch.linalg.solve(matrix + 1e-3 * dense.eye(len(matrix)), p.vector()[alive])
        assert error(solution.u[alive], truth) < 1e-4


@pytest.mark.parametrize("name", sorted(SOLVERS))
def test_bad_vectors_are_refused(name):
    p = problem()
    v = p.vector()
    v[3] = float("nan")
    with pytest.raises(ScoreError, match="vector v to solve for has 1 entries that are not finite"):
        create_solver(name).solve(System(p.objective), v)
    with pytest.raises(ScoreError, match=r"v has shape \(2,\)"):
        create_solver(name).solve(System(p.objective), v[:2])


def test_products_that_are_not_finite_are_refused():
    p = problem()
    with torch.no_grad():
        p.model.head.weight[0, 0] = float("inf")
    for ask in (p.objective.gradient, p.objective.loss, lambda: p.objective.hessian(p.vector())):
        with pytest.raises(ScoreError, match=r"not finite|loss must be finite"):
            ask()


def test_gauss_newton_needs_a_call_of_the_model():
    p = problem(loss_fn=lambda model, batch: model.head.weight.square().sum())
    with pytest.raises(ScoreError, match=r"never calls model\(\.\.\.\)"):
        p.objective.gauss_newton(p.vector())

    def twice(model, batch):
        return nn.functional.cross_entropy(model(model(batch[0]).sum() + batch[0]), batch[1])

    with pytest.raises(ScoreError, match="depends on its own weights"):
        problem(loss_fn=twice).objective.gauss_newton(p.vector())


def test_registry_names_its_solvers_and_options():
    with pytest.raises(ScoreError, match=r"'newton' is unknown; choose one of identity, neumann, sherman-morrison, cg"):
        create_solver("newton")
    with pytest.raises(ScoreError, match="'cg' has no option 'steps'; its options are damping, tolerance, iterations"):
        create_solver("cg", steps=3)
    with pytest.raises(ScoreError, match="damping must be"):
        create_solver("cg", damping=-1)
    made = create_solver("cg", damping=0.5)
    assert create_solver(made) is made


def test_no_batches_is_an_error():
    p = problem()
    with pytest.raises(ScoreError, match="no batches"):
        Objective(p.objective.products, iter(()))
