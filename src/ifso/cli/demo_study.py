"""What ``ifso demo`` does: a small network trained, pruned by several criteria, fine-tuned and compared."""

from __future__ import annotations

import copy
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

from ifso.common.files import replacing
from ifso.criteria.base import Criterion
from ifso.criteria.registry import create
from ifso.data.registry import open_data
from ifso.errors import IfsoError, RunError
from ifso.models import create_model
from ifso.pruning.budget import Budget
from ifso.pruning.events import Listener
from ifso.pruning.prune import prune
from ifso.report import write_report
from ifso.runs.reading import EVALUATION, FINETUNE
from ifso.surgery.store import load, save
from ifso.tasks.classification import cross_entropy
from ifso.training.evaluation import Accuracy, Quality, evaluate
from ifso.training.profiling import Profile, costs_of, hardware, time_forward, training_peak
from ifso.training.runs import Silent, Training, train_side_by_side
from ifso.training.settings import TrainSettings
from ifso.training.trainer import Epoch, TrainerHooks, fit

MODEL, DATA = "ifso:resnet8-digits", "digits"

KEPT = 0.5

OURS = "true-loss"

CRITERIA = {OURS: 1, "magnitude": 1, "random": 3}
"""What is compared, and how often it is done: chance deserves more than one try.

All else is the default of ``ifso.prune`` for each of them: stages without training, weights fitted in closed form.
"""


@dataclass(frozen=True)
class Effort:
    """How long things are done. Pruning looks at ``calibration`` training images in each of its stages."""

    train_epochs: int = 20
    train_rate: float = 0.1
    finetune_epochs: int = 10
    finetune_rate: float = 0.05
    batch_size: int = 64
    calibration: int = 1024


@dataclass(frozen=True)
class Row:
    """One network: shares of MACs and parameters kept, accuracies in percent, seconds of training or pruning.

    ``before`` is the accuracy after pruning, ``after`` the one after fine-tuning, which took ``finetune_seconds``;
    ``loss`` is the mean cross entropy on the test set in the end. With several ``runs`` all numbers are means.
    """

    name: str
    macs: float
    params: float
    before: float
    after: float
    loss: float
    seconds: float
    finetune_seconds: float
    runs: int = 1


def write_json(path: Path, document: dict[str, Any]) -> None:
    """A JSON file, as a whole or not at all."""
    try:
        with replacing(path) as new:
            new.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}") from error


class _Told(Silent):
    """Says a line after every fifth epoch."""

    def __init__(self, say: Callable[[str], None], epochs: int) -> None:
        self._say, self._epochs = say, epochs

    def tell(self, epoch: Epoch) -> None:
        """One epoch is over."""
        if epoch.number % 5 == 0:
            self._say(f"epoch {epoch.number} of {self._epochs}, loss {epoch.loss:.4f}")

    def ended(self, name: str, epoch: Epoch) -> None:  # noqa: ARG002 there is one training only
        """The same of a training in a folder."""
        self.tell(epoch)


class Study:
    """Data and training, the same for all networks."""

    def __init__(self, seed: int, say: Callable[[str], None], effort: Effort) -> None:
        self._seed, self._say, self._effort = seed, say, effort
        self._data = open_data(DATA, seed=seed)
        self.test_images = sum(len(labels) for _, labels in self._data.test_batches())

    def trained(self) -> tuple[nn.Module, Row]:
        """The network before pruning."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            model = create_model(MODEL)
        effort = self._effort
        self._say(f"training {MODEL} on {DATA}, {effort.train_epochs} epochs")
        seconds = self._fit(model, effort.train_epochs, effort.train_rate, "one-cycle")
        found = self._tested(model)
        self._say(f"accuracy {found.top1:.2f} %")
        return model, Row("unpruned", 1.0, 1.0, found.top1, found.top1, found.loss, seconds, 0.0)

    def pruned(
        self, unpruned: nn.Module, name: str, number: int, folder: Path, listener: Listener
    ) -> tuple[nn.Module, Row]:
        """A copy of the network, pruned with a criterion and fine-tuned. ``number`` tells its runs apart, from 1."""
        which = f", {number} of {CRITERIA[name]}" if CRITERIA[name] > 1 else ""
        self._say(f"removing half of the MACs with {name}{which}")
        model, effort = copy.deepcopy(unpruned), self._effort
        result = prune(
            model,
            self._data.train_batches(effort.batch_size),
            cross_entropy,
            budget=Budget(macs=KEPT),
            example_inputs=self._data.example_inputs(),
            criterion=self._criterion(name, number),
            calibration=effort.calibration,
            seed=self._seed,
            listener=listener,
            evaluate=self._accuracy,
            about=self._about,
            out=folder,
        )
        pruned, before = copy.deepcopy(model), self._tested(model).top1
        self._say(f"fine-tuning for {effort.finetune_epochs} epochs")
        seconds = self._finetune(model, folder / FINETUNE)
        after = self._tested(model)
        self._measure(folder / EVALUATION, {"unpruned": unpruned, "pruned": pruned, "fine-tuned": model})
        self._say(f"accuracy {before:.2f} %, after fine-tuning {after.top1:.2f} %")
        macs, params = (getattr(result.after, kind) / getattr(result.before, kind) for kind in ("macs", "params"))
        return model, Row(name, macs, params, before, after.top1, after.loss, result.seconds, seconds)

    def same_again(self, model: nn.Module, folder: Path) -> bool:
        """Does the network in ``folder``, loaded into a fresh one, compute the same?"""
        (images, _), loaded = next(iter(self._data.test_batches())), load(folder, create_model(MODEL))
        with torch.no_grad():
            return torch.equal(loaded.eval()(images), model.eval()(images))

    def _criterion(self, name: str, number: int) -> Criterion:
        if name != "random":
            return create(name)
        return create(name, seed=self._seed * CRITERIA[name] + number)

    @property
    def _about(self) -> dict[str, Any]:
        """What the run folders tell of the task."""
        return {"model": MODEL, "data": DATA, "command": f"ifso demo --seed {self._seed}"}

    def _fit(self, model: nn.Module, epochs: int, lr: float, schedule: str) -> float:
        """Train; the seconds it took."""
        begun, settings = time.perf_counter(), self._settings(epochs, lr, schedule)
        hooks = TrainerHooks(on_epoch=_Told(self._say, epochs).tell)
        fit(model, self._data.train_batches(settings.batch), settings, hooks=hooks)
        return time.perf_counter() - begun

    def _finetune(self, model: nn.Module, folder: Path) -> float:
        """Train in a folder of its own; the seconds it took."""
        begun, effort = time.perf_counter(), self._effort
        settings = self._settings(effort.finetune_epochs, effort.finetune_rate, "cosine")
        training = Training("fine-tuning", folder, model, self._data, settings, about=self._about, start="pruned")
        (outcome,) = train_side_by_side([training], _Told(self._say, settings.epochs))
        if isinstance(outcome, IfsoError):
            raise outcome
        return time.perf_counter() - begun

    def _settings(self, epochs: int, lr: float, schedule: str) -> TrainSettings:
        return TrainSettings(
            epochs=epochs,
            batch=self._effort.batch_size,
            lr=lr,
            schedule=schedule,
            nesterov=True,
            weight_decay=5e-4,
            seed=self._seed,
        )

    def _accuracy(self, model: nn.Module) -> dict[str, float]:
        found = self._tested(model)
        return {"accuracy": found.top1, "test_loss": found.loss}

    def _tested(self, model: nn.Module) -> Accuracy:
        return evaluate(model, self._data.test_batches())

    def _measure(self, path: Path, models: dict[str, nn.Module]) -> None:
        """What ``ifso eval`` would measure of these networks."""
        example, precision = self._data.example_inputs(), "float32"
        batch = next(iter(self._data.train_batches(self._effort.batch_size)))
        times = time_forward(models, example, 1, precision)
        networks = {}
        for name, model in models.items():
            found, peak = self._tested(model), training_peak(model, batch, cross_entropy, precision)
            worth = Quality(found.loss, found.samples, found.top1, found.top5)
            networks[name] = Profile(worth, *costs_of(model, example, precision), (times[name],), peak).as_dict()
        about = {"data": DATA, "model": MODEL, "split": "test", "precision": precision, "hardware": hardware("cpu")}
        write_json(path, {**about, "train_batch": self._effort.batch_size, "networks": networks})


POINTS = 1.0
"""By so many points of accuracy the fine-tuned network may stay behind the unpruned one."""

Checks = tuple[tuple[str, bool], ...]
"""What was checked, in words, and whether it is so."""

SUMMARY, FINAL, REPORT = "demo.json", "finetuned", "report.html"


@dataclass(frozen=True)
class Outcome:
    """The table, the folder with everything, and what was checked."""

    rows: tuple[Row, ...]
    folder: Path
    seconds: float
    test_images: int
    checks: Checks

    @property
    def passed(self) -> bool:
        """Is everything as it should be?"""
        return all(passed for _, passed in self.checks)

    def as_json(self) -> dict[str, Any]:
        """As plain values."""
        checks = [{"what": what, "passed": passed} for what, passed in self.checks]
        rows = [asdict(row) for row in self.rows]
        return {
            "model": MODEL, "data": DATA, "kept": KEPT, "folder": str(self.folder), "seconds": self.seconds,
            "test_images": self.test_images, "rows": rows, "checks": checks,
        }  # fmt: skip


def demonstrate(
    out: Path,
    seed: int,
    say: Callable[[str], None],
    listener: Listener,
    effort: Effort = Effort(),
) -> Outcome:
    """Train, prune, fine-tune and compare; everything is written into ``out``, or a numbered folder beside it.

    One thread does it all: more are no quicker with layers this small, and far slower where other work is going on.
    """
    begun, folder = time.perf_counter(), _free(out)
    with _one_thread():
        study = Study(seed, say, effort)
        rows, checks = _compare(folder, study, listener)
    outcome = Outcome(tuple(rows), folder, time.perf_counter() - begun, study.test_images, checks)
    write_json(folder / SUMMARY, outcome.as_json())
    write_report([folder / name for name in run_names()], folder / REPORT)
    return outcome


def _compare(folder: Path, study: Study, listener: Listener) -> tuple[list[Row], Checks]:
    unpruned, row = study.trained()
    rows, models = [row], {}
    for name, runs in CRITERIA.items():
        places = {number: folder / _run_name(name, number) for number in range(1, runs + 1)}
        found = [study.pruned(unpruned, name, number, place, listener) for number, place in places.items()]
        rows.append(_mean([row for _, row in found]))
        models[name] = found[0][0]
    save(models[OURS], folder / FINAL)
    return rows, _checks(rows, study.same_again(models[OURS], folder / FINAL))


def run_names() -> list[str]:
    """The folders of all prunings."""
    return [_run_name(name, number) for name, runs in CRITERIA.items() for number in range(1, runs + 1)]


def _run_name(name: str, number: int) -> str:
    return name if CRITERIA[name] == 1 else f"{name}-{number}"


def _mean(rows: Sequence[Row]) -> Row:
    """One row for all runs of a criterion.

    >>> a, b = Row("random", 0.5, 0.4, 90.0, 98.0, 0.1, 3.0, 2.0), Row("random", 0.5, 0.3, 80.0, 99.0, 0.3, 5.0, 2.0)
    >>> mean = _mean([a, b])
    >>> mean.before, mean.after, mean.seconds, mean.runs
    (85.0, 98.5, 4.0, 2)
    """
    numbers = ("macs", "params", "before", "after", "loss", "seconds", "finetune_seconds")
    means = {name: fmean(getattr(row, name) for row in rows) for name in numbers}
    return Row(rows[0].name, **means, runs=len(rows))


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _free(out: Path) -> Path:
    """``out`` if nothing is there yet, else the first of ``out-2``, ``out-3``, … that is free."""
    names = itertools.chain([out], (out.with_name(f"{out.name}-{number}") for number in itertools.count(2)))
    try:
        folder = next(name for name in names if not name.exists() or (name.is_dir() and not any(name.iterdir())))
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{out} cannot be made: {error.strerror or error}; give another --out") from error
    return folder


def _checks(rows: Sequence[Row], same_again: bool) -> Checks:
    unpruned, ours = rows[0], rows[1]
    least = unpruned.after - POINTS
    return (
        (f"every pruned network keeps at most {KEPT:.0%} of the MACs", all(row.macs <= KEPT for row in rows[1:])),
        (f"accuracy with {ours.name} after fine-tuning is at least {least:.2f} %", ours.after >= least - 1e-9),
        ("the saved network, loaded into a fresh one, gives the same bits", same_again),
    )
