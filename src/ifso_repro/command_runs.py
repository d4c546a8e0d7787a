"""``ifso repro`` for whole networks: tables, figures and rows are run, listed, or shown as tables."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifso.cli.console import chatter_to_stderr, complain, console, print_json, say
from ifso.cli.signals import TERMINATED, Terminated
from ifso.errors import DataError, IfsoError
from ifso_repro import command_overview as repro_overview
from ifso_repro.config import studies, study
from ifso_repro.jobs import Job
from ifso_repro.schema import DATA, PRUNE_OPTIONS, TABLES

if TYPE_CHECKING:
    from rich.table import Table

    from ifso_repro.dealing import Rank
    from ifso_repro.results import AnyResult
    from ifso_repro.workspace import Workspace

OUT = Path("repro")
LANES = {"cpu": 1, "cuda": 8}
ON_CUDA = {"precision": "bf16", "channels_last": True}
MEASURES = {"top1": "Top-1", "map": "mAP"}
INTERRUPTED = 130
NOT_SMOKE = ("data", "weights", "epochs", "units_per_step", "prune", "validation")
POSITIVE = ("seeds", "epochs", "units_per_step", "validation", "lanes")


def run(args: argparse.Namespace) -> int:
    """Run what was named, or show what there is."""
    for name in POSITIVE:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise IfsoError(f"--{name.replace('_', '-')} {value}: give 1 or more")
    if args.table:
        return _table(args)
    if args.markdown is not None:
        raise IfsoError("--markdown goes with --table: ifso repro --table --markdown FILE")
    if args.list and not args.studies:
        return repro_overview.run(args, _results_folder(args), _seeds(args))
    if not args.studies:
        raise IfsoError(f"nothing to run; name {', '.join(studies())}, figure1 or a row such as resnet32-cifar10-50")
    jobs = _jobs(args)
    changes = _changes(args, jobs)
    try:
        return _done(args, jobs, changes)
    except KeyboardInterrupt as stop:
        word, status = ("terminated", TERMINATED) if isinstance(stop, Terminated) else ("interrupted", INTERRUPTED)
        complain(f"{word}; what is done is kept in {args.out or OUT}: the same command goes on")
        return status


def _done(args: argparse.Namespace, jobs: Sequence[Job], changes: dict[str, Any]) -> int:
    """Run or list the jobs; the first rank tells what came out."""
    with chatter_to_stderr():
        from ifso_repro.dealing import Rank

        place = Rank.here()
        unused = [f"--{name.replace('_', '-')}" for name in NOT_SMOKE if args.smoke and getattr(args, name)]
        if unused and not place.rank:
            say(f"a smoke run has sizes and images of its own: {', '.join(unused)} not used")
        shop = _workshop(args, changes, place)
        document = _listed(shop, jobs) if args.list else _run(args, shop, jobs, place)
    if place.rank:
        return 0
    if args.json:
        print_json(document)
    elif args.list or document["runs"]:
        console().print(_list_table(document["runs"]) if args.list else _result_table(document, shop))
    return int(document.get("status", 0))


# ------------------------------------------------------------------------------------------------- what was asked for


def _jobs(args: argparse.Namespace) -> list[Job]:
    """The runs of all studies that were named, each once, those of seed 0 first."""
    found: dict[str, Job] = {}
    for name in args.studies:
        for job in study(name, seeds=_seeds(args), criteria=args.criteria, recipes=args.recipes):
            found.setdefault(job.name, job)
    return sorted(found.values(), key=lambda job: job.seed)


def _seeds(args: argparse.Namespace) -> int | None:
    """How many, where it is not for the study to say."""
    return 1 if args.smoke and args.seeds is None else args.seeds


def _apart(args: argparse.Namespace) -> str:
    """The folder of runs that shall not be taken for others: smoke runs, and those on a validation part."""
    return "smoke" if args.smoke else f"validation-{args.validation}" if args.validation else ""


def _results_folder(args: argparse.Namespace) -> Path:
    """Where results are; those of smoke runs have a folder in it."""
    return (args.out or OUT) / "results" / ("" if args.smoke else _apart(args))


def _changes(args: argparse.Namespace, jobs: Sequence[Job]) -> dict[str, Any]:
    """Settings of all prunings that shall be others; none that a study is about."""
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
    """Where each data set is.

    >>> _data(["cifar10:sets/cifar10.npz"])
    {'cifar10': 'sets/cifar10.npz'}
    """
    found: dict[str, str] = {}
    for text in given:
        name, _, path = text.partition(":")
        if name not in DATA or not path:
            raise DataError(f"--data {text}: write one of {', '.join(f'{name}:PATH' for name in DATA)}")
        if found.setdefault(name, path) != path:
            raise DataError(f"--data gives {name} twice: {found[name]} and {path}")
    return found


def _workshop(args: argparse.Namespace, changes: dict[str, Any], place: Rank) -> Workspace:
    from ifso.common.devices import usable_device
    from ifso.training.precision import check_precision, check_score_precision
    from ifso_repro.workspace import Workspace

    device = place.device(args.device or "cpu")
    usable_device(device)
    on_cuda = device.startswith("cuda")
    if ":" in device:
        import torch

        torch.cuda.set_device(device)
    train: dict[str, Any] = dict(ON_CUDA) if on_cuda else {}
    asked = {name: getattr(args, name) for name in ("epochs", "precision", "channels_last", "compile")}
    train |= {name: value for name, value in asked.items() if value is not None}
    check_precision(train.get("precision", "float32"))
    check_score_precision(args.prune_precision or "float32")
    return Workspace(
        work=(args.out or OUT) / "work" / _apart(args),
        results=_results_folder(args),
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


# ---------------------------------------------------------------------------------------------------------- running


def _run(args: argparse.Namespace, shop: Workspace, jobs: Sequence[Job], place: Rank) -> dict[str, Any]:
    """All jobs, or those that are dealt to this rank; then what came out, of all ranks."""
    from ifso_repro.dealing import Meeting, dealt
    from ifso_repro.runner import Runner

    meeting = Meeting(place)
    own = dealt(jobs, lambda job: str(shop.pruned_folder(job)), place)
    lanes = args.lanes or LANES["cuda" if shop.device.startswith("cuda") else "cpu"]
    running = Runner(shop, own, lanes=lanes, workers=args.workers or 1, say=_voice(place))
    running.run()
    failures = meeting.gathered([list(failure) for failure in running.failed])
    if place.rank == 0:
        _tell(failures)
    return {
        "studies": list(args.studies),
        "smoke": shop.smoke,
        "runs": [] if place.rank else [asdict(result) for result in _results(shop, jobs, failures)],
        "failures": [dict(zip(("run", "reason", "status"), failure, strict=True)) for failure in failures],
        "status": next((failure[2] for failure in failures), 0),
    }


def _voice(place: Rank) -> Callable[[str], None]:
    """Lines of progress; with several ranks they say whose they are."""
    return say if place.world == 1 else lambda line: say(f"[{place.rank}] {line}")


def _tell(failures: Sequence[Sequence[Any]]) -> None:
    """One line for each reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason, _ in failures:
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        complain(f"error: {names[0]}{more}: {reason}")


def _results(shop: Workspace, jobs: Sequence[Job], failures: Sequence[Sequence[Any]]) -> list[AnyResult]:
    """Those of the runs that did not fail: a file of one that did is damaged, or of something else."""
    from ifso_repro.results import path_of, read_file

    failed = {name for name, *_ in failures}
    places = [path_of(job.name, shop.results, smoke=shop.smoke) for job in jobs if job.name not in failed]
    return [read_file(place) for place in places if place.exists()]


def _listed(shop: Workspace, jobs: Sequence[Job]) -> dict[str, Any]:
    """How far each run is, and who teaches where it is another than the unpruned network."""
    taught = {job.name: {"teacher": job.teacher.task} for job in jobs if job.teacher is not None}
    return {"runs": [{"run": job.name, "state": _state(shop, job), **taught.get(job.name, {})} for job in jobs]}


def _state(shop: Workspace, job: Job) -> str:
    from ifso_repro.results import path_of, state_of

    state = state_of(path_of(job.name, shop.results, smoke=shop.smoke))
    if state is not None:
        return state
    if (shop.work / "training" / job.name).exists():
        return "fine-tuning begun"
    if shop.is_pruned(job):
        return "pruned"
    return "pruning begun" if shop.pruned_folder(job).exists() else "to do"


# ---------------------------------------------------------------------------------------------------------- showing


def _list_table(runs: Sequence[dict[str, str]]) -> Table:
    from rich.table import Table

    table = Table(title=f"{len(runs)} runs", title_justify="left")
    taught = [{"teacher": "–"}] if any("teacher" in entry for entry in runs) else []
    for heading in ("run", "state", *(["teacher"] if taught else [])):
        table.add_column(heading)
    for entry in runs:
        table.add_row(entry["run"], entry["state"], *(entry.get("teacher", "–") for _ in taught))
    return table


def _result_table(document: dict[str, Any], shop: Workspace) -> Table:
    from rich.table import Table

    runs = document["runs"]
    measured = f"{shop.validation} held-out images" if shop.validation else "the test set"
    if shop.smoke:
        measured = "a few generated images, which means nothing,"
    worth = " or ".join(dict.fromkeys(MEASURES[_measure(entry)] for entry in runs))
    place = shop.results / "smoke" if shop.smoke else shop.results
    caption = f"{worth} on {measured} in per cent. Written into {place}."
    failed = f", {len(document['failures'])} failed" if document["failures"] else ""
    table = Table(title=f"{len(runs)} runs done{failed}", caption=caption, title_justify="left", caption_justify="left")
    table.add_column("run", overflow="fold")
    for heading in ("MACs kept", "base", "pruned", "last epoch", "best epoch", "seconds"):
        table.add_column(heading, justify="right")
    for entry in runs:
        shares = [f"{entry[f'{stage}_{_measure(entry)}']:.2f}" for stage in ("base", "pruned", "last", "best")]
        table.add_row(_name(entry), f"{entry['macs_kept']:.1%}", *shares, f"{entry['seconds']:.0f}")
    return table


def _measure(entry: dict[str, Any]) -> str:
    """What the network of a run is judged by."""
    return next(measure for measure in MEASURES if f"last_{measure}" in entry)


def _name(entry: dict[str, Any]) -> str:
    from ifso_repro.jobs import job_name

    return job_name(*(entry[name] for name in ("row", "criterion", "variant", "recipe", "seed")))


def _table(args: argparse.Namespace) -> int:
    """The tables of the paper with what is in DIR/results, and other studies of which something was run."""
    from ifso_repro.results import read
    from ifso_repro.statistics import Runs
    from ifso_repro.tables import grids, render, write_markdown

    place = (args.out or OUT) / "results"
    results = read(place)
    if args.markdown is not None:
        write_markdown(results, args.markdown, args.studies or None)
    runs = Runs(results)
    names = args.studies or [name for name in studies() if name in TABLES or _any_run(name, runs)]
    if args.json:
        print_json({"tables": [asdict(grid) for name in names for grid in grids(name, runs)]})
    else:
        console().print(*(table for name in names for table in render(name, results)), sep="\n")
    if not results:
        say(f"{place} holds no results; say with --out where they are")
    return 0


def _any_run(name: str, runs: Any) -> bool:
    return any(runs.of(job) for job in study(name, seeds=1))
