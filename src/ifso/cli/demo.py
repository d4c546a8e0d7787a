"""``ifso demo``: a small network trained, pruned by several criteria, fine-tuned and compared, in about a minute."""

from __future__ import annotations

import argparse
import copy
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ifso.cli.console import complain, console, print_json, table, write_json
from ifso.cli.evaluate import profiles
from ifso.cli.inputs import compute_threads
from ifso.cli.options import add_option, add_shared, seed
from ifso.cli.prune import evaluation
from ifso.common.text import with_error
from ifso.errors import IfsoError, RunError, VerificationError
from ifso.runs.arguments import FINETUNE
from ifso.training.settings import TrainSettings

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn

    from ifso.pruning.events import Listener
    from ifso.training.evaluation import Accuracy
    from ifso.training.trainer import Epoch

MODEL, DATA, KEPT = "ifso:resnet8-digits", "digits", 0.5
OURS = "true-loss"
CRITERIA = {OURS: 1, "magnitude": 1, "random": 3}
"""What is compared, and how often it is done: chance deserves more than one try.

All else is the default of ``ifso.prune`` for each of them: stages without training, weights fitted in closed form.
"""
POINTS = 1.0
"""By so many points of accuracy the fine-tuned network may stay behind the unpruned one."""
SUMMARY, FINAL, REPORT = "demo.json", "finetuned", "report.html"

Checks = tuple[tuple[str, bool], ...]
"""What was checked, in words, and whether it is so."""


@dataclass(frozen=True)
class Effort:
    """How long things are done. Pruning looks at ``calibration`` training images in each of its stages."""

    train_epochs: int = 20
    finetune_epochs: int = 10
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


@dataclass(frozen=True)
class Outcome:
    """The table, the folder with everything, and what was checked."""

    rows: tuple[Row, ...]
    folder: Path
    seconds: float
    test_images: int
    checks: Checks

    def as_json(self) -> dict[str, Any]:
        """As plain values."""
        checks = [{"what": what, "passed": passed} for what, passed in self.checks]
        return {
            "model": MODEL, "data": DATA, "kept": KEPT, "folder": str(self.folder), "seconds": self.seconds,
            "test_images": self.test_images, "rows": [asdict(row) for row in self.rows], "checks": checks,
        }  # fmt: skip


class EveryFifthEpoch:
    """A listener of a training that reports every fifth epoch."""

    def __init__(self, say: Callable[[str], None], epochs: int) -> None:
        self._say, self._epochs = say, epochs

    def ended(self, _: str, epoch: Epoch) -> None:
        """Print one line."""
        if epoch.number % 5 == 0:
            self._say(f"epoch {epoch.number} of {self._epochs}, loss {epoch.loss:.4f}")

    def started(self, *_: Any) -> None:
        """Do nothing."""

    stepped = said = started


class Study:
    """Data and training, the same for all networks."""

    def __init__(self, seed: int, say: Callable[[str], None], listener: Listener, effort: Effort) -> None:
        from ifso.data import open_data

        self._seed, self._say, self._listener, self._effort = seed, say, listener, effort
        self._about = {"model": MODEL, "data": DATA, "command": f"ifso demo --seed {seed}"}
        self._settings = TrainSettings(
            effort.train_epochs, batch=64, schedule="one-cycle", nesterov=True, weight_decay=5e-4, seed=seed
        )
        self.data = open_data(DATA, seed=seed)

    def trained(self) -> tuple[nn.Module, Row]:
        """The network before pruning."""
        from ifso.models.registry import network_for
        from ifso.training.trainer import TrainerHooks, fit

        settings, started = self._settings, time.perf_counter()
        model = network_for(MODEL, None, seed=self._seed)
        self._say(f"training {MODEL} on {DATA}, {settings.epochs} epochs")
        watch = TrainerHooks(on_epoch=partial(EveryFifthEpoch(self._say, settings.epochs).ended, MODEL))
        fit(model, self.data.train_batches(settings.batch), settings, hooks=watch)
        seconds, accuracy = time.perf_counter() - started, self._accuracy(model)
        self._say(f"accuracy {with_error(accuracy.top1, accuracy.samples)} %")
        return model, Row("unpruned", 1.0, 1.0, accuracy.top1, accuracy.top1, accuracy.loss, seconds, 0.0)

    def pruned(self, unpruned: nn.Module, name: str, number: int, folder: Path) -> tuple[nn.Module, Row]:
        """A copy of the network, pruned with a criterion and fine-tuned. ``number`` tells its runs apart, from 1."""
        from ifso.criteria.registry import create
        from ifso.pruning.budget import Budget
        from ifso.pruning.prune import prune

        which = f", {number} of {CRITERIA[name]}" if CRITERIA[name] > 1 else ""
        self._say(f"removing half of the MACs with {name}{which}")
        seed = {"seed": self._seed * CRITERIA[name] + number} if name == "random" else {}
        model = copy.deepcopy(unpruned)
        result = prune(
            model, self.data.train_batches(self._settings.batch), self.data.loss_fn, budget=Budget(macs=KEPT),
            example_inputs=self.data.example_inputs(), criterion=create(name, **seed),
            calibration=self._effort.calibration, seed=self._seed, listener=self._listener,
            evaluate=evaluation(self.data, "float32"), about=self._about, out=folder,
        )  # fmt: skip
        pruned, before = copy.deepcopy(model), self._accuracy(model).top1
        seconds = self._finetune(model, folder / FINETUNE)
        after = self._accuracy(model)
        self._profile(folder, {"unpruned": unpruned, "pruned": pruned, "fine-tuned": model})
        first, last = (with_error(value, after.samples) for value in (before, after.top1))
        self._say(f"accuracy {first} %, after fine-tuning {last} %")
        macs, params = (getattr(result.after, kind) / getattr(result.before, kind) for kind in ("macs", "params"))
        return model, Row(name, macs, params, before, after.top1, after.loss, result.seconds, seconds)

    def same_again(self, model: nn.Module, folder: Path) -> bool:
        """Whether the network, saved in ``folder`` and loaded into a fresh one, computes the same."""
        import torch

        from ifso.models import create_model
        from ifso.surgery.store import load, save

        save(model, folder)
        (images, _), loaded = next(iter(self.data.test_batches())), load(folder, create_model(MODEL))
        with torch.no_grad():
            return torch.equal(loaded.eval()(images), model.eval()(images))

    def _finetune(self, model: nn.Module, folder: Path) -> float:
        """Train in a folder of its own; the seconds it took."""
        from ifso.training.runs import Training, train_side_by_side

        epochs, started = self._effort.finetune_epochs, time.perf_counter()
        self._say(f"fine-tuning for {epochs} epochs")
        settings = replace(self._settings, epochs=epochs, lr=0.05, schedule="cosine")
        training = Training("fine-tuning", folder, model, self.data, settings, about=self._about, start="pruned")
        (outcome,) = train_side_by_side([training], EveryFifthEpoch(self._say, epochs))
        if isinstance(outcome, IfsoError):
            raise outcome
        return time.perf_counter() - started

    def _accuracy(self, model: nn.Module) -> Accuracy:
        from ifso.training.evaluation import evaluate

        return evaluate(model, self.data.test_batches())

    def _profile(self, folder: Path, models: dict[str, nn.Module]) -> None:
        """Write what ``ifso eval`` would measure of these networks."""
        from ifso.runs.reading import EVALUATION
        from ifso.training.evaluation import quality
        from ifso.training.profiling import hardware

        data, precision, test = self.data, "float32", self.data.test_batches()
        batch = next(iter(data.train_batches(self._settings.batch)))
        qualities = {name: quality(each, data, test, precision, over_ranks=False) for name, each in models.items()}
        found = profiles(models, qualities, data.example_inputs(), batch, data.loss_fn, precision)
        about = {"data": DATA, "model": MODEL, "split": "test", "precision": precision, "hardware": hardware("cpu")}
        networks = {name: profile.as_dict() for name, profile in found.items()}
        write_json(folder / EVALUATION, {**about, "train_batch": self._settings.batch, "networks": networks})


def demonstrate(
    out: Path, seed: int, say: Callable[[str], None], listener: Listener, effort: Effort = Effort()
) -> Outcome:
    """Train, prune, fine-tune and compare; everything is written into ``out``, or a numbered folder beside it.

    One thread does it all: more are no quicker with layers this small, and far slower where other work is going on.
    """
    from ifso.report import write_report

    started, folder = time.perf_counter(), free_folder(out)
    with compute_threads(1):
        study = Study(seed, say, listener, effort)
        unpruned, row = study.trained()
        rows, models = [row], {}
        for name in CRITERIA:
            runs = [study.pruned(unpruned, name, n, folder / run) for n, run in enumerate(run_names(name), 1)]
            models[name] = runs[0][0]
            rows.append(mean_row([row for _, row in runs]))
        checks = check(rows, same_again=study.same_again(models[OURS], folder / FINAL))
        images = sum(len(labels) for _, labels in study.data.test_batches())
    outcome = Outcome(tuple(rows), folder, time.perf_counter() - started, images, checks)
    write_json(folder / SUMMARY, outcome.as_json())
    write_report([folder / run for name in CRITERIA for run in run_names(name)], folder / REPORT)
    return outcome


def run_names(name: str) -> list[str]:
    """The folders of the prunings with a criterion.

    >>> run_names("random"), run_names("magnitude")
    (['random-1', 'random-2', 'random-3'], ['magnitude'])
    """
    return [name] if CRITERIA[name] == 1 else [f"{name}-{number}" for number in range(1, CRITERIA[name] + 1)]


def mean_row(rows: Sequence[Row]) -> Row:
    """One row for all runs of a criterion.

    >>> a, b = Row("random", 0.5, 0.4, 90.0, 98.0, 0.1, 3.0, 2.0), Row("random", 0.5, 0.3, 80.0, 99.0, 0.3, 5.0, 2.0)
    >>> mean = mean_row([a, b])
    >>> mean.before, mean.after, mean.seconds, mean.runs
    (85.0, 98.5, 4.0, 2)
    """
    numbers = ("macs", "params", "before", "after", "loss", "seconds", "finetune_seconds")
    return Row(rows[0].name, **{name: fmean(getattr(row, name) for row in rows) for name in numbers}, runs=len(rows))


def free_folder(out: Path) -> Path:
    """``out`` if nothing is there yet, else the first of ``out-2``, ``out-3``, … that is free."""
    names = itertools.chain([out], (out.with_name(f"{out.name}-{number}") for number in itertools.count(2)))
    try:
        folder = next(name for name in names if not name.exists() or (name.is_dir() and not any(name.iterdir())))
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{out} cannot be made: {error.strerror or error}; give another --out") from error
    return folder


def check(rows: Sequence[Row], *, same_again: bool) -> Checks:
    """What must be so: the budget is met, fine-tuning restores the accuracy, the saved network is the same."""
    unpruned, ours = rows[0], rows[1]
    least = unpruned.after - POINTS
    return (
        (f"every pruned network keeps at most {KEPT:.0%} of the MACs", all(row.macs <= KEPT for row in rows[1:])),
        (f"accuracy with {ours.name} after fine-tuning is at least {least:.2f} %", ours.after >= least - 1e-9),
        ("the saved network, loaded into a fresh one, gives the same bits", same_again),
    )


HEADINGS = (
    "criterion", "MACs kept", "parameters kept", "accuracy", "after fine-tuning", "test loss", "seconds", "fine-tuning",
)  # fmt: skip
SAME = (
    "The first accuracy is measured right after pruning, before any training. Only the criterion differs between the "
    "runs: each removes units in stages and fits the remaining weights in closed form."
)


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("demo", help="train, prune, fine-tune and compare on real data, in about a minute")
    where = "where to save; if taken, DIR-2, DIR-3, …"
    add_option(parser, "out", Path, "DIR", where, default=Path("ifso-demo"))
    add_option(parser, "seed", seed, "N", "of weights and data (default: 0)", default=0)
    add_shared(parser, "json")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo; the status is 4 if a check of the result fails."""
    from ifso.pruning.progress import progress

    with progress() as listener:
        outcome = demonstrate(args.out, args.seed, _say, listener)
    if args.json:
        print_json(outcome.as_json())
    else:
        console().print(outcome_table(outcome), *_remarks(outcome), sep="\n")
    failed = "; ".join(what for what, passed in outcome.checks if not passed)
    if failed:
        complain(f"error: a check of the result failed: {failed}")
    return VerificationError.exit_status if failed else 0


def _say(line: str) -> None:
    print(f"demo: {line}", file=sys.stderr, flush=True)


def outcome_table(outcome: Outcome) -> Table:
    """Accuracies in percent, one row for each network."""
    rows = []
    for row in outcome.rows:
        name = row.name if row.runs == 1 else f"{row.name}, {row.runs} runs"
        accuracies = (with_error(value, outcome.test_images) for value in (row.before, row.after))
        values = f"{row.macs:.1%}", f"{row.params:.1%}", *accuracies, f"{row.loss:.4f}"
        rows.append((name, *values, f"{row.seconds:.1f}", f"{row.finetune_seconds:.1f}" * (row.finetune_seconds > 0)))
    return table(HEADINGS, rows, title=f"{MODEL} on {DATA}, pruned to {KEPT:.0%} of its MACs")


def _remarks(outcome: Outcome) -> list[str]:
    runs = ", ".join(name if count == 1 else f"{name}-1 to {name}-{count}" for name, count in CRITERIA.items())
    return [
        SAME,
        f"Accuracy in per cent ± its standard error on {outcome.test_images} test images. Of runs: the mean, ± of one.",
        f"One of the {outcome.test_images} test images is {100 / outcome.test_images:.2f} points of accuracy.",
        *(f"{'ok' if passed else 'FAILED'}: {what}" for what, passed in outcome.checks),
        f"run folder: {outcome.folder} (runs {runs}; the fine-tuned network in {FINAL}, the numbers in {SUMMARY})",
        f"to look at: {outcome.folder / REPORT}",
        f"{outcome.seconds:.0f} s in all",
    ]
