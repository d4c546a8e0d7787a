"""``ifso bench train``: seconds of a training step of a pruned network, alone and side by side with others."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifso.cli.bench_options import add_machine, take_threads
from ifso.cli.output import chatter_to_stderr, console, print_json, say
from ifso.errors import IfsoError

if TYPE_CHECKING:
    from rich.table import Table

DEFAULTS = {"cpu": {"lanes": (1, 2), "steps": 4}, "cuda": {"lanes": (1, 8), "steps": 390}}
CAPTION = (
    "ms: a step of one network alone, from fetching its batch to SGD; median over epochs, the first one not counted. "
    "Floor: loss and gradient alone on one batch, on a GPU as a CUDA graph. MACs: what is computed, of the whole "
    "network. × N: throughput of N networks side by side over that of one after another. Projected: not run, but "
    "{epochs} epochs of {steps} steps at this rate, without evaluation. Compact: as pruned; padded: the same network "
    "in its former shape, with zeros."
)


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("train", help="seconds of a training step, alone and side by side")
    parser.add_argument("--model", default="ifso:resnet32", metavar="MODEL", help="default: %(default)s")
    parser.add_argument(
        "--kept",
        type=float,
        default=0.5,
        metavar="SHARE",
        help="of the MACs, chosen at random; 1 for all (%(default)s)",
    )
    parser.add_argument("--shapes", nargs="+", metavar="NAME", help="some of compact, rounded and padded (all of them)")
    parser.add_argument(
        "--data", default="generated", metavar="DATA", help="digits, cifar10:PATH, cifar100:PATH or %(default)s"
    )
    parser.add_argument("--batch", type=int, default=128, metavar="N", help="images in a batch (%(default)s)")
    parser.add_argument("--lanes", nargs="+", type=int, metavar="N", help="networks side by side (1 8; cpu: 1 2)")
    parser.add_argument("--steps", type=int, metavar="N", help="that are timed together (390; cpu: 4)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="how often (%(default)s)")
    parser.add_argument("--compile", action="store_true", help="torch.compile the network")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(%(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON document there as it grows")
    add_machine(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print the table."""
    from ifso.bench.train import Setup, measure

    if args.threads is not None and args.threads < 1:
        raise IfsoError(f"--threads {args.threads}: give 1 or more")
    take_threads(args)
    usual = DEFAULTS["cuda" if args.device.startswith("cuda") else "cpu"]
    lists = {name: tuple(getattr(args, name)) for name in ("lanes", "shapes") if getattr(args, name) is not None}
    given = lists if args.steps is None else {**lists, "steps": args.steps}
    names = ("model", "kept", "device", "precision", "channels_last", "compile", "batch", "repeats", "data", "seed")
    options: dict[str, Any] = {**usual, **given, **{name: getattr(args, name) for name in names}}

    def keep(result: dict[str, Any]) -> dict[str, Any]:
        document = {"bench": "train", "result": result}
        if args.out is not None:
            _write(document, args.out)
        return document

    with chatter_to_stderr():
        result = measure(Setup(**options), say, keep)
    document = keep(result)
    if args.json:
        print_json(document)
    else:
        console().print(_table(result), *result["notes"], *_notes(result["rows"]), sep="\n")
    return 0


def _write(document: dict[str, Any], path: Path) -> None:
    from ifso.common.files import delivering

    try:
        with delivering(path) as new:
            new.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise IfsoError(f"{path} cannot be written: {error.strerror}") from error


def _notes(rows: list[dict[str, Any]]) -> list[str]:
    return [f"* {row['shape']}, {row['way']}: {note}" for row in rows for note in row["notes"]]


def _table(result: dict[str, Any]) -> Table:
    from rich.table import Table

    layout = "channels last" if result["channels_last"] else "channels first"
    compiled = ", compiled" if result["compile"] else ""
    title = (
        f"ifso bench train: {result['model']} with {result['kept']:.0%} of its MACs; batch {result['batch']}, "
        f"{result['data']} images; {result['device_name']}, {result['precision']}, {layout}{compiled}, "
        f"torch {result['torch']}"
    )
    caption = CAPTION.format(**result["projected"])
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    counts = list(dict.fromkeys(count for row in result["rows"] for count in row["side_by_side"]))
    table.add_column("shape")
    table.add_column("steps")
    for heading in ("MACs", "ms", "± ms", "floor ms", *(f"× {count}" for count in counts), "projected s"):
        table.add_column(heading, justify="right")
    for row in result["rows"]:
        times = [f"{1000 * row[name]:.2f}" for name in ("step_seconds", "spread", "floor_seconds")]
        found = row["side_by_side"]
        ratios = [f"{found[count]['throughput']:.2f}" if count in found else "–" for count in counts]
        mark = " *" if row["notes"] else ""
        projected = f"{row['projected_seconds']:.0f}"
        table.add_row(row["shape"], row["way"] + mark, f"{row['macs']:.1%}", *times, *ratios, projected)
    return table
