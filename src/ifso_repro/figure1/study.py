"""The study behind the paper's Fig. 1: does an estimate track the loss change that retraining really ends with?"""

from __future__ import annotations

import json
import multiprocessing
import platform
import signal
import sys
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
from ifso.common.files import append_bytes, explained, replacing, storable, sync_file, write_tensors, write_text
from ifso.errors import IfsoError
from ifso_repro.figure1 import masks
from ifso_repro.figure1.estimates import DEFAULT_STEPS, all_scores, estimates, measure, summed, train_
from ifso_repro.figure1.networks import Settings, create, difference
from ifso_repro.figure1.summary import summarise

SETTINGS = "figure1.settings.json"


class Record:
    """The lines of one network: the first about the network itself, then one for each mask in their order."""

    def __init__(self, folder: Path, label: str) -> None:
        self._lines, self._weights = folder / f"{label}.jsonl", folder / f"{label}.safetensors"
        self.base: dict[str, Any] | None = None
        self.rows: list[dict[str, Any]] = []

    def read(self) -> Record:
        """What is there; a last line that was not finished is cut off."""
        if not self._lines.exists() or not self._weights.exists():
            return self
        text = self._lines.read_text()
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            with told(self._lines):
                write_text(self._lines, whole)
        found = [json.loads(line) for line in whole.splitlines()]
        if found:
            self.base, self.rows = found[0], found[1:]
        return self

    def start(self, base: dict[str, Any], model: nn.Module) -> None:
        """The network is trained: keep its weights and what is known of it."""
        with told(self._weights), replacing(self._weights) as new:
            write_tensors(new, storable(model.state_dict()), {"format": "pt"})
        self.base, self.rows = base, []
        with told(self._lines):
            write_text(self._lines, json.dumps(base) + "\n")

    def replace(self, base: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        """Other numbers for the same network and masks, all at once."""
        self.base, self.rows = base, rows
        with told(self._lines):
            write_text(self._lines, "".join(json.dumps(line) + "\n" for line in (base, *rows)))

    def load_(self, model: nn.Module) -> None:
        """Put the trained weights into the model."""
        model.load_state_dict(load_file(self._weights))

    def add(self, row: dict[str, Any]) -> None:
        """One more mask, on disk before this returns."""
        self.rows.append(row)
        with told(self._lines):
            append_bytes(self._lines, (json.dumps(row) + "\n").encode())
            sync_file(self._lines)


@contextmanager
def told(path: Path) -> Iterator[None]:
    """What cannot be written, and what to do, in one line."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise IfsoError(f"{path}: {explained(error)}; --resume goes on with the run") from error


def open_folder(folder: Path, settings: Settings, *, resume: bool) -> None:
    """Make the folder ready, or refuse: it cannot be written, holds another run, or one with other settings."""
    place = folder / SETTINGS
    try:
        folder.mkdir(parents=True, exist_ok=True)
        begun = place.exists() and any(folder.glob("*.jsonl"))
        before = json.loads(place.read_text()) if begun else None
        if before is None:
            write_text(place, json.dumps(settings.document(), indent=2) + "\n")
            return
    except (OSError, ValueError) as error:
        raise IfsoError(f"--out {folder} cannot be used: {' '.join(str(error).split())}") from error
    if not resume:
        raise IfsoError(
            f"{folder} already holds a run of this study; continue it with --resume, or choose another --out"
        )
    found = difference(before, settings.document())
    if found:
        raise IfsoError(f"{folder} was begun with other settings, so --resume cannot continue it: {found}")


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
        """What its files are called."""
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
    """Of what the numbers depend on."""
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
        _say(f"{job.label}: training {problem.weights} weights on {len(problem.batch[1])} images")
        trained = train_(problem)
        scores, refused = all_scores(problem)
        about = {"weights": problem.weights, "units": problem.graph.num_units, "images": len(problem.batch[1])}
        record.start({**about, "trained": trained, "scores": scores, "not_applicable": refused}, problem.model)
    assert record.base is not None
    record.load_(problem.model)
    if job.renew and record.rows:
        _say(f"{job.label}: scores and estimates of {len(record.rows)} masks again")
        scores, refused = all_scores(problem)
        rows = [{**row, "estimates": estimates(problem, row["removed"])} for row in record.rows]
        record.replace({**record.base, "scores": scores, "not_applicable": refused}, rows)
    drawn = masks.draw(problem.graph, problem.masks, problem.subset_sizes, job.seed)
    for place in range(len(record.rows), len(drawn)):
        if _STOP is not None and _STOP.is_set():
            return
        first_order = place % job.settings.first_order_every == 0
        row = measure(problem, drawn[place], record.base["trained"]["loss"], job.settings, first_order=first_order)
        record.add(row)
        estimate = row["estimates"][str(DEFAULT_STEPS)].get("true", float("nan"))
        _say(f"{job.label}: mask {place + 1} of {len(drawn)}: truth {row['truth']:+.3g}, estimate {estimate:+.3g}")


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
    with told(path):
        write_text(path, json.dumps(document, indent=1, allow_nan=False) + "\n")
    return path


def _say(line: str) -> None:
    sys.stderr.write(f"· {line}\n")
    sys.stderr.flush()
