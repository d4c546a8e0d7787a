"""``ifso bench score``: seconds and memory of the score, as multiples of a gradient."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ifso.cli.bench_options import add_machine, take_threads
from ifso.cli.console import console, print_json, say
from ifso.errors import IfsoError

if TYPE_CHECKING:
    from rich.table import Table

RANKS = "Rank: Spearman's correlation with the exact score in float64, on {samples} samples. "
MODELS = ("ifso:resnet32",)
CAPTION = (
    "Median over rounds of time / the gradient's in the same round, and peak tensor memory / the gradient's. "
    "{ranks}"
    "On a GPU all are replayed as CUDA graphs, scores of a detector up to its loss; * marks what cannot be captured."
)


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("score", help="time and memory of the score as multiples of a gradient")
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="MODEL", help="default: %(default)s")
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="some of them, beside the gradient (all)")
    parser.add_argument("--batch", type=int, default=128, metavar="N", help="samples in the batch (%(default)s)")
    parser.add_argument("--size", metavar="PIXELS", help="height and width of the images, or both: 480x640")
    parser.add_argument("--weights", metavar="FILE", help="trained weights (random ones otherwise)")
    parser.add_argument("--images", metavar="FILE.npz", help="CIFAR images x_train, y_train (random ones otherwise)")
    parser.add_argument("--eval", action="store_true", help="batch norm in eval mode (train mode otherwise)")
    parser.add_argument("--no-ranks", action="store_true", help="do not compare with scores in float64")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="rounds (%(default)s)")
    add_machine(parser)
    parser.set_defaults(run=run)


def size_of(text: str | None) -> int | tuple[int, int] | None:
    """A side of squares, or height and width; None if nothing is said.

    >>> size_of("224"), size_of("480x640")
    (224, (480, 640))
    """
    sides = [] if text is None else text.split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) for side in sides):
        raise IfsoError(f"--size {text} is no size; write 224, or 480x640 for height and width")
    numbers = [int(side) for side in sides]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else next(iter(numbers), None)


def run(args: argparse.Namespace) -> int:
    """Measure each model and print the tables."""
    from ifso.bench.score import Setup, measure

    if any(number is not None and number < 1 for number in (args.batch, args.repeats, args.threads)):
        raise IfsoError("--batch, --repeats and --threads take numbers from 1 up")
    take_threads(args)
    results = []
    for name in args.models:
        setup = Setup(
            name, args.batch, args.device, args.precision, args.channels_last, size_of(args.size),
            args.weights, args.images, args.eval,
        )  # fmt: skip
        results.append(measure(setup, args.repeats, say, args.methods, ranks=not args.no_ranks))
    if args.json:
        print_json({"bench": "score", "results": results})
    else:
        for result in results:
            console().print(_table(result))
            for line in _remarks(result):
                console().print(line, markup=False, highlight=False)
    return 0


def _table(result: dict[str, Any]) -> Table:
    from rich.table import Table

    from ifso.bench.score import METHODS

    layout = "channels last" if result["channels_last"] else "channels first"
    where = f"{result['device_name']}, {result['precision']}, {layout}, torch {result['torch']}"
    title = f"ifso bench score: {result['model']}, batch {result['batch']}, {where}"
    samples = result["rank_samples"]
    caption = CAPTION.format(ranks=RANKS.format(samples=samples) if samples else "")
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for heading in ("method", "what", "ms", "± ms", "× time", "MiB", "× memory", "rank"):
        table.add_column(heading, justify="left" if heading in ("method", "what") else "right")
    for name, row in result["methods"].items():
        if "error" in row:
            table.add_row(name, METHODS[name], "failed")
            continue
        mark = "" if row["captured"] or result["device"] == "cpu" else " *"
        table.add_row(
            name,
            METHODS[name],
            f"{1000 * row['seconds']:.1f}{mark}",
            f"{1000 * row['spread']:.1f}",
            f"{row['times']:.2f}",
            f"{row['peak_bytes'] / 2**20:.0f}",
            f"{row['memory']:.2f}",
            "" if row["fidelity"] is None else f"{row['fidelity']:.4f}",
        )
    return table


def _remarks(result: dict[str, Any]) -> list[str]:
    """Why methods failed, and how those were computed that went another way."""
    rows = result["methods"].items()
    failed = [f"{name} failed: {row['error']}" for name, row in rows if "error" in row]
    return failed + [f"{name}: {row['note']}" for name, row in rows if row.get("note")]
