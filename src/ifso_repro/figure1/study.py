"""The study behind the paper's Fig. 1: does an estimate track the loss change that retraining really ends with?

Small networks are trained to convergence. Units are removed, the network is retrained to convergence under the mask,
and the true loss change ΔL_gt is compared with ΔL_ex, with :func:`ifso.true_loss_change` and with every criterion.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import shlex
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

import ifso
from ifso.cli.console import complain, console, print_json, say
from ifso.common.files import append_bytes, explained, replacing, storable, sync_file, write_tensors, write_text
from ifso.common.text import one_line
from ifso.errors import IfsoError
from ifso.runs.files import differences
from ifso_repro.cli import FIGURE1
from ifso_repro.figure1.estimates import DEFAULT_STEPS, all_scores, draw_masks, estimates, measure, summed, train_
from ifso_repro.figure1.networks import Settings, checksum, choose, create, data_path
from ifso_repro.figure1.summary import draw_loss_change, summarise, tables
from ifso_repro.plots import PlotUnavailable

SETTINGS = "figure1.settings.json"


class Record:
    """The lines of one network: the first about the network itself, then one for each mask in their order."""

    def __init__(self, folder: Path, label: str) -> None:
        self._lines, self._weights = folder / f"{label}.jsonl", folder / f"{label}.safetensors"
        self.base: dict[str, Any] | None = None
        self.rows: list[dict[str, Any]] = []

    def read(self) -> Record:
        """The record, with what its files hold; a last line that was not finished is cut off."""
        if self._lines.exists() and self._weights.exists():
            text = self._lines.read_text()
            whole = text[: text.rfind("\n") + 1]
            if whole != text:
                with writing(self._lines):
                    write_text(self._lines, whole)
            self.base, *self.rows = [json.loads(line) for line in whole.splitlines()] or [None]
        return self

    def start(self, base: dict[str, Any], model: nn.Module) -> None:
        """Keep the weights of a network that was trained, and what is known of it."""
        with writing(self._weights), replacing(self._weights) as new:
            write_tensors(new, storable(model.state_dict()), {"format": "pt"})
        self.replace(base, [])

    def replace(self, base: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        """Other numbers for the same network and masks, all at once."""
        self.base, self.rows = base, rows
        with writing(self._lines):
            write_text(self._lines, "".join(json.dumps(line) + "\n" for line in (base, *rows)))

    def load_(self, model: nn.Module) -> None:
        """Put the trained weights into the model."""
        model.load_state_dict(load_file(self._weights))

    def add(self, row: dict[str, Any]) -> None:
        """One more mask, on disk before this returns."""
        self.rows.append(row)
        with writing(self._lines):
            append_bytes(self._lines, (json.dumps(row) + "\n").encode())
            sync_file(self._lines)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Within it, a file that cannot be written is an IfsoError that says what to do."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise IfsoError(f"{path}: {explained(error)}; --resume goes on with the run") from error


def open_folder(folder: Path, settings: Settings, *, resume: bool) -> None:
    """Prepare the folder; IfsoError if it cannot be written, holds another run, or one with other settings."""
    path = folder / SETTINGS
    try:
        folder.mkdir(parents=True, exist_ok=True)
        begun = path.exists() and any(folder.glob("*.jsonl"))
        before = json.loads(path.read_text()) if begun else None
        if before is None:
            write_text(path, json.dumps(settings.document(), indent=2) + "\n")
            return
    except (OSError, ValueError) as error:
        raise IfsoError(f"--out {folder} cannot be used: {one_line(error)}") from error
    if not resume:
        raise IfsoError(
            f"{folder} already holds a run of this study; continue it with --resume, or choose another --out"
        )
    changes = differences(settings.document(), before)
    if changes:
        words = "; ".join(changes)
        raise IfsoError(f"{folder} was begun with other settings, so --resume cannot continue it: {words}")


_STOP: Any = None


@dataclass(frozen=True)
class Job:
    """One network with one seed."""

    name: str
    seed: int
    settings: Settings
    data: Path | None
    folder: Path
    renew: bool = False

    @property
    def label(self) -> str:
        """The name of its files."""
        return f"{self.name}-seed{self.seed}"


def figure1(
    settings: Settings, data: Path | None, folder: Path, *, resume: bool, workers: int, renew: bool = False
) -> dict[str, Any]:
    """Run the study, or what is left of it, in ``workers`` processes of one thread; the whole result as a document.

    ``renew`` keeps the networks and the truths that are recorded, and computes scores and estimates again.
    """
    open_folder(folder, settings, resume=resume or renew)
    seeds = range(settings.seeds)
    jobs = [Job(name, seed, settings, data, folder, renew) for seed in seeds for name in settings.networks]
    if workers > 1 and len(jobs) > 1:
        _in_processes(jobs, min(workers, len(jobs)))
    else:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for job in jobs:
                run_job(job)
        finally:
            torch.set_num_threads(threads)
    networks = [_network(job) for job in jobs]
    return {
        "study": "figure1",
        "settings": settings.document(),
        "default_path_steps": DEFAULT_STEPS,
        "versions": versions(),
        "networks": networks,
        "summary": summarise(networks),
    }


def versions() -> dict[str, str]:
    """The versions that the numbers depend on."""
    return {
        "ifso": ifso.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def _in_processes(jobs: list[Job], workers: int) -> None:
    """On an error or Ctrl-C every process finishes the mask it is at."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_prepare, initargs=(stop,)) as pool:
        try:
            for done in as_completed([pool.submit(run_job, job) for job in jobs]):
                done.result()
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


def _prepare(stop: Any) -> None:
    global _STOP  # noqa: PLW0603 (the one thing that a process is given at its start)
    _STOP = stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def run_job(job: Job) -> None:
    """Train the network, score its units, and measure every mask that is not recorded yet."""
    record = Record(job.folder, job.label).read()
    problem = create(job.name, job.seed, job.settings, job.data)
    if record.base is None:
        say(f"{job.label}: training {problem.weights} weights on {len(problem.batch[1])} images")
        trained = train_(problem)
        scores, refused = all_scores(problem)
        about = {"weights": problem.weights, "units": problem.graph.num_units, "images": len(problem.batch[1])}
        record.start({**about, "trained": trained, "scores": scores, "not_applicable": refused}, problem.model)
    assert record.base is not None
    record.load_(problem.model)
    if job.renew and record.rows:
        say(f"{job.label}: scores and estimates of {len(record.rows)} masks again")
        scores, refused = all_scores(problem)
        rows = [{**row, "estimates": estimates(problem, row["removed"])} for row in record.rows]
        record.replace({**record.base, "scores": scores, "not_applicable": refused}, rows)
    drawn = draw_masks(problem.graph, problem.settings.masks, problem.settings.subset_sizes, job.seed)
    for index in range(len(record.rows), len(drawn)):
        if _STOP is not None and _STOP.is_set():
            return
        first_order = index % job.settings.first_order_every == 0
        row = measure(problem, drawn[index], record.base["trained"]["loss"], first_order=first_order)
        record.add(row)
        estimate = row["estimates"][str(DEFAULT_STEPS)].get("true", float("nan"))
        say(f"{job.label}: mask {index + 1} of {len(drawn)}: truth {row['truth']:+.3g}, estimate {estimate:+.3g}")


def _network(job: Job) -> dict[str, Any]:
    """Everything about one network as a document; every mask with the sums of its units' scores."""
    record = Record(job.folder, job.label).read()
    if record.base is None:
        raise IfsoError(f"{job.folder} has no results for {job.label}; run the study again with --resume")
    rows = [
        {**row, "criteria": {name: summed(scores, row["removed"]) for name, scores in record.base["scores"].items()}}
        for row in record.rows
    ]
    return {"name": job.name, "seed": job.seed, **record.base, "masks": rows}


def write(document: dict[str, Any], folder: Path) -> Path:
    """``figure1.json``; numbers that are not finite would be refused."""
    path = folder / "figure1.json"
    with writing(path):
        write_text(path, json.dumps(document, indent=1, allow_nan=False) + "\n")
    return path


def run(args: argparse.Namespace) -> int:
    """``ifso repro figure1``: run the study, write figure1.json and its pictures, and print the tables."""
    if set(args.studies) - {FIGURE1}:
        others = ", ".join(name for name in args.studies if name != FIGURE1)
        raise IfsoError(f"{FIGURE1} is a study of its own kind; run it apart from {others}")
    if args.data is not None and len(args.data) > 1:
        raise IfsoError(f"{FIGURE1} takes one --data; {len(args.data)} were given")
    out = args.out or Path(f"ifso-{FIGURE1}")
    data = None if args.data is None else data_path(args.data[0])
    name = None if data is None else f"cifar10:{data.name}, sha256 {checksum(data)}"
    settings = choose(smoke=args.smoke, seeds=args.seeds, networks=args.networks, masks=args.masks, data=name)
    workers = args.workers or os.cpu_count() or 1
    document = {
        "command": _command(args, data),
        **figure1(settings, data, out, resume=args.resume, workers=workers, renew=args.renew),
    }
    written = [str(write(document, out))]
    try:
        written += map(str, draw_loss_change(document, out / FIGURE1))
    except PlotUnavailable as error:
        complain(str(error))
    if args.json:
        print_json(document)
    else:
        console().print(*tables(document), f"written: {', '.join(written)}", sep="\n")
    return 0


def _command(args: argparse.Namespace, data: Path | None) -> str:
    """The command that gives this result, with names of files only."""
    words = ["ifso", "repro", FIGURE1, *(["--smoke"] if args.smoke else [])]
    words += ["--data", f"cifar10:{data.name}"] if data else []
    for option in ("seeds", "masks"):
        value = getattr(args, option)
        words += [f"--{option}", str(value)] if value is not None else []
    return shlex.join([*words, *(["--networks", *args.networks] if args.networks else [])])
