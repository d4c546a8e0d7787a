"""Solvers with the empirical Fisher: K-FAC and EK-FAC, one Kronecker product per layer, and Sherman–Morrison.

For K-FAC, per layer with weight matrix W [out, in] (a convolution's kernel flattened, a bias as one more column):

    A = 1/(N T) Σ_n Σ_t a aᵀ,      G = 1/N Σ_n Σ_t g gᵀ,

over N samples and T positions (T = 1 for a linear layer on vectors), where g is the gradient of the sample's own loss.
``loss_fn`` is taken to be the mean over the samples of a batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifso.common.batches import num_samples
from ifso.common.loss_fn import checked
from ifso.common.torch_state import undisturbed
from ifso.curvature.objective import GRADIENT, Objective, Solution, System, checked_positive, checked_vector
from ifso.errors import ScoreError


@dataclass(frozen=True)
class Kfac:
    """Solve with the empirical Fisher as blocks G ⊗ A + λI, one for each conv or linear layer.

    A = E[a aᵀ] over the layer's inputs (patches for a convolution), G = E[g gᵀ] over the gradients at its outputs; the
    damping is exact, in the eigenbasis Q_G ⊗ Q_A. Weights of other layers (norms, grouped and transposed convolutions)
    have a diagonal Fisher from the gradients of whole batches.

    Args:
        damping: λ.
        corrected: EK-FAC: the eigenvalues are replaced by the second moments of the samples' gradients in that basis.
    """

    damping: float = 1e-3
    corrected: bool = False

    def __post_init__(self) -> None:
        checked_positive("kfac", damping=self.damping)

    def solve(self, system: System, v: Tensor) -> Solution:
        """u block by block."""
        v = checked_vector(system, v)
        space = system.objective.space
        parts = space.split(v)
        keeps = space.split(torch.ones_like(v) if system.support is None else system.support)
        blocks = kronecker_blocks(system.objective, keeps, self.corrected)
        solved: dict[str, Tensor | None] = {}
        for block in blocks:
            solved |= block.split(block.solve(block.joined(parts), self.damping))
        rest = [name for name in space.tensors if name not in solved]
        if rest:
            squares = diagonal_fisher(system.objective)
            solved.update({name: parts[name] / (squares[name] + self.damping) for name in rest})
        return Solution(system.restrict(space.flat(solved)), None, len(blocks))


@dataclass(eq=False)
class Block:
    """The Kronecker factors of one layer; ``names`` are its weight and, if it belongs to W, its bias.

    ``rows`` [out] and ``columns`` [in (+ 1)] are 1 where weights may move. ``moments`` [out, in (+ 1)] are the
    eigenvalues of G ⊗ A in the basis (Q_G, Q_A).
    """

    names: tuple[str, ...]
    shape: torch.Size
    rows: Tensor
    columns: Tensor
    inputs: Tensor
    outputs: Tensor
    calls: int = 0
    moments: Tensor = field(init=False)
    basis: tuple[Tensor, Tensor] = field(init=False)

    def joined(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Weight and bias as one matrix [out, in (+ 1)]."""
        return torch.cat([parts[name].reshape(self.shape[0], -1) for name in self.names], 1)

    def split(self, matrix: Tensor) -> dict[str, Tensor]:
        """The matrix as weight and bias."""
        columns = self.shape[1:].numel()
        shapes = (self.shape, self.shape[:1])
        pieces = (matrix[:, :columns], matrix[:, columns:])
        return {name: piece.reshape(shape) for name, piece, shape in zip(self.names, pieces, shapes, strict=False)}

    def add(self, a: Tensor, g: Tensor) -> None:
        """Inputs [N, T, in] and gradients [N, T, out] of one call."""
        self.calls += 1
        self.inputs = self.inputs + torch.einsum("nti,ntj->ij", a, a) / a.shape[1]
        self.outputs = self.outputs + torch.einsum("nto,ntp->op", g, g)

    def diagonalise(self, samples: int) -> None:
        """Eigenvectors of A and G over the weights that may move, and the eigenvalues of G ⊗ A."""
        small, q_in = torch.linalg.eigh(self.inputs / samples * torch.outer(self.columns, self.columns))
        large, q_out = torch.linalg.eigh(self.outputs / samples * torch.outer(self.rows, self.rows))
        self.basis = (q_out, q_in)
        self.moments = torch.outer(large.clamp_min(0), small.clamp_min(0))

    def solve(self, matrix: Tensor, damping: float) -> Tensor:
        """(G ⊗ A + λI)⁻¹ matrix."""
        q_out, q_in = self.basis
        return q_out @ ((q_out.t() @ matrix @ q_in) / (self.moments + damping)) @ q_in.t()


def kronecker_blocks(objective: Objective, keeps: Mapping[str, Tensor], corrected: bool) -> list[Block]:
    """The blocks of every conv and linear layer in W; with ``corrected``, EK-FAC's eigenvalues."""
    layers = _layers(objective, keeps)
    samples = sum(map(num_samples, objective.batches))
    for block, a, g in _statistics(objective, layers):
        block.add(a, g)
    blocks = [block for block in layers.values() if block.calls]
    if not blocks:
        raise ScoreError("K-FAC needs a plain conv or linear layer among the weights; use solver='cg'")
    for block in blocks:
        block.diagonalise(samples)
    if corrected:  # EK-FAC: E[(Q_Gᵀ ∂L_n/∂W Q_A)²] in place of the products of eigenvalues
        for block in blocks:
            block.moments = torch.zeros_like(block.moments)
        for block, a, g in _statistics(objective, layers):
            q_out, q_in = block.basis
            gradients = torch.einsum("nto,nti->noi", (g * block.rows) @ q_out, (a * block.columns) @ q_in)
            block.moments += gradients.square().sum(0) / samples
    return blocks


def diagonal_fisher(objective: Objective) -> dict[str, Tensor]:
    """Diagonal Fisher by name from the gradients of whole batches: mean of N g²."""
    objective.spent += GRADIENT
    total = None
    for batch in objective.batches:
        square = objective.products.gradient(batch)[1].square() * num_samples(batch)
        total = square if total is None else total + square
    assert total is not None
    return objective.space.split(total / len(objective.batches))


def _layers(objective: Objective, keeps: Mapping[str, Tensor]) -> dict[nn.Module, Block]:
    tensors = objective.space.tensors
    names = {id(tensor): name for name, tensor in tensors.items()}
    blocks = {}
    for module in objective.model.modules():
        if not _is_plain(module) or id(module.weight) not in names:
            continue
        used = [names[id(tensor)] for tensor in (module.weight, module.bias) if id(tensor) in names]
        shape = tensors[used[0]].shape
        keep = torch.cat([keeps[name].reshape(shape[0], -1) for name in used], 1)
        rows, columns = (keep.amax(dim).to(tensors[used[0]].dtype) for dim in (1, 0))
        zeros = [line.new_zeros(len(line), len(line)) for line in (columns, rows)]
        blocks[module] = Block(tuple(used), shape, rows, columns, zeros[0], zeros[1])
    return blocks


def _is_plain(module: nn.Module) -> bool:
    if isinstance(module, nn.Conv2d):
        return module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return isinstance(module, nn.Linear)


def _statistics(objective: Objective, layers: dict[nn.Module, Block]) -> Iterator[tuple[Block, Tensor, Tensor]]:
    """(block, inputs [N, T, in], gradients [N, T, out]) of every call of a layer in every batch."""
    objective.spent += GRADIENT
    for batch in objective.batches:
        caught: list[tuple[nn.Module, Tensor, Tensor]] = []
        with undisturbed(objective.model), torch.enable_grad(), recording_calls(layers, caught):
            loss = checked(objective.loss_fn(objective.model, batch))
            grads = torch.autograd.grad(loss, [output for _, _, output in caught], allow_unused=True)
        for (module, entering, _), grad in zip(caught, grads, strict=True):
            if grad is not None:
                a, g = layer_matrices(module, entering, grad)
                if len(layers[module].names) > 1:
                    a = torch.cat([a, a.new_ones(*a.shape[:2], 1)], 2)
                yield layers[module], a, g * num_samples(batch)


@contextlib.contextmanager
def recording_calls(modules: Iterable[nn.Module], caught: list[tuple[nn.Module, Tensor, Tensor]]) -> Iterator[None]:
    """Append (module, input, output) of every call of the modules to ``caught``."""

    def catch(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        caught.append((module, args[0].detach(), output))

    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(module.register_forward_hook(catch))
        yield


def layer_matrices(module: nn.Module, entering: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs [N, T, in] (patches for a convolution) and output gradients [N, T, out] of a layer."""
    if isinstance(module, nn.Conv2d):
        assert not isinstance(module.padding, str)
        a = F.unfold(entering, module.kernel_size, module.dilation, module.padding, module.stride).transpose(1, 2)
        return a, grad.flatten(2).transpose(1, 2)
    a, g = (tensor.reshape(tensor.shape[0], -1, tensor.shape[-1]) for tensor in (entering, grad))
    return a, g


@dataclass(frozen=True)
class ShermanMorrison:
    """Solve (λI + 1/N Σ g gᵀ) u = v exactly, by u = (v − Aᵀ (NλI + A Aᵀ)⁻¹ A v) / λ.

    The gradients g of the N samples are the rows of A. Only the N × N Gram matrix is ever inverted.

    Args:
        damping: λ.
        group_size: samples that make one row (batch norm in train mode needs ≥ 2).
        memory: bytes for rows to be held; those that do not fit are computed again, block against block.
    """

    damping: float = 1e-3
    group_size: int = 1
    memory: int = 2**30

    def __post_init__(self) -> None:
        checked_positive("sherman-morrison", damping=self.damping, group_size=self.group_size, memory=self.memory)

    def solve(self, system: System, v: Tensor) -> Solution:
        """u, with the residual in the empirical Fisher."""
        v = checked_vector(system, v)
        norm = float(v.norm())
        if norm == 0:
            return Solution(torch.zeros_like(v), 0.0, 0)
        rows = _Rows(lambda: system.sample_gradients(self.group_size), system.size * v.element_size(), self.memory)
        gram, projected = rows.gram(), rows.times(v)
        count = gram.shape[0]
        shifted = gram + count * self.damping * torch.eye(count, dtype=gram.dtype, device=gram.device)
        weights = torch.cholesky_solve(projected[:, None], torch.linalg.cholesky(shifted))[:, 0]
        u = (v - rows.combined(weights)) / self.damping
        back = self.damping * u + rows.combined(rows.times(u)) / count
        return Solution(u, float((v - back).norm()) / norm, count)


class _Rows:
    """The rows of A in blocks: held if all of them fit, made again each time if not."""

    def __init__(self, make: Callable[[], Iterator[Tensor]], row_bytes: int, memory: int) -> None:
        self._make, self._per_block = make, max(1, memory // (2 * row_bytes))
        self._held: list[Tensor] | None = None
        first = list(islice(self._blocks_anew(), 3))
        if len(first) <= 2:
            self._held = first

    def _blocks_anew(self) -> Iterator[Tensor]:
        block: list[Tensor] = []
        for row in self._make():
            block.append(row)
            if len(block) == self._per_block:
                yield torch.stack(block)
                block = []
        if block:
            yield torch.stack(block)

    def _blocks(self) -> Iterator[Tensor]:
        return iter(self._held) if self._held is not None else self._blocks_anew()

    def gram(self) -> Tensor:
        """A Aᵀ [N, N]."""
        return torch.cat([torch.cat([left @ right.t() for right in self._blocks()], 1) for left in self._blocks()])

    def times(self, vector: Tensor) -> Tensor:
        """A·vector [N]."""
        return torch.cat([block @ vector for block in self._blocks()])

    def combined(self, weights: Tensor) -> Tensor:
        """Aᵀ·weights."""
        total, start = None, 0
        for block in self._blocks():
            part = weights[start : start + len(block)] @ block
            total, start = part if total is None else total + part, start + len(block)
        assert total is not None
        return total
