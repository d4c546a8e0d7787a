"""Trainings in folders of their own, alone or side by side: the files they write, and how they are resumed.

A folder holds ``config.json``, ``metrics.jsonl`` with a line for every epoch and, until the end, a checkpoint; at the
end ``recipe.json`` and ``model.safetensors`` for :func:`ifso.load`, and ``summary.json``.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ifso._version import __version__
from ifso.common.devices import out_of_memory
from ifso.common.distributed import is_distributed, rank, together
from ifso.common.loss_fn import LossFn
from ifso.common.serialization import located
from ifso.common.text import standard_error
from ifso.data.base import Data, detects, has_own_loss, headline
from ifso.data.compatibility import check_fits
from ifso.errors import DataError, IfsoError, RecipeError, RunError, TrainingError
from ifso.runs.files import CONFIG, DIGESTS, SUMMARY, TRAINING, read_config, read_object, refuse_other_files
from ifso.runs.folder import RunFolder
from ifso.surgery.recipe import recipe
from ifso.training.checkpoint import FILE, describe_model, load_checkpoint
from ifso.training.evaluation import Measuring, with_clear_errors
from ifso.training.objective import NamedLosses, TeacherCaches, batches_and_loss
from ifso.training.padded_finetune import MULTIPLE, Padding, padded_
from ifso.training.profiling import hardware
from ifso.training.settings import TrainSettings
from ifso.training.trainer import SAVE_EVERY, Epoch, Measures, RoundRobin, Trainer, TrainerHooks, seeded_rng


class TrainingListener(Protocol):
    """The interface of those who follow trainings, each by its name."""

    def started(self, name: str, epoch: int, epochs: int) -> None:
        """A training begins, or goes on after ``epoch`` epochs."""

    def stepped(self, name: str, done: float) -> None:
        """So many epochs are done, the present one in part."""

    def ended(self, name: str, epoch: Epoch) -> None:
        """An epoch is over."""

    def said(self, line: str) -> None:
        """There is a line for a person."""


class SilentTraining:
    """A listener that ignores everything."""

    def started(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    stepped = ended = said = started


@dataclass(frozen=True)
class Training:
    """A network to train in ``folder``, its data and its settings.

    It is evaluated on the validation part of the data if ``validation``, else on the test set, after ``every`` epochs
    and at the end. ``fixed`` must be the same when the training is resumed, ``about`` need not: both go into
    ``config.json``. ``start`` is what the summary calls the network before training, None if it is not evaluated then;
    ``before`` are accuracies, or the mAP, of other networks beside it. With ``wide``, a network as ``model`` was before
    pruning, ``model`` is trained with zeros where that makes no difference (:mod:`ifso.training.padded_finetune`).
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
        """The contents of ``config.json``."""
        return {"settings": {TRAINING: self.settings.as_dict(), **self.fixed}, "about": dict(self.about)}


def train_side_by_side(
    trainings: Sequence[Training], listener: TrainingListener, *, resume: bool = False, ranks: int = 1
) -> list[dict[str, Any] | IfsoError]:
    """Train all networks in turns, none waiting for another; return the summary or the error of each.

    With ``resume`` they go on where they were interrupted. Under ``torch.distributed`` every process calls this with
    its share of the data; the first one writes.
    """
    if not trainings:
        return []
    for training in trainings:
        if training.settings.epochs < 1:
            raise TrainingError(f"epochs must be 1 or more, got {training.settings.epochs}")
        for model in (training.model, training.teacher):
            if model is not None:
                together(partial(check_fits, model, training.data))
    outcomes: list[dict[str, Any] | IfsoError] = [TrainingError("not trained")] * len(trainings)
    turns, caches = RoundRobin(), TeacherCaches()
    models, seed = [training.model for training in trainings], trainings[0].settings.seed
    with ExitStack() as stack, closing(turns), seeded_rng(models, seed):
        for number, training in enumerate(trainings):
            folder = _open_folder(training, resume)
            if folder is not None:
                stack.callback(folder.close)
                stack.push(partial(_discard_after_error, folder))
            networks = sum(other.teacher is training.teacher for other in trainings)
            material = _batches_and_loss(training, listener, caches, ranks, networks)
            trainer = RunningTraining(training, folder, listener, material)
            turns.add(trainer, partial(_on_end, outcomes, number, trainer, turns))
        while turns.size:
            turns.turn()
    return outcomes


def _open_folder(training: Training, resume: bool) -> RunFolder | None:
    """The folder, opened by the first process only."""
    way = RunFolder.resume if resume else RunFolder.create
    return together(lambda: None if rank() else way(training.folder, training.config))


def _batches_and_loss(
    training: Training, listener: TrainingListener, caches: TeacherCaches, ranks: int, networks: int
) -> tuple[Any, LossFn]:
    """Batches, and the loss with clear errors; ``networks`` have the same teacher."""
    data = training.data
    batches, loss_fn = batches_and_loss(
        data, training.settings, training.teacher, ranks=ranks, caches=caches, networks=networks, say=listener.said
    )
    if isinstance(loss_fn, NamedLosses):
        return batches, NamedLosses(with_clear_errors(loss_fn.losses_of, data))
    return batches, with_clear_errors(loss_fn, data)


def _on_end(
    outcomes: list[dict[str, Any] | IfsoError],
    number: int,
    trainer: RunningTraining,
    turns: RoundRobin,
    failure: IfsoError | None,
) -> None:
    """Keep the outcome. After a failure other networks go on; other ranks cannot, so it is raised at once."""
    outcomes[number] = trainer.summary if failure is None else failure
    if failure is None:
        return
    if trainer.folder is not None:
        _discard_if_empty(trainer.folder)
    if is_distributed():
        raise failure
    if turns.size:
        trainer.say(f"failed: {failure}")


def _discard_after_error(folder: RunFolder, kind: type[BaseException] | None, *_: object) -> None:
    """Remove a folder in which nothing could be begun; what was interrupted can go on."""
    if kind is not None and issubclass(kind, (Exception, SystemExit)):
        _discard_if_empty(folder)


def _discard_if_empty(folder: RunFolder) -> None:
    if not (folder.path / FILE).exists():
        folder.discard_if_empty()


def finished_summary(folder: Path) -> dict[str, Any] | None:
    """The summary of a training that is over, else None."""
    path = folder / SUMMARY
    if not path.is_file():
        return None
    summary = read_object(path)
    with located(path):
        if summary is not None and "shares" in summary:
            raise RunError(f"of a pruning, not of a training; go on with ifso prune --resume --out {folder}")
        if summary is None or not {"last_top1", "last_map"} & summary.keys():
            raise RunError("damaged, or not of a training; delete it and resume the training, which writes it again")
    refuse_other_files(folder, read_config(folder / CONFIG))
    return {name: value for name, value in summary.items() if name != DIGESTS}


class RunningTraining(Trainer):
    """A trainer that writes its folder and informs its listener; ``summary`` is there at its end."""

    def __init__(
        self, training: Training, folder: RunFolder | None, listener: TrainingListener, material: tuple[Any, LossFn]
    ) -> None:
        batches, loss_fn = material
        self._training, self.folder, self._listener = training, folder, listener
        self._headline = headline(training.data)
        self._evaluate = self._evaluator()
        self._length = len(batches) if hasattr(batches, "__len__") else 0
        self._steps_done, self._before = 0, dict(training.before)
        self._began: Measures | None = None
        self.summary: dict[str, Any] = {}
        hooks = TrainerHooks(
            self._evaluate, training.every, on_epoch=self._ended, folder=training.folder, save_every=SAVE_EVERY
        )
        self._padding, network = self._padded()
        super().__init__(network, batches, training.settings, loss_fn=loss_fn, hooks=hooks)

    def _evaluator(self) -> Measuring | None:
        """None, and a line about it, where a user's data has no test set."""
        training = self._training
        try:
            return Measuring(training.model, training.data, training.settings, validation=training.validation)
        except DataError as error:
            if training.validation:
                raise
            self.say(f"no accuracy will be known, because {error}")
            return None

    def _padded(self) -> tuple[Padding | None, nn.Module]:
        """The network to train, and its padding unless it is trained in its own shape."""
        training = self._training
        wide = training.wide
        if wide is not None:
            try:
                return padded_(wide, training.model, training.data, multiple=self._multiple(wide)), wide
            except RecipeError as error:
                self.say(f"trained in its own shape, because {error}")
        return None, training.model

    def _multiple(self, wide: nn.Module) -> int | None:
        """What widths are multiples of; None where a training goes on that was begun in the shape of ``wide``."""
        try:
            stored = load_checkpoint(self._training.folder, "cpu")
        except RunError:  # it is told when this training begins, and the others go on
            return MULTIPLE
        begun = None if stored is None else stored[1]["model"]["fingerprint"]
        return None if begun == describe_model(wide)["fingerprint"] else MULTIPLE

    def run(self) -> Generator[bool]:
        """As a trainer's, but the network is evaluated before and saved afterwards."""
        if self._training.start is not None and self._evaluate is not None:
            self._began = self._evaluate(self.model)
            if self._headline in self._began:
                self._before[self._training.start] = self._began[self._headline]
        try:
            for stepped in super().run():
                if stepped:
                    self._on_step()
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
        """Pass on the line with the name of the training."""
        self._listener.said(f"{self._training.name}: {line}")

    def _resumed(self) -> int:
        """As a trainer's; lines beyond the checkpoint are removed."""
        begun = super()._resumed()
        if self.folder is not None:
            self.folder.rewrite(map(_line, self.done))
        self._listener.started(self._training.name, begun, self.settings.epochs)
        return begun

    def _on_step(self) -> None:
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
            self.folder.write_model(model, recipe(model))
            self.folder.finish(self.summary)
            remove_checkpoint(self.folder.path)

    def _summary(self) -> dict[str, Any]:
        training, name, last = self._training, self._headline, self.done[-1]
        values = [epoch.measures[name] for epoch in self.done if name in epoch.measures]
        guessed = not (has_own_loss(training.data) or detects(training.data))
        notes = harm(self._began, last, training.data.num_classes if guessed else None, self.settings.lr)
        return {
            "folder": str(training.folder),
            "data": training.data.name,
            "split": "validation" if training.validation else "test",
            "before": self._before,
            f"last_{name}": values[-1] if values else None,
            f"best_{name}": max(values, default=None),
            "last": last.measures,
            **({"samples": self._evaluate.samples} if self._evaluate is not None and self._evaluate.samples else {}),
            **({"losses": last.losses} if last.losses else {}),
            **({"notes": notes} if notes else {}),
            "epochs": len(self.done),
            "loss": last.loss,
            "seconds": sum(epoch.seconds for epoch in self.done),
            "settings": self.settings.as_dict(),
            "padded": self._padding is not None,
            "about": dict(training.about),
            "hardware": hardware(next(self.model.parameters()).device),
            "torch": str(torch.__version__),
            "ifso": __version__,
        }


def harm(began: Measures | None, last: Epoch, classes: int | None, lr: float) -> list[str]:
    """What is to be said of a training that left a network worse than it was: ``began`` are its measures before.

    The loss must end twice as high as it began and as that of guessing among the ``classes`` (None where the loss is no
    cross entropy), and have been above guessing in training, too (twice as high if it began with random weights), while
    the accuracy has not risen, to half as much again as that of guessing at least. Within its standard error an
    accuracy is not called lower.

    >>> harm({"top1": 90.0, "eval_loss": 0.3}, Epoch(1, 8.0, 0.1, 1.0, {"top1": 9.0, "eval_loss": 300.0}), 10, lr=0.1)
    ['the training diverged: the loss went from 0.3 to 300, where guessing has 2.3; give a lower --lr than 0.1']
    >>> harm({"top1": 90.0}, Epoch(1, 0.1, 0.1, 1.0, {"top1": 89.5}, samples=900), 10, lr=0.1)
    []
    >>> harm({"top1": 90.0, "eval_loss": 0.3}, Epoch(1, 0.1, 0.1, 1.0, {"top1": 89.5, "eval_loss": 3.0}), 10, lr=0.1)
    ['top1 ends lower than it began: 89.5 after 90; a lower --lr than 0.1 or more epochs may help']
    """
    guess = math.log(classes) if classes and classes > 1 else math.inf
    ended = last.measures.get("eval_loss", last.loss if began is None else math.inf)
    before = 0.0 if began is None else began.get("eval_loss", 0.0)
    name = "top1" if "top1" in last.measures else "map"
    first, now = (began or {}).get(name, -math.inf), last.measures.get(name, math.inf)
    learned = bool(began) and now > max(first, 150 * math.exp(-guess))
    if last.loss > (guess if began else 2 * guess) and ended > 2 * max(guess, before) and not learned:
        came = f"went from {before:.3g} to" if began else "is"
        words = f"the loss {came} {ended:.3g}, where guessing has {guess:.3g}"
        return [f"the training diverged: {words}; give a lower --lr than {lr:g}"]
    unsure = standard_error(first, last.samples) if name == "top1" and last.samples and began else 0.0
    if now >= first - unsure:
        return []
    words = f"{name} ends lower than it began: {now:.4g} after {first:.4g}"
    return [f"{words}; a lower --lr than {lr:g} or more epochs may help"]


def remove_checkpoint(folder: Path) -> None:
    """Delete the checkpoint of a training that is over."""
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
    measures, losses, _ = (plain.pop(name) for name in ("measures", "losses", "samples"))
    named = {f"loss_{name.removeprefix('loss_')}": loss for name, loss in losses.items()}
    return {"epoch": plain.pop("number"), **plain, **named, **measures}
