"""``ifso demo``: commands of ifso on real data: a small network trained, pruned by several criteria, fine-tuned."""

from __future__ import annotations

import argparse
import io
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ifso.cli import evaluate, finetune, prune, train
from ifso.cli.console import complain, console, print_json, table, write_json
from ifso.cli.evaluate import STAGES
from ifso.cli.inputs import compute_threads
from ifso.cli.options import add_option, add_shared, seed
from ifso.common.text import with_error
from ifso.errors import RunError, VerificationError
from ifso.runs.arguments import FINETUNE

if TYPE_CHECKING:
    from rich.table import Table

MODEL, DATA, KEPT = "ifso:resnet8-digits", "digits", 0.5
OURS = "true-loss"
CRITERIA = {OURS: 1, "magnitude": 1, "random": 3}
"""What is compared, and how often it is done: chance deserves more than one try.

All else is the default of ``ifso prune`` for each of them: stages without training, weights fitted in closed form.
"""
TRAINING: dict[str, Any] = {"batch": 64, "nesterov": True, "weight_decay": 5e-4}
"""Options of ``ifso train`` and ``ifso finetune``."""

POINTS = 1.0
"""By so many points of accuracy the fine-tuned network may stay behind the unpruned one."""
TRAINED, FINAL, NUMBERS, REPORT = "trained", "finetuned", "demo.json", "report.html"
SUMMARY, EVALUATION = "summary.json", "eval.json"
"""What commands write into the folder of a run."""

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
    finetune_seconds: float = 0.0
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


def demonstrate(out: Path, seed: int, say: Callable[[str], None], effort: Effort = Effort()) -> Outcome:
    """Train, prune, fine-tune and compare; everything is written into ``out``, or a numbered folder beside it.

    One thread does it all: more are no quicker with layers this small, and far slower where other work is going on.
    """
    from ifso.report import write_report

    started, folder = time.perf_counter(), free_folder(out)
    runs = [folder / run for name in CRITERIA for run in run_names(name)]
    with compute_threads(1):
        say(f"training {MODEL} on {DATA}, {effort.train_epochs} epochs")
        how = {**TRAINING, "epochs": effort.train_epochs, "lr_schedule": "one-cycle", "seed": seed}
        command("train", model=MODEL, data=DATA, out=folder / TRAINED, **how)
        compared = []
        for name in CRITERIA:
            places = enumerate((folder / run for run in run_names(name)), 1)
            compared.append(mean_row([smaller(run, name, number, seed, say, effort) for number, run in places]))
        images, unpruned = unpruned_row(runs[0], folder / TRAINED)
        rows = (unpruned, *compared)
        checks = check(rows, same_again=saved_again(folder / OURS / FINETUNE, folder / FINAL))
    outcome = Outcome(rows, folder, time.perf_counter() - started, images, checks)
    write_json(folder / NUMBERS, outcome.as_json())
    write_report(runs, folder / REPORT)
    return outcome


def smaller(run: Path, name: str, number: int, seed: int, say: Callable[[str], None], effort: Effort) -> Row:
    """The trained network, pruned with a criterion, fine-tuned, measured. ``number`` tells its runs apart, from 1."""
    which = f", {number} of {CRITERIA[name]}" if CRITERIA[name] > 1 else ""
    say(f"removing half of the MACs with {name}{which}")
    how: dict[str, Any] = {"criterion": name, "calibration": effort.calibration, "batch": 64, "seed": seed}
    if name == "random":
        how["criterion_option"] = f"seed={seed * CRITERIA[name] + number}"
    weights = run.parent / TRAINED / "model.safetensors"
    command("prune", model=MODEL, weights=weights, data=DATA, macs=KEPT, out=run, **how)
    say(f"fine-tuning for {effort.finetune_epochs} epochs")
    how = {**TRAINING, "epochs": effort.finetune_epochs, "lr": 0.05, "lr_schedule": "cosine", "seed": seed}
    command("finetune", run, **how)
    command("eval", run, latency_batch=1, train_batch=64, out=run / EVALUATION)
    pruned, after = (read_json(run / EVALUATION)["networks"][stage] for stage in STAGES[1:])
    first, last = (with_error(each["top1"], each["samples"]) for each in (pruned, after))
    say(f"accuracy {first} %, after fine-tuning {last} %")
    seconds = (read_json(folder / SUMMARY)["seconds"] for folder in (run, run / FINETUNE))
    return Row(name, after["macs_share"], after["params_share"], pruned["top1"], after["top1"], after["loss"], *seconds)


def unpruned_row(run: Path, trained: Path) -> tuple[int, Row]:
    """The network that a run began with, and how many images it was measured on."""
    found, seconds = read_json(run / EVALUATION)["networks"][STAGES[0]], read_json(trained / SUMMARY)["seconds"]
    return found["samples"], Row("unpruned", 1.0, 1.0, found["top1"], found["top1"], found["loss"], seconds)


def read_json(path: Path) -> dict[str, Any]:
    """The document in a file that a command has written."""
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def command(name: str, *words: object, **options: object) -> None:
    """Run ``ifso NAME WORD … --OPTION VALUE …`` on the CPU, without what it prints on standard output."""
    parser = argparse.ArgumentParser("ifso")
    commands = parser.add_subparsers()
    for each in (train, prune, finetune, evaluate):
        each.add_parser(commands)
    given = [
        word
        for option, value in options.items()
        for word in (f"--{option.replace('_', '-')}", *([] if value is True else [str(value)]))
    ]
    args = parser.parse_args([name, *map(str, words), "--device", "cpu", *given])
    with redirect_stdout(io.StringIO()):
        args.run(args)


def saved_again(folder: Path, copy: Path) -> bool:
    """Whether the network in ``folder``, saved as ``copy`` and loaded into a fresh one, computes the same."""
    import torch

    from ifso.data import open_data
    from ifso.models import create_model
    from ifso.surgery.store import load, save

    model = load(folder, create_model(MODEL)).eval()
    save(model, copy)
    images, _ = next(iter(open_data(DATA).test_batches()))
    with torch.no_grad():
        return torch.equal(load(copy, create_model(MODEL)).eval()(images), model(images))


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
    outcome = demonstrate(args.out, args.seed, _say)
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
        f"run folder: {outcome.folder} (runs {runs}; the fine-tuned network in {FINAL}, the numbers in {NUMBERS})",
        f"to look at: {outcome.folder / REPORT}",
        f"{outcome.seconds:.0f} s in all",
    ]
