"""Criteria that run the network once over a batch: Taylor and Group Fisher by gradients, HRank by its feature maps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ifso.common.loss_fn import checked
from ifso.common.torch_state import differentiable, undisturbed, without_checkpoints
from ifso.criteria.base import Criterion, Task
from ifso.criteria.reader_hooks import ReadingLayers, in_rows
from ifso.curvature.weight_space import sum_by_unit, unit_indices
from ifso.errors import ScoreError


@dataclass(frozen=True)
class Taylor(Criterion):
    """s_i = |∂L/∂m_i| = |Σ W_i · ∂L/∂W_i| over the slices that read unit i, on the loss of the whole batch.

    Layers coupled by the unit are added before the absolute value ("Pruning Convolutional Neural Networks for Resource
    Efficient Inference", Molchanov et al., ICLR 2017, with one gate for all of a unit's places).
    """

    name = "taylor"
    needs = "gradients"

    def units(self, task: Task, batch: Any) -> Tensor:
        """Scores [units]."""
        weights = {reader.parameter: task.tensors[reader.parameter] for reader in task.readers}
        with undisturbed(task.model), torch.enable_grad(), differentiable(weights.values()):
            loss = checked(task.loss_fn(task.model, batch))
            grads = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
        products = {
            name: torch.zeros_like(weights[name]) if grad is None else weights[name].detach() * grad
            for name, grad in zip(weights, grads, strict=True)
        }
        return task.add_slices((reader, products[reader.parameter]) for reader in task.readers).abs()


@dataclass(frozen=True)
class GroupFisher(Criterion):
    """s_i = Σ_n (∂L_n/∂m_i)² over the samples n of the batch; layers coupled by unit i add up before squaring.

    "Group Fisher Pruning for Practical Network Compression" (Liu et al., ICML 2021), without its division by memory.
    ``reduction`` says how ``loss_fn`` puts the L_n together: of a ``"mean"`` over N samples ∂L_n/∂m is N times the
    gradient with respect to the mask of sample n alone, of a ``"sum"`` it is that gradient. With batch norm in train
    mode samples meet, and L_n stands for everything that the mask of sample n changes.

    Samples lie along the first dim of every reading layer's input. N is the smallest such dim; where it is k·N
    (windows, tokens), k rows after each other belong to one sample. After regions were cut out of images, as for the
    second stage of a detector, rows that are as many belong to the image they were cut out of. Where attention takes
    tokens first, it says how many samples there are, and layers that see [tokens, N, features] have them second.

    Args:
        reduction: how ``loss_fn`` puts the losses of samples together, ``"mean"`` or ``"sum"``.
    """

    name = "group-fisher"
    needs = "gradients"

    reduction: Literal["mean", "sum"] = "mean"

    def units(self, task: Task, batch: Any) -> Tensor:
        """Scores [units]."""
        taps: list[MaskTap] = []

        def visit(layers: ReadingLayers, x: Tensor, dim: int, owner: Tensor) -> Tensor:
            taps.append(MaskTap.at(layers, x, dim, owner))
            return _Masked.apply(x, taps[-1].mask, dim)

        with undisturbed(task.model), torch.enable_grad(), without_checkpoints():
            with ReadingLayers(task, visit, everywhere=True, in_rows=True) as layers:
                loss = checked(task.loss_fn(task.model, batch))
            layers.refuse_unseen()
            samples, by_sample = by_sample_and_unit(loss, taps, layers.samples, task.graph.num_units, self.name)
        scale = samples if self.reduction == "mean" else 1
        return (by_sample * scale).square().sum(0)


class MaskTap(NamedTuple):
    """A call of a reading layer, of which shared heads have one for each level: its mask [rows, channels].

    If rows are regions, ``images`` has the image of each. ``grid``: they are tokens and samples, as in
    :class:`~ifso.criteria.reader_hooks.ReadingLayers`.
    """

    name: str
    mask: Tensor
    owner: Tensor
    images: Tensor | None
    grid: tuple[int, int] | None = None

    @classmethod
    def at(cls, layers: ReadingLayers, x: Tensor, dim: int, owner: Tensor) -> MaskTap:
        """A new mask for what a layer is about to read."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        rows = in_rows(x, dim).shape[:2]
        mask = torch.ones((), dtype=dtype, device=x.device).expand(rows).requires_grad_()
        images = layers.regions if layers.regions is not None and len(layers.regions) == rows[0] else None
        return cls(layers.reader.parameter, mask, owner, images, layers.grid)


def by_sample_and_unit(
    loss: Tensor, taps: list[MaskTap], attended: int, num_units: int, criterion: str
) -> tuple[int, Tensor]:
    """The number of samples, and ∂L/∂mask of all calls of reading layers added up [samples, units].

    ``attended`` is how many samples attention has seen, which tells them from tokens.
    """
    if not taps:
        raise ScoreError(f"criterion {criterion!r}: no layer that reads units ran; does loss_fn call the model?")
    grads = torch.autograd.grad(loss, [tap.mask for tap in taps], allow_unused=True)
    calls = [
        (tap, _without_tokens(tap, torch.zeros_like(tap.mask) if grad is None else grad, attended, criterion))
        for tap, grad in zip(taps, grads, strict=True)
    ]
    samples = _samples(calls)
    total = torch.zeros(samples, num_units + 1, dtype=torch.float64, device=calls[0][1].device)
    for tap, grad in calls:
        rows = _by_sample(tap, grad.to(total.dtype), samples, criterion)
        total.index_add_(1, unit_indices(tap.owner, num_units), rows)
    return samples, total[:, :-1]


def _without_tokens(tap: MaskTap, grad: Tensor, samples: int, criterion: str) -> Tensor:
    """Rows of tokens and samples added up over the tokens."""
    if tap.grid is None:
        return grad
    if tap.grid == (samples, samples):
        raise ScoreError(
            f"criterion {criterion!r} cannot tell samples from tokens: the layer of {tap.name} sees {samples} of each; "
            "give batches of another size"
        )
    return grad.unflatten(0, tap.grid).sum(0 if tap.grid[1] == samples else 1)


def _samples(calls: list[tuple[MaskTap, Tensor]]) -> int:
    """N, the smallest number of rows of a layer that does not look at regions."""
    whole = [len(grad) for call, grad in calls if call.images is None]
    regions = [call.images for call, _ in calls if call.images is not None and len(call.images)]
    samples = min(whole, default=0) or max((int(images[-1]) + 1 for images in regions), default=0)
    if not samples:
        raise ScoreError("a batch holds no samples; give batches that hold some")
    return samples


def _by_sample(call: MaskTap, grad: Tensor, samples: int, criterion: str) -> Tensor:
    """Rows [rows, channels] added up to [samples, channels]."""
    if call.images is not None:
        return grad.new_zeros(samples, grad.shape[1]).index_add_(0, call.images, grad)
    if len(grad) % samples:
        raise ScoreError(
            f"criterion {criterion!r} needs samples along the first dim: the layer of {call.name} sees "
            f"{len(grad)} rows, another {samples}; use a criterion of whole batches, such as ifso or taylor"
        )
    return grad.unflatten(0, (samples, -1)).sum(1)


class _Masked(Function):
    """``x ⊙ mask`` at mask = 1, without a second copy of ``x``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, dim: int) -> Tensor:  # noqa: ARG004 (the mask is 1)
        """``x``."""
        ctx.save_for_backward(x)
        ctx.dim = dim
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """λ, and Σ x·λ over positions [rows, channels]."""
        (x,) = ctx.saved_tensors
        product = in_rows(x * grad, ctx.dim).unsqueeze(-1).flatten(2)
        return grad, product.sum(2, dtype=torch.promote_types(x.dtype, torch.float32)), None


@dataclass(frozen=True)
class HRank(Criterion):
    """s_i = mean rank of the feature maps of unit i, over samples and over the layers that read it.

    "HRank: Filter Pruning using High-Rank Feature Map" (Lin et al., CVPR 2020). The maps are the inputs of the reading
    layers, so they have passed their norm and activation. A map of more than two dims is flattened to a matrix after
    its first. Where there are no positions (a linear layer behind a pooling) a map is one number: its rank is 1, or 0
    where the number is 0, and the score is the share of samples on which the unit is active.
    """

    name = "hrank"
    needs = "activations"

    @torch.no_grad()
    def units(self, task: Task, batch: Any) -> Tensor:
        """Scores [units]."""
        number = task.graph.num_units
        ranks, maps = torch.zeros(2, number, dtype=torch.float64, device=task.device)

        def visit(layers: ReadingLayers, x: Tensor, dim: int, owner: Tensor) -> Tensor:
            of_maps = _ranks(in_rows(x, dim), layers.reader.parameter)
            ranks.add_(sum_by_unit(of_maps.sum(0), owner, number))
            maps.add_(sum_by_unit(torch.full_like(of_maps[0], of_maps.shape[0]), owner, number))
            return x

        with undisturbed(task.model), ReadingLayers(task, visit, everywhere=False):
            task.loss_fn(task.model, batch)
        for group in task.graph.groups:
            if not bool(maps[group.units].all()):
                raise ScoreError(
                    f"criterion 'hrank' saw no feature map of group {group.name!r}: no conv or linear layer that ran "
                    "reads it; use ifso, taylor or magnitude, which allow for other layers"
                )
        return ranks / maps.clamp(min=1)


def _ranks(maps: Tensor, name: str) -> Tensor:
    """Rank of every map [rows, channels, …] as [rows, channels].

    >>> _ranks(torch.eye(3).expand(2, 1, 3, 3), "conv.weight").tolist()
    [[3.0], [3.0]]
    """
    if not bool(maps.isfinite().all()):
        raise ScoreError(f"criterion 'hrank': the features read by {name} are not finite; check the batch and weights")
    maps = maps.to(torch.promote_types(maps.dtype, torch.float32))
    matrices = maps[..., None, None] if maps.dim() == 2 else maps.unsqueeze(-1).flatten(3)
    if min(matrices.shape[2:]) == 1:
        return matrices.flatten(2).any(2).to(torch.float64)
    return torch.linalg.matrix_rank(matrices).to(torch.float64)
