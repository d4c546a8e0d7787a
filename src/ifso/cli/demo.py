"""``ifso demo``: traces a network, removes random channels, and checks that the removal is exact and can be saved."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifso.cli.output import amount, console

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor, nn

    import ifso

MODEL = "ifso:resnet32"
REMOVED = 0.3
TOLERANCE = 1e-5
CHECK_FAILED = 4


@dataclass(frozen=True)
class Outcome:
    """What the demo measured."""

    before: ifso.Cost
    after: ifso.Cost
    units: int
    removed: int
    error: float
    reloaded_identical: bool


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("demo", help="remove random channels from a small network and check the result")
    parser.add_argument("--out", type=Path, default=Path("ifso-demo"), metavar="DIR", help="where to save the result")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo; the status is 4 if the compacted or the reloaded network computes something else."""
    outcome = _demonstrate(args.out)
    console().print(_table(outcome), f"saved to {args.out} (recipe.json, model.safetensors)", sep="\n")
    if outcome.error <= TOLERANCE and outcome.reloaded_identical:
        return 0
    print("ifso: error: a check of the result failed (see the table)", file=sys.stderr)
    return CHECK_FAILED


def _demonstrate(out: Path) -> Outcome:
    import torch

    import ifso

    torch.manual_seed(0)
    images = torch.randn(8, 3, 32, 32)
    model = _shaken(ifso.create_model(MODEL), images).eval()

    _say(f"tracing {MODEL}")
    graph = ifso.trace(model, images[:1])
    keep = ifso.balance(graph, _random_keep(graph))
    before, after = ifso.cost(model, graph), ifso.cost(model, graph, keep)

    removed = sum(int((~kept).sum()) for kept in keep.values())
    _say(f"removing {removed} of {graph.num_units} units, chosen at random")
    with torch.no_grad():
        with ifso.masked(model, graph, keep):
            expected = model(images)
        ifso.compact_(model, graph, keep)
        compacted = model(images)

    _say("saving, and loading into a fresh network")
    ifso.save(model, out)
    with torch.no_grad():
        reloaded = ifso.load(out, ifso.create_model(MODEL)).eval()(images)
    error = float((compacted - expected).abs().max() / expected.abs().max())
    return Outcome(before, after, graph.num_units, removed, error, torch.equal(reloaded, compacted))


def _shaken(model: nn.Module, images: Tensor) -> nn.Module:
    """``model`` with random BatchNorm gains and biases and the statistics of ``images``: no error hides in zeros."""
    import torch
    from torch import nn

    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.5)
    with torch.no_grad():
        model.train()(images)
    return model


def _random_keep(graph: ifso.ChannelGraph) -> dict[str, Tensor]:
    """Of each group the share ``REMOVED`` of its units goes, rounded; which ones is drawn at random."""
    import torch

    return {group.name: torch.randperm(group.size) >= round(REMOVED * group.size) for group in graph.groups}


def _table(outcome: Outcome) -> Table:
    from rich.table import Table

    table = Table(title=f"{MODEL}: {outcome.removed} of {outcome.units} units removed at random", title_justify="left")
    for heading in ("", "before", "after", "kept"):
        table.add_column(heading, justify="right" if heading else "left")
    for label, name in (("MACs", "macs"), ("parameters", "params"), ("activations", "activations")):
        before, after = getattr(outcome.before, name), getattr(outcome.after, name)
        table.add_row(label, amount(before), amount(after), f"{after / before:.1%}")
    table.add_section()
    table.add_row("compacted against masked, max relative error", "", f"{outcome.error:.1e}", "")
    table.add_row("reloaded, bit for bit", "", "identical" if outcome.reloaded_identical else "DIFFERENT", "")
    return table


def _say(line: str) -> None:
    print(f"· {line}", flush=True)
