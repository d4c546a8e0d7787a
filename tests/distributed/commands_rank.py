"""One of several processes that ``torchrun`` starts, which run commands together; see test_ranks_together.py.

Argument: a folder with ``jobs.json``: a list of (name, arguments of ``ifso``), and ``last``, a command that comes after
all others, with ``faults`` in the environment. What each rank has found before it goes into ``RANK.json``.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import refused
import torch
import torch.distributed as dist

import ifso
from ifso.cli import evaluate, finetune, main, prune, train
from ifso.cli.distributed import joined, leave
from ifso.pruning import prune as pruning
from ifso.surgery.recipe import digest_of
from ifso.training import runs

WRITES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.link"}
MODULES = (main, prune, finetune, train, evaluate)


class Watched:
    """What this rank writes, prunes and trains."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self.written: list[str] = []
        self.found: dict[str, Any] = {}
        sys.addaudithook(self._hear)
        self._prune, self._finish = pruning.prune, runs.RunningTraining._finish
        pruning.prune = self.pruned

        def finish(training: runs.RunningTraining) -> None:
            self._finish(training)
            self.found["weights"] = digest_of(training._training.model)

        runs.RunningTraining._finish = finish

    def _hear(self, event: str, details: tuple[Any, ...]) -> None:
        writing = event in WRITES or (event == "open" and isinstance(details[2], int) and details[2] & 0o3)
        if writing and str(details[0]).startswith(self._folder):
            self.written.append(f"{event} {details[0]}")

    def pruned(self, *args: Any, **options: Any) -> Any:
        result = self._prune(*args, **options)
        self.found["keep"] = {name: kept.int().tolist() for name, kept in result.keep.items()}
        self.found["weights"] = digest_of(result.model)
        return result


def outcome(watched: Watched, arguments: list[str]) -> dict[str, Any]:
    watched.found, watched.written = {}, []
    printed, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        status = main.main(arguments)
    lines = [line for line in errors.getvalue().splitlines() if line.startswith("ifso: error:")]
    return {
        "status": status, "errors": lines, "printed": printed.getvalue(), "written": watched.written, **watched.found
    }  # fmt: skip


def all_commands(folder: Path, rank: int, jobs: dict[str, Any]) -> None:
    watched, results = Watched(folder / "runs"), {}
    for name, arguments in jobs["commands"]:
        results[name] = outcome(watched, arguments)
        dist.barrier()
    results["refused"] = {name: refused.all_words(make) for name, make in refused.RANKED.items()}
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    os.environ.update(jobs["faults"])
    args = main._parser().parse_args(jobs["last"])
    args.run(args)


def run() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    for module in MODULES:
        module.leave = lambda status: status
    try:
        with joined("cpu") as place:
            all_commands(folder, place.rank, json.loads((folder / "jobs.json").read_text()))
    except ifso.IfsoError as error:
        sys.stderr.write(f"ifso: error: {error}\n")
        leave(error.exit_status)
    leave(0)


if __name__ == "__main__":
    run()
