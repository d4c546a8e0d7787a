"""Rows R with RᵀR ≈ Gauss-Newton: a few backward passes give the whole matrix, which is then inverted exactly.

For outputs f_n of sample n, the loss has the curvature ∇²ℓ_n = Σ_i λ_i q_i q_iᵀ (C × C, a matter of the outputs alone).
The vector √λ_i q_i pulled back through the network is a row per sample; the ``rank`` largest i of every sample take
``rank`` backward passes. With rank = C the matrix is G exactly; near an optimum of a classifier the first few say it
all, as the outputs are sure of themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifso.common.batches import num_samples
from ifso.common.loss_fn import checked
from ifso.common.torch_state import undisturbed
from ifso.curvature.objective import (
    LOSS,
    Objective,
    QuadraticModel,
    Solution,
    System,
    checked_positive,
    checked_vector,
)
from ifso.curvature.solvers.fisher import layer_matrices, recording_calls
from ifso.errors import ScoreError

MOST_OUTPUTS = 256
MEMORY_LIMIT, FEW_OUTPUTS = 2 * 2**30, 10
"""Bytes that the rows may take, if the model has so many outputs."""

_BATCH_NORMS = nn.modules.batchnorm._BatchNorm


@dataclass(frozen=True)
class JacobianRows:
    """Solve (RᵀR + diag(D) + λI) u = v with the rows of :func:`sample_rows`.

    All of the spectrum is there, which conjugate gradients need a product each to find. For models with up to 256
    outputs per sample whose weights are in conv, linear and (in eval mode) batch-norm layers.

    Args:
        damping: λ.
        rank: rows per sample, at a backward pass each; as many as the model has outputs give the Gauss-Newton matrix
            itself.
    """

    damping: float = 1e-3
    rank: int = 3

    def __post_init__(self) -> None:
        checked_positive("jacobian", damping=self.damping, rank=self.rank)

    def solve(self, system: System, v: Tensor) -> Solution:
        """u, with the residual in RᵀR + diag(D) + λI."""
        v = checked_vector(system, v)
        norm = float(v.norm())
        if norm == 0:
            return Solution(torch.zeros_like(v), 0.0, 0)
        factors = self.factors(system)
        u = factors.solve(v, self.damping)
        residual = float((v - factors.times(u) - self.damping * u).norm()) / norm
        return Solution(u, residual, self.rank)

    def factors(self, system: System) -> Factors:
        """R and D, restricted to the weights that may move."""
        if system.curvature != "gauss-newton":
            raise ScoreError("solver 'jacobian' has the Gauss-Newton matrix; use solver='cg' for the Hessian")
        why = obstacle(system.objective, self.rank)
        if why:
            raise ScoreError(f"solver 'jacobian' does not fit this network: {why}; use solver='cg'")
        rows, diagonal = sample_rows(system.objective, self.rank)
        return Factors(system.restrict(rows), system.restrict(diagonal), system.support)


class Factors:
    """RᵀR + diag(D), over the weights of ``support``."""

    def __init__(self, rows: Tensor, diagonal: Tensor, support: Tensor | None) -> None:
        self._support, self._size = support, rows.shape[1]
        if support is not None:
            self._indices = support.nonzero()[:, 0]
            rows, diagonal = rows[:, self._indices], diagonal[self._indices]
        self._rows, self._diagonal = rows, diagonal
        self._square = rows.t() @ rows if rows.shape[1] <= rows.shape[0] else None

    def times(self, vector: Tensor) -> Tensor:
        """(RᵀR + D)·vector."""
        inner = self._gather(vector)
        return self._scatter(self._rows.t() @ (self._rows @ inner) + self._diagonal * inner)

    def solve(self, vector: Tensor, damping: float) -> Tensor:
        """(RᵀR + D + λI)⁻¹·vector, in the smaller of the two spaces."""
        inner, shifted = self._gather(vector), self._diagonal + damping
        if self._square is not None:
            factor = torch.linalg.cholesky(self._square + torch.diag(shifted))
            return self._scatter(torch.cholesky_solve(inner[:, None], factor)[:, 0])
        scaled = self._rows / shifted
        gram = self._rows @ scaled.t()
        gram.diagonal().add_(1)
        weights = torch.cholesky_solve((scaled @ inner)[:, None], torch.linalg.cholesky(gram))[:, 0]
        return self._scatter(inner / shifted - weights @ scaled)

    def _gather(self, vector: Tensor) -> Tensor:
        return vector if self._support is None else vector[self._indices]

    def _scatter(self, vector: Tensor) -> Tensor:
        if self._support is None:
            return vector
        return vector.new_zeros(self._size).index_copy_(0, self._indices, vector)


class RowsModel(QuadraticModel):
    """C = RᵀR + diag(D)."""

    def __init__(self, factors: Factors, gradient: Tensor) -> None:
        self._factors, self._gradient = factors, gradient

    def solve(self, damping: float) -> Tensor:
        """(RᵀR + D + λI)⁻¹g."""
        return self._factors.solve(self._gradient, damping)

    def decrease(self, damping: float) -> float:
        """Of the model without damping."""
        u = self.solve(damping)
        return float(self._gradient @ u - 0.5 * u @ self._factors.times(u))

    def inverse(self, vector: Tensor, damping: float) -> Tensor:
        """(RᵀR + D + λI)⁻¹·vector."""
        return self._factors.solve(vector, damping)

    def with_gradient(self, gradient: Tensor) -> QuadraticModel:
        """All of C is there."""
        return RowsModel(self._factors, gradient)


def obstacle(objective: Objective, rank: int) -> str:
    """Why ``rank`` rows per sample cannot be computed for this network; empty if they can."""
    samples = sum(num_samples(batch) for batch in objective.curvature_batches)
    size = min(rank, FEW_OUTPUTS) * samples * objective.size * objective.space.current().element_size()
    if size > MEMORY_LIMIT:
        return f"its rows of the Gauss-Newton matrix would take {size / 2**30:.1f} GiB (limit {MEMORY_LIMIT / 2**30:g})"
    covered = set()
    for module in objective.model.modules():
        if isinstance(module, _BATCH_NORMS) and module.training:
            return "batch norm in train mode mixes the samples"
        if _is_supported(module):
            covered |= {id(parameter) for parameter in module.parameters(recurse=False)}
    for name, tensor in objective.space.tensors.items():
        if id(tensor) not in covered:
            return f"{name} belongs to no conv, linear or batch-norm layer"
    return ""


def _is_supported(module: nn.Module) -> bool:
    if isinstance(module, nn.Conv2d):
        return module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return isinstance(module, (nn.Linear, *_BATCH_NORMS.__subclasses__()))


def sample_rows(objective: Objective, rank: int) -> tuple[Tensor, Tensor]:
    """R [rank · samples, weights] and a diagonal D [weights]: G ≈ RᵀR + diag(D), over the batches for curvature.

    D is the curvature of what ``loss_fn`` does with the weights directly: ∂²ℓ/∂W² times ones, exact for an L2 term.
    One pass costs a forward pass and ``rank`` backward passes.
    """
    batches = objective.curvature_batches
    rows, direct = [], torch.zeros_like(objective.space.current())
    for batch in batches:
        batch_rows, diagonal = _rows_of_batch(objective, batch, rank)
        rows += batch_rows
        direct += diagonal
        objective.spent += LOSS * (1 + 2 * len(batch_rows)) / len(objective.batches)
    return torch.cat(rows) / len(batches) ** 0.5, (direct / len(batches)).clamp_min(0)


def _rows_of_batch(objective: Objective, batch: Any, rank: int) -> tuple[list[Tensor], Tensor]:
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []
    with undisturbed(objective.model), torch.enable_grad():
        hook = _OutputLeaf()
        with objective.model.register_forward_hook(hook), recording_calls(_layers(objective), calls):
            loss = checked(objective.loss_fn(objective.model, batch))
        if hook.output is None or hook.leaf is None:
            raise ScoreError("loss_fn never calls model(...) with one output tensor; use solver='cg'")
        outputs = [output for _, _, output in calls]
        rows = []
        for root in _roots(loss, hook.leaf, rank):
            grads = torch.autograd.grad(hook.output, outputs, root, retain_graph=True, allow_unused=True)
            rows.append(_rows(objective, calls, grads))
        return rows, _direct(objective, loss)


def _direct(objective: Objective, loss: Tensor) -> Tensor:
    """∂²ℓ/∂W² · 1, where ℓ sees the weights only directly."""
    tensors = list(objective.space.tensors.values())
    first = torch.autograd.grad(loss, tensors, create_graph=True, allow_unused=True)
    total = sum((grad.sum() for grad in first if grad is not None and grad.requires_grad), torch.zeros(()))
    second = torch.autograd.grad(total, tensors, allow_unused=True) if total.requires_grad else [None] * len(tensors)
    return objective.space.flat(dict(zip(objective.space.tensors, second, strict=True)))


def _roots(loss: Tensor, output: Tensor, rank: int) -> list[Tensor]:
    """√λ_i q_i of every sample for the ``rank`` largest λ_i, each in the shape of the output."""
    (first,) = torch.autograd.grad(loss, output, create_graph=True)
    width = output[0].numel()
    if width > MOST_OUTPUTS:
        raise ScoreError(f"the model has {width} outputs per sample, more than {MOST_OUTPUTS}; use solver='cg'")
    columns = []
    for index in range(width):
        pick = first.flatten(1)[:, index].sum()
        (column,) = torch.autograd.grad(pick, output, retain_graph=True, allow_unused=True)
        columns.append(torch.zeros_like(output) if column is None else column)
    blocks = torch.stack([column.flatten(1) for column in columns], 1)
    values, vectors = torch.linalg.eigh((blocks + blocks.transpose(1, 2)) / 2)
    order = range(width - 1, max(width - 1 - rank, -1), -1)
    return [(vectors[:, :, i] * values[:, i, None].clamp_min(0).sqrt()).view_as(output) for i in order]


@dataclass
class _OutputLeaf:
    """A forward hook that exchanges the model's output for a leaf: the loss is differentiated without the network."""

    output: Tensor | None = None
    leaf: Tensor | None = None

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Tensor:  # noqa: ARG002 (torch's order)
        if not isinstance(output, Tensor) or self.output is not None:
            raise ScoreError(
                "rows of the Gauss-Newton matrix need one call of a model with one output; use solver='cg'"
            )
        self.output, self.leaf = output, output.detach().requires_grad_()
        return self.leaf


def _layers(objective: Objective) -> list[nn.Module]:
    """The modules that own weights of W."""
    wanted = {id(tensor) for tensor in objective.space.tensors.values()}
    return [
        module
        for module in objective.model.modules()
        if _is_supported(module) and any(id(parameter) in wanted for parameter in module.parameters(recurse=False))
    ]


def _rows(
    objective: Objective, calls: Sequence[tuple[nn.Module, Tensor, Tensor]], grads: Sequence[Tensor | None]
) -> Tensor:
    """Per-sample gradients [N, weights] from what entered every layer and the gradients at what left it."""
    names = {id(tensor): name for name, tensor in objective.space.tensors.items()}
    parts: dict[str, Tensor] = {}
    for (module, entering, _), grad in zip(calls, grads, strict=True):
        for parameter, part in () if grad is None else _per_sample(module, entering, grad):
            if id(parameter) in names:
                name = names[id(parameter)]
                parts[name] = parts[name] + part if name in parts else part
    count = calls[0][1].shape[0]
    zeros = {
        name: tensor.new_zeros(1).expand(count, tensor.numel()) for name, tensor in objective.space.tensors.items()
    }
    return torch.cat([parts.get(name, zero).reshape(count, -1) for name, zero in zeros.items()], 1)


def _per_sample(module: nn.Module, entering: Tensor, grad: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(parameter, its gradient for each sample [N, ...])."""
    if isinstance(module, _BATCH_NORMS):
        rest = list(range(2, grad.dim()))
        if module.weight is not None:
            plain = F.batch_norm(entering, module.running_mean, module.running_var, None, None, False, 0.0, module.eps)
            yield module.weight, (grad * plain).sum(rest) if rest else grad * plain
            yield module.bias, grad.sum(rest) if rest else grad
        return
    assert isinstance(module, (nn.Conv2d, nn.Linear))
    a, g = layer_matrices(module, entering, grad)
    if isinstance(module, nn.Conv2d) and module.groups > 1:
        a = a.unflatten(2, (module.groups, -1))
        g = g.unflatten(2, (module.groups, -1))
        yield module.weight, torch.einsum("ntxo,ntxi->nxoi", g, a).flatten(1)
        g = g.flatten(2)
    else:
        yield module.weight, torch.einsum("nto,nti->noi", g, a)
    if module.bias is not None:
        yield module.bias, g.sum(1)
