"""``ifso bench prune``: seconds of whole pruning runs, by part and as multiples of a training step."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ifso.cli.bench_options import add_machine, take_threads
from ifso.cli.console import chatter_to_stderr, console, print_json, say
from ifso.errors import IfsoError

if TYPE_CHECKING:
    from rich.table import Table

CAPTION = (
    "s: the whole run, from tracing to verification; the first one also pays for kernels that are compiled. "
    "× step: seconds of a round (scores of its batches and, unless in one shot, a step; in a staged run the score of "
    "one batch) over those of a plain training step of the whole network in the same process, on a GPU as a CUDA "
    "graph. Weights: entries of kernels and matrices left. "
    "Streams: units removed that several layers make together, such as a residual stream's. "
    "Seconds on a CPU say nothing about a GPU; compare ratios."
)


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("prune", help="seconds of whole pruning runs, by part and against a training step")
    parser.add_argument("--model", default="ifso:resnet32", metavar="MODEL", help="default: %(default)s")
    parser.add_argument("--weights", metavar="FILE", help="trained weights (random ones otherwise)")
    parser.add_argument("--data", metavar="DATA", help="as for ifso prune (random images otherwise)")
    parser.add_argument("--macs", type=float, default=0.6, metavar="SHARE", help="share kept (%(default)s)")
    parser.add_argument("--criteria", nargs="+", metavar="NAME", help="one run each (ifso; and true-loss, staged)")
    parser.add_argument(
        "--schedules", nargs="+", metavar="NAME",
        help="with each of these: incremental, one-shot (both by default) or staged, without training",
    )  # fmt: skip
    parser.add_argument("--presets", nargs="+", default=[], metavar="NAME", help="and presets, such as authors")
    parser.add_argument("--batch", type=int, default=128, metavar="N", help="samples in a batch (%(default)s)")
    parser.add_argument("--accumulate", type=int, default=10, metavar="K", help="rounds to a removal (%(default)s)")
    parser.add_argument("--batches-per-score", type=int, default=2, metavar="N", help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(%(default)s)")
    add_machine(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run every method and print the table."""
    from ifso.bench.prune import Method, Setup, measure

    if any(number is not None and number < 1 for number in (args.batch, args.threads)):
        raise IfsoError("--batch and --threads take numbers from 1 up")
    take_threads(args)
    setup = Setup(
        model=args.model, macs=args.macs, data=args.data, weights=args.weights, batch=args.batch,
        accumulate=args.accumulate, batches_per_score=args.batches_per_score, device=args.device,
        precision=args.precision, channels_last=args.channels_last, seed=args.seed,
    )  # fmt: skip
    schedules = args.schedules or ["incremental", "one-shot"]
    methods = [Method(criterion, schedule) for criterion in args.criteria or ["ifso"] for schedule in schedules]
    methods += [Method.of_preset(preset, schedule) for preset in args.presets for schedule in schedules]
    if args.criteria is None and args.schedules is None:
        methods.append(Method.default())
    with chatter_to_stderr():
        result = measure(setup, methods, say)
    if args.json:
        print_json({"bench": "prune", "result": result})
    else:
        console().print(*_tables(result), sep="\n")
    return 0


def _tables(result: dict[str, Any]) -> list[Table]:
    """What came out, and where the seconds went."""
    return [_outcome(result), _parts(result)]


def _outcome(result: dict[str, Any]) -> Table:
    layout = "channels last" if result["channels_last"] else "channels first"
    title = (
        f"ifso bench prune: {result['model']} to {result['macs']:.0%} of its MACs; batch {result['batch']}, "
        f"k={result['accumulate']}, {result['batches_per_score']} batches for a score; {result['device_name']}, "
        f"{result['precision']}, {layout}, torch {result['torch']}; "
        f"training step {1000 * result['step_seconds']:.1f} ms"
    )
    headings = ("s", "removals", "scores/s", "× step", "MACs", "weights", "streams", "accuracy")
    table = _empty(title, CAPTION, headings)
    for name, row in result["methods"].items():
        table.add_row(
            name,
            f"{row['seconds']:.1f}",
            str(row["removals"]),
            f"{row['scores_per_second']:.0f}",
            f"{row['ratio']:.2f}",
            f"{row['macs']:.1%}",
            f"{row['weights']:.1%}",
            str(row["stream_units_removed"]),
            "–" if row["accuracy"] is None else f"{row['accuracy']:.2f}",
        )
    return table


def _parts(result: dict[str, Any]) -> Table:
    methods = result["methods"]
    parts = list(dict.fromkeys(part for row in methods.values() for part in row["timings"]))
    table = _empty("seconds by part of the run", None, parts)
    for name, row in methods.items():
        table.add_row(name, *(f"{row['timings'].get(part, 0.0):.2f}" for part in parts))
    return table


def _empty(title: str, caption: str | None, headings: Sequence[str]) -> Table:
    from rich.table import Table

    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    table.add_column("method")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table
