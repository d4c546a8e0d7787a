"""``ifso repro --list`` without a name: every study, and how many of its runs are done."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ifso.cli.console import console, print_json
from ifso.errors import IfsoError
from ifso_repro.config import studies, study
from ifso_repro.results import path_of, state_of
from ifso_repro.schema import Study


def run(args: argparse.Namespace, results: Path, seeds: int | None) -> int:
    """Show them, as a table or JSON."""
    for option in ("criteria", "recipes"):
        if getattr(args, option) is not None:
            raise IfsoError(f"--{option} chooses among the runs of a study; name one: ifso repro table2 --list")
    found = [_overview(each, results, args.smoke, seeds) for each in studies().values()]
    if args.json:
        print_json({"studies": found})
        return 0
    from rich.table import Table

    table = Table(title="ifso repro STUDY runs one; ifso repro STUDY --list shows its runs", title_justify="left")
    for heading in ("study", "what", "done"):
        table.add_column(heading)
    for each in found:
        damaged = f", {each['damaged']} damaged" if "damaged" in each else ""
        table.add_row(each["study"], each["title"], f"{each['done']} of {each['runs']}{damaged}")
    console().print(table)
    return 0


def _overview(chosen: Study, results: Path, smoke: bool, seeds: int | None) -> dict[str, Any]:
    jobs = study(chosen.name, seeds=seeds)
    states = [state_of(path_of(job.name, results, smoke=smoke)) for job in jobs]
    damaged = {"damaged": states.count("damaged")} if "damaged" in states else {}
    return {"study": chosen.name, "title": chosen.title, "runs": len(jobs), "done": states.count("done"), **damaged}
