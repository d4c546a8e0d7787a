"""What the network of a run is worth, whether a smaller one does the same, and the networks at budgets on its way."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ifso.common.batches import not_finite, on_device
from ifso.common.distributed import gathered, sum_over_ranks, together
from ifso.common.loss_fn import LossFn, outputs_of, scalar, steady_
from ifso.common.tensors import map_tensors
from ifso.common.text import measured
from ifso.common.torch_state import full_float32, same_modes, undisturbed
from ifso.errors import ScoreError, VerificationError
from ifso.pruning.budget import Budget
from ifso.pruning.reconstruction import reconstruct_
from ifso.pruning.recovery import mean_loss, norms_of, recalibrate_
from ifso.pruning.result import Check, Network
from ifso.pruning.shrinking_network import ShrinkingNetwork
from ifso.surgery.compact import as_float64, in_float64
from ifso.surgery.recipe import Recipe

if TYPE_CHECKING:
    from ifso.pruning.run import Run

LOSS_BATCHES = 4
"""Batches whose mean loss is measured where a user gives no ``evaluate``."""

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
ROUGH = 5e-2
"""For outputs in half precision."""


def evaluated(run: Run, model: nn.Module) -> dict[str, float]:
    """What ``evaluate`` says of a model in eval mode; without it, its loss over the first batches."""
    with run.progress.timed("measures"), same_modes(model):
        model.eval()
        if run.evaluate is None:
            return {"loss": mean_loss(model, run.loss_fn, run.examples)}
        return _as_numbers(run.evaluate(model))


def _as_numbers(found: Any) -> dict[str, float]:
    """What ``evaluate`` returned as numbers by name."""
    values = found if isinstance(found, Mapping) else {"value": found}
    if not values:
        raise ScoreError("evaluate returned no numbers; it must return a number or a dict of numbers")
    try:
        return {str(name): float(value) for name, value in values.items()}
    except (TypeError, ValueError, RuntimeError):
        kind = type(found).__name__
        raise ScoreError(f"evaluate returned {kind}; it must return a number or a dict of numbers") from None


def measure(run: Run, stage: str, values: dict[str, float] | None = None) -> None:
    """Put on record what the network is worth now: ``values``, if they are known."""
    values = evaluated(run, run.network.model) if values is None else values
    run.progress.measures.append({"stage": stage, "values": values})
    words = (f"{name} {measured(name, value, samples_of(run))}" for name, value in values.items())
    run.listener.said(f"{stage}: {', '.join(words)}")


def samples_of(run: Run) -> int | None:
    """How many samples an accuracy is of, if ``evaluate`` says so."""
    samples = getattr(run.evaluate, "samples", None)
    return samples if isinstance(samples, int) and samples > 0 else None


def measure_in_place(run: Run) -> dict[str, float]:
    """What the network of a staged run is worth now, units that are gone still in place as zeros."""
    recalibrate(run, run.batches_here())
    with run.network.running():
        return evaluated(run, run.network.model)


def recalibrate(run: Run, batches: Iterable[Any]) -> None:
    """New statistics for batch norms, the same on all ranks, if there are any and the user wants that."""
    model = run.network.model
    if not run.settings.recalibrate or not norms_of(model):
        return
    with run.progress.timed("recovery"):
        recalibrate_(model, run.loss_fn, batches)


def reconstruct(run: Run, model: nn.Module) -> bool:
    """Fit the layers of a compacted network to the outputs of the unpruned one; False if that does no good."""
    if run.teacher is None or not run.settings.update or (norms_of(model) and not run.settings.recalibrate):
        return False
    with run.progress.timed("update"):
        return reconstruct_(
            model, run.teacher, run.network.original, run.network.kept, run.loss_fn, run.batches_here,
            reduce=sum_over_ranks,
        )  # fmt: skip


def keep_network(run: Run, budget: Budget, values: Mapping[str, float]) -> dict[str, Any]:
    """Check and keep the network for a budget of several; return what its stage says of it, nothing for one alone."""
    if len(run.settings.budget.path) == 1:
        return {}
    if budget != run.settings.budget.path[-1]:
        model, recipe = _checked_copy(run)
        if reconstruct(run, model):
            values = evaluated(run, model)
        _keep(run, budget, model, recipe, values)
    return {"budget": budget.targets, "network": _name_of(budget), "values": values}


def keep_on_the_way(run: Run, budget: Budget) -> dict[str, Any]:
    """Keep the network for a budget of Algorithm 2 as a run to this budget would end; return what stands for its stage.

    The run itself goes on with the batches after those that gave the network new statistics.
    """
    values: dict[str, float] = {}
    if budget != run.settings.budget.path[-1]:
        model, recipe = _checked_copy(run)
        if run.settings.recalibrate and norms_of(model):
            data = together(lambda: [next(run.stream) for _ in range(run.settings.recalibrate)])
            run.scoring.spoilt += sum(int(not_finite(batch)) for batch in data)
            if any(gathered(int(run.scoring.spoilt))):
                run.stop(math.nan)
            with run.progress.timed("recovery"):
                recalibrate_(model, run.loss_fn, (on_device(batch, run.network.device) for batch in data))
        values = evaluated(run, model)
        _keep(run, budget, model, recipe, values)
    units = int((~run.network.kept).sum()) - sum(stage["units"] for stage in run.progress.stages)
    return {
        "stage": len(run.progress.stages) + 1, "units": units, "shares": run.ledger.shares(), "values": values,
        "seconds": round(run.seconds, 3), "budget": budget.targets, "network": _name_of(budget),
    }  # fmt: skip


def _checked_copy(run: Run) -> tuple[nn.Module, Recipe]:
    """The network as it is now without what is gone, which was compared with it; and its recipe."""
    before = outputs(run.network, run.loss_fn, run.examples[0])
    model, recipe = run.network.compacted_copy()
    smaller = ShrinkingNetwork(model, run.network.original)
    refuse_failed([compare(before, outputs(smaller, run.loss_fn, run.examples[0]))])
    return model, recipe


def _keep(run: Run, budget: Budget, model: nn.Module, recipe: Recipe, values: Mapping[str, float]) -> None:
    """In its folder, or in memory if the run has none."""
    folder = None if run.folder is None else run.folder.write_network(_name_of(budget), model, recipe)
    run.networks.append(Network(budget.targets, run.ledger.shares(), values, folder, None if folder else model))


def _name_of(budget: Budget) -> str:
    """What the network for one budget of several is called.

    >>> _name_of(Budget(macs=0.5, params=0.7))
    'macs-0.5-params-0.7'
    """
    return "-".join(f"{kind}-{share:g}" for kind, share in budget.targets.items())


def outputs(network: ShrinkingNetwork, loss_fn: LossFn, batch: Any) -> list[Tensor]:
    """Everything the model gives on a batch, and the loss. In eval mode or, for a model with no loss there, train mode.

    Dropout is off, and so is TF32 in convolutions. A model whose course values decide, such as a detector that sorts
    boxes, computes in float64 if it can, so that rounding decides nothing.
    """
    with same_modes(network.model), full_float32(), network.running():
        if network.graph.on_real_tensors:
            with suppress(Exception), in_float64(network.model):
                return _run(network.model, loss_fn, map_tensors(batch, as_float64))
        return _run(network.model, loss_fn, batch)


@torch.no_grad()
def _run(model: nn.Module, loss_fn: LossFn, batch: Any) -> list[Tensor]:
    steady_(model, loss_fn, batch)
    with undisturbed(model), outputs_of(model) as found:
        loss = loss_fn(model, batch)
    return [leaf.detach().clone() for leaf in tree_leaves([*found, scalar(loss)]) if isinstance(leaf, Tensor)]


def compare(masked: list[Tensor], compacted: list[Tensor]) -> Check:
    """Check that the compacted network gives what the masked one gave."""
    name = "compacted equals masked"
    shapes = [[tuple(tensor.shape) for tensor in side] for side in (masked, compacted)]
    if shapes[0] != shapes[1]:
        return Check(name, passed=False, detail=f"outputs of shapes {shapes[1]} instead of {shapes[0]}")
    largest, passed = 0.0, True
    for one, other in zip(masked, compacted, strict=True):
        if not one.is_floating_point():
            passed &= torch.equal(one, other)
            continue
        if not bool(one.isfinite().all() and other.isfinite().all()):
            words = "the network gives NaN or infinity on a batch, so that nothing can be compared; check its weights"
            return Check(name, passed=False, detail=words)
        scale = one.abs().max().clamp(min=1e-12) if one.numel() else torch.ones(())
        error = float(((one - other).abs().max() / scale).item()) if one.numel() else 0.0
        largest = max(largest, error)
        passed &= error <= max(TOLERANCES.get(side.dtype, ROUGH) for side in (one, other))
    return Check(name, passed, f"largest relative error {largest:.1e} on a batch", largest)


def refuse_failed(checks: Sequence[Check]) -> None:
    """VerificationError if one of them failed."""
    failed = [f"{check.name}: {check.detail}" for check in checks if not check.passed]
    if failed:
        raise VerificationError(f"the result failed its check: {'; '.join(failed)}")


def worst(checks: Sequence[Check]) -> Check:
    """Of several checks of the same thing the one that failed, or came nearest to it."""
    return max(checks, key=lambda check: (not check.passed, check.error))
