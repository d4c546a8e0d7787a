"""Train a network step by step, alone or in turns with others that share the GPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ifso.common.batches import same_random_numbers
from ifso.common.devices import let_go_of
from ifso.common.distributed import copy_from_first_, gathered, mean_over_ranks, rank
from ifso.common.loss_fn import LossFn
from ifso.common.torch_state import same_modes
from ifso.errors import DataError, DivergedError, IfsoError, RunError, TrainingError
from ifso.pruning.recovery import first_bad, refuse_spoilt_weights
from ifso.tasks.classification import classification, cross_entropy
from ifso.training.checkpoint import (
    RNG,
    InputDigests,
    check_same_model,
    check_same_settings,
    copy_tensors_,
    describe_model,
    load_checkpoint,
    restore_rng,
    rng_states,
    save_checkpoint,
)
from ifso.training.objective import MixedBatches, MixedFiles, NamedLosses
from ifso.training.optimizers import check_warm_up
from ifso.training.settings import TrainSettings
from ifso.training.steps import CapturedSteps, PlainSteps, Steps, TrainStep, can_capture

Measures = dict[str, float]

SAVE_EVERY = 15.0
"""Seconds between two checkpoints, which are written at the ends of epochs."""


@dataclass(frozen=True)
class Epoch:
    """An epoch that is over: its number from 1, the mean loss of its batches, the rate it ended with, its seconds.

    ``measures`` such as ``top1`` are of the evaluation after it, if there was one, on ``samples`` images if that is
    known; ``losses`` are the means of the named parts of ``loss``, if it has any.
    """

    number: int
    loss: float
    lr: float
    seconds: float
    measures: Measures = field(default_factory=dict)
    losses: Measures = field(default_factory=dict)
    samples: int = 0


@dataclass(frozen=True)
class TrainerHooks:
    """What is called and stored during a run.

    ``evaluate(model)`` is called after every ``every`` epochs and each of the last ``final`` ones, ``on_epoch`` after
    every epoch. Checkpoints are kept in ``folder``; only a run with the same ``origin`` is resumed from them.
    """

    evaluate: Callable[[nn.Module], Measures] | None = None
    every: int = 1
    final: int = 1
    on_epoch: Callable[[Epoch], None] | None = None
    folder: Path | None = None
    save_every: float = SAVE_EVERY
    origin: InputDigests = field(default_factory=InputDigests)


class Trainer:
    """``for _ in trainer.run(): …`` trains ``model`` in place; ``done`` are its epochs, ``notes`` lines to show."""

    def __init__(
        self,
        model: nn.Module,
        batches: Any,
        settings: TrainSettings,
        *,
        loss_fn: LossFn = cross_entropy,
        hooks: TrainerHooks | None = None,
    ) -> None:
        check_warm_up(settings, len(batches) if hasattr(batches, "__len__") else None)
        self.model, self.settings = model, settings
        self.done: list[Epoch] = []
        self.notes: list[str] = []
        self._batches, self._hooks = batches, hooks or TrainerHooks()
        self._train_step = TrainStep(model, settings, loss_fn)
        self._named = loss_fn if isinstance(loss_fn, NamedLosses) else None
        self._saved = time.monotonic()
        self._modes = [(module, module.training) for module in model.modules()]

    def run(self) -> Generator[bool]:
        """Train for all epochs that are left. Yields True after a step and False where it waits for the GPU."""
        refuse_spoilt_weights(self.model)
        begun = self._resumed()
        self._check_same_start(begun)
        if begun < self.settings.epochs:
            try:
                self.model.train()
                steps = self._steps()
                for number in range(begun, self.settings.epochs):
                    yield from self._epoch(steps, number)
            finally:
                for module, training in self._modes:
                    module.training = training
        if self._train_step.ema is not None:
            self._train_step.ema.keep_()
        copy_from_first_(self.model.buffers())

    def _epoch(self, steps: Steps, number: int) -> Iterator[bool]:
        started = time.perf_counter()
        self._train_step.total.zero_()
        yield from steps.epoch(number)
        if not steps.count:
            raise DataError("there is nothing to train on: the batches ran out before the first one")
        loss = float(mean_over_ranks(self._train_step.total, steps.count))
        if not math.isfinite(loss):
            raise self._diverged(loss, number + 1)
        seconds = time.perf_counter() - started
        lr = float(self._train_step.optimizer.param_groups[0]["lr"])
        losses = {} if self._named is None else self._named.pop_means()
        measures = self._measured(number + 1)
        samples = getattr(self._hooks.evaluate, "samples", 0) if measures else 0
        self.done.append(Epoch(number + 1, loss, lr, seconds, measures, losses, samples))
        self._save()
        if self._hooks.on_epoch is not None:
            self._hooks.on_epoch(self.done[-1])

    def _diverged(self, loss: float, epoch: int) -> DivergedError:
        """The error for a loss that is not finite, which blames a batch or the rate."""
        bad, was = first_bad(self._batches), f"the loss was {loss} in epoch {epoch} of training"
        if bad is not None:
            return DivergedError(f"{was}: batch {bad} of them, from 0, holds NaN or infinity; mend the data")
        return DivergedError(f"{was}; lower the learning rate ({self.settings.lr})")

    def _steps(self) -> Steps:
        if can_capture(self._train_step, self._batches):
            try:
                return CapturedSteps(self._train_step, self._batches, torch.cuda.Stream())
            except TrainingError as error:
                self.notes.append(f"{error}; it runs without")
        return PlainSteps(self._train_step, self._batches)

    def _measured(self, number: int) -> Measures:
        hooks = self._hooks
        if hooks.evaluate is None or (number % hooks.every and number <= self.settings.epochs - hooks.final):
            return {}
        with same_modes(self.model), self._train_step.averaged():
            copy_from_first_(self.model.buffers())
            return hooks.evaluate(self.model)

    def _save(self) -> None:
        folder, now = self._hooks.folder, time.monotonic()
        last = len(self.done) == self.settings.epochs
        if folder is None or rank() or not (last or now - self._saved >= self._hooks.save_every):
            return
        facts = {
            "settings": self.settings.as_dict(),
            "model": describe_model(self.model),
            "epochs": [asdict(epoch) for epoch in self.done],
            "scaling": self._train_step.scaler.state_dict(),
            **self._hooks.origin.facts(),
        }
        save_checkpoint(folder, {**self._train_step.state(), **rng_states(self._train_step.device)}, facts)
        self._saved = now

    def _resumed(self) -> int:
        """Restore the checkpoint, if there is one, and return how many epochs are done."""
        folder, origin, step = self._hooks.folder, self._hooks.origin, self._train_step
        stored = None if folder is None else load_checkpoint(folder, step.device)
        if stored is None or folder is None:
            return 0
        tensors, facts = stored
        origin.refuse_other(facts.get("origin", {}), folder)
        check_same_model(self.model, facts["model"], folder, origin.advice)
        check_same_settings(self.settings, facts["settings"], folder, origin.advice)
        copy_tensors_(step.state(), {name: value for name, value in tensors.items() if not name.startswith(RNG)})
        step.scaler.load_state_dict(dict(facts["scaling"]))
        restore_rng(tensors, step.device)
        self.done = [Epoch(**epoch) for epoch in facts["epochs"]]
        return len(self.done)

    def _check_same_start(self, begun: int) -> None:
        """Raise unless all ranks resume from one epoch; then all have read the checkpoint before it is replaced."""
        starts = gathered(begun)
        if len(set(starts)) > 1:
            raise RunError(
                f"{self._hooks.folder}: ranks read that {', '.join(map(str, starts))} epochs are done; "
                "give a folder that all of them see"
            )


OnEnd = Callable[[IfsoError | None], None]
"""Called when a training is over, with its error or None."""

PAUSE = 5e-5
"""Seconds to sleep when the GPU has enough to do for all networks."""


class RoundRobin:
    """``add`` trainers and call ``turn`` until ``size`` is 0. On a GPU each trainer has a stream of its own."""

    def __init__(self) -> None:
        self._running: list[tuple[Generator[bool], OnEnd]] = []

    @property
    def size(self) -> int:
        """The number of networks in training."""
        return len(self._running)

    def add(self, trainer: Trainer, on_end: OnEnd) -> None:
        """Add a network; ``on_end`` is called when it is done."""
        self._running.append((trainer.run(), on_end))

    def turn(self) -> None:
        """Take a step of every network that does not wait for the GPU."""
        waiting = True
        for steps, on_end in list(self._running):
            try:
                waiting &= not next(steps)
            except StopIteration:
                self._end(steps, on_end, None)
            except IfsoError as error:
                self._end(steps, on_end, error)
        if waiting:
            time.sleep(PAUSE)

    def close(self) -> None:
        """Stop all trainings that are left; modes of their modules are as before."""
        for steps, _ in self._running:
            steps.close()
        self._running.clear()

    def _end(self, steps: Generator[bool], on_end: OnEnd, failure: IfsoError | None) -> None:
        """Remove a training, without keeping the memory of one that failed."""
        self._running.remove((steps, on_end))
        let_go_of(failure)
        on_end(failure)


def fit(
    model: nn.Module,
    batches: Iterable[Any],
    settings: TrainSettings,
    *,
    loss_fn: LossFn | None = None,
    hooks: TrainerHooks | None = None,
) -> list[Epoch]:
    """Train ``model`` in place and in train mode for ``settings.epochs`` rounds over ``batches``; return the epochs.

    Afterwards modes are as before. The rate changes at every step if ``batches`` have a length, else once an epoch.
    ``set_epoch`` of batches is called with 0, 1, …, and dropout and what is random in batches follow
    ``settings.seed``, so that the same call gives the same weights; the global random states are left alone. On a GPU,
    batches held there (see :mod:`ifso.data`) are learned from in one CUDA graph a step. The loss is the cross entropy
    with the settings' label smoothing unless given; for distillation give ``loss_fn=distillation(teacher)``. With
    ``cutmix`` the batches must be those of :func:`ifso.training.objective.batches_and_loss`.
    """
    if loss_fn is None and settings.distill:
        raise TrainingError(
            f"distill={settings.distill:g} needs a teacher; give loss_fn=distillation(teacher), or distill=0"
        )
    if settings.mixes and not isinstance(batches, (MixedBatches, MixedFiles)):
        which = f"cutmix={settings.cutmix:g}" if settings.cutmix else f"mixup={settings.mixup:g}"
        raise TrainingError(f"{which} needs MixedBatches and a loss for them; give those of batches_and_loss()")
    loss_fn = classification(settings.label_smoothing, mixed=settings.mixes) if loss_fn is None else loss_fn
    trainer = Trainer(model, batches, settings, loss_fn=loss_fn, hooks=hooks)
    failure = fit_side_by_side([trainer])[0]
    if failure is not None:
        raise failure
    return trainer.done


def fit_side_by_side(trainers: Sequence[Trainer]) -> list[IfsoError | None]:
    """Run all trainers in turns, none waiting for another, and return the error of each, or None.

    With dropout the numbers drawn by one network depend on the others.
    """
    failures: list[IfsoError | None] = [None] * len(trainers)
    seed = trainers[0].settings.seed if trainers else 0
    with closing(RoundRobin()) as turns, seeded_rng([trainer.model for trainer in trainers], seed):
        for number, trainer in enumerate(trainers):
            turns.add(trainer, partial(failures.__setitem__, number))
        while turns.size:
            turns.turn()
    return failures


@contextmanager
def seeded_rng(models: Sequence[nn.Module], seed: int) -> Iterator[None]:
    """Seed torch's random numbers for a while; then restore the global states, also numpy's and Python's."""
    devices = sorted({p.device for model in models for p in model.parameters() if p.is_cuda}, key=str)
    with same_random_numbers(), torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
