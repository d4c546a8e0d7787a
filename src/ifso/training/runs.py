"""Trainings in folders of their own, alone or side by side: what they write, and how they go on when interrupted.

A folder holds ``config.json``, ``metrics.jsonl`` with a line for every epoch and, until the end, a checkpoint; at the
end ``recipe.json`` and ``model.safetensors`` for :func:`ifso.load`, and ``summary.json``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ifso._version import __version__
from ifso.common.devices import out_of_memory
from ifso.common.distributed import rank, several, together
from ifso.common.loss_fn import LossFn
from ifso.common.serialization import located, parsed, refuse_special
from ifso.data.base import Data, headline
from ifso.data.compatibility import check_fits
from ifso.errors import DataError, IfsoError, RecipeError, RunError, TrainingError
from ifso.runs.folder import CONFIG, DIGESTS, SUMMARY, TRAINING, RunFolder, read_config, refuse_other_files
from ifso.surgery.recipe import recipe_of, unchanged
from ifso.training.checkpoint import FILE
from ifso.training.evaluation import make_evaluator, with_clear_errors
from ifso.training.losses import NamedLosses
from ifso.training.objective import TeacherCaches, batches_and_loss
from ifso.training.padded_finetune import Padding, padded_
from ifso.training.profiling import hardware
from ifso.training.settings import TrainSettings
from ifso.training.trainer import SAVE_EVERY, Epoch, Measures, RoundRobin, Trainer, TrainerHooks, seeded_rng


@dataclass(frozen=True)
class Training:
    """A network to train in ``folder``, what it learns from, and how.

    It is evaluated on the validation part of the data if ``validation``, else on the test set, after ``every`` epochs
    and at the end. ``fixed`` must be the same when the training is resumed, ``about`` need not: both go into
    ``config.json``. ``start`` is what the summary calls the network before training, None if it is not evaluated then;
    ``before`` are accuracies, or the mAP, of others that belong beside it. With ``wide``, a network as ``model`` was
    before pruning, ``model`` is trained in that shape
    (:mod:`ifso.training.padded_finetune`), where that makes no difference.
    """

    name: str
    folder: Path
    model: nn.Module
    data: Data
    settings: TrainSettings
    teacher: nn.Module | None = None
    validation: bool = False
    every: int = 1
    fixed: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    start: str | None = None
    before: Mapping[str, float] = field(default_factory=dict)
    wide: nn.Module | None = None

    @property
    def config(self) -> dict[str, Any]:
        """What stands in ``config.json``."""
        return {"settings": {TRAINING: self.settings.as_dict(), **self.fixed}, "about": dict(self.about)}


def train_side_by_side(
    trainings: Sequence[Training], listener: Listener, *, resume: bool = False, ranks: int = 1
) -> list[dict[str, Any] | IfsoError]:
    """Train all of them in turns, none waiting for another; the summary of each, or what it failed with.

    With ``resume`` they go on where they were interrupted. Under ``torch.distributed`` every process calls this with
    its share of the data; the first one writes.
    """
    if not trainings:
        return []
    for training in trainings:
        _refuse_unfit(training)
    outcomes: list[dict[str, Any] | IfsoError] = [TrainingError("not trained")] * len(trainings)
    crew, tables, models = RoundRobin(), TeacherCaches(), [training.model for training in trainings]
    first = trainings[0].settings
    with ExitStack() as stack, closing(crew), seeded_rng(models, first.seed):
        for number, training in enumerate(trainings):
            folder = _opened(training, resume)
            if folder is not None:
                stack.callback(folder.close)
                stack.push(partial(_discard_after_error, folder))
            alike = sum(other.teacher is training.teacher for other in trainings)
            lane = RunningTraining(training, folder, listener, _lesson(training, listener, tables, ranks, alike))
            crew.add(lane, partial(_end, outcomes, number, lane, crew))
        while crew.size:
            crew.turn()
    return outcomes


def finished_summary(folder: Path) -> dict[str, Any] | None:
    """The summary of a training that has come to its end, else None."""
    place = folder / SUMMARY
    if not place.is_file():
        return None
    with located(place):
        refuse_special(place)
        summary = parsed(place.read_bytes())
        if summary is not None and "shares" in summary:
            raise RunError(f"of a pruning, not of a training; go on with ifso prune --resume --out {folder}")
        if summary is None or not {"last_top1", "last_map"} & summary.keys():
            raise RunError("damaged, or not of a training; delete it and resume the training, which writes it again")
    refuse_other_files(folder, read_config(folder / CONFIG))
    return {name: value for name, value in summary.items() if name != DIGESTS}


class RunningTraining(Trainer):
    """A lane that keeps its folder and tells its listener; at its end ``summary`` says what came out."""

    def __init__(
        self,
        training: Training,
        folder: RunFolder | None,
        listener: Listener,
        lesson: tuple[Any, LossFn],
    ) -> None:
        batches, loss_fn = lesson
        self._training, self.folder, self._listener = training, folder, listener
        self._headline = headline(training.data)
        self._measures = _measures_of(training, listener)
        self._length = len(batches) if hasattr(batches, "__len__") else 0
        self._steps_done, self._before = 0, dict(training.before)
        self.summary: dict[str, Any] = {}
        watch = TrainerHooks(self._measures, training.every, 1, self._ended, training.folder, SAVE_EVERY)
        self._padding = _padded(training, listener)
        network = training.model if self._padding is None or training.wide is None else training.wide
        super().__init__(network, batches, training.settings, loss_fn=loss_fn, watch=watch)

    def run(self) -> Generator[bool]:
        """As a lane's; the network is evaluated before and saved afterwards."""
        if self._training.start is not None and self._measures is not None:
            found = self._measures(self.model)
            self._before |= {self._training.start: found[self._headline]} if self._headline in found else {}
        try:
            for stepped in super().run():
                if stepped:
                    self._tell_step()
                yield stepped
        except (RuntimeError, MemoryError, TrainingError) as error:
            if not out_of_memory(error):
                raise
            raise TrainingError(
                f"there is too little memory for a batch of {self.settings.batch}; give a smaller one, accumulate "
                f"{2 * self.settings.accumulate} micro-batches, or train fewer networks side by side"
            ) from error
        for note in self.notes:
            self.say(note)
        self._finish()

    def say(self, line: str) -> None:
        """The line for a person, with the name of the training."""
        self._listener.said(f"{self._training.name}: {line}")

    def _resumed(self) -> int:
        """What was written beyond the checkpoint goes."""
        begun = super()._resumed()
        if self.folder is not None:
            self.folder.rewrite(map(_line, self.done))
        self._listener.started(self._training.name, begun, self.settings.epochs)
        return begun

    def _tell_step(self) -> None:
        self._steps_done += 1
        if self._length:
            done = len(self.done) + min(self._steps_done / self._length, 1.0)
            self._listener.stepped(self._training.name, done)

    def _ended(self, epoch: Epoch) -> None:
        self._steps_done = 0
        if self.folder is not None:
            self.folder.append(_line(epoch))
        self._listener.ended(self._training.name, epoch)

    def _finish(self) -> None:
        self.summary, model = self._summary(), self._training.model
        if self._padding is not None:
            self._padding.unpad_(model, self.model)
        if self.folder is not None:
            self.folder.write_model(model, recipe_of(model) or unchanged(model))
            self.folder.finish(self.summary)
            remove_checkpoint(self.folder.path)

    def _summary(self) -> dict[str, Any]:
        training = self._training
        name = self._headline
        found = [epoch.measures[name] for epoch in self.done if name in epoch.measures]
        return {
            "folder": str(training.folder),
            "data": training.data.name,
            "split": "validation" if training.validation else "test",
            "before": self._before,
            f"last_{name}": found[-1] if found else None,
            f"best_{name}": max(found, default=None),
            "last": self.done[-1].measures,
            **({"losses": self.done[-1].losses} if self.done[-1].losses else {}),
            "epochs": len(self.done),
            "loss": self.done[-1].loss,
            "seconds": sum(epoch.seconds for epoch in self.done),
            "settings": self.settings.as_dict(),
            "padded": self._padding is not None,
            "about": dict(training.about),
            "hardware": hardware(next(self.model.parameters()).device),
            "torch": str(torch.__version__),
            "ifso": __version__,
        }


def remove_checkpoint(folder: Path) -> None:
    """A training that is over needs none."""
    with located(folder / FILE):
        (folder / FILE).unlink(missing_ok=True)


def _line(epoch: Epoch) -> dict[str, Any]:
    """A line of ``metrics.jsonl``.

    >>> _line(Epoch(3, 0.5, 0.1, 2.0, {"top1": 90.0}))
    {'epoch': 3, 'loss': 0.5, 'lr': 0.1, 'seconds': 2.0, 'top1': 90.0}
    >>> _line(Epoch(3, 0.5, 0.1, 2.0, {}, {"boxes": 0.3, "loss_classes": 0.2}))
    {'epoch': 3, 'loss': 0.5, 'lr': 0.1, 'seconds': 2.0, 'loss_boxes': 0.3, 'loss_classes': 0.2}
    """
    plain = asdict(epoch)
    measures, losses = plain.pop("measures"), plain.pop("losses")
    named = {f"loss_{name.removeprefix('loss_')}": loss for name, loss in losses.items()}
    return {"epoch": plain.pop("number"), **plain, **named, **measures}


def _refuse_unfit(training: Training) -> None:
    if training.settings.epochs < 1:
        raise TrainingError(f"{training.settings.epochs} epochs train nothing; give 1 or more")
    for model in (training.model, training.teacher):
        if model is not None:
            together(partial(check_fits, model, training.data))


def _opened(training: Training, resume: bool) -> RunFolder | None:
    """The folder, of the first process only."""

    def opened() -> RunFolder | None:
        if rank():
            return None
        way = RunFolder.resume if resume else RunFolder.create
        return way(training.folder, training.config)

    return together(opened)


def _discard_after_error(folder: RunFolder, kind: type[BaseException] | None, *_: object) -> None:
    """What could not be begun leaves nothing behind; what was interrupted can go on."""
    if kind is not None and issubclass(kind, (Exception, SystemExit)):
        _discard_if_empty(folder)


def _discard_if_empty(folder: RunFolder) -> None:
    if not (folder.path / FILE).exists():
        folder.discard_if_empty()


def _lesson(
    training: Training, listener: Listener, tables: TeacherCaches, ranks: int, networks: int
) -> tuple[Any, LossFn]:
    """Batches, and the loss; ``networks`` have the same teacher."""
    data, settings, teacher = training.data, training.settings, training.teacher
    batches, loss_fn = batches_and_loss(
        data, settings, teacher, ranks=ranks, tables=tables, networks=networks, say=listener.said
    )
    if isinstance(loss_fn, NamedLosses):
        return batches, NamedLosses(with_clear_errors(loss_fn.losses_of, data))
    return batches, with_clear_errors(loss_fn, data)


def _padded(training: Training, listener: Listener) -> Padding | None:
    """None where the network is trained as it is, and a word about it if that was not asked for."""
    if training.wide is None:
        return None
    try:
        return padded_(training.wide, training.model, training.data)
    except RecipeError as error:
        listener.said(f"{training.name}: trained in its own shape, because {error}")
        return None


def _measures_of(training: Training, listener: Listener) -> Callable[[nn.Module], Measures] | None:
    """None, and a word about it, where a user's data has no test set."""
    try:
        return make_evaluator(training.model, training.data, training.settings, validation=training.validation)
    except DataError as error:
        if training.validation:
            raise
        listener.said(f"{training.name}: no accuracy will be known, because {error}")
        return None


def _end(
    outcomes: list[dict[str, Any] | IfsoError],
    number: int,
    lane: RunningTraining,
    crew: RoundRobin,
    failure: IfsoError | None,
) -> None:
    """Other networks go on, and a failure is told at once; other ranks cannot, and wait for this one until it goes."""
    outcomes[number] = lane.summary if failure is None else failure
    if failure is None:
        return
    if lane.folder is not None:
        _discard_if_empty(lane.folder)
    if several():
        raise failure
    if crew.size:
        lane.say(f"failed: {failure}")


class Listener(Protocol):
    """Somebody who wants to see trainings go on, each under its name."""

    def started(self, name: str, epoch: int, epochs: int) -> None:
        """It begins, or goes on after ``epoch`` epochs."""

    def stepped(self, name: str, done: float) -> None:
        """So many epochs are done, the present one in part."""

    def ended(self, name: str, epoch: Epoch) -> None:
        """An epoch is over."""

    def said(self, line: str) -> None:
        """One line for a person."""


class Silent:
    """Tells nobody."""

    def started(self, name: str, epoch: int, epochs: int) -> None:
        """Nothing."""

    def stepped(self, name: str, done: float) -> None:
        """Nothing."""

    def ended(self, name: str, epoch: Epoch) -> None:
        """Nothing."""

    def said(self, line: str) -> None:
        """Nothing."""
