"""``ifso.prune``: from a trained network to a smaller one at a budget."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ifso.common.batch_stream import (
    REMEMBERS,
    BatchStream,
    dealt_again,
    first_batches,
    not_finite,
    on_device,
    remembers,
)
from ifso.common.batches import rough_count
from ifso.common.distributed import from_first, rank, together
from ifso.common.loss_fn import LossFn, WatchedLoss
from ifso.common.module_state import copy_of
from ifso.common.torch_state import same_modes
from ifso.costs.cost import count
from ifso.criteria.base import Criterion
from ifso.errors import BudgetError, DataError, TraceError
from ifso.graph.channel_graph import ChannelGraph
from ifso.graph.execution import trainable, unmarked
from ifso.graph.naming import names_in
from ifso.graph.tracing import check_model, trace
from ifso.graph.units import UNUSED
from ifso.pruning.budget import STAGED, Budget, Schedule, usual
from ifso.pruning.cost_tracker import Ledger
from ifso.pruning.events import Listener
from ifso.pruning.finalize import LOSS_BATCHES, Finisher
from ifso.pruning.floors import ALL, MinShare, MinUnits
from ifso.pruning.latency_budget import timed
from ifso.pruning.moves import Moves
from ifso.pruning.progress import listener_for
from ifso.pruning.recovery import Evaluate, mean_loss, norms_of, refuse_spoilt_weights
from ifso.pruning.reminders import reminders
from ifso.pruning.result import PruneResult, finished_result
from ifso.pruning.run import Progress, Run
from ifso.pruning.scoring_loop import MakeOptimizer, ScoringLoop
from ifso.pruning.selection import Target, check_reachable
from ifso.pruning.settings import Settings, criterion_of, describe, sgd
from ifso.pruning.shrinking_network import ShrinkingNetwork
from ifso.pruning.state import shrink_to_
from ifso.runs.files import RESUMED, STRUCTURE, holds_run, refuse_other
from ifso.runs.folder import Checkpoint, RunFolder
from ifso.runs.structure import structure_of
from ifso.surgery.recipe import digest_of, name_of

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
        budget: :class:`ifso.Budget`, the shares kept. ``Budget(macs=(0.8, 0.5))`` leaves a network for each share: in
            folders below ``out``, and in ``result.networks``.
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
        about: further plain values to be written into ``config.json``.
        checkpoint_every: seconds between checkpoints.
        compact: take units out of memory during the run when that pays. The result does not depend on it, but for
            rounding.

    Every result is verified: the smaller network against the masked one, its cost counted anew, the budget. A
    :class:`~ifso.errors.VerificationError` says what failed.
    """
    if torch.get_default_device().type == "meta":
        raise BudgetError("torch's default device is meta, where there are no numbers; set another, or leave its block")
    together(partial(check_model, model))
    ignored, chosen_modules = (_names(model, given, name) for name, given in (("ignore", ignore), ("only", only)))
    for name, floor in (("min_units", min_units), ("min_share", min_share)):
        _names(model, [pattern for pattern in floor if pattern != ALL] if isinstance(floor, Mapping) else (), name)
    of_algorithm_2: dict[str, Any] = {
        "accumulate": accumulate, "accumulation": accumulation, "batches_per_score": batches_per_score,
        "units_per_step": units_per_step,
    }  # fmt: skip
    other = schedule if schedule != "staged" else None
    chosen = usual(preset, {**of_algorithm_2, "optimizer": optimizer, "schedule": other})
    if schedule == "staged":
        chosen = STAGED if preset is None else {**chosen, "update": True, "min_share": STAGED["min_share"]}
    if isinstance(min_share, Mapping):
        min_share = {ALL: chosen["min_share"], **min_share}
    given: dict[str, Any] = {"schedule": schedule, "update": update, "min_share": min_share}
    settings = Settings(
        budget=budget, criterion=criterion_of(criterion or chosen["criterion"]),
        **{name: chosen[name] if value is None else value for name, value in given.items()},
        normalize=normalize or chosen["normalize"], recover=recover, stop=stop, calibration=calibration,
        **{name: value for name, value in of_algorithm_2.items() if value is not None},
        round_to=round_to, min_units=min_units, ignore=ignored, only=chosen_modules, seed=seed,
        train_mode=train_mode, recalibrate=recalibrate, weight_update=weight_update, damping=damping,
    )  # fmt: skip
    resume, out = (None if path is None else _place(name, path) for name, path in (("resume", resume), ("out", out)))
    if overwrite and (out is None or resume is not None):
        raise BudgetError("overwrite=True needs out=, the folder of the run that makes room, and no resume=")
    if resume == Path(AUTO):
        if out is None:
            raise BudgetError("resume='auto' needs out=, the folder of the run that is started or goes on")
        resume = out if holds_run(out) else None
    if resume is not None and out is not None and out.resolve() != resume.resolve():
        raise BudgetError(f"out={str(out)!r} beside resume={str(resume)!r}; a run goes on in its own folder")
    devices = sorted({tensor.device for tensor in model.parameters() if tensor.is_cuda}, key=str)
    with trainable(), same_modes(model), torch.random.fork_rng(devices=devices):
        start = _Start(
            model, train_batches, loss_fn, settings, optimizer or partial(sgd, learning_rate=chosen["learning_rate"]),
            listener_for(progress, listener), dict(about or {}), checkpoint_every,
            compact and not settings.criterion.masks_itself and settings.criterion.needs != "nothing",
        )  # fmt: skip
        return start.prune(example_inputs, resume, out, evaluate, overwrite=overwrite)


def _names(model: nn.Module, given: Any, option: str) -> tuple[str, ...]:
    """The names of what the user calls by name, by pattern or as a module."""
    if isinstance(given, str) or not isinstance(given, (nn.Module, Iterable)):
        what = f"one string; give a tuple of names: {option}=({given!r},)" if isinstance(given, str) else "no tuple"
        raise BudgetError(f"{option}={given!r} is {what}")
    return names_in(model, given, option)


def _place(name: str, path: Any) -> Path:
    """A folder as the user writes it."""
    try:
        return Path(path).expanduser()
    except (TypeError, RuntimeError) as error:
        raise BudgetError(f"{name} must be a path, got {path!r} ({error})") from None


class _Start:
    """A run put together: traced, checked, its folder opened, its state brought back."""

    def __init__(
        self,
        model: nn.Module,
        train_batches: Iterable[Any],
        loss_fn: LossFn,
        settings: Settings,
        make_optimizer: MakeOptimizer,
        listener: Listener,
        about: dict[str, Any],
        checkpoint_every: float,
        shrink: bool,
    ) -> None:
        self._model, self._batches, self._loss_fn, self._settings = model, train_batches, loss_fn, settings
        self._make_optimizer, self._listener, self._about = make_optimizer, listener, about
        self._checkpoint_every, self._shrink = checkpoint_every, shrink
        self._ignore = settings.ignore
        self._reminders: list[str] = []

    def prune(
        self,
        example_inputs: Any,
        resume: PathLike | None,
        out: PathLike | None,
        evaluate: Evaluate | None,
        *,
        overwrite: bool,
    ) -> PruneResult:
        """The whole way."""
        progress = Progress()
        config = together(self._config)
        first = from_first(config["settings"])
        together(lambda: refuse_other(config["settings"], first, "the first rank"))
        with progress.timed("trace"):
            graph, moves = together(lambda: self._trace(example_inputs, progress))
        looked_at = LOSS_BATCHES if evaluate is None or self._settings.weight_update > 0 else 1
        batches = together(lambda: self._first_batches(graph, looked_at))
        if resume is None:
            self._check_budget(graph, moves, progress)
        folder = together(lambda: self._open(config, resume, out, overwrite) if rank() == 0 else None)
        try:
            if resume is not None:
                folder = together(lambda: folder or RunFolder.resume(resume, config, reading=True))
            if folder is not None and folder.finished:
                return together(lambda: finished_result(folder, self._model, graph))
            found = together(lambda: None if folder is None else folder.newest_checkpoint())
            if found is None and resume is not None:
                self._check_budget(graph, moves, progress)
            run = together(lambda: self._run(graph, moves, progress, batches, found))
            for note in self._reminders:
                run.say(note)
            if folder is not None and rank() == 0:
                self._write_into(folder, run)
            return self._through(run, evaluate, config)
        except (Exception, SystemExit):
            if folder is not None and rank() == 0 and resume is None:
                folder.discard_if_empty()
            raise
        finally:
            if folder is not None:
                folder.close()

    def _trace(self, example_inputs: Any, progress: Progress) -> tuple[ChannelGraph, Moves]:
        """In the mode the model is in, or the other one where only that runs, or runs more of the model."""
        try:
            graph = trace(self._model, example_inputs, ignore=self._ignore)
        except TraceError:
            if not self._model.training:
                raise
            found = self._traced(example_inputs, training=True)
            graph = found or trace(self._model.eval(), example_inputs, ignore=self._ignore)
        graph = self._both_modes(graph, example_inputs, progress)
        limits = self._settings
        moves = Moves(
            graph, round_to=limits.round_to, min_units=limits.min_units, min_share=limits.min_share, only=limits.only
        )
        return graph, moves

    def _both_modes(self, graph: ChannelGraph, example_inputs: Any, progress: Progress) -> ChannelGraph:
        """The graph of the mode in which more of the model runs: heads that only train must lose their inputs, too.

        What such heads make themselves is left alone, as scores say nothing of it. Where each mode has heads of its
        own, no graph shows all of them, and what leads to those that it does not show is left alone.
        """
        idle, mode = _idle(graph), self._model.training
        if not idle and not (mode and _answers(graph) > 1):
            return graph
        with same_modes(self._model):
            other = self._traced(example_inputs, training=not mode) or graph
        here, there = _idle(other) - idle, idle - _idle(other)
        widest = mode if here or not there else not mode
        if not here and not there:
            return graph
        heads, where = there or here, "train" if widest else "eval"
        named = f"{min(heads)} and {len(heads) - 1} other parameters" if len(heads) > 1 else min(heads)
        if here and there:
            alone = _holding(other, lambda members: members - there if members & there else set())
            note = f"each mode has heads of its own; what leads to {named} is left alone"
        else:
            alone = _holding(other if there else graph, lambda members: members if members <= heads else set())
            note = f"costs are those of {where} mode, in which {named} run{'' if len(heads) > 1 else 's'}, too"
        progress.notes.append(note)
        self._ignore = (*self._ignore, *sorted(alone))
        if widest != mode:
            return self._traced(example_inputs, training=widest) or graph
        return trace(self._model, example_inputs, ignore=self._ignore)

    def _traced(self, example_inputs: Any, *, training: bool) -> ChannelGraph | None:
        """The graph in that mode, or None if there is none. Batch norms that cannot train on one sample do not."""
        for trains in (True, False) if training and norms_of(self._model) else (True,):
            self._model.train(training)
            for norm in norms_of(self._model) if not trains else ():
                norm.eval()
            with suppress(TraceError):
                return trace(self._model, example_inputs, ignore=self._ignore)
        return None

    def _first_batches(self, graph: ChannelGraph, least: int) -> list[Any]:
        """The first batches, looked at before there is a folder: are they numbers, and can the loss be computed?"""
        refuse_spoilt_weights(self._model)
        macs = count(graph, graph.kept(None)).macs / rough_count(graph.inputs)
        samples = self._settings.samples(macs) if self._settings.schedule == "staged" else None
        batches = first_batches(self._batches, self._settings.seed, samples, least)
        for number, batch in enumerate(batches):
            if bool(not_finite(batch)):
                raise DataError(f"batch {number} of train_batches holds NaN or infinity; nothing was pruned")
        device = next(self._model.parameters()).device
        watched = WatchedLoss(self._loss_fn)
        with unmarked(self._model):
            loss = mean_loss(self._model, watched, [on_device(batches[0], device)])
        watched.where = " of the first batch"
        watched.refuse_infinite()
        self._reminders = reminders(self._model, graph, self._settings.budget, loss, batches[0])
        return batches

    def _through(self, run: Run, evaluate: Evaluate | None, config: Mapping[str, Any]) -> PruneResult:
        try:
            finisher = Finisher(run, evaluate, config)
            if not run.progress.measures:
                finisher.measure("unpruned")
            if self._settings.train_mode:
                self._model.train()
            run.go()
            return finisher.finish()
        finally:
            for parameter in self._model.parameters():
                parameter.grad = None
            self._listener.finished()

    def _check_budget(self, graph: ChannelGraph, moves: Moves, progress: Progress) -> None:
        """Before any work and before any file. All ranks count with the seconds of the first."""
        progress.latency = from_first(together(lambda: self._timed_if_reachable(graph, moves, progress)))

    def _timed_if_reachable(self, graph: ChannelGraph, moves: Moves, progress: Progress) -> dict[str, Any] | None:
        if not graph.num_units:
            raise BudgetError(f"nothing in {type(self._model).__name__} can be pruned; see graph.frozen of ifso.trace")
        plain = {kind: share for kind, share in self._settings.budget.targets.items() if kind != "latency"}
        if plain:
            check_reachable(graph, Ledger(graph), moves, Target(Budget(**plain)))
        if not self._settings.needs_latency or rank():
            return None
        with progress.timed("latency"):
            return timed(self._model, graph, moves, self._settings)

    def _config(self) -> dict[str, Any]:
        some = next((parameter for parameter in self._model.parameters() if parameter.requires_grad), None)
        if some is None:
            raise BudgetError(f"{type(self._model).__name__} has no trainable parameters; set requires_grad")
        if not callable(self._make_optimizer):
            given = type(self._make_optimizer).__name__
            raise BudgetError(f"optimizer is a {given}; give a function from parameters to an optimizer")
        optimizer = self._make_optimizer([nn.Parameter(torch.zeros_like(some))])
        if not isinstance(optimizer, Optimizer):
            raise BudgetError(f"optimizer gave a {type(optimizer).__name__}; it must return a torch.optim.Optimizer")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise BudgetError("optimizer gave LBFGS, which evaluates the loss itself; give one that takes plain steps")
        settings = {
            **self._settings.as_dict(),
            "optimizer": describe(optimizer),
            "model": name_of(self._model),
            "weights": digest_of(self._model),
        }
        from ifso._version import __version__

        versions = {"ifso": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
        return {"settings": settings, "versions": versions, "about": self._about}

    def _open(
        self, config: dict[str, Any], resume: PathLike | None, out: PathLike | None, overwrite: bool
    ) -> RunFolder | None:
        if resume is not None:
            return RunFolder.resume(resume, config)
        return None if out is None else RunFolder.create(out, config, overwrite=overwrite)

    def _run(
        self, graph: ChannelGraph, moves: Moves, progress: Progress, batches: list[Any], found: Checkpoint | None
    ) -> Run:
        """The run at its beginning, or where a checkpoint says."""
        fitted = self._settings.schedule == "staged" and self._settings.update
        teacher = copy_of(self._model) if fitted or self._settings.recover else None
        network = ShrinkingNetwork(self._model, graph, self._ignore)
        position = (0, 0)
        if found is not None:
            _, tensors, state = found
            progress = Progress.from_json(state["progress"])
            position = (state["position"][0], state["position"][1])
            shrink_to_(network, tensors)
        worker = ScoringLoop(
            network, self._settings.criterion, self._loss_fn, self._make_optimizer,
            capture=self._settings.schedule != "staged",
        )  # fmt: skip
        if found is not None:
            worker.fill_(tensors, state["optimizer"])
        staged = self._settings.schedule == "staged"
        examples = [on_device(batch, network.device) for batch in batches[:LOSS_BATCHES]]
        run = Run(
            network, worker, self._settings, BatchStream(self._batches, self._settings.seed, position), examples,
            worker.loss_fn, moves, progress, self._listener, checkpoint_every=self._checkpoint_every,
            shrink=self._shrink, calibration=dealt_again(batches, self._settings.seed) if staged else (),
            teacher=teacher,
        )  # fmt: skip
        if found is not None:
            run.go_on_(tensors, state)
        return run

    def _write_into(self, folder: RunFolder, run: Run) -> None:
        """From now on a run writes into its folder, after what is already there."""
        run.folder = folder
        folder.rewind(run.progress.removals)
        run.metrics = folder.metrics()[0]
        folder.write_json(STRUCTURE, structure_of(run.network.original))
        if run.progress.removals:
            run.say(f"{RESUMED} {run.progress.removals}")
            if remembers(self._batches):
                run.say(REMEMBERS)
        for note in folder.notes:
            run.say(note)


def _holding(graph: ChannelGraph, chosen: Callable[[set[str]], set[str]]) -> set[str]:
    """Parameters whose being left alone leaves groups alone: vectors among those ``chosen`` of a group, if any."""
    found = set()
    for group in graph.groups:
        names = chosen({member.parameter for member in group.members})
        found |= {name for name in names if len(graph.layouts[name].shape) == 1} or names
    return found


def _answers(graph: ChannelGraph) -> int:
    """How many outputs have values for each sample or place, as losses have not."""
    return sum(bool(shape) for shape in graph.output_shapes)


def _idle(graph: ChannelGraph) -> set[str]:
    """Parameters that take no part in what was traced."""
    return {frozen.parameter for frozen in graph.frozen if frozen.reason == UNUSED}
