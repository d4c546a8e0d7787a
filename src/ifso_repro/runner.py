"""The runs of a study: unpruned networks are trained, pruned and fine-tuned, as many at once as one GPU can take.

Whatever is done is kept: an unpruned network, a pruned one, the last checkpoint of a fine-tuning, a result. A run that
was interrupted goes on there when the same command is given again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ifso.common.locks import FolderLock
from ifso.common.text import one_line
from ifso.data import Data
from ifso.errors import IfsoError, RunError, TrainingError
from ifso.surgery.recipe import digest_of
from ifso.training.checkpoint import DATA, START, TEACHER, InputDigests
from ifso.training.evaluation import Evaluator, evaluation_batches
from ifso.training.objective import TeacherCaches, batches_and_loss
from ifso.training.trainer import Epoch, RoundRobin, Trainer, TrainerHooks, seeded_rng
from ifso_repro.jobs import Job
from ifso_repro.outcomes import (
    Measure,
    averages,
    detection_result_of,
    detector_measure,
    memory_of_training,
    result_of,
)
from ifso_repro.provenance import (
    THAT_FOLDER,
    identity,
    refuse_other_pruning,
    refuse_other_result,
    refuse_other_start,
    trained_as,
)
from ifso_repro.prune_pool import PrunePool
from ifso_repro.results import AnyResult, path_of, read_file, write
from ifso_repro.schema import Row
from ifso_repro.workspace import Workspace

Say = Callable[[str], None]
EVERY, FINAL = 5, 10
"""A classifier is evaluated after every fifth epoch and each of the last ten."""

BOX_EVALUATIONS = 5
"""How often a detector is evaluated while it is trained."""

PAUSE = 0.2
"""Seconds between two looks at what can be taken up."""


class Failure(NamedTuple):
    """A run that could not be done, why, and the exit status that goes with it."""

    name: str
    reason: str
    status: int

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


class Runner:
    """Runs ``jobs``: ``lanes`` networks are trained side by side while ``workers`` processes prune others.

    ``failed`` is what could not be done, ``failures`` the same in words.
    """

    def __init__(self, space: Workspace, jobs: Sequence[Job], *, lanes: int, workers: int, say: Say) -> None:
        self._space, self._say, self._lanes, self._workers = space, say, lanes, workers
        self.failed: list[Failure] = []
        self._crew, self._tables = RoundRobin(), TeacherCaches()
        self._bases: dict[str, tuple[nn.Module, dict[str, float]]] = {}
        self._in_training: dict[str, FolderLock] = {}
        self._elsewhere: set[str] = set()
        self._waiting: dict[str, Job] = {}
        for job in jobs:
            try:
                self._enter(job)
            except IfsoError as error:
                self._note(job, error)
        waiting, failed = len(self._waiting), len(self.failed)
        counts = {"to do": waiting, "done already": len(jobs) - waiting - failed, "that cannot be done": failed}
        say("runs: " + ", ".join(f"{count} {words}" for words, count in counts.items() if count or words == "to do"))

    @property
    def failures(self) -> list[str]:
        """What could not be done, in words."""
        return [str(failure) for failure in self.failed]

    def run(self) -> None:
        """All that is to be done, in the order of the jobs wherever there is a choice."""
        with _shared_threads(self._space.device, self._workers) as threads, seeded_rng([], 0):
            self._prunings = PrunePool(self._space, self._workers, threads, self._say)
            try:
                self._go()
            except torch.OutOfMemoryError as error:
                raise TrainingError(
                    f"no memory is left for {self._crew.size} networks side by side; what is done is kept: "
                    "give the same command with fewer --lanes"
                ) from error
            finally:
                self._prunings.stop()

    def _go(self) -> None:
        looked, size = -math.inf, 0
        while self._waiting or self._crew.size:
            if time.monotonic() - looked > PAUSE or self._crew.size < size:
                self._prunings.turn()
                self._fill()
                looked, size = time.monotonic(), self._crew.size
            if self._crew.size:
                self._crew.turn()
            elif self._waiting:
                time.sleep(PAUSE)

    def _enter(self, job: Job) -> None:
        """Put the job into the queue, unless it has a result, which must be one of the same settings and data."""
        path = path_of(job.name, self._space.results, smoke=self._space.smoke)
        if path.exists():
            refuse_other_result(self._space, job, read_file(path), path)
            return
        self._space.check(job)
        self._waiting[job.name] = job

    def _fill(self) -> None:
        """Begin whatever can begin now."""
        for name, job in list(self._waiting.items()):
            try:
                if name in self._waiting:
                    self._take_up(job)
            except IfsoError as error:
                self._fail(job, error)

    def _take_up(self, job: Job) -> None:
        """Begin the next thing that ``job`` needs: an unpruned network, a pruned one, a teacher, or fine-tuning."""
        room = self._crew.size < self._lanes
        if not self._space.base_file(job.row).is_file():
            if room:
                self._train_base(job.row)
            return
        pruned = self._space.is_pruned(job)
        if not pruned:
            pruned = self._left_on_the_way(job, room)
        if job.teacher is not None and not self._space.base_file(job.teacher).is_file():
            if room:
                self._train_base(job.teacher)
        elif pruned and room:
            del self._waiting[job.name]
            self._finetune(job)

    def _left_on_the_way(self, job: Job, room: bool) -> bool:
        """Ask for a pruning; if it has failed, return whether it had left the network of ``job`` before."""
        try:
            self._prunings.ask(job)
        except IfsoError:
            if room and self._space.passed(job) is None:
                raise
            return room
        return False

    def _fail(self, job: Job, error: IfsoError) -> None:
        self._note(job, error)
        self._say(f"{self.failed[-1].name} failed: {self.failed[-1].reason}")

    def _note(self, job: Job, error: IfsoError) -> None:
        self._waiting.pop(job.name, None)
        self.failed.append(Failure(job.name, " ".join(str(error).split()), error.exit_status))

    def _train_base(self, row: Row) -> None:
        """Begin to train an unpruned network, unless that is going on here or in another process."""
        if row.task in self._in_training:
            return
        lock = self._locked(row)
        if lock is None or self._space.base_file(row).is_file():
            return
        settings, data = self._space.base_settings(row), self._space.open(row, 0)
        model = self._space.placed(self._space.fresh(row, data.num_classes))
        batches, loss_fn = batches_and_loss(data, settings)
        watch = self._watch(f"{row.task} unpruned", row.task, row, data, settings.epochs, {DATA: identity(data)})
        self._in_training[row.task] = lock
        self._say(f"training {row.task} for {settings.epochs} epochs")
        lane = Trainer(model, batches, settings, loss_fn=loss_fn, hooks=watch)
        self._crew.add(lane, partial(self._base_done, row, model))

    def _locked(self, row: Row) -> FolderLock | None:
        """The right to train an unpruned network; None while another process does."""
        folder = self._space.trainings / row.task
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return FolderLock(folder / ".lock")
        except BlockingIOError:
            if row.task not in self._elsewhere:
                self._elsewhere.add(row.task)
                self._say(f"waiting for {row.task}, which another process trains")
            return None
        except OSError as error:
            raise RunError(f"{folder} cannot be written: {one_line(error)}") from error

    def _base_done(self, row: Row, model: nn.Module, failure: IfsoError | None) -> None:
        lock = self._in_training.pop(row.task)
        if failure is None:
            self._space.keep_base(row, model)
        lock.release()
        for job in list(self._waiting.values()):
            if failure is not None and row.task in [each.task for each in (job.row, job.teacher) if each is not None]:
                self._fail(job, failure)

    def _base(self, row: Row, data: Data) -> tuple[nn.Module, dict[str, float]]:
        """An unpruned network and what it is worth, if that can be measured; it is the teacher, too."""
        if row.task not in self._bases:
            if row.base.weights is None and not self._space.smoke and trained_as(self._space, row) is None:
                file = self._space.base_file(row)
                self._say(f"{file} does not tell how it was trained; taken to be as the rows of {row.task} say")
            model, measure = self._space.base(row, data), self._measure(row, data, "float32")
            self._bases[row.task] = model, {} if measure is None else measure(model)
        return self._bases[row.task]

    def _finetune(self, job: Job) -> None:
        """Begin to fine-tune a pruned network, if everything was made as it would be now."""
        if job.prunes:
            refuse_other_pruning(self._space, job)
            self._space.prune_facts(job)
        settings, data = self._space.settings(job), self._space.open(job.row, job.seed)
        unpruned, _ = self._base(job.row, data)
        if job.prunes:
            refuse_other_start(self._space, job, unpruned)
        teacher, _ = self._base(job.teacher or job.row, data)
        pruned = self._space.pruned(job, data)
        digests = {START: digest_of(pruned), DATA: identity(data)}
        if settings.distill:
            digests[TEACHER] = digest_of(teacher)
        model = self._space.trainable(job, pruned, data)
        others = self._waiting.values()
        alike = 1 + sum(other.row.task == job.row.task and other.recipe == job.recipe for other in others)
        batches, loss_fn = batches_and_loss(data, settings, teacher, caches=self._tables, networks=alike, say=self._say)
        if job.row.detects:
            memory_of_training(self._space.training_folder(job), unpruned, model, data, settings)
        watch = self._watch(job.name, job.name, job.row, data, settings.epochs, digests)
        self._say(f"fine-tuning {job.name} for {settings.epochs} epochs")
        lane = Trainer(model, batches, settings, loss_fn=loss_fn, hooks=watch)
        self._crew.add(lane, partial(self._finetuned, job, lane))

    def _finetuned(self, job: Job, lane: Trainer, failure: IfsoError | None) -> None:
        for note in lane.notes:
            self._say(f"{job.name}: {note}")
        try:
            if failure is not None:
                raise failure
            result = self._result(job, lane)
        except IfsoError as error:
            self._fail(job, error)
            return
        write(result, self._space.results)
        base, last, best = (result.worth(stage) for stage in ("base", "last", "best"))
        self._say(f"{job.name}: {base:.2f} → {last:.2f} % (last epoch), best {best:.2f}")

    def _result(self, job: Job, lane: Trainer) -> AnyResult:
        data = self._space.open(job.row, job.seed)
        unpruned, worth = self._base(job.row, data)
        if not job.row.detects:
            teacher = None if job.teacher is None else self._base(job.teacher, data)[1]
            return result_of(self._space, job, lane, worth, teacher)
        measure = averages(data, self._batches(data), lane.settings.precision)
        return detection_result_of(self._space, job, lane, unpruned, worth, measure)

    def _watch(
        self, name: str, folder: str, row: Row, data: Data, epochs: int, digests: dict[str, str]
    ) -> TrainerHooks:
        """What is measured, told and stored of a training; detectors, which take long, are evaluated less often."""
        measure = self._measure(row, data, self._space.train.get("precision", "float32"))
        every, final = (max(1, epochs // BOX_EVALUATIONS), 1) if row.detects else (EVERY, FINAL)

        def tell(epoch: Epoch) -> None:
            if epoch.measures and (row.detects or epoch.number % (4 * EVERY) == 0 or epoch.number == epochs):
                worth = epoch.measures["map" if row.detects else "top1"]
                self._say(f"{name}: epoch {epoch.number} of {epochs}, loss {epoch.loss:.4f}, {worth:.2f} %")

        origin = InputDigests(digests, THAT_FOLDER)
        return TrainerHooks(measure, every, final, tell, folder=self._space.trainings / folder, origin=origin)

    def _batches(self, data: Data) -> Any:
        return evaluation_batches(data, self._space.device, validation=bool(self._space.validation))

    def _measure(self, row: Row, data: Data, precision: str) -> Measure | None:
        """Return a function that measures a network; None for a detector where that cannot be computed."""
        if row.detects:
            return detector_measure(data, self._batches(data), precision)
        examiner = Evaluator(self._batches(data), precision)
        return lambda model: {"top1": examiner(model).top1}


@contextmanager
def _shared_threads(device: str, workers: int) -> Iterator[int]:
    """Threads of each process: on a CPU this one and those that prune share the cores."""
    before = torch.get_num_threads()
    threads = max(1, before // (workers + 1)) if device == "cpu" else before
    torch.set_num_threads(threads)
    try:
        yield threads
    finally:
        torch.set_num_threads(before)
