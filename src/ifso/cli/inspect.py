"""``ifso inspect MODEL``: which channels go together, what they cost, what cannot be pruned and why."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifso.cli.console import chatter_to_stderr, console, print_json, say
from ifso.cli.options import (
    MODEL,
    add_json,
    add_pretrained,
    check_size,
    detector_images,
    name_networks,
    shape,
    shapes_of,
)
from ifso.common.text import amount
from ifso.errors import TraceError, users_line

if TYPE_CHECKING:
    from rich.console import RenderableType
    from torch import nn

    from ifso.costs import Cost
    from ifso.graph.channel_graph import ChannelGraph, Group
    from ifso.graph.printing import Column
    from ifso.graph.terms import Term

CAPTION = (
    "MACs, params: the share of the model that belongs to at least one unit of the group. "
    "Groups that meet in a layer both hold its weight, so the shares overlap and do not add up."
)
NOTHING = "nothing of this model can be pruned"
COUNTED = "everything torch.utils.flop_counter counts, halved"


@dataclass(frozen=True)
class Inspection:
    """The graph, the model's cost, and per group the MACs and parameters its units hold."""

    name: str
    graph: ChannelGraph
    cost: Cost
    macs: Counter[str]
    params: Counter[str]

    @property
    def input(self) -> str:
        """The shapes of the inputs that costs are counted on."""
        return shapes_of(self.graph.inputs)


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("inspect", help="show coupled channels, their costs, and what is frozen and why")
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    parser.add_argument(
        "--input",
        type=shape,
        action="append",
        metavar="1,3,224,224",
        help="shape of the input; repeat it for several inputs (default: what is known of MODEL)",
    )
    add_pretrained(parser)
    parser.add_argument("--data", metavar="DATA", help="of a run, if it has moved; its first input is taken")
    parser.add_argument(
        "--ignore", nargs="+", action="extend", default=[], metavar="NAME", help="modules to leave alone"
    )
    add_json(parser)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also draw the tables into an SVG picture")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Trace the model and print the tables."""
    with chatter_to_stderr():
        inspection = _inspect(args)
    if args.json:
        print_json(_document(inspection))
    else:
        console().print(*_report(inspection), sep="\n")
    if args.svg is not None:
        from ifso.cli.svg import write_svg

        write_svg(args.svg, f"ifso inspect {inspection.name}", _report(inspection))
    return 0


def _inspect(args: argparse.Namespace) -> Inspection:
    from ifso.costs import cost
    from ifso.costs.cost import MAC_KINDS

    name, model = args.model, _network(args).eval()
    graph = _trace(args, model)
    return Inspection(
        name=name,
        graph=graph,
        cost=cost(model, graph),
        macs=_held(graph, [term for term in graph.terms if term.kind in MAC_KINDS]),
        params=_held(graph, [term for term in graph.terms if term.kind == "parameter"]),
    )


def _network(args: argparse.Namespace) -> nn.Module:
    """A new network; or that of a run, whose data says how many classes there are and, if need be, what it takes."""
    from ifso.data import open_data
    from ifso.models.registry import network_for

    args.weights, named = None, args.model
    said = name_networks(args)
    if args.model is None:
        raise TraceError(
            f"{named} does not say which MODEL its network is of; in Python: "
            "print(ifso.trace(ifso.load(FOLDER, the_unpruned_model), example_inputs))"
        )
    if args.input and isinstance(args.input[0], int):
        args.input = [tuple(args.input)]
    data = None if args.data is None else open_data(args.data)
    model = network_for(
        args.model, None if data is None else data.num_classes, weights=args.weights, pretrained=args.pretrained
    )
    for line in said:
        say(line)
    args.example = None if data is None else data.example_inputs()
    return model


def _trace(args: argparse.Namespace, model: nn.Module) -> ChannelGraph:
    """Trace, and speak of ``--input`` where the model does not run."""
    from ifso.graph.tracing import trace

    inputs = _inputs(args, model)
    try:
        return trace(model, inputs, ignore=tuple(args.ignore))
    except TraceError as error:
        cause = error.__cause__
        if cause is None or isinstance(cause, TraceError):
            raise
        given = (
            " and ".join(f"--input {','.join(map(str, shape))}" for shape in args.input or ()) or "its default input"
        )
        message = " ".join(str(cause).split())[:300] or "no message"
        raise TraceError(
            f"{args.model} does not run on {given}: {type(cause).__name__}: {message}{users_line(cause)}; "
            "give the shape it takes with --input, once for each input"
        ) from error


def _held(graph: ChannelGraph, terms: list[Term]) -> Counter[str]:
    """Per group, how many of the elements that ``terms`` count belong to at least one of its units."""
    import torch

    names = [group.name for group in graph.groups]
    sizes = torch.tensor([group.size for group in graph.groups], dtype=torch.long)
    number_of = torch.repeat_interleave(torch.arange(len(names)), sizes)
    whole, held = graph.kept(None), Counter(dict.fromkeys(names, 0))
    for term in terms:
        units = torch.cat([layer.flatten() for layer in term.layers]) if term.layers else number_of[:0]
        for number in number_of[units[units >= 0].unique()].unique().tolist():
            without = whole.clone()
            without[graph.groups[number].units] = False
            held[names[number]] += term.count(whole) - term.count(without)
    return held


def _inputs(args: argparse.Namespace, model: nn.Module) -> Any:
    import torch

    from ifso.models import default_inputs
    from ifso.models.detectors import is_detector

    if not args.input:
        if args.example is not None:
            return args.example
        try:
            return default_inputs(args.model, model)
        except TraceError:
            raise TraceError(
                f"no example input is known for {args.model}; give its shape, for example --input 1,3,224,224"
            ) from None
    for sizes in args.input:
        check_size(sizes)
    try:
        if is_detector(model):
            return detector_images(*args.input)
        inputs = tuple(torch.randn(shape) for shape in args.input)
    except RuntimeError as error:
        raise TraceError(f"an input of that size cannot be made: {error}") from error
    return inputs[0] if len(inputs) == 1 else inputs


def _report(inspection: Inspection) -> list[RenderableType]:
    """The tables and lines that are printed."""
    from ifso.graph.printing import details, groups_table

    groups = groups_table(inspection.graph, _columns(inspection), CAPTION) if inspection.graph.groups else NOTHING
    return [groups, *details(inspection.graph), _totals(inspection)]


def _columns(inspection: Inspection) -> list[Column]:
    from ifso.graph.printing import Column

    macs, params = max(inspection.cost.macs, 1), max(inspection.cost.params, 1)
    return [
        Column("MACs", lambda group: f"{inspection.macs[group.name] / macs:.1%}"),
        Column("params", lambda group: f"{inspection.params[group.name] / params:.1%}"),
    ]


def _totals(inspection: Inspection) -> str:
    cost = inspection.cost
    return (
        f"{inspection.name}: {amount(cost.params)} parameters, {amount(cost.macs)} MACs, {amount(cost.activations)} "
        f"activations (numbers that convolutions and matrix products write) on an input of {inspection.input}\n"
        f"MACs: {amount(cost.conv_macs)} in convolutions, {amount(cost.linear_macs)} in linear layers, "
        f"{amount(cost.matmul_macs)} in other matrix products; {COUNTED}"
    )


def _document(inspection: Inspection) -> dict[str, Any]:
    return {
        "model": inspection.name,
        "input": inspection.input,
        "cost": inspection.cost.as_dict(),
        "counted": COUNTED,
        "units": inspection.graph.num_units,
        "groups": [_group_entry(group, inspection) for group in inspection.graph.groups],
        "frozen": [
            {"parameter": axis.parameter, "dim": axis.dim, "channels": len(axis.index), "reason": axis.reason}
            for axis in inspection.graph.frozen
        ],
        "notes": list(inspection.graph.notes),
    }


def _group_entry(group: Group, inspection: Inspection) -> dict[str, Any]:
    return {
        "name": group.name,
        "units": group.size,
        "flags": sorted(group.flags),
        "members": [
            {"parameter": member.parameter, "dim": member.dim, "role": member.role} for member in group.members
        ],
        "macs": inspection.macs[group.name],
        "params": inspection.params[group.name],
        "macs_share": inspection.macs[group.name] / max(inspection.cost.macs, 1),
        "params_share": inspection.params[group.name] / max(inspection.cost.params, 1),
    }
