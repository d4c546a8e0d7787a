"""Random networks of every kind of part: what is removed is removed exactly, counted rightly and saved whole.

The quick tests look at a fixed sample. The long run, ``pytest -o addopts= -m slow tests/properties``, looks at
``IFSO_PROPERTY_CASES`` networks (3,000 unless told) from ``IFSO_PROPERTY_SEED`` on and writes what it saw to
``docs/bench/properties.json``. With ``IFSO_PROPERTY_RESUME=1`` it goes on with the run that this file tells of;
``IFSO_PROPERTY_WORKERS`` processes (1 unless told) share the work, which changes nothing of what is drawn.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from invariants import Tally, examine
from random_networks import KINDS, Net, networks

QUICK_LOTS = 4
PER_ROUND = 5
TELLING = ("shuffle", "grouped_conv", "transposed_grouped_conv", "halves", "unequal_split", "multihead", "shared")
REPORT = Path(__file__).parents[2] / "docs" / "bench" / "properties.json"
COMMAND = "IFSO_PROPERTY_CASES={} pytest -o addopts= -m slow tests/properties"


def explore(kind: str, examples: int, first: int, tally: Tally, around: int = 1, full: bool = True) -> None:
    """Draw networks with a part of that kind and examine them; a failure is shrunk to its simplest network.

    Hypothesis begins with the simplest network of all, which a short run, not ``full``, leaves out
    unless it is telling.
    """
    drawn = []

    @seed(first * len(KINDS) + KINDS.index(kind))
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink) if full else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(networks(kind, before=around, after=around))
    def look(net: Net) -> None:
        drawn.append(net)
        if full or len(drawn) > 1 or kind in TELLING:
            examine(net, tally, full)

    look()


def assert_that_it_tested_something(tally: Tally, kinds: Sequence[str]) -> None:
    """Bounds on what was refused, and on networks of which nothing could go or was seen to go."""
    assert sum(tally.refused.values()) == 0, tally.refused
    assert sum(tally.refused_removals.values()) <= 1 + 0.03 * tally.networks, tally.refused_removals
    assert tally.pruned >= 0.5 * tally.networks
    assert tally.visible >= 0.9 * tally.pruned
    assert [kind for kind in kinds if not tally.parts[kind]] == []


@pytest.mark.parametrize("lot", range(QUICK_LOTS))
def test_a_sample_of_every_part(lot):
    tally, kinds = Tally(), KINDS[lot::QUICK_LOTS]
    for kind in kinds:
        explore(kind, examples=2, first=0, tally=tally, around=0, full=False)
    assert_that_it_tested_something(tally, kinds)


@pytest.mark.slow
def test_thousands_of_networks():
    """In rounds over all kinds of parts, the report renewed after each, so that it always tells what was run."""
    cases = int(os.environ.get("IFSO_PROPERTY_CASES", "3000"))
    first = int(os.environ.get("IFSO_PROPERTY_SEED", "1"))
    tally, failures, done, seconds = _so_far(cases, first)
    start = time.perf_counter() - seconds
    workers = int(os.environ.get("IFSO_PROPERTY_WORKERS", "1"))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for number in range(first + done, first + max(1, -(-cases // (len(KINDS) * PER_ROUND)))):
            for seen, failed in pool.map(partial(_explored, number=number), KINDS):
                tally.add(seen)
                failures += failed
            _write_report(tally, failures, time.perf_counter() - start, cases, first, number - first + 1)
    assert failures == []
    assert_that_it_tested_something(tally, KINDS)


def _explored(kind: str, number: int) -> tuple[Tally, list[str]]:
    """What one round saw of one kind, and how it failed."""
    tally, failures = Tally(), []
    try:
        explore(kind, PER_ROUND, number, tally)
    except Exception as error:
        where = " ".join(" ".join(getattr(error, "__notes__", ())).split())
        failures.append(f"{kind} in round {number}: {type(error).__name__}: {error} {where}"[:2000])
    return tally, failures


def _so_far(cases: int, first: int) -> tuple[Tally, list[str], int, float]:
    """(tally, failures, rounds, seconds) of the run that is gone on with."""
    if os.environ.get("IFSO_PROPERTY_RESUME") != "1":
        return Tally(), [], 0, 0.0
    told = json.loads(REPORT.read_text(encoding="utf-8"))
    assert (told["networks_asked_for"], told["seed"], told["torch"]) == (cases, first, torch.__version__)
    counts = {name: Counter(told[name]) if isinstance(told[name], dict) else told[name] for name in vars(Tally())}
    return Tally(**counts), told["failures"], told["rounds"], told["seconds"]


def _write_report(tally: Tally, failures: list[str], seconds: float, cases: int, first: int, rounds: int) -> None:
    counts = {
        name: dict(sorted(value.items())) if isinstance(value, dict) else value for name, value in vars(tally).items()
    }
    report = {
        "what": "random networks of every kind of part: traced, masked, compacted, recounted, saved, loaded",
        "command": COMMAND.format(cases),
        "networks_asked_for": cases,
        "seed": first,
        "torch": torch.__version__,
        "rounds": rounds,
        "seconds": round(seconds, 1),
        "failures": failures,
        **counts,
    }
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
