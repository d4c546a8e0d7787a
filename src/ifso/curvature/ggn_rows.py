"""Rows R with RᵀR ≈ Gauss-Newton: a few backward passes give the whole matrix, where conjugate gradients give a ray.

For outputs f_n of sample n, the loss has the curvature ∇²ℓ_n = Σ_i λ_i q_i q_iᵀ (C × C, a matter of the outputs alone).
The vector √λ_i q_i pulled back through the network is a row per sample; the ``rank`` largest i of every sample take
``rank`` backward passes. With rank = C the matrix is G exactly; near an optimum of a classifier the first few say it
all, as the outputs are sure of themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifso.common.batches import tensor_length
from ifso.common.loss_fn import checked
from ifso.common.torch_state import undisturbed
from ifso.curvature.kronecker import catching, layer_matrices
from ifso.curvature.objective import LOSS, Objective
from ifso.errors import ScoreError

MOST_OUTPUTS = 256
_BATCH_NORMS = nn.modules.batchnorm._BatchNorm


MEMORY_LIMIT, FEW_OUTPUTS = 2 * 2**30, 10
"""Bytes that the rows may take, if the model has so many outputs."""


def obstacle(objective: Objective, rank: int) -> str:
    """Why ``rank`` rows per sample cannot be computed for this network; empty if they can."""
    samples = sum(tensor_length(batch) for batch in objective.curvature_batches)
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
        found, diagonal = _rows_of_batch(objective, batch, rank)
        rows += found
        direct += diagonal
        objective.spent += LOSS * (1 + 2 * len(found)) / len(objective.batches)
    return torch.cat(rows) / len(batches) ** 0.5, (direct / len(batches)).clamp_min(0)


def _rows_of_batch(objective: Objective, batch: Any, rank: int) -> tuple[list[Tensor], Tensor]:
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []
    with undisturbed(objective.model), torch.enable_grad():
        with _Leaf(objective.model) as leaf, catching(_layers(objective), calls):
            loss = checked(objective.loss_fn(objective.model, batch))
        if leaf.output is None or leaf.value is None:
            raise ScoreError("loss_fn never calls model(...) with one output tensor; use solver='cg'")
        cotangents = _roots(loss, leaf.value, rank)
        outputs = [output for _, _, output in calls]
        rows = []
        for root in cotangents:
            grads = torch.autograd.grad(leaf.output, outputs, root, retain_graph=True, allow_unused=True)
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


class _Leaf:
    """Swap the model's output for a leaf, so that the loss can be differentiated twice without the network."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.output: Tensor | None = None
        self.value: Tensor | None = None

    def __enter__(self) -> _Leaf:
        self._handle = self._model.register_forward_hook(self._swap)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _swap(self, _: nn.Module, args: Any, output: Any) -> Any:
        del args
        if not isinstance(output, Tensor) or self.output is not None:
            raise ScoreError(
                "rows of the Gauss-Newton matrix need one call of a model with one output; use solver='cg'"
            )
        self.output, self.value = output, output.detach().requires_grad_()
        return self.value


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
    count = calls[0][1].shape[0]
    for (module, entering, _), grad in zip(calls, grads, strict=True):
        if grad is None:
            continue
        for parameter, part in _per_sample(module, entering, grad):
            if id(parameter) in names:
                name = names[id(parameter)]
                parts[name] = parts[name] + part if name in parts else part
    tensors = objective.space.tensors
    like = next(iter(tensors.values()))
    return torch.cat(
        [
            parts[name].reshape(count, -1) if name in parts else like.new_zeros(count, tensor.numel())
            for name, tensor in tensors.items()
        ],
        1,
    )


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
