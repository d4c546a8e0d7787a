"""``ifso inspect MODEL``: which channels go together, what they cost, what cannot be pruned and why."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ifso.cli.output import amount, chatter_to_stderr, console, print_json

if TYPE_CHECKING:
    from torch import nn

    import ifso
    from ifso.graph.table import Column

CAPTION = (
    "MACs and params: what removing the group's units saves, each counted alone, as a share of the model. "
    "A weight between two groups counts in both, so shares add up to more than 100 %."
)
COUNTED = "everything torch.utils.flop_counter counts, halved"


@dataclass(frozen=True)
class Inspection:
    """What was found: the graph, the model's cost, and per group the MACs and parameters its units hold."""

    name: str
    graph: ifso.ChannelGraph
    cost: ifso.Cost
    macs: dict[str, float]
    params: dict[str, float]


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("inspect", help="show coupled channels, their costs, and what is frozen and why")
    parser.add_argument("model", metavar="MODEL", help="torchvision:NAME, timm:NAME, ifso:NAME or file.py:factory")
    parser.add_argument(
        "--input",
        type=_shape,
        action="append",
        metavar="1,3,224,224",
        help="shape of the input; repeat it for several inputs (default: what is known of MODEL)",
    )
    parser.add_argument(
        "--ignore", nargs="+", action="extend", default=[], metavar="NAME", help="modules to leave alone"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Trace the model and print what was found."""
    with chatter_to_stderr():
        found = _inspect(args)
    if args.json:
        print_json(_document(found))
    else:
        _print(found)
    return 0


def _inspect(args: argparse.Namespace) -> Inspection:
    import ifso

    model = ifso.create_model(args.model).eval()
    graph = ifso.trace(model, _inputs(args, model), ignore=tuple(args.ignore))
    saved = ifso.unit_costs(graph)
    return Inspection(
        name=args.model,
        graph=graph,
        cost=ifso.cost(model, graph),
        macs={name: float(costs.macs.sum()) for name, costs in saved.items()},
        params={name: float(costs.params.sum()) for name, costs in saved.items()},
    )


def _inputs(args: argparse.Namespace, model: nn.Module) -> Any:
    import torch

    from ifso.models import default_inputs

    if not args.input:
        return default_inputs(args.model, model)
    inputs = tuple(torch.randn(shape) for shape in args.input)
    return inputs[0] if len(inputs) == 1 else inputs


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape; write positive numbers, for example 1,3,224,224")
    return shape


def _print(found: Inspection) -> None:
    from ifso.graph.table import details, groups_table

    out = console()
    out.print(groups_table(found.graph, _columns(found), CAPTION), *details(found.graph), _totals(found), sep="\n")


def _columns(found: Inspection) -> list[Column]:
    from ifso.graph.table import Column

    macs, params = max(found.cost.macs, 1), max(found.cost.params, 1)
    return [
        Column("MACs", lambda group: f"{found.macs[group.name] / macs:.1%}"),
        Column("params", lambda group: f"{found.params[group.name] / params:.1%}"),
    ]


def _totals(found: Inspection) -> str:
    cost = found.cost
    return (
        f"{found.name}: {amount(cost.params)} parameters, {amount(cost.macs)} MACs ({COUNTED}: "
        f"convolutions {amount(cost.conv_macs)}, linear layers {amount(cost.linear_macs)}, "
        f"other matrix products {amount(cost.matmul_macs)}), "
        f"{amount(cost.activations)} activations (numbers that convolutions and matrix products write)"
    )


def _document(found: Inspection) -> dict[str, Any]:
    return {
        "model": found.name,
        "cost": found.cost.as_dict(),
        "counted": COUNTED,
        "units": found.graph.num_units,
        "groups": [_group_entry(group, found) for group in found.graph.groups],
        "frozen": [
            {"parameter": axis.parameter, "dim": axis.dim, "channels": len(axis.index), "reason": axis.reason}
            for axis in found.graph.frozen
        ],
        "notes": list(found.graph.notes),
    }


def _group_entry(group: ifso.Group, found: Inspection) -> dict[str, Any]:
    return {
        "name": group.name,
        "units": group.size,
        "flags": sorted(group.flags),
        "members": [
            {"parameter": member.parameter, "dim": member.dim, "role": member.role} for member in group.members
        ],
        "macs": found.macs[group.name],
        "params": found.params[group.name],
        "macs_share": found.macs[group.name] / max(found.cost.macs, 1),
        "params_share": found.params[group.name] / max(found.cost.params, 1),
    }
