"""``ifso prune``: from a trained network to a smaller one at a budget, or what that would come to (``--dry-run``)."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifso.cli.console import console, path_from, print_json, table
from ifso.cli.distributed import World, device_of, joined, leave
from ifso.cli.evaluate import accuracy
from ifso.cli.inputs import data_options, example_input, report_notes, shapes_of
from ifso.cli.options import add_help, resumable
from ifso.cli.prune_options import COSTS, add_options, gather, prune_arguments, takes_default_steps, takes_steps
from ifso.common.text import amount, measured, roughly
from ifso.errors import DataError, IfsoError
from ifso.pruning.events import Plan, Removal, Silent, Stage
from ifso.pruning.progress import progress
from ifso.tasks import PRUNING_BATCH, PRUNING_RATE

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn

    from ifso.data.base import Data
    from ifso.pruning.events import Listener, Plan
    from ifso.pruning.result import PruneResult

DESCRIPTION = (
    "Prune a trained network to a budget. Each budget is the share KEPT: --macs 0.5 keeps half, --macs 0.8 0.65 0.5 "
    "leaves a network for each share. By default units go in stages and the weights that are left are fitted in closed "
    "form, without training. --preset paper is Algorithm 2 of the paper; so is any option that only Algorithm 2 has."
)
RANDOM = "the network has random weights; give trained ones with --weights FILE, or --pretrained for published ones"


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "prune", help="prune a trained network to a budget", description=DESCRIPTION, add_help=False
    )
    add_help(parser, _names)
    add_options(parser)
    parser.set_defaults(run=run)


def _names() -> str:
    """What can be chosen."""
    from ifso.criteria.registry import names
    from ifso.pruning.budget import NORMALIZERS, PRESETS
    from ifso.training.precision import SCORE_PRECISIONS

    lists = {"criterion": names(), "preset": PRESETS, "normalize": NORMALIZERS, "precision": SCORE_PRECISIONS}
    return " ".join(f"--{option}: {', '.join(choices)}." for option, choices in lists.items())


def run(args: argparse.Namespace) -> int:
    """Prune, and print what came out."""
    if args.out is None and not args.dry_run:
        raise IfsoError("--out is missing; name the folder of the run; ifso prune --help shows what can be given")
    if args.dry_run and args.resume:
        raise IfsoError("--dry-run shows what a new run would come to; leave --resume out")
    if args.overwrite and args.resume:
        raise IfsoError("--overwrite gives up the run that --resume would go on with; leave one of them out")
    if args.resume == "auto":
        from ifso.runs.files import holds_run

        args.resume = holds_run(args.out)
    settings, start = gather(args), Path.cwd()
    command = ["prune", "--resume", "--out", str(args.out)]
    device = device_of(settings.get("device"), args.said)
    folders = [] if args.dry_run else [args.out]
    with joined(device) as world, resumable(command, *folders, shown=world.is_first and not args.dry_run):
        result = _prune(settings, args, world)
    if isinstance(result, DryRun):
        print_json(result.as_json()) if args.json else print(result)
    elif world.is_first and args.json:
        print_json({**result.summary(), "path": path_of(result)})
    elif world.is_first:
        print(result)
        value = result.measures[-1].values.get("accuracy") if result.measures else None
        if value is not None and result.samples:
            print(f"accuracy: {accuracy(value, result.samples)}, ± standard error of {result.samples:,} test images")
        if any(isinstance(settings.get(cost), list) for cost in COSTS):
            console().print("", path_table(path_of(result), result.samples), sep="\n")
        print(f"run folder: {path_from(args.out, start)}")
    return leave(0)


def _prune(settings: dict[str, Any], args: argparse.Namespace, world: World) -> PruneResult | DryRun:
    """Open the data, make the model and prune it, or see what that would come to."""
    from ifso.cli.progress import TensorBoardListener
    from ifso.pruning.events import Silent
    from ifso.pruning.prune import prune
    from ifso.training.precision import tensor_cores

    if args.dry_run and world.ranks > 1:
        raise IfsoError("--dry-run takes one process; run it without torchrun")
    writes = args.tensorboard and world.is_first and not args.dry_run
    others = [TensorBoardListener(args.out / "tensorboard")] if writes else []
    shown = progress(*others) if world.is_first else nullcontext(Silent())
    with tensor_cores(settings.get("precision", "float32")), shown as listener:
        call = {**_call(settings, args, world, listener), "listener": _Telling(listener, args.said)}
        if args.dry_run:
            found = dry_run(call)
            for line in args.said:
                listener.said(line)
            return found
        where = {"resume" if args.resume else "out": args.out, **({"overwrite": True} if args.overwrite else {})}
        return prune(**call, **where)


class _Telling:
    """A listener that is told further lines when the run begins, as one that cannot begin ends with one line."""

    def __init__(self, listener: Listener, lines: Sequence[str]) -> None:
        self._listener, self._lines = listener, lines

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)

    def started(self, plan: Plan) -> None:
        """Say the lines, and pass it on."""
        for line in self._lines:
            self._listener.said(line)
        self._listener.started(plan)


def _call(settings: dict[str, Any], args: argparse.Namespace, world: World, listener: Listener) -> dict[str, Any]:
    """The arguments of ``ifso.prune``. Every rank has the same model, and its part of the joint batches."""
    import torch

    from ifso.common.batches import shared_size
    from ifso.data import open_data
    from ifso.data.base import detects
    from ifso.data.from_file import FileData
    from ifso.models.registry import is_program, network_for
    from ifso.pruning.budget import FLOPS, Budget
    from ifso.training.precision import loss_in

    budget = Budget(**{cost: settings[cost] for cost in COSTS if cost in settings})
    arguments = prune_arguments(settings)
    seed, precision = settings.get("seed", 0), settings.get("precision", "float32")
    torch.manual_seed(seed)
    data = open_data(settings["data"], **data_options(args, world, seed))
    report_notes(data, listener.said)
    if detects(data) and not args.resume and takes_default_steps(settings):
        settings = {**settings, "lr": PRUNING_RATE[data.task]}
        arguments = prune_arguments(settings)
    given = {name: settings[name] for name in ("weights", "channels_last") if name in settings}
    model = network_for(settings["model"], data.num_classes, pretrained=args.pretrained, device=world.device, **given)
    _check_fits(model, data)
    if not (args.pretrained or "weights" in settings or is_program(settings["model"])):
        listener.said(RANDOM)
    if args.flops:
        listener.said(FLOPS)
    model.train(settings.get("train_mode", True))
    example = example_input(settings.get("input"), data, world.device)
    batch = settings.get("batch", PRUNING_BATCH[data.task])
    own = isinstance(data, FileData)
    each = shared_size(batch, world.ranks) if takes_steps(settings) and not own else batch
    if world.ranks > 1 and not own:
        shares = f"{each} of each batch on each of them" if each < batch else "whole batches on each of them"
        listener.said(f"batches: {batch} samples, shared by {world.ranks} processes: {shares}")
    return {
        "model": model,
        "train_batches": data.train_batches(batch_size=each),
        "loss_fn": loss_in(precision, data.loss_fn),
        "budget": budget,
        "example_inputs": example,
        "evaluate": evaluation(data, precision),
        "about": {"arguments": settings, **({"counted_on": shapes_of(example)} if detects(data) else {})},
        **arguments,
    }


def _check_fits(model: nn.Module, data: Data) -> None:
    """A network that is no detector where there are boxes, or has too few classes, is refused before any work."""
    from ifso.data.base import detects
    from ifso.data.compatibility import check_detector_fits
    from ifso.models.detectors import is_detector
    from ifso.tasks.classification import cross_entropy

    if detects(data):
        check_detector_fits(model, data)
    elif data.loss_fn is cross_entropy and is_detector(model):
        raise DataError(f"{data.name} has no boxes, but the network is a detector; give coco:PATH, or a classifier")


def evaluation(data: Data, precision: str) -> Callable[[nn.Module], dict[str, float]] | None:
    """Accuracy on the test set, or average precision; None for data without a test set, and of another kind."""
    from ifso.data.base import detects
    from ifso.tasks.classification import cross_entropy
    from ifso.training.average_precision import check_evaluator

    try:
        batches = data.test_batches()
    except DataError:
        return None
    if data.loss_fn is not cross_entropy and not detects(data):
        return None
    if detects(data):
        check_evaluator()
    return _Evaluation(data, batches, precision)


class _Evaluation:
    """Evaluates networks on ``batches``; ``samples`` is of how many an accuracy is, 0 for detectors."""

    def __init__(self, data: Data, batches: Iterable[Any], precision: str) -> None:
        self._data, self._batches, self._precision, self.samples = data, batches, precision, 0

    def __call__(self, model: nn.Module) -> dict[str, float]:
        from ifso.training.evaluation import quality

        found = quality(model, self._data, self._batches, self._precision, over_ranks=True)
        values = {"accuracy": found.top1, "test_loss": found.loss}
        if found.detection is None:
            self.samples = found.samples
        else:
            values = {name: getattr(found.detection, name) for name in ("map", "map50", "map75")}
        return {name: value for name, value in values.items() if value is not None}


def path_of(result: PruneResult) -> list[dict[str, Any]]:
    """The unpruned network, one for each budget that was met on the way, and the one at the end.

    Of each the shares asked for (none of the unpruned one), those kept, what was measured, and its folder, relative to
    that of the run (None).
    """
    from ifso.runs.files import NETWORKS

    undone = " ".join(note for note in result.notes if "undone: " in note)
    kept = [one for one in result.measures if not one.stage.endswith("(undone)") and one.stage not in undone]
    first: tuple[Any, ...] = {}, dict.fromkeys(result.shares, 1.0), dict(result.measures[0].values), None
    between = [
        (stage["budget"], stage["shares"], stage["values"], f"{NETWORKS}/{stage['network']}")
        for stage in result.stages
        if "budget" in stage and dict(stage["budget"]) != dict(result.targets)
    ]
    last = dict(result.targets), dict(result.shares), dict(kept[-1].values), "."
    return [dict(zip(("asked", "shares", "values", "folder"), step, strict=True)) for step in (first, *between, last)]


def path_table(path: Sequence[Mapping[str, Any]], samples: int | None = None) -> Table:
    """One row for each network; ``samples`` are those that an accuracy is of."""
    from ifso.pruning.result import LABELS

    names = list(dict.fromkeys(name for step in path for name in step["values"]))
    costs = list(dict.fromkeys(("macs", *path[-1]["asked"])))
    rows = []
    for step in path:
        kept = [f"{step['shares'][cost]:.1%}" for cost in costs]
        asked = [f"{share:.1%}" for share in step["asked"].values()]
        values = [measured(name, step["values"][name], samples) if name in step["values"] else "" for name in names]
        rows.append((step["folder"] or "unpruned", *kept, ", ".join(asked), *values))
    headings = ("folder", *(f"{LABELS[cost]} kept" for cost in costs), "asked for", *names)
    return table(headings, rows, title="a network for each budget")


REMOVALS = 3
"""Removals one by one that are enough to see how long all of them take."""


@dataclass(frozen=True)
class DryRun:
    """What is known of a run before it is made.

    ``stages`` are planned (0: units go one by one), ``smallest`` the shares that are left when all is gone that may go.
    ``seconds`` is an estimate from the first stage or removals, ``first``, without the last step and the checks.
    """

    model: str
    units: int
    before: Mapping[str, float]
    asked: Mapping[str, float]
    smallest: Mapping[str, float]
    stages: int
    first: float
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"dry_run": True, **asdict(self)}

    def __str__(self) -> str:
        costs = f"{amount(self.before['macs'])} MACs, {amount(self.before['params'])} parameters"
        first = f"the first took {self.first:.1f} s"
        return "\n".join(
            [
                "dry run: nothing was written",
                f"network    {self.model}: {self.units} units, {costs}",
                f"asked for  {_shares(self.asked)}",
                f"smallest   {_shares(self.smallest)}",
                f"stages     {f'{self.stages}; {first}' if self.stages else 'none: units go one by one'}",
                f"time       about {roughly(self.seconds)}; the last step and the checks come on top",
            ]
        )


def _shares(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in shares.items())


class _EnoughError(Exception):
    """The run has shown what was to be seen."""


class _Watching(Silent):
    """Ends a run after its first stage, or the first removals of one without stages."""

    def __init__(self, say: Callable[[str], None], *, at_once: bool) -> None:
        self._say, self._at_once, self._count = say, at_once, 0
        self.plan: Plan | None = None
        self.smallest: Mapping[str, float] = {}
        self.begun = self.since = time.monotonic()
        self.share_done = 1.0

    def said(self, line: str) -> None:
        """Pass it on."""
        self._say(line)

    def started(self, plan: Plan) -> None:
        """What came before happens only once."""
        self.plan, self.smallest = plan, plan.smallest()
        self.since = time.monotonic()

    def staged(self, stage: Stage) -> None:
        """One of all stages is enough."""
        self.share_done = stage.number / stage.stages
        raise _EnoughError

    def removed(self, removal: Removal) -> None:
        """Some removals are enough, where there are no stages."""
        assert self.plan is not None
        self._count += 1
        if self.plan.stages or (self._count < REMOVALS and not self._at_once):
            return
        if not self._at_once:
            targets = self.plan.targets.items()
            self.share_done = min((1 - removal.shares[name]) / max(1 - target, 1e-9) for name, target in targets)
        raise _EnoughError


def dry_run(call: Mapping[str, Any]) -> DryRun:
    """Begin the run that ``ifso.prune(**call)`` would be, in memory.

    Raises:
        UnreachableBudget: as the run would.
    """
    from ifso.pruning.prune import prune

    watching = _Watching(call["listener"].said, at_once=call.get("schedule") == "one-shot")
    with suppress(_EnoughError):
        prune(**{**call, "listener": watching})
    now, plan = time.monotonic(), watching.plan
    assert plan is not None
    first = now - watching.since
    whole = first / max(watching.share_done, 1e-9)
    return DryRun(
        plan.model, plan.units, plan.costs, dict(plan.targets), watching.smallest, plan.stages, first,
        watching.since - watching.begun + whole,
    )  # fmt: skip
