"""``ifso inspect MODEL``: which channels go together, what they cost, what cannot be pruned and why."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifso.cli.console import chatter_to_stderr, console, print_json
from ifso.common.text import amount
from ifso.errors import TraceError

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
    """What was found: the graph, the model's cost, and per group the MACs and parameters its units hold."""

    name: str
    graph: ChannelGraph
    cost: Cost
    macs: Counter[str]
    params: Counter[str]

    @property
    def input(self) -> str:
        """The shapes of the inputs that costs are counted on."""
        return words_of(self.graph.inputs)


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("inspect", help="show coupled channels, their costs, and what is frozen and why")
    parser.add_argument("model", metavar="MODEL", help="torchvision:NAME, timm:NAME, ifso:NAME or file.py:factory")
    parser.add_argument(
        "--input",
        type=shape,
        action="append",
        metavar="1,3,224,224",
        help="shape of the input; repeat it for several inputs (default: what is known of MODEL)",
    )
    add_pretrained(parser)
    parser.add_argument(
        "--ignore", nargs="+", action="extend", default=[], metavar="NAME", help="modules to leave alone"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also draw the tables into an SVG picture")
    parser.set_defaults(run=run)


def add_pretrained(group: Any) -> None:
    """Permission to load what a MODEL names."""
    words = "let torchvision and timm load published weights, and download them if need be"
    group.add_argument("--pretrained", action="store_true", help=words)


def run(args: argparse.Namespace) -> int:
    """Trace the model and print what was found."""
    with chatter_to_stderr():
        found = _inspect(args)
    if args.json:
        print_json(_document(found))
    else:
        console().print(*_report(found), sep="\n")
    if args.svg is not None:
        from ifso.cli.svg import write_svg

        write_svg(args.svg, f"ifso inspect {found.name}", _report(found))
    return 0


def _inspect(args: argparse.Namespace) -> Inspection:
    from ifso.costs import cost
    from ifso.costs.cost import MAC_KINDS
    from ifso.models import create_model

    model = create_model(args.model, pretrained=args.pretrained).eval()
    graph = _trace(args, model)
    return Inspection(
        name=args.model,
        graph=graph,
        cost=cost(model, graph),
        macs=_held(graph, [term for term in graph.terms if term.kind in MAC_KINDS]),
        params=_held(graph, [term for term in graph.terms if term.kind == "parameter"]),
    )


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
            f"{args.model} does not run on {given}: {type(cause).__name__}: {message}; "
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
        try:
            return default_inputs(args.model, model)
        except TraceError:
            raise TraceError(
                f"no example input is known for {args.model}; give its shape, for example --input 1,3,224,224"
            ) from None
    for sizes in args.input:
        refuse_large(sizes)
    try:
        if is_detector(model):
            return images_of(*args.input)
        inputs = tuple(torch.randn(shape) for shape in args.input)
    except RuntimeError as error:
        raise TraceError(f"an input of that size cannot be made: {error}") from error
    return inputs[0] if len(inputs) == 1 else inputs


def images_of(*shapes: Sequence[int], device: str = "cpu") -> Any:
    """What a detector takes for these shapes [N, 3, H, W] or [3, H, W]: a list of images of all of them."""
    from ifso.models.detectors import example_images

    images = []
    for sizes in shapes:
        refuse_large(sizes)
        if len(sizes) not in (3, 4) or sizes[-3] != 3:
            raise TraceError(
                f"--input {','.join(map(str, sizes))} is no shape of images for a detector; write N,3,H,W, "
                "for example 1,3,480,640"
            )
        images += example_images(*(sizes[:1] if len(sizes) == 4 else (1,)), *sizes[-2:], device=device)[0]
    return (images,)


def words_of(inputs: Any) -> str:
    """The shapes of all tensors in the inputs.

    >>> import torch
    >>> words_of(([torch.zeros(3, 48, 64), torch.zeros(3, 48, 64)],)), words_of(torch.zeros(1, 3, 32, 32))
    ('3x48x64 + 3x48x64', '1x3x32x32')
    """
    from ifso.common.tensors import tensors_in

    return " + ".join("x".join(map(str, tensor.shape)) or "scalar" for tensor in tensors_in(inputs))


def zeros_of(sizes: Sequence[int], device: str) -> Any:
    """An input of that shape."""
    import torch

    refuse_large(sizes)
    return torch.zeros(tuple(sizes), device=device)


def refuse_large(sizes: Sequence[int]) -> None:
    """IfsoError for an input that would fill the memory."""
    from ifso.common.devices import refuse_too_large

    refuse_too_large(math.prod(sizes), f"--input {','.join(map(str, sizes))}")


def shape(text: str) -> tuple[int, ...]:
    """A shape as it is written on the command line.

    >>> shape("1,3,224,224")
    (1, 3, 224, 224)
    """
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1 or max(sizes) >= 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape; write positive numbers, for example 1,3,224,224")
    return sizes


def _report(found: Inspection) -> list[RenderableType]:
    """The tables and lines that are printed."""
    from ifso.graph.printing import details, groups_table

    groups = groups_table(found.graph, _columns(found), CAPTION) if found.graph.groups else NOTHING
    return [groups, *details(found.graph), _totals(found)]


def _columns(found: Inspection) -> list[Column]:
    from ifso.graph.printing import Column

    macs, params = max(found.cost.macs, 1), max(found.cost.params, 1)
    return [
        Column("MACs", lambda group: f"{found.macs[group.name] / macs:.1%}"),
        Column("params", lambda group: f"{found.params[group.name] / params:.1%}"),
    ]


def _totals(found: Inspection) -> str:
    cost = found.cost
    return (
        f"{found.name}: {amount(cost.params)} parameters, {amount(cost.macs)} MACs, {amount(cost.activations)} "
        f"activations (numbers that convolutions and matrix products write) on an input of {found.input}\n"
        f"MACs: {amount(cost.conv_macs)} in convolutions, {amount(cost.linear_macs)} in linear layers, "
        f"{amount(cost.matmul_macs)} in other matrix products; {COUNTED}"
    )


def _document(found: Inspection) -> dict[str, Any]:
    return {
        "model": found.name,
        "input": found.input,
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


def _group_entry(group: Group, found: Inspection) -> dict[str, Any]:
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
