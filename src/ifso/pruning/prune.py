"""``ifso.prune``: from a trained network to a smaller one at a budget."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ifso.common.batches import REMEMBERS, BatchStream, dealt_again, on_device, remembers
from ifso.common.distributed import rank, together
from ifso.common.loss_fn import LossFn
from ifso.common.module_state import copy_of
from ifso.common.torch_state import same_modes
from ifso.criteria.base import Criterion
from ifso.errors import BudgetError
from ifso.graph.execution import trainable
from ifso.graph.naming import names_in
from ifso.graph.tracing import check_model
from ifso.pruning.budget import Budget, Schedule
from ifso.pruning.constraints import ALL, MinShare, MinUnits
from ifso.pruning.events import Listener
from ifso.pruning.finalize import finish, finished_result
from ifso.pruning.measures import LOSS_BATCHES, measure
from ifso.pruning.preflight import (
    PRUNED_HERE,
    Traced,
    agreed_config,
    check_budget,
    checked_batches,
    trace_and_moves,
    without_unread,
)
from ifso.pruning.progress import listener_for
from ifso.pruning.recovery import Evaluate
from ifso.pruning.result import PruneResult
from ifso.pruning.run import Progress, Run
from ifso.pruning.scoring_loop import MakeOptimizer, ScoringLoop
from ifso.pruning.settings import Settings, settings_of, sgd
from ifso.pruning.shrinking_network import ShrinkingNetwork
from ifso.runs.files import RESUMED, STRUCTURE, holds_run
from ifso.runs.folder import Checkpoint, RunFolder
from ifso.runs.structure import structure_of

PathLike = str | os.PathLike[str]
AUTO = "auto"
Modules = nn.Module | Iterable[str | nn.Module]


def prune(
    model: nn.Module,
    train_batches: Iterable[Any],
    loss_fn: LossFn,
    *,
    budget: Budget,
    example_inputs: Any,
    criterion: str | Criterion | None = None,
    schedule: Schedule | None = None,
    normalize: str | None = None,
    update: bool | None = None,
    recover: int = 0,
    stop: float | None = None,
    calibration: int | None = None,
    accumulate: int | None = None,
    accumulation: str | None = None,
    batches_per_score: int | None = None,
    units_per_step: int | None = None,
    round_to: int | None = None,
    min_units: MinUnits = 1,
    min_share: MinShare | None = None,
    ignore: Modules = (),
    only: Modules = (),
    optimizer: MakeOptimizer | None = None,
    resume: PathLike | None = None,
    out: PathLike | None = None,
    overwrite: bool = False,
    seed: int = 0,
    preset: str | None = None,
    train_mode: bool = True,
    evaluate: Evaluate | None = None,
    recalibrate: int = 20,
    weight_update: int = 0,
    damping: float = 3.0,
    progress: bool | None = None,
    listener: Listener | None = None,
    about: Mapping[str, Any] | None = None,
    checkpoint_every: float = 30.0,
    compact: bool = True,
) -> PruneResult:
    """Make a trained network smaller, in place, until a budget is met; without training, in stages.

    Each stage scores all units on the calibration batches, removes those that cost least for what they save, about 5 %
    of the budget's cost, and fits the weights that read them anew, in closed form. At the end batch norms get new
    statistics, and everything is checked. ``preset="paper"`` is Algorithm 2 of the paper instead: again and again, add
    up ``accumulate`` scores with one step of the optimizer after each, and remove the least important unit. So is every
    call that gives an option of its own (``accumulate``, ``batches_per_score``, ``units_per_step``, ``optimizer``) or
    another schedule.

    Args:
        model: trained; it is changed in place. A network that was pruned before is pruned further.
        train_batches: an iterable that can be gone through again, such as a DataLoader. Tensors are brought to the
            device of the model.
        loss_fn: ``loss_fn(model, batch)`` gives the mean loss of a batch.
        budget: :class:`ifso.Budget`, the shares kept. ``Budget(macs=(0.8, 0.5))`` leaves a network for each share
            (staged and incremental runs): in folders below ``out``, and in ``result.networks``.
        example_inputs: what the model takes, for :func:`ifso.trace` and for counting MACs.
        criterion: a name or an object of :mod:`ifso.criteria`; ``"true-loss"`` by default, ``"ifso"`` in Algorithm 2.
        schedule: ``"staged"`` (the default), ``"incremental"`` (Algorithm 2), ``"one-shot"`` (no steps of the
            optimizer, everything goes at once) or ``ifso.Mixed(0.75)``.
        normalize: what scores are divided by: ``"macs"``, ``"params"``, ``"memory"``, ``"sqrt-memory"`` (the paper),
            ``"latency"`` or ``"none"``; by default what the budget counts.
        update: fit the weights that read removed units anew in each stage (staged runs: True).
        recover: steps of distillation from the unpruned network on the calibration batches at the end; undone if they
            do harm.
        stop: how far the first number of ``evaluate`` may fall (or, of a loss, rise) before a staged run ends with the
            last network that held.
        calibration: samples of ``train_batches`` that a staged run looks at: 1,024 by default, fewer for networks that
            take more than 20 billion multiply-adds each.
        accumulate: k, scores (each followed by a step) before a removal.
        accumulation: ``"sum"`` adds the k scores up, with ``"last"`` only the k-th counts (Fig. 8 of the paper).
        batches_per_score: b, proxy batches for one score.
        units_per_step: removals after each k scores.
        round_to: layers keep multiples of so many channels.
        min_units: every layer keeps at least so many units. ``{"layer1.*": 16, "stem": 32}`` says it of the layers that
            a name or a pattern stands for; the last one that fits counts, other layers keep what is usual.
        min_share: every layer keeps at least this share of its units (0.1 in staged runs); also by name or pattern.
        ignore: modules whose channels are left alone: names, patterns such as ``"layer1.*"`` or the modules themselves.
        only: modules that may lose units, named in the same way; all by default.
        optimizer: a function from parameters to an optimizer; SGD with momentum 0.9, weight decay 1e-4 and a learning
            rate of 0.01 by default.
        resume: the folder of a run to go on with; the settings must be the same, and ``model`` as it was before it.
            ``"auto"`` goes on with the run in ``out`` if there is one, and starts one there if not.
        out: a new folder for the run.
        overwrite: a run that is in ``out`` already makes room for this one, once all has been checked.
        seed: of the order of data and what is random in the model.
        preset: ``"paper"`` for Algorithm 2 as the paper has it, ``"authors"`` as the authors' program does it: with
            its finite differences and its learning rate of 0.1.
        train_mode: score and step in train mode, as the paper does; False leaves every module in the mode it is in.
        evaluate: ``evaluate(model)`` gives a number, or numbers by any names (an accuracy …), that are taken before,
            after and between, with the model in eval mode. The first is what a report shows.
        recalibrate: batches for new statistics of batch norms at the end (all calibration batches in a staged run); 0
            leaves them.
        weight_update: batches for ΔW of Proposition 1 at the end; 0 for none.
        damping: λ of that ΔW.
        progress: show the progress on standard error: None does if no ``listener`` is given, False never.
        listener: hears of the progress, see :mod:`ifso.pruning.events`.
        about: further plain values to be written into ``config.json``. The names of ``"model"``, ``"weights"`` and
            ``"data"`` as the command line has them let ``ifso eval RUN`` and its like open the run without being told.
        checkpoint_every: seconds between checkpoints.
        compact: take units out of memory during the run when that pays. The result does not depend on it, but for
            rounding.

    Returns:
        The smaller network with its costs, measures, checks and recipe. It was verified: against the masked network,
        its cost counted anew, the budget.

    Raises:
        BudgetError: an option that cannot be meant, or a budget that cannot be met.
        TraceError: a model that does not run on ``example_inputs``, or cannot be followed.
        WeightsError: weights with NaN or infinity.
        DataError: batches with NaN or infinity.
        ScoreError: scores that are all zero or cannot be computed.
        DivergedError: a loss that became NaN or infinite; the last good state is in the model.
        RunError: a folder that cannot be written or resumed.
        VerificationError: a result that failed a check, and which.
    """
    if torch.get_default_device().type == "meta":
        raise BudgetError("torch's default device is meta, where there are no numbers; set another, or leave its block")
    together(partial(check_model, model))
    for name, floor in (("min_units", min_units), ("min_share", min_share)):
        names_in(model, [pattern for pattern in floor if pattern != ALL] if isinstance(floor, Mapping) else (), name)
    settings, learning_rate = settings_of(
        preset, optimizer, budget=budget, criterion=criterion, schedule=schedule, normalize=normalize, update=update,
        recover=recover, stop=stop, calibration=calibration, accumulate=accumulate, accumulation=accumulation,
        batches_per_score=batches_per_score, units_per_step=units_per_step, round_to=round_to, min_units=min_units,
        min_share=min_share, ignore=names_in(model, ignore, "ignore", BudgetError),
        only=names_in(model, only, "only", BudgetError), seed=seed, train_mode=train_mode,
        recalibrate=recalibrate, weight_update=weight_update, damping=damping,
    )  # fmt: skip
    resume, out = _folders(resume, out, overwrite=overwrite)
    make_optimizer, told = optimizer or partial(sgd, learning_rate=learning_rate), listener_for(progress, listener)
    devices = sorted({tensor.device for tensor in model.parameters() if tensor.is_cuda}, key=str)
    with trainable(), same_modes(model), torch.random.fork_rng(devices=devices):
        so_far = Progress()
        config = agreed_config(model, settings, make_optimizer, about or {})
        traced = trace_and_moves(model, example_inputs, settings, so_far)
        least = LOSS_BATCHES if evaluate is None or weight_update > 0 else 1
        batches, notes = checked_batches(model, traced.graph, settings, train_batches, loss_fn, least)
        traced, unread = without_unread(model, traced, settings, example_inputs, loss_fn, batches[0])
        if resume is None:
            check_budget(model, traced, settings, so_far)
        with _opened(config, resume, out, overwrite=overwrite) as folder:
            if folder is not None and folder.finished:
                return together(lambda: finished_result(folder, model, traced.graph))
            checkpoint = together(lambda: None if folder is None else folder.newest_checkpoint())
            if checkpoint is None and resume is not None:
                check_budget(model, traced, settings, so_far)
            run = together(lambda: _begin(
                model, traced, settings, loss_fn, make_optimizer, train_batches, batches, so_far, checkpoint,
                listener=told, evaluate=evaluate, config=config, checkpoint_every=checkpoint_every, shrink=compact,
            ))  # fmt: skip
            for note in (*notes, *unread):
                run.say(note)
            if folder is not None and rank() == 0:
                _write_into(folder, run, remembered=remembers(train_batches))
            PRUNED_HERE.add(model)
            return _complete(run)


def _folders(resume: Any, out: Any, *, overwrite: bool) -> tuple[Path | None, Path | None]:
    """``resume`` and ``out`` as paths; ``resume="auto"`` is decided by what is there."""
    auto, paths = isinstance(resume, str) and resume == AUTO, []
    for name, path in (("resume", resume), ("out", out)):
        try:
            paths.append(None if path is None else Path(path).expanduser())
        except (TypeError, RuntimeError) as error:
            raise BudgetError(f"{name} must be a path, got {path!r} ({error})") from None
    resume, out = paths
    if overwrite and (out is None or resume is not None):
        raise BudgetError("overwrite=True needs out=, the folder of the run that makes room, and no resume=")
    if auto:
        if out is None:
            raise BudgetError("resume='auto' needs out=, the folder of the run that is started or goes on")
        resume = out if holds_run(out) else None
    if resume is not None and out is not None and out.resolve() != resume.resolve():
        raise BudgetError(f"out={str(out)!r} beside resume={str(resume)!r}; a run goes on in its own folder")
    return resume, out


@contextmanager
def _opened(
    config: Mapping[str, Any], resume: Path | None, out: Path | None, *, overwrite: bool
) -> Iterator[RunFolder | None]:
    """The folder of the run, None where nothing is written. Ranks but the first only read one that goes on.

    A new run that fails before its first removal leaves none behind.
    """

    def begin() -> RunFolder | None:
        if resume is not None and not rank():
            return RunFolder.resume(resume, config)
        return RunFolder.create(out, config, overwrite=overwrite) if out is not None and not rank() else None

    folder = together(begin)
    try:
        if resume is not None:
            folder = together(lambda: folder or RunFolder.resume(resume, config, reading=True))
        yield folder
    except (Exception, SystemExit):
        if folder is not None and rank() == 0 and resume is None:
            folder.discard_if_empty()
        raise
    finally:
        if folder is not None:
            folder.close()


def _begin(
    model: nn.Module,
    traced: Traced,
    settings: Settings,
    loss_fn: LossFn,
    make_optimizer: MakeOptimizer,
    train_batches: Iterable[Any],
    batches: list[Any],
    progress: Progress,
    checkpoint: Checkpoint | None,
    *,
    shrink: bool,
    **others: Any,
) -> Run:
    """The run at its beginning, or where a checkpoint says."""
    staged = settings.schedule == "staged"
    teacher = copy_of(model) if (staged and settings.update) or settings.recover else None
    network = ShrinkingNetwork(model, traced.graph, traced.left_alone)
    position = (0, 0)
    if checkpoint is not None:
        _, tensors, state = checkpoint
        progress = Progress.from_json(state["progress"])
        position = (state["position"][0], state["position"][1])
        network.shrink_to_(tensors)
    scoring = ScoringLoop(network, settings.criterion, loss_fn, make_optimizer, capture=not staged)
    if checkpoint is not None:
        scoring.fill_(tensors, state["optimizer"])
    examples = [on_device(batch, network.device) for batch in batches[:LOSS_BATCHES]]
    run = Run(
        network, scoring, settings, BatchStream(train_batches, settings.seed, position), examples, scoring.loss_fn,
        traced.moves, progress, teacher=teacher, calibration=dealt_again(batches, settings.seed) if staged else (),
        shrink=shrink and not settings.criterion.masks_itself and settings.criterion.needs != "nothing", **others,
    )  # fmt: skip
    if checkpoint is not None:
        run.go_on_(tensors, state)
    return run


def _write_into(folder: RunFolder, run: Run, *, remembered: bool) -> None:
    """From now on a run writes into its folder, after what is already there."""
    run.folder = folder
    folder.rewind(run.progress.removals)
    run.metrics = folder.metrics()[0]
    folder.write_json(STRUCTURE, structure_of(run.network.original))
    if run.progress.removals:
        run.say(f"{RESUMED} {run.progress.removals}")
        if remembered:
            run.say(REMEMBERS)
    for note in folder.notes:
        run.say(note)


def _complete(run: Run) -> PruneResult:
    """Measure, remove, finish."""
    model = run.network.model
    try:
        if not run.progress.measures:
            measure(run, "unpruned")
        if run.settings.train_mode:
            model.train()
        run.go()
        return finish(run)
    finally:
        for parameter in model.parameters():
            parameter.grad = None
        run.listener.finished()
