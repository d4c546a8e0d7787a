"""``ifso demo``: trains a small network, prunes half of it away, fine-tunes it, and shows what that cost."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifso.cli.console import complain, console, print_json

if TYPE_CHECKING:
    from rich.table import Table

    from ifso.cli.demo_study import Outcome

CHECK_FAILED = 4
COLUMNS = (
    "criterion", "MACs kept", "parameters kept", "accuracy", "after fine-tuning", "test loss", "seconds", "fine-tuning",
)  # fmt: skip

SAME = (
    "The first accuracy is measured right after pruning, before any training. Only the criterion differs between the "
    "runs: each removes units in stages and fits the remaining weights in closed form."
)


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("demo", help="train, prune, fine-tune and compare on real data, in about a minute")
    parser.add_argument(
        "--out", type=Path, default=Path("ifso-demo"), metavar="DIR", help="where to save; if taken, DIR-2, DIR-3, …"
    )
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="of weights and data (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def _seed(text: str) -> int:
    if not text.isdecimal() or not text.isascii():
        raise argparse.ArgumentTypeError(f"{text!r} is no seed; give a whole number from 0 up")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Run the demo; the status is 4 if a check of the result fails."""
    outcome = _demonstrate(args.out, args.seed)
    if args.json:
        print_json(outcome.as_json())
    else:
        console().print(table(outcome), *_remarks(outcome), sep="\n")
    if outcome.passed:
        return 0
    failed = "; ".join(what for what, passed in outcome.checks if not passed)
    complain(f"error: a check of the result failed: {failed}")
    return CHECK_FAILED


def _demonstrate(out: Path, seed: int) -> Outcome:
    from ifso.cli.demo_study import demonstrate
    from ifso.pruning.progress import progress

    with progress() as listener:
        return demonstrate(out, seed, _say, listener)


def table(outcome: Outcome) -> Table:
    """Accuracies in percent, one row for each network."""
    from rich.table import Table

    from ifso.cli.demo_study import DATA, KEPT, MODEL

    found = Table(title=f"{MODEL} on {DATA}, pruned to {KEPT:.0%} of its MACs", title_justify="left")
    for heading in COLUMNS:
        found.add_column(heading, justify="left" if heading == "criterion" else "right")
    for row in outcome.rows:
        name = row.name if row.runs == 1 else f"{row.name}, mean of {row.runs}"
        shares = f"{row.macs:.1%}", f"{row.params:.1%}"
        accuracies = f"{row.before:.2f} %", f"{row.after:.2f} %"
        finetuning = f"{row.finetune_seconds:.1f}" if row.finetune_seconds else ""
        found.add_row(name, *shares, *accuracies, f"{row.loss:.4f}", f"{row.seconds:.1f}", finetuning)
    return found


def _remarks(outcome: Outcome) -> list[str]:
    from ifso.cli.demo_study import CRITERIA, FINAL, REPORT, SUMMARY

    runs = ", ".join(name if count == 1 else f"{name}-1 to {name}-{count}" for name, count in CRITERIA.items())
    checks = [f"{'ok' if passed else 'FAILED'}: {what}" for what, passed in outcome.checks]
    return [
        SAME,
        f"One of the {outcome.test_images} test images is {100 / outcome.test_images:.2f} points of accuracy.",
        *checks,
        f"run folder: {outcome.folder} (runs {runs}; the fine-tuned network in {FINAL}, the numbers in {SUMMARY})",
        f"to look at: {outcome.folder / REPORT}",
        f"{outcome.seconds:.0f} s in all",
    ]


def _say(line: str) -> None:
    print(f"demo: {line}", file=sys.stderr, flush=True)
