"""``ifso bench``: what ifso itself costs: tracing, scores, whole runs."""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifso.cli.console import chatter_to_stderr, console, print_json, say, table, write_json
from ifso.cli.options import add_shared, positive
from ifso.common.text import describe_error
from ifso.errors import IfsoError

if TYPE_CHECKING:
    from rich.table import Table

MOVED = ("train", "export", "everyday", "zoo")
"""Benchmarks for developers, which a checkout has and the package has not."""

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

TRACE_CAPTION = (
    "CPU s: process time of one trace; the first one in a process also pays for imports inside torch. "
    "Memory: growth of the peak resident size during the first trace, as a share of the model's own bytes."
)
SCORE_CAPTION = (
    "Median over rounds of time / the gradient's in the same round; peak tensor memory / the gradient's, the step's. "
    "{ranks}"
    "On a GPU all are replayed as CUDA graphs, scores of a detector up to its loss; * marks what cannot be captured."
)
RANKS = "Rank: Spearman's correlation with the exact score in float64, on {samples} samples. "
PRUNE_CAPTION = (
    "s: the whole run, from tracing to verification; the first one also pays for kernels that are compiled. "
    "× step: seconds of a round (scores of its batches and, unless in one shot, a step; in a staged run the score of "
    "one batch) over those of a plain training step of the whole network in the same process, on a GPU as a CUDA "
    "graph. × memory: the most that the run holds beside the model and the data over what that step holds; on a GPU. "
    "Weights: entries of kernels and matrices left. "
    "Streams: units removed that several layers make together, such as a residual stream's. "
    "Seconds on a CPU say nothing about a GPU; compare ratios."
)


def add_parser(commands: Any, *more: Callable[[Any], None]) -> None:
    """Register the command and what it can measure; ``more`` register what others measure."""
    parser = commands.add_parser("bench", help="measure what ifso itself costs and chooses")
    what = parser.add_subparsers(title="what to measure", metavar="WHAT", required=True)
    trace = what.add_parser("trace", help="CPU seconds and memory of tracing")
    models = ["torchvision:resnet50", "torchvision:vit_h_14"]
    trace.add_argument("--models", nargs="+", default=models, metavar="MODEL", help="default: %(default)s")
    add_shared(trace, "json")
    trace.set_defaults(run=run_trace)
    _add_score(what.add_parser("score", help="time and memory of the score as multiples of a gradient"))
    _add_prune(what.add_parser("prune", help="seconds of whole pruning runs, by part and against a training step"))
    for add in more:
        add(what)
    for name in MOVED:
        moved = what.add_parser(name, add_help=False, prefix_chars="\0")
        moved.add_argument("rest", nargs="*")
        moved.set_defaults(run=_moved, name=name)


def _add_score(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", default=["ifso:resnet32"], metavar="MODEL", help="default: %(default)s")
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="some of them, beside the gradient (all)")
    parser.add_argument("--batch", type=positive, default=128, metavar="N", help="samples in the batch (%(default)s)")
    parser.add_argument("--size", metavar="PIXELS", help="height and width of the images, or both: 480x640")
    parser.add_argument("--weights", metavar="FILE", help="trained weights (random ones otherwise)")
    parser.add_argument("--images", metavar="FILE.npz", help="CIFAR images x_train, y_train (random ones otherwise)")
    words = "the batch and the loss are those of DATA, such as file.py:factory (images with labels otherwise)"
    parser.add_argument("--data", metavar="DATA", help=words)
    parser.add_argument("--eval", action="store_true", help="batch norm in eval mode (train mode otherwise)")
    parser.add_argument("--no-ranks", action="store_true", help="do not compare with scores in float64")
    parser.add_argument("--repeats", type=positive, default=7, metavar="N", help="rounds (%(default)s)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="a JSON file for each model, once it is measured")
    add_machine(parser)
    parser.set_defaults(run=run_score)


def _add_prune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="ifso:resnet32", metavar="MODEL", help="default: %(default)s")
    parser.add_argument("--weights", metavar="FILE", help="trained weights (random ones otherwise)")
    parser.add_argument("--data", metavar="DATA", help="as for ifso prune (random images otherwise)")
    parser.add_argument("--macs", type=float, default=0.6, metavar="SHARE", help="share kept (%(default)s)")
    parser.add_argument("--criteria", nargs="+", metavar="NAME", help="one run each (ifso; and true-loss, staged)")
    words = "with each of these: incremental, one-shot (both by default) or staged, without training"
    parser.add_argument("--schedules", nargs="+", metavar="NAME", help=words)
    parser.add_argument("--presets", nargs="+", default=[], metavar="NAME", help="and presets, such as authors")
    parser.add_argument("--batch", type=positive, default=128, metavar="N", help="samples in a batch (%(default)s)")
    parser.add_argument("--accumulate", type=int, default=10, metavar="K", help="rounds to a removal (%(default)s)")
    parser.add_argument("--batches-per-score", type=int, default=2, metavar="N", help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(%(default)s)")
    add_machine(parser)
    parser.set_defaults(run=run_prune)


def add_machine(parser: Any) -> None:
    """Device, precision, layout, threads and the form of the output."""
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    parser.add_argument("--precision", default="float32", help="float32, tf32 or bf16 (%(default)s)")
    add_shared(parser, "channels_last")
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads (torch's own choice)")
    add_shared(parser, "json")


def _moved(args: argparse.Namespace) -> int:
    raise IfsoError(f"ifso bench {args.name} is for developers: run python -m benchmarks {args.name} in a checkout")


def set_threads(args: argparse.Namespace) -> None:
    """Compute with as many threads as were asked for."""
    if args.threads is not None:
        import torch

        torch.set_num_threads(args.threads)


def chosen(setup: Any, args: argparse.Namespace) -> Any:
    """A dataclass whose fields are options."""
    return setup(**{field.name: getattr(args, field.name) for field in fields(setup)})


def measure_apart(module: str, arguments: Sequence[str]) -> dict[str, Any]:
    """What a module prints as JSON in a process of its own, with one thread."""
    environment = {**os.environ, **dict.fromkeys(THREADS, "1")}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise IfsoError(f"measuring {arguments[0]} failed with status {done.returncode} (its message is above)")
    result: dict[str, Any] = json.loads(done.stdout)
    if "error" in result:
        raise IfsoError(result["error"])
    return result


def run_trace(args: argparse.Namespace) -> int:
    """Trace each model in a process of its own and print the table."""
    results = []
    for name in args.models:
        say(f"tracing {name}")
        results.append(measure_apart("ifso.bench.trace_worker", [name]))
    if args.json:
        print_json({"bench": "trace", "threads": 1, "results": results})
        return 0
    headings = ("model", "units", "CPU s, first", "CPU s, again", "model MiB", "growth MiB", "growth / model")
    rows = []
    for result in results:
        model, growth = result["model_bytes"], result["peak_growth_bytes"]
        seconds = f"{result['cpu_s_first']:.2f}", f"{result['cpu_s_again']:.2f}"
        sizes = f"{model / 2**20:.0f}", f"{growth / 2**20:.0f}", f"{growth / model:.2f}"
        rows.append((result["model"], str(result["units"]), *seconds, *sizes))
    console().print(table(headings, rows, title="ifso bench trace, one thread", caption=TRACE_CAPTION))
    return 0


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


def run_score(args: argparse.Namespace) -> int:
    """Measure each model and print the tables; one that cannot be measured is told of when the others are done."""
    from ifso.bench.score import ScoreSetup, measure
    from ifso.common.devices import let_go_of

    set_threads(args)
    try:
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise IfsoError(f"{args.out} cannot be made: {error.strerror or error}; give another --out") from error
    results, failed = [], None
    for name in args.models:
        setup = ScoreSetup(
            name, args.batch, args.device, args.precision, args.channels_last, size_of(args.size),
            args.weights, args.images, args.eval, args.data,
        )  # fmt: skip
        try:
            results.append(measure(setup, args.repeats, say, args.methods, ranks=not args.no_ranks))
        except Exception as error:
            let_go_of(error)
            failed = failed or error
            if len(args.models) > 1:
                say(f"{name} was not measured: {describe_error(error)}")
        else:
            if args.out is not None:
                write_json(args.out / f"{_FORBIDDEN.sub('_', name)}.json", {"bench": "score", "results": results[-1:]})
        gc.collect()  # so that the next model has all memory
    if results:
        _print_scores(args, results)
    if failed is not None:
        raise failed
    return 0


_FORBIDDEN = re.compile(r"[^\w.-]+")
"""What does not belong into the name of a file."""


def _print_scores(args: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    if args.json:
        print_json({"bench": "score", "results": results})
        return
    for result in results:
        rows = result["methods"].items()
        failed = [f"{name} failed: {row['error']}" for name, row in rows if "error" in row]
        notes = [f"{name}: {row['note']}" for name, row in rows if row.get("note")]
        console().print(_score_table(result), *failed, *notes, sep="\n")


def _score_table(result: dict[str, Any]) -> Table:
    from ifso.bench.score import METHODS

    rows: list[tuple[str, ...]] = []
    for name, row in result["methods"].items():
        if "error" in row:
            rows.append((name, METHODS[name], "failed"))
            continue
        mark = "" if row["captured"] or result["device"] == "cpu" else " *"
        times = f"{1000 * row['seconds']:.1f}{mark}", f"{1000 * row['spread']:.1f}", f"{row['times']:.2f}"
        steps = row.get("memory_in_steps")
        memory = f"{row['peak_bytes'] / 2**20:.0f}", f"{row['memory']:.2f}", "" if steps is None else f"{steps:.2f}"
        rows.append((name, METHODS[name], *times, *memory, "" if row["fidelity"] is None else f"{row['fidelity']:.4f}"))
    samples = result["rank_samples"]
    return table(
        ("method", "what", "ms", "± ms", "× time", "MiB", "× memory", "× step's", "rank"),
        rows,
        title=f"ifso bench score: {result['model']}, batch {result['batch']}, {_machine(result)}",
        caption=SCORE_CAPTION.format(ranks=RANKS.format(samples=samples) if samples else ""),
        left=2,
    )


def _machine(result: dict[str, Any]) -> str:
    layout = "channels last" if result["channels_last"] else "channels first"
    return f"{result['device_name']}, {result['precision']}, {layout}, torch {result['torch']}"


def run_prune(args: argparse.Namespace) -> int:
    """Run every method and print the table."""
    from ifso.bench.prune import PruneMethod, PruneSetup, measure

    set_threads(args)
    schedules = args.schedules or ["incremental", "one-shot"]
    methods = [PruneMethod(criterion, schedule) for criterion in args.criteria or ["ifso"] for schedule in schedules]
    methods += [PruneMethod.of_preset(preset, schedule) for preset in args.presets for schedule in schedules]
    if args.criteria is None and args.schedules is None:
        methods.append(PruneMethod.default())
    with chatter_to_stderr():
        result = measure(chosen(PruneSetup, args), methods, say)
    if args.json:
        print_json({"bench": "prune", "result": result})
    else:
        console().print(_outcome_table(result), _seconds_table(result), sep="\n")
    return 0


def _outcome_table(result: dict[str, Any]) -> Table:
    rows = []
    for name, row in result["methods"].items():
        memory = "–" if row["memory_in_steps"] is None else f"{row['memory_in_steps']:.2f}"
        speed = f"{row['scores_per_second']:.0f}", f"{row['ratio']:.2f}"
        work = f"{row['seconds']:.1f}", str(row["removals"]), *speed, memory
        left = f"{row['macs']:.1%}", f"{row['weights']:.1%}", str(row["stream_units_removed"])
        rows.append((name, *work, *left, "–" if row["accuracy"] is None else f"{row['accuracy']:.2f}"))
    title = (
        f"ifso bench prune: {result['model']} to {result['macs']:.0%} of its MACs; batch {result['batch']}, "
        f"k={result['accumulate']}, {result['batches_per_score']} batches for a score; {_machine(result)}; "
        f"training step {1000 * result['step_seconds']:.1f} ms"
    )
    headings = ("method", "s", "removals", "scores/s", "× step", "× memory", "MACs", "weights", "streams", "accuracy")
    return table(headings, rows, title=title, caption=PRUNE_CAPTION)


def _seconds_table(result: dict[str, Any]) -> Table:
    methods = result["methods"]
    parts = list(dict.fromkeys(part for row in methods.values() for part in row["timings"]))
    rows = [(name, *(f"{row['timings'].get(part, 0.0):.2f}" for part in parts)) for name, row in methods.items()]
    return table(("method", *parts), rows, title="seconds by part of the run")
