"""Trace, prune and check every network of the zoo; see ``python benchmarks/zoo/run.py --help``."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from fnmatch import fnmatch
from importlib import metadata
from importlib.util import find_spec
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # where ``benchmarks`` is, and not this folder, as the first place to look

from benchmarks.zoo import table  # noqa: E402
from benchmarks.zoo.networks import LIBRARIES, SETS, Entry, entries, write_families  # noqa: E402
from benchmarks.zoo.worker import Worker, serving  # noqa: E402

PACKAGES = ("torch", "torchvision", "timm")
INTERRUPTED = 130


def main() -> int:
    """The command line; status 4 if any network run now came out neither exact nor refused."""
    arguments = parse()
    if arguments.command == "catalog":
        print(write_families())
        return 0
    if arguments.command == "table":
        write_page(arguments.out, load(arguments.out), arguments.set)
        return 0
    return run(arguments)


def parse() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", nargs="?", default="run", choices=("run", "catalog", "table"), help="default: run")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="PATTERN", help="names such as 'resnet*' or 'timm:vit_*'"
    )
    parser.add_argument("--set", default="all", choices=SETS, help="'all': torchvision and the timm families")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--limit-seconds", type=float, default=300, help="wall-clock seconds per network")
    parser.add_argument("--limit-gib", type=float, default=9, help="memory per network")
    parser.add_argument("--double-below", type=float, default=120, help="float64 below so many million parameters")
    parser.add_argument("--device", default="cpu", help="where the networks run: cpu or cuda")
    parser.add_argument("--resume", action="store_true", help="skip networks that have a result")
    parser.add_argument("--retry", action="store_true", help="with --resume: run those again that are not exact")
    parser.add_argument("--out", type=Path, default=Path("docs/zoo"), help="OUT/results.json and OUT.md are written")
    return parser.parse_args()


def run(arguments: argparse.Namespace) -> int:
    """Check the chosen networks, writing results as they come."""
    document = load(arguments.out)
    packages = (*PACKAGES, *LIBRARIES.values()) if arguments.set == "third-party" else PACKAGES
    document["versions"] = versions_now(arguments.device, packages)
    results = document["results"]
    todo = chosen(arguments, results)
    failed = 0
    try:
        for number, (entry, outcome) in enumerate(outcomes(todo, arguments), start=1):
            row = {"source": entry.source, "kind": entry.kind} | outcome
            results[entry.key] = row
            failed += row["status"] not in ("exact", "refused")
            print(progress(number, len(todo), entry, row), flush=True)
            save(arguments.out, document)
    except KeyboardInterrupt:
        print("interrupted; continue with --resume", file=sys.stderr)
        return INTERRUPTED
    write_page(arguments.out, document, arguments.set)
    return 4 if failed else 0


def outcomes(todo: Sequence[Entry], arguments: argparse.Namespace) -> Iterator[tuple[Entry, dict[str, Any]]]:
    """Results in the order of completion, each from a process that is killed when it takes too long or too much."""
    stopped, context = Event(), _context()

    def outcome(entry: Entry) -> dict[str, Any]:
        begun, setup = time.monotonic(), (arguments.double_below * 1e6, arguments.device)
        with Worker(serve, setup, stopped=stopped, gib=arguments.limit_gib, context=context) as worker:
            found, reason = worker.ask(entry, arguments.limit_seconds)
        if reason:
            found = {"status": "killed" if reason.startswith("took") else "crashed", "reason": reason}
        spent = round(time.monotonic() - begun, 1)
        return {**found, "seconds": spent, "peak_gib": round(worker.peak_gib, 1)}

    with ThreadPoolExecutor(arguments.jobs) as pool:
        futures = {pool.submit(outcome, entry): entry for entry in todo}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            stopped.set()
            pool.shutdown(cancel_futures=True)


def serve(pipe: Connection, setup: tuple[float, str]) -> None:
    """In the process: check networks."""
    from benchmarks.zoo.check import check

    serving(pipe, lambda entry: [check(entry, *setup)])


def _context() -> Any:
    """Processes are forked from a server that has the libraries loaded, on one core each, and deaf to Ctrl-C."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torchvision", "timm"])
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    return context


def chosen(arguments: argparse.Namespace, results: dict[str, Any]) -> list[Entry]:
    """The networks to run: of the set, matching a pattern, without a result if resuming."""
    listed = entries(arguments.set)
    if arguments.only:
        listed = [e for e in listed if any(fnmatch(e.key, p) or fnmatch(e.name, p) for p in arguments.only)]
        if not listed:
            raise SystemExit(f"no network in set {arguments.set!r} matches {' '.join(arguments.only)}")
    if arguments.resume:
        again = {key for key, row in results.items() if arguments.retry and row["status"] != "exact"}
        listed = [entry for entry in listed if entry.key not in results or entry.key in again]
    return listed


def progress(number: int, total: int, entry: Entry, row: dict[str, Any]) -> str:
    """One line on one network."""
    detail = row.get("reason") or found(row)
    return f"[{number}/{total}] {entry.key}: {row['status']} ({row['seconds']} s, {row['peak_gib']} GiB): {detail}"


def found(row: dict[str, Any]) -> str:
    """What an exact network came to."""
    if "groups" in row:
        return f"{row['groups']} groups, {row['units']} units, error {row['error']}"
    modes = ("eval", "train")
    return ", ".join(f"{mode} {row[f'{mode}_prunable']:.1%}, error {row[f'{mode}_error']}" for mode in modes)


def load(out: Path) -> dict[str, Any]:
    """Earlier results, or none."""
    file = out / "results.json"
    return json.loads(file.read_text()) if file.exists() else {"versions": {}, "results": {}}


def versions_now(device: str, packages: Sequence[str]) -> dict[str, str]:
    """What the results are made with."""
    libraries = {name: metadata.version(name) for name in packages if find_spec(name)}
    return {"Python": platform.python_version()} | libraries | {"device": device_name(device)}


def device_name(device: str) -> str:
    """The device in words."""
    import torch

    return torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"


def save(out: Path, document: dict[str, Any]) -> None:
    """Write the results, one network per line, through a second file so that a kill leaves a whole one."""
    out.mkdir(parents=True, exist_ok=True)
    rows = [
        f"    {json.dumps(key)}: {json.dumps(row, ensure_ascii=False)}"
        for key, row in sorted(document["results"].items())
    ]
    text = f'{{\n  "versions": {json.dumps(document["versions"])},\n  "results": {{\n' + ",\n".join(rows) + "\n  }\n}\n"
    partial = out / "results.json.partial"
    partial.write_text(text)
    partial.replace(out / "results.json")


def write_page(out: Path, document: dict[str, Any], which: str) -> None:
    """Render OUT.md and print its headline."""
    render, headline = table.THIRD_PARTY if which == "third-party" else table.ZOO
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_name(out.name + ".md").write_text(render(document))
    print("\n".join(headline(document["results"])))


if __name__ == "__main__":
    sys.exit(main())
