"""Every file operation of every command fails once in each way, and signals come at random times; counts as JSON.

python tests/faults/every_fault.py --out docs/bench/faults.json [--only save report train …] [--kinds crash power …]

With ``--only`` or ``--kinds``, what the file tells of others stays.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import signalled
import torch
import trials
from failing_files import GROWING, KINDS, SIGNALS

FILES = ("save", "report", "train", "finetune", "prune", "prune staged", "export torch", "export onnx")
CHOSEN = {
    **dict.fromkeys(("train", "finetune", "prune", "prune staged"), (*KINDS, *SIGNALS)),
    **dict.fromkeys(("export torch", "export onnx"), ("full", "refused", "crash", *SIGNALS)),
}
"""Ways in which a command is stopped, where they are others than those of a disk."""
SIGNALLED = {"train": 18, "prune": 18, "prune staged": 18, "finetune": 12, "export torch": 9, "export onnx": 9}
"""How many processes of each command get a signal, each signal in turn."""


def failures_of_files(name: str, kinds: Sequence[str] = ()) -> dict[str, Any]:
    """All operations of one command, in every way, or in those that are named."""
    operations, _ = trials.reference(name)
    counts: dict[str, int] = {}
    failed: list[str] = []
    for kind in kinds or CHOSEN.get(name, KINDS):
        points = [at for at, what in enumerate(operations, 1) if kind != "full" or what in GROWING]
        counts[kind] = len(points)
        for at in points:
            with TemporaryDirectory() as place:
                failed += _failure(f"{kind} at {at}", lambda k=kind, a=at, p=place: trials.trial(name, k, a, Path(p)))
    return {"operations": len(operations), "injected": counts, "failures": failed}


def failures_of_signals(name: str) -> dict[str, Any]:
    """One command, stopped at random times."""
    run = trials._finished_run() / "work" / "run"
    with TemporaryDirectory() as place:
        work, began = signalled.works(run, Path(place))[name], time.monotonic()
        signalled.prepared(work, run, Path(place))
        signalled.goes_on(work, signalled.signalled(work, "SIGTERM", 600.0)[0])
        whole, wanted = time.monotonic() - began, signalled.result(work)
    sent = dict.fromkeys(signalled.SIGNALS, 0)
    stopped, failed = 0, []
    for number, moment in enumerate(signalled.moments(SIGNALLED[name], whole)):
        kind = tuple(sent)[number % len(sent)]
        sent[kind] += 1
        found: list[bool] = []
        failed += _failure(
            f"{kind} after {moment:.2f} s", lambda k=kind, m=moment, f=found: f.append(_signal(name, run, k, m, wanted))
        )
        stopped += sum(found)
    return {"sent": sent, "stopped": stopped, "failures": failed}


def _signal(name: str, run: Path, kind: str, moment: float, wanted: object) -> bool:
    with TemporaryDirectory() as place:
        work = signalled.works(run, Path(place))[name]
        signalled.prepared(work, run, Path(place))
        status, words = signalled.signalled(work, kind, moment)
        cut = signalled.check_stopped(work, kind, status, words)
        signalled.goes_on(work, status)
        assert signalled.result(work) == wanted
        return cut


def _failure(what: str, work: Callable[[], object]) -> Iterator[str]:
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            work()
    except Exception as error:
        yield f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:400]}"


def main() -> int:
    """Do what is asked for, and write what came out after each part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=[*FILES, *(f"signals {name}" for name in SIGNALLED)])
    parser.add_argument("--kinds", nargs="+", default=[])
    args = parser.parse_args()
    torch.set_num_threads(1)
    parts = json.loads(args.out.read_text())["parts"] if args.out.exists() else {}
    for part in args.only:
        began, kind = time.monotonic(), "signals" if part.startswith("signals ") else "files"
        found = failures_of_signals(part[8:]) if kind == "signals" else failures_of_files(part, args.kinds)
        found |= {"kind": kind, "seconds": round(time.monotonic() - began, 1)}
        parts[part] = _joined(parts[part], found) if args.kinds and part in parts else found
        args.out.write_text(json.dumps(_document(parts), indent=1) + "\n")
        sys.stderr.write(f"{part}: {json.dumps(parts[part])}\n")
    return int(any(part["failures"] for part in parts.values()))


def _count(part: Mapping[str, Any], kinds: Iterable[str]) -> int:
    return sum(part["injected"].get(kind, 0) for kind in kinds)


def _joined(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Two runs of one part, in other ways."""
    return {
        **before,
        "injected": {**before["injected"], **now["injected"]},
        "failures": [*before["failures"], *now["failures"]],
        "seconds": round(before["seconds"] + now["seconds"], 1),
    }


def _document(parts: dict[str, Any]) -> dict[str, Any]:
    files = [part for part in parts.values() if part["kind"] == "files"]
    signals = [part for part in parts.values() if part["kind"] == "signals"]
    return {
        "bench": "faults",
        "command": "python tests/faults/every_fault.py --out docs/bench/faults.json",
        "torch": str(torch.__version__),
        "file_faults": sum(_count(part, KINDS) for part in files),
        "signals_at_file_operations": sum(_count(part, SIGNALS) for part in files),
        "signals_at_random_times": sum(sum(part["sent"].values()) for part in signals),
        "stopped_by_signals": sum(part["stopped"] for part in signals),
        "failures": sum(len(part["failures"]) for part in parts.values()),
        "seconds": round(sum(part["seconds"] for part in parts.values()), 1),
        "parts": parts,
    }


if __name__ == "__main__":
    sys.exit(main())
