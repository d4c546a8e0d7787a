"""``ifso bench choose``: networks made smaller without training, by our methods and by Torch-Pruning's."""

from __future__ import annotations

import argparse
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifso.cli.console import chatter_to_stderr, console, say, table
from ifso.cli.inputs import compute_threads, name_networks
from ifso.cli.options import positive
from ifso.common.text import standard_error
from ifso.errors import IfsoError

if TYPE_CHECKING:
    from rich.table import Table

    from ifso_repro.choose.record import Record

MACS = (0.8, 0.7, 0.6, 0.5)
METHODS = (
    "default", "ifso-one-shot", "group-fisher-one-shot", "taylor-one-shot", "magnitude-one-shot", "random-one-shot",
    "tp-taylor", "tp-magnitude", "tp-hessian",
)  # fmt: skip
CAPTION = (
    "No training. MACs and parameters: shares left, counted by ifso for every method. Top-1 in per cent. s: of the "
    "whole way, scores and search included. Batch norms are recalibrated for all."
)


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("choose", help="top-1 without training, by method and share of MACs kept")
    parser.add_argument("files", nargs="*", type=Path, metavar="JSON", help="print or draw these instead of a run")
    parser.add_argument("--model", metavar="MODEL", help="a classifier")
    parser.add_argument("--weights", metavar="FILE", help="its trained weights")
    parser.add_argument("--data", metavar="DATA", help="as for ifso prune, such as jpegs:FILE.npz")
    parser.add_argument("--macs", nargs="+", type=float, default=MACS, metavar="SHARE", help="kept (0.8 0.7 0.6 0.5)")
    words = f"({' '.join(METHODS)}); also a criterion's name, with all else as ifso.prune has it"
    parser.add_argument("--methods", nargs="+", default=METHODS, metavar="NAME", help=words)
    parser.add_argument("--calibration", type=positive, default=1000, metavar="N", help="training images (%(default)s)")
    parser.add_argument("--measured", type=positive, default=1000, metavar="N", help="test images (%(default)s)")
    parser.add_argument("--batch", type=positive, default=50, metavar="N", help="images in a batch (%(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads (torch's own choice)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after every row; an existing one is gone on")
    parser.add_argument("--markdown", action="store_true", help="print the table as markdown")
    parser.add_argument("--draw", type=Path, metavar="FILE.svg", help="draw the JSON files, a panel for each")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run what is missing and print the table, or show earlier runs."""
    from ifso_repro.choose.record import read_record

    if args.files and args.model:
        raise IfsoError("JSON files are shown, --model runs; give one of the two")
    if args.draw is not None and not args.files:
        raise IfsoError("--draw needs the JSON files of earlier runs: ifso bench choose --draw OUT.svg A.json B.json")
    records = [read_record(path) for path in args.files] if args.files else [_measured(args)]
    if args.draw is not None:
        from ifso_repro.choose.record import draw_choices

        print(*draw_choices(records, args.draw.with_suffix("")), sep="\n")
    elif args.markdown:
        print("\n\n".join(map(markdown, records)))
    else:
        console().print(*map(record_table, records), sep="\n")
    return 0


def _measured(args: argparse.Namespace) -> Record:
    said = name_networks(args)
    missing = [f"--{name}" for name in ("model", "data") if getattr(args, name) is None]
    if missing:
        raise IfsoError(f"give {' and '.join(missing)}, or JSON files of earlier runs")
    from ifso_repro.choose.record import opened
    from ifso_repro.choose.study import ChooseSetup, about, check, measure

    check(args.methods, args.macs)
    setup = ChooseSetup(**{field.name: getattr(args, field.name) for field in fields(ChooseSetup)})
    for line in said:
        say(line)
    record = opened(args.json, asdict(setup), about(setup.device))
    with chatter_to_stderr(), compute_threads(args.threads):
        measure(setup, args.methods, args.macs, record, say)
    return record


def record_table(record: Record) -> Table:
    """A line for each row."""
    rows = []
    for row in record.rows:
        cells: tuple[str, ...] = ("–", "–", "failed", "–")
        if "failed" not in row:
            cells = f"{row['macs']:.1%}", f"{row['params']:.1%}", f"{row['top1']:.2f}", f"{row['seconds']:.1f}"
        rows.append((row["method"], f"{row['target']:.0%}", *cells))
    headings = ("method", "asked", "MACs", "params", "top-1", "s")
    caption = "\n".join([CAPTION, *_reasons(record)])
    return table(headings, rows, title=f"ifso bench choose: {_title(record)}", caption=caption)


def markdown(record: Record) -> str:
    """Methods down, shares of MACs removed across, top-1 in the cells, the best in bold; then what to know."""
    targets = sorted({row["target"] for row in record.rows}, reverse=True)
    values = {(row["method"], row["target"]): row["top1"] for row in record.rows if "top1" in row}
    best = {target: max(value for key, value in values.items() if key[1] == target) for _, target in values}
    cells = {key: f"**{top1:.1f}**" if top1 == best[key[1]] else f"{top1:.1f}" for key, top1 in values.items()}
    lines = [
        f"| MACs removed | {' | '.join(f'{100 * (1 - target):g} %' for target in targets)} |",
        f"|---|{'---:|' * len(targets)}",
    ]
    methods = dict.fromkeys(row["method"] for row in record.rows)
    rows = {name: " | ".join(cells.get((name, target), "–") for target in targets) for name in methods}
    lines += [f"| {name} | {row} |" for name, row in rows.items()]
    return "\n".join([*lines, "", f"{_title(record)}.", *_reasons(record)])


def _title(record: Record) -> str:
    settings, about = record.settings, record.about
    top1 = "not measured"
    if record.unpruned is not None:
        value = record.unpruned["top1"]
        top1 = f"top-1 {value:.2f} (standard error {standard_error(value, max(settings['measured'], 1)):.1f})"
    versions = [f"torch {about['torch']}", f"ifso {about['ifso']}"]
    if about.get("torch_pruning"):
        versions.append(f"Torch-Pruning {about['torch_pruning']}")
    return (
        f"{settings['model']}, unpruned {top1}; {settings['calibration']} images to calibrate, {settings['measured']} "
        f"to measure; {about['device_name']}, {', '.join(versions)}"
    )


def _reasons(record: Record) -> list[str]:
    """What was left out, failed, or was run in another form than its name says."""
    forms = {row["method"]: row["form"] for row in record.rows if row.get("form")}
    failed = [
        f"{row['method']} at {row['target']:.0%} failed: {row['failed']}" for row in record.rows if "failed" in row
    ]
    told = [f"{name}: {words}" for name, words in forms.items()]
    return [*told, *(f"{name} is left out. {reason}" for name, reason in record.left_out.items()), *failed]
