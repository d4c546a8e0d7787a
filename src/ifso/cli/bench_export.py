"""``ifso bench export``: how much faster pruned networks are on the CPU, against the MACs that are gone."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ifso.cli.bench_options import take_threads
from ifso.cli.eval_options import positive
from ifso.cli.output import chatter_to_stderr, console, print_json, say
from ifso.common.text import amount

if TYPE_CHECKING:
    from rich.table import Table

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
    from ifso.bench.export import Setup, about, measure
    from ifso.errors import IfsoError

    if args.weights and len(args.models) != 1:
        raise IfsoError("--weights are those of one network; give one --models with them")
    take_threads(args)
    with chatter_to_stderr():
        results = [
            measure(
                Setup(
                    model=model, weights=args.weights, macs=args.macs, round_to=args.round_to,
                    criterion=args.criterion, batches=tuple(args.batches), runtimes=tuple(args.runtimes),
                    rounds=args.rounds, clock=args.clock, seed=args.seed,
                ),
                say,
            )
            for model in args.models
        ]  # fmt: skip
        where = about()
    if args.json:
        print_json({"bench": "export", **where, "results": results})
    else:
        console().print(*(_table(result, where) for result in results), sep="\n")
    return 0


def _table(result: dict[str, Any], where: dict[str, Any]) -> Table:
    from rich.table import Table

    hardware, sizes = where["hardware"], "×".join(map(str, result["input"][1:]))
    title = (
        f"ifso bench export: {result['model']} to {result['macs']:.0%} of its MACs by {result['criterion']}, {sizes}; "
        f"{hardware['cpu']}, {hardware['threads']} threads, torch {where['torch']}, "
        f"onnxruntime {where['onnxruntime'] or 'not installed'}, {result['rounds']} rounds, {result['clock']} clock"
    )
    table = Table(title=title, caption=CAPTION, title_justify="left", caption_justify="left")
    table.add_column("network")
    for heading in ("MACs", "÷ 8", "batch", "runtime", "ms", "faster"):
        table.add_column(heading, justify="right")
    for line in result["timings"]:
        network = result["networks"][line["network"]]
        table.add_row(
            line["network"],
            f"{amount(network['macs'])} (×{1 / network['macs_share']:.2f})",
            f"{network['multiples_of_8']:.0%}",
            str(line["batch"]),
            line["runtime"],
            f"{line['seconds'] * 1e3:.2f} ± {line['spread'] * 5e2:.2f}",
            f"×{line['speedup']:.2f} ± {line['speedup_spread'] / 2:.2f}",
        )
    return table
