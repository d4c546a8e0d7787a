"""``python -m benchmarks zoo``: torchvision's builders and timm's families scored, pruned a little and trained."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifso.cli.console import say
from ifso.errors import IfsoError

if TYPE_CHECKING:
    from benchmarks.zoo.networks import Entry

SETS = ("all", "torchvision", "timm")


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("zoo", help="every torchvision builder and timm family: score, a stage, a step")
    parser.add_argument("files", nargs="*", type=Path, metavar="JSONL", help="show these instead of a run")
    parser.add_argument("--markdown", action="store_true", help="print them as a page, a row for each network")
    parser.add_argument("--out", type=Path, metavar="FILE.jsonl", help="a line for each network; those in it are done")
    parser.add_argument("--set", default="all", choices=SETS, help="which networks (%(default)s)")
    parser.add_argument("--models", nargs="+", metavar="MODEL", help="these networks instead")
    parser.add_argument("--only", nargs="+", default=[], metavar="PATTERN", help="names or kinds such as 'resnet*'")
    parser.add_argument("--retry", action="store_true", help="also networks in --out of which something failed")
    parser.add_argument("--batch", type=int, default=2, metavar="N", help="images in a batch (%(default)s)")
    parser.add_argument("--repeats", type=int, default=2, metavar="N", help="rounds of the timings (%(default)s)")
    parser.add_argument("--limit", type=float, default=240, metavar="SECONDS", help="for one network (%(default)s)")
    parser.add_argument("--minutes", type=float, metavar="M", help="leave what is not done by then for the next run")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes on the device (%(default)s)")
    parser.add_argument("--float64", metavar="FOLDER", help="where scores in float64 of a CPU are kept and looked for")
    parser.add_argument("--float64-only", action="store_true", help="only compute those, on the CPU")
    parser.add_argument("--no-float64", action="store_true", help="no ranks against float64")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (torch's own choice)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Examine what is left, or show what was examined."""
    if args.files:
        return _show(args)
    _check(args)
    from benchmarks.zoo.examine import Setup
    from benchmarks.zoo.record import Limits, left
    from benchmarks.zoo.record import run as go

    chosen = _entries(args)
    setup = Setup(
        args.batch, "cpu" if args.float64_only else args.device, args.repeats, args.threads, not args.no_float64,
        args.float64, args.float64_only, args.jobs,
    )  # fmt: skip
    out = None if args.float64_only else args.out
    todo = left(chosen, setup, out, args.retry)
    say(f"{len(todo)} of {len(chosen)} networks are left")
    done, rest = go(todo, setup, out, Limits(args.limit, args.minutes, args.jobs), say)
    say(f"{done} networks done, {rest} left" + (": the same command goes on with them" if rest else ""))
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.markdown:
        raise IfsoError("--markdown needs the JSON lines of earlier runs: python -m benchmarks zoo FILES --markdown")
    if args.float64_only and args.no_float64:
        raise IfsoError("--float64-only and --no-float64 exclude each other; give one of the two")
    if args.float64_only and args.float64 is None:
        raise IfsoError("--float64-only must have --float64 FOLDER, where scores are kept")
    if not args.float64_only and args.out is None:
        raise IfsoError("give --out FILE.jsonl for the rows, or JSON lines of earlier runs to show")
    for name in ("threads", "limit", "minutes", "jobs"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise IfsoError(f"--{name} must be above 0, got {value:g}")


def _entries(args: argparse.Namespace) -> list[Entry]:
    from benchmarks.zoo.networks import installed, matching, named, timm_entries, torchvision_entries

    if args.models:
        found = named(args.models)
    else:
        found = torchvision_entries() if args.set != "timm" else []
        found += timm_entries() if args.set != "torchvision" else []
        found, lacking = installed(found)
        if lacking:
            say(f"not in the installed timm: {', '.join(entry.name for entry in lacking)}")
    return matching(found, args.only)


def _show(args: argparse.Namespace) -> int:
    from benchmarks.zoo.page import page, summary
    from benchmarks.zoo.record import read

    rows = read(args.files)
    if not rows:
        raise IfsoError(f"{args.files[0]} holds no networks yet")
    print(page(rows) if args.markdown else "\n".join(summary(rows)), end="" if args.markdown else "\n")
    return 0
