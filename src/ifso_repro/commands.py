"""``ifso repro run``, ``list`` and ``table``: whole networks of tables, figures and rows, shared by processes."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ifso.cli.console import chatter_to_stderr, complain, console, print_json, say
from ifso.cli.main import TERMINATED, Terminated
from ifso.errors import DataError, IfsoError
from ifso_repro.cli import FIGURE1, RECIPE
from ifso_repro.config import studies, study
from ifso_repro.jobs import Job
from ifso_repro.results import AnyResult, path_of, read, read_file, state_of
from ifso_repro.schema import DATA, PRUNE_OPTIONS, TABLES
from ifso_repro.table_lines import UNKNOWN, Grid, as_rich

if TYPE_CHECKING:
    from ifso_repro.workspace import Workspace

T = TypeVar("T")
KEY = "ifso-repro-"
PATIENCE = timedelta(days=30)
"""How long the first process waits for the others: networks take their time."""


@dataclass(frozen=True)
class Rank:
    """The number of this process among ``world``, and on its own machine, as ``torchrun`` sets them."""

    rank: int = 0
    world: int = 1
    local: int = 0

    @classmethod
    def here(cls) -> Rank:
        """The rank that the environment says; alone where it says nothing."""
        numbers = (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
        return cls(*(int(os.environ.get(name, usual)) for name, usual in numbers))

    def device(self, asked: str) -> str:
        """The device for this process: each has its own GPU.

        >>> Rank(5, 8, 1).device("cuda"), Rank(5, 8, 1).device("cpu"), Rank().device("cuda:3")
        ('cuda:1', 'cpu', 'cuda:3')
        """
        return f"cuda:{self.local}" if self.world > 1 and asked.partition(":")[0] == "cuda" else asked


def dealt(jobs: Sequence[T], group_of: Callable[[T], str], rank: Rank) -> list[T]:
    """The jobs of one process: those of every ``world``-th group, so that what a group shares is made only once.

    >>> dealt(["a1", "b1", "a2", "c1"], lambda job: job[0], Rank(0, 2)), dealt(["a1", "b1"], str, Rank(1, 2))
    (['a1', 'a2', 'c1'], ['b1'])
    """
    groups = list(dict.fromkeys(group_of(job) for job in jobs))
    own = set(groups[rank.rank :: rank.world])
    return [job for job in jobs if group_of(job) in own]


class Meeting:
    """Where the first process collects lists from all others, which need not wait for anybody."""

    def __init__(self, rank: Rank) -> None:
        self._rank: Rank = rank
        self._store: Any = None
        if rank.world > 1:
            from torch.distributed.rendezvous import rendezvous

            self._store, _, _ = next(rendezvous("env://", timeout=PATIENCE))

    def gathered(self, items: list[Any]) -> list[Any]:
        """The items of all processes for the first one, once all are done; its own items for each other."""
        if self._store is None:
            return items
        self._store.set(f"{KEY}{self._rank.rank}", json.dumps(items))
        if self._rank.rank:
            return items
        return [item for rank in range(self._rank.world) for item in json.loads(self._store.get(f"{KEY}{rank}"))]


OUT = Path("repro")
LANES = {"cpu": 1, "cuda": 8}
ON_CUDA = {"precision": "bf16", "channels_last": True}
MEASURES = {"top1": "Top-1", "map": "mAP"}
INTERRUPTED = 130
NOT_SMOKE = ("data", "weights", "epochs", "units_per_step", "prune", "validation")
ELSEWHERE = {FIGURE1: FIGURE1, RECIPE: RECIPE, "figure3": "draw figure3", "figure4": "draw figure4"}
"""Studies that have a command of their own."""


def run(args: argparse.Namespace) -> int:
    """Run the studies that were named."""
    if not args.studies:
        raise IfsoError(f"nothing to run; name {', '.join(studies())} or a row such as resnet32-cifar10-50")
    return _run_or_list(args, _run)


def list_runs(args: argparse.Namespace) -> int:
    """Show how far each run of the studies is or, without a name, how many runs of each study are done."""
    return _run_or_list(args, _listed) if args.studies else _overview(args)


def _run_or_list(args: argparse.Namespace, work: Callable[..., Document]) -> int:
    """Do the work for all jobs; the first rank prints what came out."""
    for name in args.studies:
        if name in ELSEWHERE:
            raise IfsoError(f"{name} is a study of another kind; give its command: ifso repro {ELSEWHERE[name]}")
    jobs = _jobs(args)
    changes = _changes(args, jobs)
    try:
        with chatter_to_stderr():
            rank = Rank.here()
            unused = [f"--{name.replace('_', '-')}" for name in NOT_SMOKE if args.smoke and getattr(args, name)]
            if unused and not rank.rank:
                say(f"a smoke run has sizes and images of its own: {', '.join(unused)} not used")
            space = _workspace(args, changes, rank)
            document, table = work(args, space, jobs, rank)
    except KeyboardInterrupt as stop:
        word, status = ("terminated", TERMINATED) if isinstance(stop, Terminated) else ("interrupted", INTERRUPTED)
        complain(f"{word}; what is done is kept in {args.out or OUT}: the same command goes on")
        return status
    if rank.rank:
        return 0
    if args.json:
        print_json(document)
    elif document["runs"]:
        console().print(as_rich(table))
    return int(document.get("status", 0))


def _jobs(args: argparse.Namespace) -> list[Job]:
    """The runs of all studies that were named, each once, those of seed 0 first."""
    jobs: dict[str, Job] = {}
    for name in args.studies:
        for job in study(name, seeds=_seeds(args), criteria=args.criteria, recipes=args.recipes):
            jobs.setdefault(job.name, job)
    return sorted(jobs.values(), key=lambda job: job.seed)


def _seeds(args: argparse.Namespace) -> int | None:
    """How many seeds; None where the study says it."""
    return 1 if args.smoke and args.seeds is None else args.seeds


def _folders(args: argparse.Namespace) -> tuple[Path, Path]:
    """Where work and results are: smoke runs, and those on a validation part, have folders of their own."""
    apart = "smoke" if args.smoke else f"validation-{args.validation}" if args.validation else ""
    out = args.out or OUT
    return out / "work" / apart, out / "results" / ("" if args.smoke else apart)


def _changes(args: argparse.Namespace, jobs: Sequence[Job]) -> dict[str, Any]:
    """The changes to all prunings; none may be what a study is about."""
    given = [*(args.prune or ()), *([] if args.units_per_step is None else [f"units_per_step={args.units_per_step}"])]
    changes = dict(_change(text) for text in given)
    for job in jobs:
        for key in job.variant.options.keys() & changes.keys():
            raise IfsoError(f"--prune {key}={changes[key]}: {key} is what {job.name} is about; leave it out")
    return changes


def _change(text: str) -> tuple[str, Any]:
    """A setting of pruning.

    >>> _change("accumulate=5"), _change("lr=0.02")
    (('accumulate', 5), ('lr', 0.02))
    """
    key, equals, value = text.partition("=")
    key = key.replace("-", "_")
    if not equals or key not in PRUNE_OPTIONS:
        raise IfsoError(f"--prune {text}: write KEY=VALUE, with a key among {', '.join(PRUNE_OPTIONS)}")
    try:
        return key, PRUNE_OPTIONS[key](value)
    except ValueError:
        raise IfsoError(f"--prune {text}: {value!r} is no number") from None


def _data(given: Sequence[str]) -> dict[str, str]:
    """The path of each data set.

    >>> _data(["cifar10:sets/cifar10.npz"])
    {'cifar10': 'sets/cifar10.npz'}
    """
    paths: dict[str, str] = {}
    for text in given:
        name, _, path = text.partition(":")
        if name not in DATA or not path:
            raise DataError(f"--data {text}: write one of {', '.join(f'{name}:PATH' for name in DATA)}")
        if paths.setdefault(name, path) != path:
            raise DataError(f"--data gives {name} twice: {paths[name]} and {path}")
    return paths


def _workspace(args: argparse.Namespace, changes: dict[str, Any], rank: Rank) -> Workspace:
    from ifso.common.devices import usable_device
    from ifso.training.precision import check_precision, check_score_precision
    from ifso_repro.workspace import Workspace

    device = rank.device(args.device or "cpu")
    usable_device(device)
    if ":" in device:
        import torch

        torch.cuda.set_device(device)
    train = training_changes(args, device, ("epochs", "precision", "channels_last", "compile"))
    check_precision(train.get("precision", "float32"))
    check_score_precision(args.prune_precision or "float32")
    work, results = _folders(args)
    return Workspace(
        work=work,
        results=results,
        data=_data(args.data or ()),
        weights=args.weights,
        device=device,
        prune_precision=args.prune_precision or "float32",
        train=train,
        prune=changes,
        one_pruning=args.one_pruning,
        validation=0 if args.smoke else args.validation or 0,
        smoke=args.smoke,
    )


def training_changes(args: argparse.Namespace, device: str, names: Sequence[str]) -> dict[str, Any]:
    """Changes to all recipes: what is quick on the device, and the options ``names`` that were given."""
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return {**(ON_CUDA if device.startswith("cuda") else {}), **given}


Document = tuple[dict[str, Any], Grid]


def _run(args: argparse.Namespace, space: Workspace, jobs: Sequence[Job], rank: Rank) -> Document:
    """Run all jobs, or those that are dealt to this rank; then the results of all ranks."""
    from ifso_repro.runner import Runner

    own = dealt(jobs, lambda job: str(space.pruned_folder(job)), rank)
    lanes = args.lanes or LANES["cuda" if space.device.startswith("cuda") else "cpu"]
    voice = say if rank.world == 1 else lambda line: say(f"[{rank.rank}] {line}")
    meeting = Meeting(rank)
    runner = Runner(space, own, lanes=lanes, workers=args.workers or 1, say=voice)
    runner.run()
    failures = meeting.gathered([list(failure) for failure in runner.failed])
    results: list[AnyResult] = []
    if rank.rank == 0:
        failed = {name for name, *_ in failures}
        paths = [path_of(job.name, space.results, smoke=space.smoke) for job in jobs if job.name not in failed]
        results = [read_file(path) for path in paths if path.exists()]
        _complain_of(failures)
    document = {
        "studies": list(args.studies),
        "smoke": space.smoke,
        "runs": [asdict(result) for result in results],
        "failures": [dict(zip(("run", "reason", "status"), failure, strict=True)) for failure in failures],
        "status": next((failure[2] for failure in failures), 0),
    }
    return document, _result_table(results, len(failures), space)


def _complain_of(failures: Sequence[Sequence[Any]]) -> None:
    """One line for each reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason, _ in failures:
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        complain(f"error: {names[0]}{more}: {reason}")


def _result_table(results: Sequence[AnyResult], failed: int, space: Workspace) -> Grid:
    measured = f"{space.validation} held-out images" if space.validation else "the test set"
    if space.smoke:
        measured = "a few generated images, which means nothing,"
    worth = " or ".join(dict.fromkeys(MEASURES[result.measure] for result in results))
    folder = space.results / "smoke" if space.smoke else space.results
    lines = []
    for result in results:
        worths = [f"{result.worth(stage):.2f}" for stage in ("base", "pruned", "last", "best")]
        lines.append((result.name, f"{result.macs_kept:.1%}", *worths, f"{result.seconds:.0f}"))
    return Grid(
        f"{len(results)} runs done{f', {failed} failed' if failed else ''}",
        ("run", "MACs kept", "base", "pruned", "last epoch", "best epoch", "seconds"),
        (tuple(lines),),
        (f"{worth} on {measured} in per cent. Written into {folder}.",),
    )


def _listed(_: argparse.Namespace, space: Workspace, jobs: Sequence[Job], __: Rank) -> Document:
    """How far each run is, and who teaches where it is another than the unpruned network."""
    taught = {job.name: {"teacher": job.teacher.task} for job in jobs if job.teacher is not None}
    runs = [{"run": job.name, "state": _state(space, job), **taught.get(job.name, {})} for job in jobs]
    headings = ("run", "state", *(["teacher"] if taught else []))
    lines = tuple(tuple(entry.get(heading, UNKNOWN) for heading in headings) for entry in runs)
    return {"runs": runs}, Grid(f"{len(runs)} runs", headings, (lines,), words=3)


def _state(space: Workspace, job: Job) -> str:
    state = state_of(path_of(job.name, space.results, smoke=space.smoke))
    if state is not None:
        return state
    if space.training_folder(job).exists():
        return "fine-tuning begun"
    if job.prunes and space.is_pruned(job):
        return "pruned"
    return "pruning begun" if space.pruned_folder(job).exists() else "to do"


def _overview(args: argparse.Namespace) -> int:
    """Show every study, and how many of its runs are done."""
    for option in ("criteria", "recipes"):
        if getattr(args, option) is not None:
            raise IfsoError(f"--{option} chooses among the runs of a study; name one: ifso repro list table2")
    overview: list[dict[str, Any]] = []
    for name, chosen in studies().items():
        jobs = study(name, seeds=_seeds(args))
        states = [state_of(path_of(job.name, _folders(args)[1], smoke=args.smoke)) for job in jobs]
        damaged = {"damaged": states.count("damaged")} if "damaged" in states else {}
        done = states.count("done")
        overview.append({"study": name, "title": chosen.title, "runs": len(jobs), "done": done, **damaged})
    if args.json:
        print_json({"studies": overview})
        return 0
    lines = []
    for each in overview:
        words = f", {each['damaged']} damaged" if "damaged" in each else ""
        lines.append((each["study"], each["title"], f"{each['done']} of {each['runs']}{words}"))
    title = "ifso repro run STUDY runs one; ifso repro list STUDY shows its runs"
    console().print(as_rich(Grid(title, ("study", "what", "done"), (tuple(lines),), words=3)))
    return 0


def show_tables(args: argparse.Namespace) -> int:
    """Show the tables of the paper with what is in DIR/results, and other studies of which something was run."""
    from ifso_repro.statistics import Runs
    from ifso_repro.tables import grids, render, write_markdown

    folder = (args.out or OUT) / "results"
    results = read(folder)
    if args.markdown is not None:
        write_markdown(results, args.markdown, args.studies or None)
    runs = Runs(results)
    names = args.studies or [
        name for name in studies() if name in TABLES or any(runs.of(job) for job in study(name, seeds=1))
    ]
    if args.json:
        print_json({"tables": [asdict(grid) for name in names for grid in grids(name, runs)]})
    else:
        console().print(*(table for name in names for table in render(name, results)), sep="\n")
    if not results:
        say(f"{folder} holds no results; say with --out where they are")
    return 0
