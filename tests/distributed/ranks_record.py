"""What the slow tests of ranks have found, for ``docs/bench/ranks.json``, if ``IFSO_RANKS_RECORD`` names that file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

COMMAND = "IFSO_RANKS_RECORD=docs/bench/ranks.json python -m pytest -m 'slow or not slow' tests/distributed"


def record(case: str, ranks: int, what: str, value: float) -> None:
    """Keep the value; a case that is repeated replaces what it found before."""
    place = os.environ.get("IFSO_RANKS_RECORD")
    if place is None:
        return
    path = Path(place)
    held = json.loads(path.read_text()) if path.exists() else {}
    cases = {(one["case"], one["ranks"]): one for one in held.get("cases", [])}
    cases.setdefault((case, ranks), {"case": case, "ranks": ranks})[what] = float(f"{value:.3g}")
    listed = [cases[key] for key in sorted(cases)]
    document = {
        "what": "commands under torchrun, gloo on CPUs; differences from one process, seconds from a fault to the end",
        "command": COMMAND,
        "torch": str(torch.__version__),
        "count": len(listed),
        "worst_difference": max((one["difference"] for one in listed if "difference" in one), default=None),
        "slowest_stop": max((one["seconds"] for one in listed if "seconds" in one), default=None),
        "cases": listed,
    }
    path.write_text(json.dumps(document, indent=2) + "\n")
