"""``ifso finetune``: trains the pruned networks of runs, several side by side, with or without their teachers."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifso.cli.console import complain, console, print_json, table
from ifso.cli.distributed import World, joined, leave
from ifso.cli.inputs import data_options, name_networks, report_notes
from ifso.cli.options import add_option, add_shared, real, seed
from ifso.cli.progress import training_progress
from ifso.cli.resume import check_same_options, resumable, stored_options
from ifso.cli.teachers import Teachers, check_teacher_options
from ifso.cli.train_options import (
    TEACHER,
    add_data,
    add_recipe,
    add_running,
    common_option,
    gather,
    has_boxes,
    settings_of,
)
from ifso.common.text import with_error
from ifso.errors import IfsoError
from ifso.runs.arguments import FINETUNE, without_folders
from ifso.runs.open import OpenedRun, open_run

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn

    from ifso.data import Data
    from ifso.training.runs import Training
    from ifso.training.settings import TrainSettings

    Outcome = dict[str, Any] | IfsoError
    Say = Callable[[str], None]

DESCRIPTION = (
    "Fine-tune the pruned network of a run, or those of several side by side, into RUN/finetune. "
    "What is not given is as in the recipe. Under torchrun, one run is trained by all ranks."
)
DISTILL, DISTILL_BOXES = 0.9, 0.5
"""The weight of the teacher in ``--distill`` without one, for labels and for boxes."""


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("finetune", help="fine-tune pruned networks", description=DESCRIPTION)
    group = parser.add_argument_group("what is fine-tuned")
    group.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a folder that ifso prune --out made")
    add_option(group, "out", Path, "DIR", "another folder than RUN/finetune, for one run")
    add_option(group, "model", str, "MODEL", "if its file has moved, or the run does not tell it")
    add_option(group, "weights", str, "FILE", "of the unpruned network, if they have moved")
    add_shared(group, "pretrained")
    add_option(group, "data", str, "DATA", "what ifso prune takes as --data (that of the run)")
    add_shared(group, "unverified")
    add_data(group)
    how = parser.add_argument_group("how it is trained")
    add_recipe(how)
    words = (
        f"learn from the unpruned network, too, with this weight ({DISTILL}, or {DISTILL_BOXES} on coco: data; "
        "0 without --distill, 0.9 in ours)"
    )
    add_option(how, "distill", _weight, "WEIGHT", words, nargs="?", const=True)
    add_option(how, "teacher", str, "MODEL", "another teacher than the unpruned network, with --distill")
    add_option(how, "teacher_weights", str, "FILE", "its weights, safetensors or .pth")
    add_option(how, "temperature", real, "T", "that softens what the teacher says (4)")
    add_option(how, "seed", seed, "N", "fixes everything that is random (that of the run)")
    where = parser.add_argument_group("where and how it runs")
    add_running(where)
    words = "train in the shape before pruning, with zeros, where that is the same: quicker on a GPU (cuda: yes)"
    add_option(where, "padded", bool, "", words)
    parser.set_defaults(run=run)


def _weight(text: str) -> float:
    try:
        return real(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no weight; write --distill after the runs, or --distill=0.9"
        ) from None


@dataclass(frozen=True)
class FinetunePlan:
    """One of the runs, where its fine-tuning goes, and how it is done."""

    run: OpenedRun
    folder: Path
    options: Mapping[str, Any]
    settings: TrainSettings

    def changed(self, name: str) -> str | None:
        """An option, if it is another than that of the run."""
        value = self.options.get(name)
        return None if value == self.run.arguments.get(name) else value


def run(args: argparse.Namespace) -> int:
    """Fine-tune, and print what came out."""
    _check_arguments(args)
    args.said = name_networks(args)
    plans = [_plan(args, folder) for folder in args.runs]
    options = [plan.options for plan in plans]
    common_option(options, "precision", "float32")
    command = ["finetune", "--resume", *([] if args.out is None else ["--out", str(args.out)]), *map(str, args.runs)]
    device, folders = common_option(options, "device", "cpu"), [plan.folder for plan in plans]
    with joined(device) as world, resumable(command, *folders, shown=world.is_first):

        def prepare(numbers: Sequence[int], say: Say) -> list[Training]:
            preparation = _Preparation(args, world, say)
            return [preparation.training(plans[number]) for number in numbers]

        outcomes = train_each("finetune", folders, prepare, args, world)
    pairs = zip(plans, outcomes, strict=True)
    failures = {str(plan.folder): each for plan, each in pairs if isinstance(each, IfsoError)}
    if failures and len(outcomes) == 1:
        raise next(iter(failures.values()))
    summaries = [each for each in outcomes if isinstance(each, dict)]
    if world.is_first and args.json:
        words = {folder: " ".join(str(failure).split()) for folder, failure in failures.items()}
        print_json({"runs": summaries, "failures": words})
    elif world.is_first and summaries:
        show_trained(summaries)
    for folder, failure in failures.items() if world.is_first else ():
        complain(f"error: {folder}: {failure}")
    return leave(max((failure.exit_status for failure in failures.values()), default=0))


def _check_arguments(args: argparse.Namespace) -> None:
    if len({folder.resolve() for folder in args.runs}) < len(args.runs):
        raise IfsoError("the same RUN is given twice; give each one once")
    if len(args.runs) > 1 and args.out is not None:
        raise IfsoError("--out is for one RUN; leave it out, and each is fine-tuned into RUN/finetune")
    if len(args.runs) > 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise IfsoError("under torchrun all ranks train one network; give one RUN, or run without torchrun")


def _plan(args: argparse.Namespace, folder: Path) -> FinetunePlan:
    run = open_run(folder, model=args.model, unverified=args.unverified)
    target = args.out or folder / FINETUNE
    known = {name: run.arguments[name] for name in ("model", "weights", "data", "seed") if name in run.arguments}
    if args.distill is True:
        usual = DISTILL_BOXES if has_boxes(args.data or known.get("data")) else DISTILL
        args = argparse.Namespace(**{**vars(args), "distill": usual})
    options = gather(args, target, known, "ifso finetune", folder)
    options["padded"] = _padded(args, target, options)
    settings = settings_of(options)
    check_teacher_options(options, settings, pretrained=args.pretrained)
    told = {name: options[name] for name in ("model", *TEACHER) if name in options}
    return FinetunePlan(replace(run, arguments={**run.arguments, **told}), target, options, settings)


def _padded(args: argparse.Namespace, folder: Path, options: Mapping[str, Any]) -> bool:
    """In the shape before pruning? As it was begun, if it is resumed, else as asked for.

    Not detectors, unless asked for: they fill a GPU by themselves, and the small network takes less memory.
    """
    stored = stored_options(folder, ("padded",), "ifso finetune") if args.resume else {}
    if stored and args.padded is not None:
        check_same_options({"padded": args.padded}, stored, folder)
    on_gpu = options["device"].partition(":")[0] == "cuda"
    default = not args.resume and on_gpu and not has_boxes(options.get("data"))
    return stored.get("padded", default if args.padded is None else args.padded)


def train_each(
    command: str,
    folders: Sequence[Path],
    prepare: Callable[[Sequence[int], Say], list[Training]],
    args: argparse.Namespace,
    world: World,
) -> list[Outcome]:
    """Train in all ``folders`` side by side what ``prepare`` makes for their numbers; what is finished is only read."""
    from ifso.training.runs import SilentTraining, finished_summary, remove_checkpoint, train_side_by_side

    found = {number: finished_summary(folder) if args.resume else None for number, folder in enumerate(folders)}
    done: dict[int, Outcome] = {number: summary for number, summary in found.items() if summary is not None}
    for number in done if world.is_first else ():
        remove_checkpoint(folders[number])
    left = [number for number in found if number not in done]
    if left:
        with training_progress(command) if world.is_first else nullcontext(SilentTraining()) as listener:
            trainings = prepare(left, listener.said)
            for line in dict.fromkeys(args.said):
                listener.said(line)
            outcomes = train_side_by_side(trainings, listener, resume=args.resume, ranks=world.ranks)
        done.update(zip(left, outcomes, strict=True))
    return [done[number] for number in found]


class _Preparation:
    """Opens data and teachers once for all runs that share them."""

    def __init__(self, args: argparse.Namespace, world: World, say: Say) -> None:
        self._args, self._world, self._say = args, world, say
        self._data: dict[Any, Data] = {}
        self._teachers = Teachers(args, world, say)

    def training(self, plan: FinetunePlan) -> Training:
        """All that it takes to fine-tune the network of a run."""
        from ifso.surgery.recipe import digest_of
        from ifso.training.runs import Training

        data, validation = self._opened(plan), bool(plan.options.get("validation"))
        model = plan.run.pruned(self._world.device, data=data)
        teacher, before, fixed = self._teachers.of(plan, data, model)
        told = {"data": without_folders(data.name), "validation": plan.options.get("validation", 0)}
        return Training(
            name=str(plan.run.folder), folder=plan.folder, model=model, data=data, settings=plan.settings,
            teacher=teacher, validation=validation, every=plan.options.get("evaluate_every", 1),
            fixed={"weights": digest_of(model), **told, **fixed},
            about={"run": str(plan.run.folder), "arguments": dict(plan.options)}, start="pruned",
            before=before, wide=self._wide(plan, data),
        )  # fmt: skip

    def _wide(self, plan: FinetunePlan, data: Data) -> nn.Module | None:
        """A network as that of a run was before pruning, to train the pruned one in; its weights do not matter."""
        from ifso.data.base import detects

        if not plan.options["padded"] or (detects(data) and not self._args.padded):
            return None
        return plan.run._network(data, None).to(self._world.device)

    def _opened(self, plan: FinetunePlan) -> Data:
        options = data_options(self._args, self._world, plan.settings.seed, plan.options.get("validation", 0))
        near = plan.run.folder.resolve().parent
        key = plan.options.get("data"), near, options["seed"], options["validation"]
        if key not in self._data:
            self._data[key] = plan.run.open_data(data=plan.changed("data"), **options)
            report_notes(self._data[key], self._say)
        return self._data[key]


def show_trained(summaries: Sequence[Mapping[str, Any]]) -> None:
    """The table, and a line for each network that was better before."""
    console().print(summary_table(summaries))
    for summary in summaries:
        for note in summary.get("notes", ()):
            print(f"note: {summary['folder']}: {note}")


def summary_table(summaries: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each network that was trained: accuracies, mAP, or losses where the data has a loss of its own."""
    splits = sorted({summary["split"] for summary in summaries})
    own = all(summary.get("last_top1") is None and "eval_loss" in summary["last"] for summary in summaries)
    kind = "map" if all("last_map" in summary for summary in summaries) else "eval_loss" if own else "top1"
    stages = list(dict.fromkeys(stage for summary in summaries for stage in summary["before"]))
    rows = []
    for summary in summaries:
        values = [*map(summary["before"].get, stages), summary.get(f"last_{kind}"), summary.get(f"best_{kind}")]
        counted = summary.get("samples") if kind == "top1" else None
        cells = ["–" if value is None else with_error(value, counted) for value in values]
        cells = [f"{summary['last']['eval_loss']:.4g}"] if kind == "eval_loss" else cells
        rows.append((summary["folder"], *cells, str(summary["epochs"]), f"{summary['seconds']:.1f}"))
    best = () if kind == "eval_loss" else ("best epoch",)
    headings = ("folder", *stages, "last epoch", *best, "epochs", "seconds")
    error = " ± standard error" if kind == "top1" and any(summary.get("samples") for summary in summaries) else ""
    return table(headings, rows, title=f"{TITLES[kind]}{error} on {' and '.join(splits)} images")


TITLES = {"top1": "Accuracy in per cent", "map": "mAP in per cent", "eval_loss": "Loss"}
