"""A long run of hostile files against every reader, in one process whose memory is limited.

    python tests/hostile/long_run.py --inputs 1000000 --out docs/bench/fuzz.json
    python tests/hostile/long_run.py --replay "COCO JSON" 4711          what one input does

Counts by reader and outcome are written as JSON, failures with the number of the input; the exit status is 1 if there
are any. An input depends on the seed, the reader and its number alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from contract import LONGEST, MEMORY, SECONDS, Counts, Reader, run_one
from readers import readers

import ifso

ROOM = 2 * 2**30
"""Bytes of address space that the process may take beyond what it has when it begins."""

MOST_TOLD = 20
"""Failures of a reader that are written out."""


def main(argv: list[str] | None = None) -> int:
    """Run as asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="run these readers alone, and keep the others in --out")
    parser.add_argument("--replay", nargs=2, metavar=("READER", "NUMBER"))
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    root = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    try:
        return replay(args, root) if args.replay else run(args, root)
    finally:
        shutil.rmtree(root)


def replay(args: argparse.Namespace, root: Path) -> int:
    """One input again."""
    outcome, told = run_one(readers(root)[args.replay[0]], root, args.seed, int(args.replay[1]))
    say(f"{outcome} {told}")
    return int(outcome == "failed")


def run(args: argparse.Namespace, root: Path) -> int:
    """All readers, each with its share of the inputs."""
    known = readers(root)
    chosen = {name: reader for name, reader in known.items() if not args.only or name in args.only}
    total = sum(reader.share for reader in known.values())
    limit_memory()
    _silence()
    counts: dict[str, Counts] = {}
    for name, reader in chosen.items():
        number = max(round(args.inputs * reader.share / total), 1) + 1
        counts[name] = count(reader, root, args.seed, number)
        told = {key: value for key, value in asdict(counts[name]).items() if key != "failures"}
        say(f"{name} {told}", *map(str, counts[name].failures[:MOST_TOLD]))
        document = summary(counts, args, known)
        if args.out is not None:
            args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    say(str({key: document[key] for key in ("inputs", "valid", "refused", "failed", "seconds")}))
    return int(document["failed"] > 0)


def say(*lines: str) -> None:
    """To standard output."""
    sys.stdout.write("\n    ".join(lines) + "\n")
    sys.stdout.flush()


def count(reader: Reader, root: Path, seed: int, inputs: int) -> Counts:
    """The outcomes of the first ``inputs`` of a reader."""
    counts, began = Counts(), time.perf_counter()
    for number in range(inputs):
        start = time.perf_counter()
        outcome, told = run_one(reader, root, seed, number)
        counts.slowest = max(counts.slowest, time.perf_counter() - start)
        counts.inputs += 1
        if outcome == "failed":
            counts.failures.append({"number": number, "told": told[:500]})
        else:
            setattr(counts, outcome, getattr(counts, outcome) + 1)
    counts.seconds = time.perf_counter() - began
    return counts


def summary(counts: dict[str, Counts], args: argparse.Namespace, known: Iterable[str]) -> dict[str, Any]:
    """What is written: of readers that ``--only`` leaves out, what stood there before."""
    before = json.loads(args.out.read_text()) if args.only and args.out is not None and args.out.exists() else {}
    rows = {
        name: {
            "inputs": one.inputs, "valid": one.valid, "refused": one.refused, "failed": len(one.failures),
            "seconds": round(one.seconds, 1), "slowest": round(one.slowest, 3), "failures": one.failures[:MOST_TOLD],
        }
        for name, one in counts.items()
    }  # fmt: skip
    rows = {name: row for name in known for row in [rows.get(name, before.get("readers", {}).get(name))] if row}
    sums = {key: sum(row[key] for row in rows.values()) for key in ("inputs", "valid", "refused", "failed")}
    return {
        "what": "hostile files, made from valid ones, against every reader of files",
        "command": f"python tests/hostile/long_run.py --inputs {args.inputs} --seed {args.seed} --out {args.out}",
        **sums, "seconds": round(sum(row["seconds"] for row in rows.values()), 1), "seed": args.seed,
        "run_again": sorted({*before.get("run_again", ()), *args.only}),
        "torch": torch.__version__, "ifso": ifso.__version__, "python": platform.python_version(),
        "limits": {
            "seconds": SECONDS, "memory_of_one_input": MEMORY, "address_space": ROOM, "letters_of_a_message": LONGEST,
        },
        "readers": rows,
    }  # fmt: skip


def limit_memory(room: int = ROOM) -> None:
    """MemoryError for whatever takes much more address space than there is in use now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + room
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _silence() -> None:
    """Decoders of images write warnings to standard error from C."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


if __name__ == "__main__":
    sys.exit(main())
