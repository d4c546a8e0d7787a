"""One stage of a staged run: score all units, remove the cheapest, fit the weights that read them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ifso.common.batches import rough_count, seed_of
from ifso.common.distributed import sum_over_ranks, together
from ifso.common.loss_fn import scalar
from ifso.common.module_state import named_tensors
from ifso.common.torch_state import undisturbed
from ifso.curvature.weight_space import Reader, readers
from ifso.pruning.events import Stage
from ifso.pruning.least_squares import least_squares
from ifso.pruning.measures import keep_network, measure_in_place, samples_of
from ifso.pruning.recovery import is_loss
from ifso.pruning.selection import Target

FEW = 4
"""A layer may read so many channels for each sample before a note says that samples are few."""

FEW_SAMPLES = "and the calibration has only"
"""By these words a note is known that this was said."""

if TYPE_CHECKING:
    from ifso.pruning.budget import Phase
    from ifso.pruning.run import Run


def run_stage(run: Run, phase: Phase, stages: int) -> None:
    """Take a run through one of its ``stages``; it is undone, and the run ends, if the measure falls too far."""
    scores = _scores(run)
    made, ranked = run.choose(scores, Target(phase.budget))
    units = [unit for move in made for unit in move.units]
    if run.settings.update and units:
        with run.progress.timed("update"):
            _fit_(run, units)
    run.scoring.remove_(units)
    run.scores.copy_(scores)
    asked = phase.ends_at is not None or run.settings.stop is not None
    values = measure_in_place(run) if asked else {"loss": _loss(run)}
    if _fell(run, values):
        _end_before(run, phase, values)
        return
    run.record(made, ranked, math.nan)
    shares, seconds = run.ledger.shares(), round(run.seconds, 3)
    kept = len(run.networks)
    reached = keep_network(run, phase.ends_at, values) if phase.ends_at is not None else {}
    network = run.networks[-1] if len(run.networks) > kept else None
    values = reached.get("values", values)
    done = {"stage": phase.stage, "units": len(units), "shares": shares, "values": values, "seconds": seconds}
    run.progress.stages.append({**done, **reached})
    run.listener.staged(Stage(phase.stage, stages, len(units), shares, values, seconds, samples_of(run), network))
    if run.shrink and phase.stage < stages:
        run.shrink_if_it_pays()
    run.keep_state(write=bool(reached))


def _scores(run: Run) -> Tensor:
    """Scores [original units] over all calibration batches."""
    with run.progress.timed("scores"), run.calibrating():
        together(lambda: run.scoring.prepare(run.calibration))
        for batch in run.calibration if run.scoring.criterion.needs_batches else run.calibration[:1]:
            torch.manual_seed(seed_of(run.settings.seed, run.progress.rounds))
            run.scoring.round([batch], train=None)
            run.progress.rounds += 1
        scores, _ = run.scoring.collect()
    if not bool(scores.isfinite().all()):
        run.stop(math.nan)
    run.refuse_zeros(scores)
    return scores


def _fit_(run: Run, units: Sequence[int]) -> None:
    """Fit the weights that read these units, which are about to go, without them."""
    network = run.network
    kept = network.kept.clone()
    kept[torch.tensor(list(units), device="cpu")] = False

    def passes() -> Iterator[None]:
        for batch in run.batches_here():
            with undisturbed(network.model), network.running():
                run.loss_fn(network.model, batch)
            yield

    gone = torch.cat([(network.kept & ~kept)[network.numbers], torch.zeros(1, dtype=torch.bool, device="cpu")])
    losing = [reader for reader in readers(network.graph, "cpu") if bool(gone[reader.owner].any())]
    stay = torch.cat([kept[network.numbers], torch.ones(1, dtype=torch.bool, device="cpu")])
    with run.calibrating():
        update = least_squares(network.model, losing, stay, passes, reduce=sum_over_ranks)
    update.apply_(network.model)
    for name, reason in update.left_alone.items():
        run.say(f"{name} was not updated: {reason}")
    _warn_of_few(run, losing)


def _warn_of_few(run: Run, losing: Sequence[Reader]) -> None:
    """Say so once where linear layers read far more channels than there are samples: they fit together by chance."""
    tensors, samples = named_tensors(run.network.model), sum(rough_count(batch) for batch in run.calibration)
    read = {reader.parameter: tensors[reader.parameter].shape[-1] for reader in losing}
    wide = {name: channels for name, channels in read.items() if tensors[name].dim() == 2 and samples * FEW < channels}
    if not wide or any(FEW_SAMPLES in note for note in run.progress.notes):
        return
    widest = max(wide, key=lambda name: wide[name])
    others = f" ({len(wide) - 1} other layers read too many, too)" if len(wide) > 1 else ""
    run.say(
        f"{widest} reads {wide[widest]} channels{others}, {FEW_SAMPLES} {samples} samples: scores and weights are "
        "unsure; give more, or smaller batches if the last, smaller one is left out"
    )


def _loss(run: Run) -> float:
    """The mean loss of the first batches, as the stages see the network."""
    model = run.network.model
    with torch.no_grad(), run.progress.timed("measures"), run.calibrating(), undisturbed(model), run.network.running():
        return fmean(float(scalar(run.loss_fn(model, batch))) for batch in run.examples)


def _fell(run: Run, values: Mapping[str, float]) -> bool:
    """Return whether the measure has fallen, or a loss risen, by more than the user allows."""
    if run.settings.stop is None:
        return False
    name, value = next(iter(values.items()))
    before = run.progress.measures[0]["values"][name]
    fall = value - before if is_loss(name) else before - value
    return not fall <= run.settings.stop


def _end_before(run: Run, phase: Phase, values: Mapping[str, float]) -> None:
    """Back to the network as it was after the stage before, with which the run ends."""
    name, value = next(iter(values.items()))
    run.undo()
    run.progress.stopped = (
        f"stage {phase.stage} was undone, and the run ends: {name} went from "
        f"{run.progress.measures[0]['values'][name]:.4g} to {value:.4g}, by more than stop={run.settings.stop:g}"
    )
    run.say(run.progress.stopped)
    run.keep_state()
