"""``ifso report``: one page that shows what runs removed, what that cost, and whether to trust it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ifso.cli.console import print_json
from ifso.cli.options import add_option, add_shared

DESCRIPTION = (
    "Write one HTML page about a pruning run, or about several to compare them. It needs no network and no other file. "
    "Runs that are not finished can be looked at, too."
)


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("report", help="write a page that shows runs", description=DESCRIPTION)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a folder that ifso prune --out made")
    add_option(parser, "out", Path, "FILE", "the page (report.html in RUN, or in the folder that all runs lie in)")
    add_shared(parser, "finetuned", "json")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the page, and say where it is."""
    from ifso.report import write_report

    place = write_report(args.runs, args.out, args.finetuned)
    if args.json:
        print_json({"report": str(place), "bytes": place.stat().st_size, "runs": [str(each) for each in args.runs]})
    else:
        print(f"report: {place}")
    return 0
