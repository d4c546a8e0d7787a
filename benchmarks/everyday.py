"""``python -m benchmarks everyday``: what every use of ifso pays for, and a comparison with an earlier record of it.

As a script, ``python -m benchmarks.everyday MODEL SIZE BATCH``, it measures one network in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import TYPE_CHECKING, Any, NamedTuple

from ifso.bench import trace_worker
from ifso.cli.bench import measure_apart
from ifso.cli.console import console, print_json, say, table
from ifso.cli.options import positive
from ifso.errors import IfsoError

if TYPE_CHECKING:
    from rich.table import Table

MODELS = ("torchvision:resnet50@224x2", "torchvision:vit_b_16@224x2")

COMMANDS = {
    "python": ("-c", "pass"),
    "import ifso": ("-c", "import ifso"),
    "ifso --version": ("-m", "ifso.cli", "--version"),
    "ifso --help": ("-m", "ifso.cli", "--help"),
}

HEAVY = ("numpy", "rich", "torch")

MORE = 1
"""Exit status where something takes more than it did."""

CAPTION = (
    "Trace: CPU s of the second one; the first pays for imports inside torch, and by it the process grows. "
    "Other bytes: tensors alive at once, without workspaces of kernels. Networks in eval mode, one thread."
)


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("everyday", help="start-up, trace and score: CPU time, memory; against a record")
    parser.add_argument(
        "--models", nargs="*", default=list(MODELS), metavar="MODEL@SIZExBATCH", help="default: %(default)s"
    )
    parser.add_argument("--repeats", type=positive, default=9, metavar="N", help="starts of each command (%(default)s)")
    parser.add_argument("--against", metavar="FILE", help="an earlier --json; status 1 if something takes more now")
    parser.add_argument("--time-factor", type=float, default=1.5, metavar="X", help="allowed to times (%(default)s)")
    parser.add_argument("--memory-factor", type=float, default=1.1, metavar="X", help="and to memory (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print, and compare if asked to."""
    wanted = [_sizes(text) for text in args.models]
    old = None if args.against is None else read_record(Path(args.against))
    record = {**_about(), "commands": _commands(args.repeats), "models": []}
    for name, size, batch in wanted:
        say(f"{name}, {size}×{size}, batch {batch}")
        record["models"].append(measure_apart("benchmarks.everyday", [name, str(size), str(batch)]))
    if args.json:
        print_json({"bench": "everyday", **record})
    else:
        console().print(_starts(record), _networks(record), sep="\n")
    return 0 if old is None else _compared(old, record, args)


def _sizes(text: str) -> tuple[str, int, int]:
    """A network, the side of its images and the size of a batch.

    >>> _sizes("torchvision:resnet50@224x2")
    ('torchvision:resnet50', 224, 2)
    """
    name, _, numbers = text.rpartition("@")
    size, _, batch = numbers.partition("x")
    if not name or not (size.isdecimal() and batch.isdecimal()) or not int(size) * int(batch):
        raise IfsoError(f"--models {text!r}: write MODEL@SIZExBATCH, such as {MODELS[0]}")
    return name, int(size), int(batch)


def _about() -> dict[str, Any]:
    import torch

    from ifso.training.profiling import hardware

    return {"cpu": hardware("cpu")["cpu"], "python": platform.python_version(), "torch": str(torch.__version__)}


def _commands(repeats: int) -> dict[str, dict[str, Any]]:
    found = {}
    for name, arguments in COMMANDS.items():
        say(name)
        seconds = sorted(_cpu_seconds(arguments) for _ in range(repeats))
        modules = _modules(arguments)
        found[name] = {
            "cpu_s": seconds[len(seconds) // 2],
            "fastest_cpu_s": seconds[0],
            "modules": len(modules),
            "heavy": [heavy for heavy in HEAVY if heavy in modules],
        }
    return found


def _cpu_seconds(arguments: tuple[str, ...]) -> float:
    """User and system time of a Python process with these arguments."""
    before = getrusage(RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=False)
    after = getrusage(RUSAGE_CHILDREN)
    if done.returncode:
        raise IfsoError(f"python {' '.join(arguments)} ended with status {done.returncode} (its message is above)")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _modules(arguments: tuple[str, ...]) -> set[str]:
    """Names of the modules that such a process has imported at its end."""
    command = [sys.executable, "-X", "importtime", *arguments]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=True)
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}


def _compared(old: dict[str, Any], new: dict[str, Any], args: argparse.Namespace) -> int:
    for line in differing(old, new):
        say(f"times are not compared: {line}")
    for name in missing(old, new):
        say(f"not measured now: {name}")
    more = grown(old, new, args.time_factor, args.memory_factor)
    for figure in more:
        say(f"more than before: {figure}")
    if not more:
        say(f"nothing takes more than ×{args.time_factor:g} the time or ×{args.memory_factor:g} the memory it did")
    return MORE if more else 0


def _starts(record: dict[str, Any]) -> Table:
    title = f"python -m benchmarks everyday: {record['cpu']}, Python {record['python']}, torch {record['torch']}"
    rows = [
        (name, f"{found['cpu_s']:.3f}", f"{found['fastest_cpu_s']:.3f}", str(found["modules"]),
         ", ".join(found["heavy"]) or "none")
        for name, found in record["commands"].items()
    ]  # fmt: skip
    return table(("command", "CPU s", "fastest", "modules", "of these heavy"), rows, title=title)


def _networks(record: dict[str, Any]) -> Table:
    headings = ("model", "batch", "trace, CPU s", "growth, MiB", "in forwards", "score, MiB", "in gradients",
                "CPU, in gradients")  # fmt: skip
    rows = [
        (found["model"], f"{found['batch']}×{found['size']}²", f"{found['trace_cpu_s']:.2f}",
         f"{found['trace_growth_bytes'] / 2**20:.0f}", f"{found['trace_in_forwards']:.2f}",
         f"{found['score_bytes'] / 2**20:.0f}", f"{found['score_in_gradients']:.2f}",
         f"{found['score_cpu_in_gradients']:.1f}")
        for found in record["models"]
    ]  # fmt: skip
    return table(headings, rows, caption=CAPTION)


MAX_BYTES = 2**20

UNNOTICED = {"cpu_s": 0.02, "bytes": 16 * 2**20}
"""Seconds and bytes that no one notices, by how the name of a figure ends: what grew by less has not grown."""

SAME = ("cpu", "python", "torch")
"""What two records must share for their times to be compared."""


class More(NamedTuple):
    """A figure that grew by more than was allowed."""

    name: str
    before: float
    now: float

    def __str__(self) -> str:
        return f"{self.name}: {self.now:.4g}, was {self.before:.4g} (×{self.now / self.before:.2f})"


def read_record(path: Path) -> dict[str, Any]:
    """A file that ``python -m benchmarks everyday --json`` printed."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES)
    except OSError as error:
        raise IfsoError(
            f"{path}: {error.strerror or error}; give a file of python -m benchmarks everyday --json"
        ) from None
    document: Any = {}
    with suppress(ValueError, RecursionError):
        document = json.loads(data.decode())
    try:
        if document["bench"] == "everyday" and dict(_figures(document)):
            return document
    except (KeyError, TypeError, AttributeError, ValueError):
        pass
    raise IfsoError(f"{path}: not a record of python -m benchmarks everyday --json; give another file")


def differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """In which of :data:`SAME` the records differ: then their times say nothing about each other."""
    return [f"{key} is {new.get(key)}, was {old.get(key)}" for key in SAME if old.get(key) != new.get(key)]


def grown(old: Mapping[str, Any], new: Mapping[str, Any], time_factor: float, memory_factor: float) -> list[More]:
    """Figures of both records that grew by more than a factor; times only where the machines are alike.

    >>> old = {"commands": {"import ifso": {"cpu_s": 0.02}}, "models": []}
    >>> new = {"commands": {"import ifso": {"cpu_s": 0.05}}, "models": []}
    >>> [str(more) for more in grown(old, new, 1.5, 1.1)]
    ['import ifso, cpu_s: 0.05, was 0.02 (×2.50)']
    """
    factors = {"cpu_s": float("inf") if differing(old, new) else time_factor, "bytes": memory_factor}
    before = dict(_figures(old))
    return [
        More(name, before[name], value)
        for name, value in _figures(new)
        if name in before
        and value > factors[_kind(name)] * before[name]
        and value > UNNOTICED[_kind(name)] + before[name]
    ]


def missing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Figures of the old record that the new one has not."""
    now = dict(_figures(new))
    return [name for name, _ in _figures(old) if name not in now]


def _figures(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for command, found in record["commands"].items():
        yield f"{command}, cpu_s", float(found["cpu_s"])
    for found in record["models"]:
        place = f"{found['model']} {found['size']}×{found['size']}, batch {found['batch']}"
        for key, value in found.items():
            if key.endswith(("_cpu_s", "_bytes")):
                yield f"{place}, {key}", float(value)


def _kind(name: str) -> str:
    return "bytes" if name.endswith("bytes") else "cpu_s"


def measure(name: str, size: int, batch: int) -> dict[str, Any]:
    """Trace, forward pass, gradient and score of a batch of square images: CPU seconds, and bytes at their peak.

    The trace is that of one image of the network's usual size, and its memory the growth of the process: tracing runs
    on fake tensors, and what it takes are Python objects. Other peaks are those of tensors that are alive at once.
    """
    import torch

    from ifso.bench.score import ScoreBench, ScoreSetup
    from ifso.common.timing import peak_bytes

    traced = trace_worker.measure(name)
    growth = traced["peak_growth_bytes"]
    torch.manual_seed(0)
    bench = ScoreBench(ScoreSetup(name, batch=batch, size=size, eval_mode=True))
    images = bench.batch[0]
    functions = {key: function for key, function in bench.methods().items() if key in ("gradient", "ifso")}

    def forward() -> Any:
        with torch.no_grad():
            return bench.model(images)

    peaks = {key: peak_bytes(function, bench.device) for key, function in {"forward": forward, **functions}.items()}
    gradient, score = _seconds_in(functions["gradient"]), _seconds_in(functions["ifso"])
    return {
        "model": name,
        "size": size,
        "batch": batch,
        "units": traced["units"],
        "model_bytes": traced["model_bytes"],
        "trace_cpu_s": traced["cpu_s_again"],
        "trace_growth_bytes": growth,
        "forward_bytes": peaks["forward"],
        "trace_in_forwards": growth / peaks["forward"],
        "gradient_bytes": peaks["gradient"],
        "score_bytes": peaks["ifso"],
        "score_in_gradients": peaks["ifso"] / peaks["gradient"],
        "gradient_cpu_s": gradient,
        "score_cpu_s": score,
        "score_cpu_in_gradients": score / gradient,
    }


def _seconds_in(function: Callable[[], Any]) -> float:
    """CPU time of this process in a call."""
    start = time.process_time()
    function()
    return time.process_time() - start


if __name__ == "__main__":
    trace_worker.answer(lambda: measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
