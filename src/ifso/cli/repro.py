"""``ifso repro``: runs a study of the paper again and says what came out."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifso.cli.output import console, print_json
from ifso.errors import IfsoError

if TYPE_CHECKING:
    from rich.table import Table

STUDIES = ("figure1",)
COLUMNS = {
    "spearman": "Spearman",
    "spearman_equal_size": "equal size",
    "pearson": "Pearson",
    "median_error": "error",
    "gradients": "gradients",
    "share": "of L-BFGS",
    "share_adam": "of Adam",
}
CAPTION = (
    "Correlation with the loss change after retraining, mean over seeds (lowest…highest). Equal size: Spearman among "
    "masks that remove equally many units. Error: median of |estimate − truth| / |truth|. Gradients: median spent "
    "on a mask, and as a share of what retraining it took."
)


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("repro", help="run a study of the paper again")
    parser.add_argument("study", metavar="FIGURE", help=f"one of: {', '.join(STUDIES)}")
    parser.add_argument("--smoke", action="store_true", help="everything at a reduced size, in a minute")
    parser.add_argument("--data", metavar="cifar10:PATH.npz", help="adds a ResNet on images of CIFAR-10")
    parser.add_argument("--out", type=Path, default=Path("ifso-figure1"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--seeds", type=int, metavar="N", help="networks of each kind (2; 1 with --smoke)")
    parser.add_argument("--networks", nargs="+", metavar="NAME", help="only these networks of the study")
    parser.add_argument("--masks", type=int, metavar="N", help="masks for each network (60; 14 with --smoke)")
    parser.add_argument("--workers", type=int, metavar="N", help="processes of one thread each (one for each core)")
    parser.add_argument("--resume", action="store_true", help="continue what an interrupted run left in --out")
    parser.add_argument("--renew", action="store_true", help="as --resume, but scores and estimates are computed again")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the study, write figure1.json and figure1.svg, and print the tables."""
    if args.study not in STUDIES:
        raise IfsoError(f"no study {args.study!r}; choose one of {', '.join(STUDIES)}")
    if args.workers is not None and args.workers < 1:
        raise IfsoError(f"--workers {args.workers}: give 1 or more")
    from ifso.repro.figure1 import figure1, write
    from ifso.repro.images import checksum, data_path
    from ifso.repro.scatter import PlotUnavailable, draw
    from ifso.repro.settings import choose

    path = None if args.data is None else data_path(args.data)
    name = None if path is None else f"cifar10:{path.name}, sha256 {checksum(path)}"
    settings = choose(smoke=args.smoke, seeds=args.seeds, networks=args.networks, masks=args.masks, data=name)
    workers = args.workers or os.cpu_count() or 1
    document = {
        "command": _command(args, path),
        **figure1(settings, path, args.out, resume=args.resume, workers=workers, renew=args.renew),
    }
    written = [str(write(document, args.out))]
    try:
        draw(document, args.out / "figure1.svg")
        written.append(str(args.out / "figure1.svg"))
    except PlotUnavailable as error:
        print(f"ifso: {error}", file=sys.stderr)
    if args.json:
        print_json(document)
    else:
        console().print(*tables(document), f"written: {', '.join(written)}", sep="\n")
    return 0


def _command(args: argparse.Namespace, data: Path | None) -> str:
    """The command that gives this result, with names of files only."""
    words = ["ifso", "repro", args.study]
    words += ["--smoke"] if args.smoke else []
    words += ["--data", f"cifar10:{data.name}"] if data else []
    for option in ("seeds", "masks"):
        value = getattr(args, option)
        words += [f"--{option}", str(value)] if value is not None else []
    words += ["--networks", *args.networks] if args.networks else []
    return shlex.join(words)


def tables(document: dict[str, Any]) -> list[Table | str]:
    """One table for each network, and below it what does not apply."""
    found: list[Table | str] = []
    for name in dict.fromkeys(row["network"] for row in document["summary"]):
        rows = [row for row in document["summary"] if row["network"] == name]
        found.append(_table(name, rows, [network for network in document["networks"] if network["name"] == name]))
        found += [f"not applicable: {row['method']}: {row['not_applicable']}" for row in rows if "masks" not in row]
    return found


def _table(name: str, rows: list[dict[str, Any]], networks: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    first = networks[0]
    size = f"{first['weights']} weights, {first['units']} units, {first['images']} images, {len(networks)} seed(s)"
    table = Table(title=f"{name}: {size}", caption=CAPTION, title_justify="left", caption_justify="left")
    table.add_column("method")
    for heading in ("masks", *COLUMNS.values()):
        table.add_column(heading, justify="right")
    for row in rows:
        if "masks" in row:
            cells = [_cell(measure, row.get(measure)) for measure in COLUMNS]
            table.add_row(row["method"], str(row["masks"]), *cells)
    return table


def _cell(measure: str, value: dict[str, float] | None) -> str:
    """Mean over seeds, for correlations with their range."""
    if value is None:
        return "–"
    if measure == "gradients":
        return f"{value['mean']:.0f}"
    if measure in ("spearman", "spearman_equal_size", "pearson"):
        spread = f" ({value['lowest']:.2f}…{value['highest']:.2f})" if value["lowest"] < value["highest"] else ""
        return f"{value['mean']:.2f}{spread}"
    return f"{value['mean']:.1%}" if value["mean"] < 10 else f"{value['mean']:.0f}×"
