"""``ifso bench trace``: CPU seconds and memory of tracing, each model in a process of its own with one thread."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ifso.cli.bench_options import measured_apart
from ifso.cli.console import console, print_json, say

if TYPE_CHECKING:
    from rich.table import Table

MODELS = ("torchvision:resnet50", "torchvision:vit_h_14")
CAPTION = (
    "CPU s: process time of one trace; the first one in a process also pays for imports inside torch. "
    "Memory: growth of the peak resident size during the first trace, as a share of the model's own bytes."
)


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("trace", help="CPU seconds and memory of tracing")
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="MODEL", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure each model and print the table."""
    results = []
    for name in args.models:
        say(f"tracing {name}")
        results.append(_measure_apart(name))
    if args.json:
        print_json({"bench": "trace", "threads": 1, "results": results})
    else:
        console().print(_table(results))
    return 0


def _measure_apart(name: str) -> dict[str, Any]:
    return measured_apart("trace_worker", [name])


def _table(results: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table(title="ifso bench trace, one thread", caption=CAPTION, title_justify="left", caption_justify="left")
    for heading in ("model", "units", "CPU s, first", "CPU s, again", "model MiB", "growth MiB", "growth / model"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for result in results:
        model, growth = result["model_bytes"], result["peak_growth_bytes"]
        table.add_row(
            result["model"],
            str(result["units"]),
            f"{result['cpu_s_first']:.2f}",
            f"{result['cpu_s_again']:.2f}",
            f"{model / 2**20:.0f}",
            f"{growth / 2**20:.0f}",
            f"{growth / model:.2f}",
        )
    return table
