"""``ifso inspect MODEL``: which channels go together, what they cost, what cannot be pruned and why; or a picture."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifso.cli.console import chatter_to_stderr, console, print_json, say, write_text
from ifso.cli.inputs import check_size, detector_images, name_networks, shapes_of
from ifso.cli.options import MODEL, add_option, add_shared, shape
from ifso.common.text import amount
from ifso.errors import TraceError, users_line

if TYPE_CHECKING:
    from rich.console import RenderableType
    from torch import nn

    from ifso.costs import Cost
    from ifso.data import Data
    from ifso.graph.channel_graph import ChannelGraph
    from ifso.graph.layouts import Term

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
    words = "shape of the input; repeat it for several inputs (default: what is known of MODEL)"
    add_option(parser, "input", shape, "1,3,224,224", words, action="append")
    add_shared(parser, "pretrained")
    add_option(parser, "data", str, "DATA", "of a run, if it has moved; its first input is taken")
    add_option(parser, "ignore", str, "NAME", "modules to leave alone", nargs="+", action="extend", default=[])
    add_shared(parser, "json")
    add_option(parser, "svg", Path, "FILE", "also draw the tables into an SVG picture")
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
        write_text(args.svg, draw(f"ifso inspect {inspection.name}", _report(inspection)))
    return 0


def _inspect(args: argparse.Namespace) -> Inspection:
    """Of a new network; or of that of a run, whose data says how many classes there are and what it takes."""
    from ifso.costs import cost
    from ifso.costs.cost import MAC_KINDS
    from ifso.data import open_data
    from ifso.models.registry import network_for

    name, args.weights = args.model, None
    said = name_networks(args)
    if args.model is None:
        raise TraceError(
            f"{name} does not say which MODEL its network is of; in Python: "
            "print(ifso.trace(ifso.load(FOLDER, the_unpruned_model), example_inputs))"
        )
    if args.input and isinstance(args.input[0], int):
        args.input = [tuple(args.input)]
    data = None if args.data is None else open_data(args.data)
    classes = None if data is None else data.num_classes
    model = network_for(args.model, classes, weights=args.weights, pretrained=args.pretrained).eval()
    for line in said:
        say(line)
    graph = _trace(args, model, data)
    macs, params = ([term for term in graph.terms if term.kind in kinds] for kinds in (MAC_KINDS, ("parameter",)))
    return Inspection(name, graph, cost(model, graph), _held(graph, macs), _held(graph, params))


def _trace(args: argparse.Namespace, model: nn.Module, data: Data | None) -> ChannelGraph:
    """Trace, and speak of ``--input`` where the model does not run."""
    from ifso.graph.tracing import trace

    inputs = _inputs(args, model) if args.input or data is None else data.example_inputs()
    try:
        return trace(model, inputs, ignore=tuple(args.ignore))
    except TraceError as error:
        cause = error.__cause__
        if cause is None or isinstance(cause, TraceError):
            raise
        given = " and ".join(f"--input {','.join(map(str, shape))}" for shape in args.input or ())
        message = " ".join(str(cause).split())[:300] or "no message"
        raise TraceError(
            f"{args.model} does not run on {given or 'its default input'}: {type(cause).__name__}: {message}"
            f"{users_line(cause)}; "
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
    from ifso.graph.printing import Column, details, groups_table

    cost = inspection.cost
    columns = [
        Column("MACs", lambda group: f"{inspection.macs[group.name] / max(cost.macs, 1):.1%}"),
        Column("params", lambda group: f"{inspection.params[group.name] / max(cost.params, 1):.1%}"),
    ]
    groups = groups_table(inspection.graph, columns, CAPTION) if inspection.graph.groups else NOTHING
    totals = (
        f"{inspection.name}: {amount(cost.params)} parameters, {amount(cost.macs)} MACs, {amount(cost.activations)} "
        f"activations (numbers that convolutions and matrix products write) on an input of {inspection.input}\n"
        f"MACs: {amount(cost.conv_macs)} in convolutions, {amount(cost.linear_macs)} in linear layers, "
        f"{amount(cost.matmul_macs)} in other matrix products; {COUNTED}"
    )
    return [groups, *details(inspection.graph), totals]


def _document(inspection: Inspection) -> dict[str, Any]:
    return {
        "model": inspection.name,
        "input": inspection.input,
        "cost": inspection.cost.as_dict(),
        "counted": COUNTED,
        "units": inspection.graph.num_units,
        "groups": [
            {
                "name": group.name,
                "units": group.size,
                "flags": sorted(group.flags),
                "members": [
                    {name: getattr(each, name) for name in ("parameter", "dim", "role")} for each in group.members
                ],
                "macs": inspection.macs[group.name],
                "params": inspection.params[group.name],
                "macs_share": inspection.macs[group.name] / max(inspection.cost.macs, 1),
                "params_share": inspection.params[group.name] / max(inspection.cost.params, 1),
            }
            for group in inspection.graph.groups
        ],
        "frozen": [
            {"parameter": axis.parameter, "dim": axis.dim, "channels": len(axis.index), "reason": axis.reason}
            for axis in inspection.graph.frozen
        ],
        "notes": list(inspection.graph.notes),
    }


INK, PAPER, LINE, ACCENT = "#24292f", "#ffffff", "#c4ccd4", "#0b5394"
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', 'Liberation Mono', monospace"
ASPECT = 0.6
"""Width of a character as a share of its height, as in most fixed-width fonts."""

FORMAT = (
    """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title></title>
<style>
.{unique_id}-matrix {{ font-family: FONTS; font-size: {char_height}px; }}
{styles}
</style>
<defs>
{lines}
</defs>
<rect width="100%" height="100%" rx="8" fill="PAPER" stroke="LINE"/>
<g class="{unique_id}-matrix" transform="translate(14, 20)">
{matrix}
</g>
</svg>
""".replace("FONTS", FONTS)
    .replace("PAPER", PAPER)
    .replace("LINE", LINE)
)


def draw(command: str, parts: Sequence[RenderableType]) -> str:
    """``parts`` (tables and text), as ``command`` prints them, as SVG; the same parts always give the same text."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.terminal_theme import TerminalTheme
    from rich.theme import Theme

    from ifso.graph.printing import WIDTH

    looks = Theme({"table.title": f"bold {ACCENT}", "table.header": f"bold {INK}", "table.caption": "#57606a"})
    console = Console(
        file=StringIO(), record=True, width=WIDTH, theme=looks, highlight=False, markup=False, emoji=False
    )
    tables = [part for part in parts if isinstance(part, Table)]
    for table in tables:  # upright lines fall apart where a font is not made for them
        table.box, table.border_style = box.SIMPLE_HEAD, LINE
    console.width = max((console.measure(table).maximum for table in tables), default=console.width - 1) + 1
    console.print(f"$ {command}")
    for part in parts:
        console.print("", part, sep="\n")
    theme = TerminalTheme(_rgb(PAPER), _rgb(INK), [_rgb(INK)] * 8, [_rgb(INK)] * 8)
    svg = console.export_svg(title="", theme=theme, code_format=FORMAT, font_aspect_ratio=ASPECT, unique_id="ifso")
    lines = (line.rstrip() for line in svg.splitlines())
    return "\n".join(lines).replace("<title></title>", f"<title>{escape(command)}</title>", 1) + "\n"


def _rgb(colour: str) -> tuple[int, int, int]:
    """``#rrggbb`` as three numbers.

    >>> _rgb("#0b5394")
    (11, 83, 148)
    """
    red, green, blue = bytes.fromhex(colour.removeprefix("#"))
    return red, green, blue
