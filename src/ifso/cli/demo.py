"""``ifso demo``: trains a small network, prunes half of it away, fine-tunes it, and shows what that cost."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifso.cli.console import complain, console, print_json, table
from ifso.cli.options import add_option, add_shared, seed
from ifso.common.text import with_error
from ifso.errors import VerificationError

if TYPE_CHECKING:
    from rich.table import Table

    from ifso.cli.demo_study import Outcome

HEADINGS = (
    "criterion", "MACs kept", "parameters kept", "accuracy", "after fine-tuning", "test loss", "seconds", "fine-tuning",
)  # fmt: skip
SAME = (
    "The first accuracy is measured right after pruning, before any training. Only the criterion differs between the "
    "runs: each removes units in stages and fits the remaining weights in closed form."
)


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("demo", help="train, prune, fine-tune and compare on real data, in about a minute")
    where = "where to save; if taken, DIR-2, DIR-3, …"
    add_option(parser, "out", Path, "DIR", where, default=Path("ifso-demo"))
    add_option(parser, "seed", seed, "N", "of weights and data (default: 0)", default=0)
    add_shared(parser, "json")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo; the status is 4 if a check of the result fails."""
    from ifso.cli.demo_study import demonstrate
    from ifso.pruning.progress import progress

    with progress() as listener:
        outcome = demonstrate(args.out, args.seed, _say, listener)
    if args.json:
        print_json(outcome.as_json())
    else:
        console().print(outcome_table(outcome), *_remarks(outcome), sep="\n")
    failed = "; ".join(what for what, passed in outcome.checks if not passed)
    if failed:
        complain(f"error: a check of the result failed: {failed}")
    return VerificationError.exit_status if failed else 0


def _say(line: str) -> None:
    print(f"demo: {line}", file=sys.stderr, flush=True)


def outcome_table(outcome: Outcome) -> Table:
    """Accuracies in percent, one row for each network."""
    from ifso.cli.demo_study import DATA, KEPT, MODEL

    rows = []
    for row in outcome.rows:
        name = row.name if row.runs == 1 else f"{row.name}, {row.runs} runs"
        accuracies = (with_error(value, outcome.test_images) for value in (row.before, row.after))
        values = f"{row.macs:.1%}", f"{row.params:.1%}", *accuracies, f"{row.loss:.4f}"
        rows.append((name, *values, f"{row.seconds:.1f}", f"{row.finetune_seconds:.1f}" * (row.finetune_seconds > 0)))
    return table(HEADINGS, rows, title=f"{MODEL} on {DATA}, pruned to {KEPT:.0%} of its MACs")


def _remarks(outcome: Outcome) -> list[str]:
    from ifso.cli.demo_study import CRITERIA, FINAL, REPORT, SUMMARY

    runs = ", ".join(name if count == 1 else f"{name}-1 to {name}-{count}" for name, count in CRITERIA.items())
    return [
        SAME,
        f"Accuracy in per cent ± its standard error on {outcome.test_images} test images. Of runs: the mean, ± of one.",
        f"One of the {outcome.test_images} test images is {100 / outcome.test_images:.2f} points of accuracy.",
        *(f"{'ok' if passed else 'FAILED'}: {what}" for what, passed in outcome.checks),
        f"run folder: {outcome.folder} (runs {runs}; the fine-tuned network in {FINAL}, the numbers in {SUMMARY})",
        f"to look at: {outcome.folder / REPORT}",
        f"{outcome.seconds:.0f} s in all",
    ]
