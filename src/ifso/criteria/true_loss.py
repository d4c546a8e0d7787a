"""``true-loss``: what a unit's removal costs after the weights that read it have adapted (Proposition 1)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ifso.common.batches import rough_count
from ifso.common.loss_fn import checked, output_tensors, outputs_of
from ifso.common.torch_state import undisturbed, without_checkpoints
from ifso.criteria.base import Criterion, Needs, Task
from ifso.criteria.gradients import MaskTap, by_sample_and_unit
from ifso.criteria.moments import Halves, Moments, in_first_half, mean_size
from ifso.criteria.reader_hooks import ReadingLayers, in_rows
from ifso.curvature.weight_space import unit_indices
from ifso.errors import ScoreError
from ifso.graph.channel_graph import STAYS

DAMPING = 0.01
POSITIONS = 64

_ReaderKey = tuple[str, int]
"""The parameter and the dim of a reader."""


@dataclass(frozen=True)
class TrueLoss(Criterion):
    """ΔL_i = ½ E_n (Σ_t ⟨∂ℓ_n/∂x_t,i , r_t,i⟩)², r_i being what the other inputs cannot say of input i.

    When unit i goes, the layers that read it take it over with what they have left: x_i = Σ_j b_j x_j + r_i, the best
    linear prediction from their other inputs, whose weights they add to their own. What is lost is the residual r_i;
    with P = (Cov(x) + λI)⁻¹ of a layer's inputs, r_i = (P (x − E x))_i / P_ii. P and E x come from one half of the
    samples, x from the other, and the reverse: with few samples the inputs of a layer predict each other by chance,
    but only on samples that the prediction was fitted to. This is Proposition 1, ΔL_gt and not ΔL_ex, for the update
    that :mod:`ifso.pruning.least_squares` makes, with the curvature of whole samples (Group Fisher has x_i in the key
    of r_i). Layers coupled by the unit are added before squaring.

    Args:
        target: ``"outputs"`` takes ℓ to be half the squared distance of the outputs from those that the network has
            now: its gradient is zero and its Hessian JᵀJ exactly, so that the quadratic model is right; labels are not
            needed. One random direction of the outputs a sample stands for JᵀJ. ``"loss"`` takes ``loss_fn`` (the
            empirical Fisher); so does ``"outputs"`` for a model that returns nothing but its loss.
        damping: λ as a share of the mean variance of the inputs.
        seed: of the random directions.
    """

    name: ClassVar[str] = "true-loss"
    needs: ClassVar[Needs] = "gradients"
    prepares: ClassVar[bool] = True

    target: Literal["outputs", "loss"] = "outputs"
    damping: float = DAMPING
    seed: int = 0

    def unread(self, task: Task, batch: Any) -> Mapping[str, str]:
        """Parameters that are no weights of layers, and weights of layers whose inputs are not of the samples."""
        taps: list[MaskTap] = []

        def visit(layers: ReadingLayers, x: Tensor, dim: int, owner: Tensor) -> Tensor:
            taps.append(MaskTap.at(layers, x, dim, owner))
            return x

        layers = ReadingLayers(task, visit, everywhere=False, in_rows=True)
        with undisturbed(task.model), torch.no_grad(), layers:
            task.loss_fn(task.model, batch)
        taps = [tap for tap in taps if tap.images is None and tap.grid is None]
        samples = max(rough_count(batch), 1)
        odd = {tap.name: "a layer whose rows are no samples" for tap in taps if len(tap.mask) % samples}
        usual = 2 * sum(tap.name not in odd for tap in taps) > len(taps)  # else the batch is counted in another way
        return {**layers.unseen(), **(odd if usual else {})}

    def prepare(self, task: Task, batches: Iterable[Any]) -> None:
        """See what every reading layer reads."""
        prepared = task.memo("true-loss", _Prepared)
        prepared.residuals, prepared.scored = None, 0  # the same directions wherever a run was resumed
        inputs = _InputStatistics(task.kept.cpu(), _units_at_positions(task))
        with ReadingLayers(task, inputs.visit, everywhere=False, in_rows=True):
            for batch in batches:
                with undisturbed(task.model), torch.no_grad():
                    task.loss_fn(task.model, batch)
                inputs.number += 1
        prepared.residuals = {key: channels.residuals(self.damping) for key, channels in inputs.seen.items()}

    def units(self, task: Task, batch: Any) -> Tensor:
        """Scores [units]."""
        prepared = task.memo("true-loss", _Prepared)
        residuals = prepared.residuals
        if residuals is None:
            self.prepare(task, [batch])
            try:
                return self.units(task, batch)
            finally:
                prepared.residuals = None
        taps: list[MaskTap] = []
        number, prepared.scored = prepared.scored, prepared.scored + 1

        def visit(layers: ReadingLayers, x: Tensor, dim: int, owner: Tensor) -> Tensor:
            """``x`` plus a mask, now zero, times what is left of each unit when the others predict it."""
            if layers.key not in residuals:
                return x
            taps.append(MaskTap.at(layers, x, dim, owner))
            mask = taps[-1].mask
            first = in_first_half(len(mask), number)
            return _ShiftedByResidual.apply(x, mask, dim, residuals[layers.key], first)

        with undisturbed(task.model), torch.enable_grad(), without_checkpoints():
            with ReadingLayers(task, visit, everywhere=False, in_rows=True) as layers, outputs_of(task.model) as caught:
                loss = checked(task.loss_fn(task.model, batch))
            layers.refuse_unseen()
            objective = self._objective(loss, caught, number)
            samples, by_sample = by_sample_and_unit(objective, taps, layers.samples, task.graph.num_units, self.name)
        scale = samples if objective is loss else 1
        return (by_sample * scale).square().mean(0) / 2

    def _objective(self, loss: Tensor, caught: list[Any], number: int) -> Tensor:
        """What is differentiated: random directions of the outputs, or the loss itself."""
        outputs = [output for output in output_tensors(caught) if output.requires_grad]
        if self.target == "loss" or not outputs:
            return loss
        generator = torch.Generator(device="cpu").manual_seed(self.seed * 1_000_003 + number)
        total = loss.new_zeros(())
        for output in outputs:
            direction = torch.randn(output.shape, generator=generator, device="cpu").to(output)
            total = total + (output * direction).sum() / output.detach().std().clamp_min(1e-12)
        return total


def _units_at_positions(task: Task) -> dict[str, Tensor]:
    """Of linear layers whose positions are channels (an MLP along tokens): the unit of each row of the traced input."""
    return {
        f"{term.where}.weight": layer.flatten()
        for term in task.graph.terms
        if term.kind == "linear"
        for layer in term.distinct
        if layer.numel() == layer.shape[0] > 1
    }


class _Residual(NamedTuple):
    """The mean [C] and the map [C, C] from x − mean to what is left of each unit when the others predict it."""

    mean: Tensor
    map: Tensor

    def of(self, rows: Tensor) -> Tensor:
        """r of [rows, C, positions]."""
        return self.map.to(rows.dtype) @ (rows - self.mean.to(rows.dtype).view(1, -1, 1))


@dataclass
class _Prepared:
    """What is known of the reading layers, None before all batches were looked at; and how many were ``scored``."""

    residuals: dict[_ReaderKey, list[_Residual]] | None = None
    scored: int = 0


@dataclass
class _ReadChannels:
    """What a layer reads [C], in ``groups`` that do not meet; ``kept`` [C] are the channels whose units are there."""

    groups: int
    owner: Tensor
    kept: Tensor
    halves: Halves

    def residuals(self, damping: float) -> list[_Residual]:
        """That of the first half of the samples and that of the second, each fitted to the other."""
        return [self._residual(moments, damping) for moments in self.halves.apart()]

    def _residual(self, moments: Moments, damping: float) -> _Residual:
        mean, covariance = moments.mean()[0], moments.matrix(centred=True)[0]
        apart = torch.arange(len(mean), device=mean.device) // (len(mean) // self.groups)
        apart = apart.where(self.kept, -1)
        meet = (apart[:, None] == apart[None, :]) & self.kept
        covariance = covariance.masked_fill(~meet, 0)
        covariance.diagonal().add_(damping * mean_size(covariance.diagonal(), self.kept))
        factor, failed = torch.linalg.cholesky_ex(covariance)
        if bool(failed):
            raise ScoreError("criterion 'true-loss': the inputs of a layer are not finite; check data and weights")
        to_residual = _by_unit(torch.cholesky_inverse(factor), self.owner)
        return _Residual(*(part.to(moments.products.dtype) for part in (mean, to_residual)))


def _by_unit(inverse: Tensor, owner: Tensor) -> Tensor:
    """[P_ii]⁻¹ P_i: of all the rows i of a unit together, where it owns several channels."""
    result = torch.zeros_like(inverse)
    units, counts = owner.unique(return_counts=True)
    order = owner.argsort(stable=True)
    starts = counts.cumsum(0) - counts
    for size in counts[units != STAYS].unique().tolist():
        chosen = starts[(counts == size) & (units != STAYS)]
        rows = order[chosen[:, None] + torch.arange(size, device=owner.device)]  # [units, size]
        blocks = inverse[rows[:, :, None], rows[:, None, :]]
        result[rows] = torch.linalg.solve(blocks, inverse[rows])
    return result


@dataclass
class _InputStatistics:
    """What the reading layers read, added up; ``number`` is that of the batch."""

    kept: Tensor
    positions: dict[str, Tensor]
    seen: dict[_ReaderKey, _ReadChannels] = field(default_factory=dict)
    number: int = 0

    def visit(self, layers: ReadingLayers, x: Tensor, dim: int, owner: Tensor) -> Tensor:
        """Add the channels of ``x`` up, at some positions of each row."""
        key = layers.key
        rows = in_rows(x.detach(), dim).unsqueeze(-1).flatten(2)
        units = self.positions.get(layers.reader.parameter)
        if units is not None and len(units) % rows.shape[2] == 0:
            rows = rows[:, :, self.kept[units[: rows.shape[2]]].to(x.device)]
        if rows.shape[2] > POSITIONS:
            generator = torch.Generator(device="cpu").manual_seed(len(self.seen))
            chosen = torch.randperm(rows.shape[2], generator=generator, device="cpu")[:POSITIONS]
            rows = rows[:, :, chosen.to(x.device)]
        samples, rows = len(rows), rows.transpose(1, 2).flatten(0, 1).unsqueeze(0)
        if key in self.seen:
            self.seen[key].halves.add(rows, samples, self.number)
        else:
            kept = self.kept[unit_indices(owner, len(self.kept) - 1).cpu()].to(x.device)
            self.seen[key] = _ReadChannels(layers.groups, owner, kept, Halves.of(rows, samples, self.number))
        return x


class _ShiftedByResidual(Function):
    """``x + mask ⊙ r`` at mask = 0, without keeping r; ``first`` rows belong to the first half of the samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, dim: int, residuals: list[_Residual], first: int) -> Tensor:  # noqa: ARG004
        """``x``."""
        ctx.save_for_backward(x)
        ctx.dim, ctx.residuals, ctx.first = dim, residuals, first
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """λ, and Σ r·λ over positions [rows, channels]."""
        (x,) = ctx.saved_tensors
        rows, back = (in_rows(part, ctx.dim).unsqueeze(-1).flatten(2) for part in (x, grad))  # [rows, C, positions]
        dtype = torch.promote_types(x.dtype, torch.float32)
        halves = zip(ctx.residuals, *(part.tensor_split([ctx.first]) for part in (rows, back)), strict=True)
        total = [(residual.of(part) * slope).sum(2, dtype=dtype) for residual, part, slope in halves]
        return grad, torch.cat(total), None, None, None
