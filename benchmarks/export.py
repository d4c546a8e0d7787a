"""``python -m benchmarks export``: what pruning saves in time, in PyTorch and in onnxruntime, against MACs removed."""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ifso
from ifso.cli.bench import set_threads
from ifso.cli.console import chatter_to_stderr, console, print_json, say, table
from ifso.cli.options import positive
from ifso.common.text import amount
from ifso.common.timing import Ready, in_turns, make_ready, middle
from ifso.errors import IfsoError
from ifso.exporting.export import export
from ifso.exporting.formats import need_packages, open_onnx
from ifso.models import default_inputs
from ifso.models.registry import network_for
from ifso.training.profiling import costs_of, hardware

if TYPE_CHECKING:
    from rich.table import Table

WHOLE = "unpruned"

RUNTIMES = ("torch", "compiled", "onnxruntime")

MANY = 1000
"""Networks and batches that torch.compile may meet in one process before it gives up and runs them as they are."""

Runner = Callable[[Tensor], Any]


@dataclass(frozen=True)
class Setup:
    """What is pruned to which share of its MACs, and timed how. ``round_to`` is that of the second pruned network.

    Without a file of ``weights`` they are random. ``rounds`` is how often all networks take their turn. ``clock`` is
    ``"wall"``, or ``"cpu"`` for the time that this process computed: with one thread it is the same on an idle machine,
    and does not count the time of others on a busy one.
    """

    model: str = "ifso:resnet32"
    weights: str | None = None
    macs: float = 0.5
    round_to: int = 8
    criterion: str = "magnitude"
    batches: tuple[int, ...] = (1, 8)
    runtimes: tuple[str, ...] = ("torch", "onnxruntime")
    rounds: int = 30
    clock: str = "wall"
    seed: int = 0


@dataclass(frozen=True)
class Variant:
    """A network, its input of one sample, and its costs."""

    name: str
    model: nn.Module
    example: Tensor
    macs: int
    params: int

    @property
    def multiples(self) -> float:
        """The share of all convolutions whose number of outputs is a multiple of 8."""
        widths = [len(module.weight) for module in self.model.modules() if isinstance(module, nn.Conv2d)]
        return sum(width % 8 == 0 for width in widths) / max(len(widths), 1)


def measure(setup: Setup, say: Callable[[str], None]) -> dict[str, Any]:
    """All networks in all runtimes for every size of batch."""
    strange = [name for name in setup.runtimes if name not in RUNTIMES]
    if strange:
        raise IfsoError(f"{strange[0]!r} is no runtime; choose among {', '.join(RUNTIMES)}")
    if "onnxruntime" in setup.runtimes:
        need_packages()
    say(f"{setup.model}: pruning to {setup.macs:.0%} of its MACs")
    variants = _variants(setup)
    whole = variants[0]
    timings = []
    with _many_compilations() if "compiled" in setup.runtimes else nullcontext():
        runners = {f"{name}/{each.name}": _runner(name, each) for name in setup.runtimes for each in variants}
        for batch in setup.batches:
            say(f"{setup.model}: {', '.join(setup.runtimes)} with a batch of {batch}")
            timings += _timed(runners, whole.example, setup, batch)
    networks = {
        each.name: {
            "macs": each.macs, "params": each.params, "macs_share": each.macs / whole.macs,
            "params_share": each.params / whole.params, "multiples_of_8": each.multiples,
        }
        for each in variants
    }  # fmt: skip
    name = setup.weights and Path(setup.weights).name
    return {
        **asdict(setup),
        "weights": name,
        "input": list(whole.example.shape),
        "networks": networks,
        "timings": timings,
    }


def _many_compilations() -> AbstractContextManager[Any]:
    from torch._dynamo import config

    return config.patch(recompile_limit=MANY)


def about() -> dict[str, Any]:
    """On what it was measured; no version of onnxruntime where it is not installed."""
    try:
        onnxruntime = version("onnxruntime")
    except PackageNotFoundError:
        onnxruntime = None
    return {"torch": str(torch.__version__), "onnxruntime": onnxruntime, "hardware": hardware("cpu")}


def _variants(setup: Setup) -> list[Variant]:
    torch.manual_seed(setup.seed)
    model = network_for(setup.model, None, weights=setup.weights).eval()
    example = default_inputs(setup.model, model)
    if not isinstance(example, Tensor):
        raise IfsoError(f"bench export measures networks that take one tensor; {setup.model} takes something else")
    models = {WHOLE: model, "pruned": _pruned(model, example, setup, None)}
    models[f"pruned, round_to={setup.round_to}"] = _pruned(model, example, setup, setup.round_to)
    costs = {name: costs_of(each, example, "float32")[0] for name, each in models.items()}
    return [Variant(name, each, example, costs[name].macs, costs[name].params) for name, each in models.items()]


def _pruned(model: nn.Module, example: Tensor, setup: Setup, round_to: int | None) -> nn.Module:
    with torch.no_grad():
        classes = model(example).shape[1]
    batches = [(torch.cat([example] * 2), torch.arange(2) % classes)]
    result = ifso.prune(
        copy.deepcopy(model), batches, lambda net, batch: F.cross_entropy(net(batch[0]), batch[1]),
        budget=ifso.Budget(macs=setup.macs), example_inputs=example, criterion=setup.criterion, schedule="one-shot",
        round_to=round_to, recalibrate=0, seed=setup.seed,
    )  # fmt: skip
    return result.model.eval()


def _timed(runners: Mapping[str, Runner], example: Tensor, setup: Setup, batch: int) -> list[dict[str, Any]]:
    """One line for each network and runtime. ``speedup`` is the median over the rounds of unpruned / pruned."""
    images = torch.randn(batch, *example.shape[1:], generator=torch.Generator().manual_seed(0))
    ready = {which: CLOCKS[setup.clock](partial(runner, images), images.device) for which, runner in runners.items()}
    for function in ready.values():
        function.call()
    found = in_turns(ready, setup.rounds)
    lines = []
    for which, seconds in found.items():
        runtime, _, name = which.partition("/")
        unpruned = found[f"{runtime}/{WHOLE}"]
        ratios = [whole / ours for whole, ours in zip(unpruned, seconds, strict=True)]
        median, spread = middle(seconds)
        speedup, speedup_spread = middle(ratios)
        lines.append({
            "batch": batch, "runtime": runtime, "network": name, "seconds": median, "spread": spread,
            "fastest": min(seconds), "speedup": speedup, "speedup_spread": speedup_spread,
            "speedup_of_fastest": min(unpruned) / min(seconds),
        })  # fmt: skip
    return lines


@dataclass(frozen=True)
class ByProcess(Ready):
    """Timed by what this process computed, all its threads together."""

    def seconds(self) -> float:
        """Time of one call."""
        start = time.process_time()
        self.call()
        return time.process_time() - start


def _by_process(function: Callable[[], Any], device: torch.device) -> Ready:
    function()
    return ByProcess(function, function, device, captured=False)


CLOCKS = {"wall": make_ready, "cpu": _by_process}


def _runner(runtime: str, variant: Variant) -> Runner:
    """What runs the network on a batch of images."""
    if runtime == "onnxruntime":
        return _onnx_runner(variant)
    network: Runner = variant.model
    if runtime == "compiled":
        network = torch.compile(copy.deepcopy(variant.model), dynamic=False)

    def forward(images: Tensor) -> Any:
        with torch.inference_mode():
            return network(images)

    return forward


def _onnx_runner(variant: Variant) -> Runner:
    with tempfile.TemporaryDirectory() as folder:
        written = export(variant.model, Path(folder) / "network.onnx", variant.example, to="onnx")
        session = open_onnx(written.path)
    name = written.inputs[0][0]
    return lambda images: session.run(None, {name: images.numpy()})


MODELS = ("ifso:resnet32", "torchvision:resnet18", "torchvision:resnet50")

CAPTION = (
    "ms: median of a forward pass ± half the width of the middle half. Faster: the unpruned network's time over this "
    "one's, median over rounds in which all networks and runtimes take their turn. MACs: how much fewer, as a factor. "
    "÷ 8: share of the convolutions whose number of outputs is a multiple of 8."
)


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("export", help="speed of pruned networks in PyTorch and onnxruntime on the CPU")
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="MODEL", help="default: %(default)s")
    parser.add_argument("--weights", metavar="FILE", help="trained weights, with one model (random ones otherwise)")
    parser.add_argument("--macs", type=float, default=0.5, metavar="SHARE", help="share kept (%(default)s)")
    parser.add_argument("--round-to", type=positive, default=8, metavar="N", help="of the second network (%(default)s)")
    parser.add_argument("--criterion", default="magnitude", metavar="NAME", help="that units go by (%(default)s)")
    parser.add_argument("--batches", nargs="+", type=positive, default=[1, 8], metavar="N", help="(1 8)")
    parser.add_argument(
        "--runtimes", nargs="+", default=["torch", "onnxruntime"], metavar="NAME",
        help="torch, compiled (torch.compile), onnxruntime (torch onnxruntime)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=positive, default=30, metavar="N", help="turns of each (%(default)s)")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: only what this process computes")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(%(default)s)")
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads (torch's own choice)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure every model and print the tables."""
    if args.weights and len(args.models) != 1:
        raise IfsoError("--weights are those of one network; give one --models with them")
    set_threads(args)
    names = ("weights", "macs", "round_to", "criterion", "rounds", "clock", "seed")
    options: dict[str, Any] = {name: getattr(args, name) for name in names}
    options |= {"batches": tuple(args.batches), "runtimes": tuple(args.runtimes)}
    with chatter_to_stderr():
        results = [measure(Setup(model, **options), say) for model in args.models]
        where = about()
    if args.json:
        print_json({"bench": "export", **where, "results": results})
    else:
        console().print(*(_table(result, where) for result in results), sep="\n")
    return 0


def _table(result: dict[str, Any], where: dict[str, Any]) -> Table:
    hardware, sizes = where["hardware"], "×".join(map(str, result["input"][1:]))
    title = (
        f"Export: {result['model']} to {result['macs']:.0%} of its MACs by {result['criterion']}, {sizes}; "
        f"{hardware['cpu']}, {hardware['threads']} threads, torch {where['torch']}, "
        f"onnxruntime {where['onnxruntime'] or 'not installed'}, {result['rounds']} rounds, {result['clock']} clock"
    )
    rows = []
    for line in result["timings"]:
        network = result["networks"][line["network"]]
        macs = f"{amount(network['macs'])} (×{1 / network['macs_share']:.2f})"
        took = f"{line['seconds'] * 1e3:.2f} ± {line['spread'] * 5e2:.2f}"
        faster = f"×{line['speedup']:.2f} ± {line['speedup_spread'] / 2:.2f}"
        share = f"{network['multiples_of_8']:.0%}"
        rows.append((line["network"], macs, share, str(line["batch"]), line["runtime"], took, faster))
    return table(("network", "MACs", "÷ 8", "batch", "runtime", "ms", "faster"), rows, title=title, caption=CAPTION)
