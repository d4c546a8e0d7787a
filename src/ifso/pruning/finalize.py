"""The end of a run: the last surgery, a latency that is measured, what helps before training, checks, the result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ifso.common.batches import not_finite, on_device
from ifso.common.distributed import copy_from_first_, from_first, together
from ifso.common.module_state import named_tensors
from ifso.common.serialization import read_tensor_file
from ifso.common.text import one_line
from ifso.costs.cost import count, recount
from ifso.costs.latency import LatencyModel, measure_latency
from ifso.errors import DataError, IfsoError, RunError, VerificationError
from ifso.graph.channel_graph import ChannelGraph, by_group
from ifso.pruning.budget import phases
from ifso.pruning.cost_tracker import Ledger
from ifso.pruning.measures import (
    evaluated,
    measure,
    recalibrate,
    reconstruct,
    refuse_failed,
    samples_of,
    worst,
)
from ifso.pruning.recovery import Undo, distil_, is_better, mean_loss, norms_of, update_weights_
from ifso.pruning.result import UNDONE, Check, Measure, Network, PruneResult, networks_of
from ifso.pruning.run import Run
from ifso.pruning.selection import TOLERANCE, Target, smallest_shares
from ifso.runs.files import SCORES, SUMMARY, read_summary, refuse_other_files
from ifso.runs.folder import RunFolder
from ifso.runs.values import whole
from ifso.surgery.compact import compact_
from ifso.surgery.recipe import Round, remember
from ifso.surgery.store import WEIGHTS, read_recipe

MOST_CALIBRATIONS, TIMES = 3, 3
"""How often a run goes on for its latency budget, and how often the smaller network is timed each time."""

MOST_SHOWN = 4
"""Costs that were counted otherwise, in the detail of a check."""


def finish(run: Run) -> PruneResult:
    """Surgery, recovery, checks, files."""
    network = run.network
    run.compact_()
    if run.settings.budget.latency is not None:
        keep_latency(run)
    recipe = network.recipe()
    run.checks = [worst(run.checks)]
    _check(run)
    measure(run, "pruned")
    _recover(run)
    measures = tuple(Measure(one["stage"], one["values"]) for one in run.progress.measures)
    result = PruneResult(
        model=network.model, graph=network.original, keep=network.keep, recipe=recipe,
        before=count(network.original, network.original.kept(None)), after=count(network.original, network.kept),
        targets=run.settings.budget.targets, shares=run.ledger.shares(), removals=run.progress.removals,
        seconds=run.seconds, timings=dict(run.progress.timings), checks=tuple(run.checks), measures=measures,
        notes=tuple(run.progress.notes), latency=measured_latency(run),
        scores=by_group(network.original, run.scores), metrics=tuple(run.metrics), config=dict(run.config),
        folder=None if run.folder is None else run.folder.path, networks=_networks(run, measures),
        stages=tuple(run.progress.stages), floors=run.moves.at_floor(network.kept), samples=samples_of(run),
    )  # fmt: skip
    if run.folder is not None:
        run.folder.write_scores(result.scores)
        run.folder.write_model(result.model, result.recipe)
        run.folder.finish(result.summary())
    refuse_failed(result.checks)
    return result


def _networks(run: Run, measures: tuple[Measure, ...]) -> tuple[Network, ...]:
    """Those for all budgets, the ones from before a resume too; with models where there is no folder."""
    folder = None if run.folder is None else run.folder.path
    found = networks_of(run.progress.stages, folder, measures, run.ledger.shares())
    if folder is not None:
        return found
    models = [*(network.model for network in run.networks), run.network.model]
    return tuple(replace(network, model=model) for network, model in zip(found, models, strict=False))


def _check(run: Run) -> None:
    """The cost of the smaller network, traced and counted anew, and the budget."""
    promised = count(run.network.original, run.network.kept)
    wrong = recount(run.network.original, run.network.kept, run.network.graph)
    text = "; ".join(wrong[:MOST_SHOWN]) or f"{promised.macs:,} MACs, {promised.params:,} parameters"
    run.checks.append(Check("cost recounted", not wrong, text))
    target, shares = Target(run.settings.budget), run.ledger.shares()
    gap = target.gap(shares)
    kept = ", ".join(f"{shares[kind]:.2%} of {kind} kept, {share:.2%} asked" for kind, share in target.shares.items())
    stopped = f"; {run.progress.stopped}" if run.progress.stopped else ""
    run.checks.append(Check("budget met", gap <= 0 or bool(stopped), kept + stopped))
    if gap < -TOLERANCE:
        run.say(f"{-gap:.2%} more than asked was removed: one unit fewer would have missed the budget")


def _recover(run: Run) -> None:
    """Statistics of batch norms, layers fitted, and what else was asked for that helps before training."""
    model, settings = run.network.model, run.settings
    if run.folder is not None:
        run.folder.write_model(model, run.network.recipe())
    staged = bool(run.calibration)
    batches = max(settings.recalibrate if norms_of(model) and not staged else 0, settings.weight_update)
    data = together(lambda: [_next(run) for _ in range(batches)])
    if staged and not run.progress.removals:
        return  # every stage was undone: the network stays as it was
    if settings.recalibrate and norms_of(model):
        recalibrate(run, run.batches_here() if staged else data[: settings.recalibrate])
        measure(run, "batch norms recalibrated")
    if reconstruct(run, model):
        measure(run, "layers fitted to the unpruned network")
    if settings.weight_update:
        _update_weights(run, data[: settings.weight_update])
    if settings.recover:
        _distil(run)
    copy_from_first_(named_tensors(model).values())


def _next(run: Run) -> Any:
    batch = on_device(next(run.stream), run.network.device)
    if bool(not_finite(batch)):
        epoch, index = run.stream.position
        if run.folder is not None:
            run.folder.write_model(run.network.model, run.network.recipe())
        raise DataError(
            f"batch {index - 1} of epoch {epoch} holds NaN or infinity; the model is pruned, but was not recovered"
        )
    return batch


def _update_weights(run: Run, data: list[Any]) -> None:
    """ΔW, kept only if a loss it was not made from gets lower."""
    model = run.network.model
    undo, before = Undo(model), mean_loss(model, run.loss_fn, run.examples)
    try:
        with run.progress.timed("recovery"):
            size = update_weights_(model, run.network.graph, run.loss_fn, data, run.settings.damping)
    except IfsoError as error:
        undo()
        run.say(f"ΔW could not be computed: {error}")
        return
    after = mean_loss(model, run.loss_fn, run.examples)
    measure(run, f"weights updated by ΔW{'' if after < before else UNDONE}")
    if not after < before:
        undo()
        run.say(
            f"ΔW ({size:.1%} of the weights' norm) was undone: the loss of other batches went from {before:.4g} "
            f"to {after:.4g}; a larger damping makes it smaller"
        )


def _distil(run: Run) -> None:
    """Steps of distillation from the unpruned network, kept only if they do good."""
    model, steps = run.network.model, run.settings.recover
    assert run.teacher is not None
    undo, before = Undo(model), run.progress.measures[-1]["values"]
    with run.progress.timed("recovery"):
        distil_(model, run.teacher, run.loss_fn, run.calibration, steps, run.settings.seed)
    recalibrate(run, run.batches_here())
    reconstruct(run, model)
    after = evaluated(run, model)
    good = is_better(after, before)
    measure(run, f"{steps} steps of distillation{'' if good else UNDONE}", after)
    if not good:
        undo()
        run.say(f"{steps} steps of distillation were undone: they did harm")


def keep_latency(run: Run) -> None:
    """Measure; where the network is slower than its model said, correct the model and go on."""
    last = phases(run.settings.schedule, run.settings.budget, run.settings.units_per_step)[-1]
    for left in range(MOST_CALIBRATIONS, -1, -1):
        known = run.progress.latency
        assert known is not None
        known |= _timed_now(run, known["before"])
        share, wanted = known["share"], run.settings.budget.latency or 1.0
        if share <= wanted + max(TOLERANCE, known["spread"] / known["before"]):
            return
        modelled = run.ledger.shares()["latency"]
        corrected = LatencyModel.from_json(known["model"]).calibrated(modelled, share)
        why = _no_further(run, corrected) if left else f"{MOST_CALIBRATIONS} corrections were made"
        if why:
            run.say(f"latency: measured {share:.1%}, modelled {modelled:.1%}; the run ends here, since {why}")
            return
        run.say(f"latency: measured {share:.1%}, modelled {modelled:.1%}; the model was corrected and the run goes on")
        known["model"] = corrected.to_json()
        run.reopen()
        run.reach(last)
        run.compact_()


def _no_further(run: Run, latency: LatencyModel) -> str | None:
    """Why a run cannot go on by a corrected model of latency; None if it can."""
    if not run.network.told_apart:
        return "its units can no longer be told apart"
    ledger = Ledger(run.network.original, extra={"latency": latency.weights(run.network.original)})
    smallest = smallest_shares(ledger, run.moves, Target(run.settings.budget))["latency"]
    if smallest > (run.settings.budget.latency or 1.0):
        return f"no smaller network is below {smallest:.1%}"
    return None


def measured_latency(run: Run) -> dict[str, Any] | None:
    """Seconds before and after, the share and its spread; None if nobody asked for latency."""
    known = run.progress.latency
    if known is None:
        return None
    if "after" not in known:
        known |= _timed_now(run, known["before"])
    return {name: known[name] for name in ("before", "after", "share", "spread")}


def _timed_now(run: Run, before: float) -> dict[str, float]:
    """Seconds of the smaller network, on the first rank, when the machine was least busy with other things."""
    times = [measure_latency(run.network.model, run.network.graph.inputs) for _ in range(TIMES)]
    now = min(times, key=lambda latency: latency.median)
    return from_first({"after": now.median, "share": now.median / before, "spread": now.spread})


def finished_result(folder: RunFolder, model: nn.Module, graph: ChannelGraph) -> PruneResult:
    """The result that was written, with the smaller network in ``model``; a check that failed then fails again."""
    summary, (scores, _) = read_summary(folder.path), read_tensor_file(folder.path / SCORES)
    refuse_other_files(folder.path, folder.config)
    recipe = read_recipe(folder.path)
    if not recipe.rounds:
        raise RunError(f"{folder.path} holds a network that was not pruned; put that of the run back, or start anew")
    keep = _keep(graph, recipe.rounds[-1])
    compact_(model, graph, keep)
    stored = load_file(folder.path / WEIGHTS)
    with torch.no_grad():
        for name, tensor in named_tensors(model).items():
            tensor.copy_(stored[name])
    remember(model, recipe)
    measures = tuple(Measure(one.pop("stage"), one) for one in map(dict, summary["measures"]))
    result = PruneResult(
        model=model, graph=graph, keep=keep, recipe=recipe, before=count(graph, graph.kept(None)),
        after=count(graph, graph.kept(keep)), targets=summary["targets"], shares=summary["shares"],
        removals=summary["removals"], seconds=summary["seconds"], timings=summary["timings"],
        checks=tuple(Check(**check) for check in summary["checks"]),
        measures=measures,
        networks=networks_of(summary.get("stages", ()), folder.path, measures, summary["shares"]),
        notes=(*summary["notes"], "the run had already come to its end"), latency=summary["latency"],
        scores=scores, metrics=tuple(folder.metrics()[0]), config=folder.config, folder=folder.path,
        stages=tuple(summary.get("stages", ())), floors=tuple(summary.get("floors", ())),
        samples=whole(summary.get("samples")),
    )  # fmt: skip
    try:
        refuse_failed(result.checks)
    except VerificationError as error:
        raise VerificationError(f"{folder.path / SUMMARY}: {one_line(error)}") from None
    return result


def _keep(graph: ChannelGraph, last: Round) -> dict[str, Tensor]:
    """What the last round has left; those before it were made before the run."""
    keep = {name: torch.zeros_like(choice) for name, choice in graph.keep_all().items()}
    for group in last.groups:
        keep[group.name][list(group.kept)] = True
    return keep
