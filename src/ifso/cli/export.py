"""``ifso export``: the network of a run as a file that runs without its class and without ifso."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from ifso.cli.console import chatter_to_stderr, console, print_json, say, table
from ifso.cli.evaluate import NOT_THERE, STAGES
from ifso.cli.inputs import check_size, detector_images, name_networks, shapes_of
from ifso.cli.options import add_option, add_shared, shape
from ifso.common.text import amount
from ifso.errors import DataError, IfsoError, RunError

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn

    from ifso.data import Data
    from ifso.runs.open import OpenedRun

DESCRIPTION = (
    "Write the fine-tuned network of a run, or the pruned one if it was not fine-tuned, as an ONNX file or a "
    "torch.export program. The file is run and compared with PyTorch before it takes its place."
)
ORIGINAL, PRUNED, TUNED = STAGES
ROWS = {"macs": "MACs of one input", "params": "parameters", "bytes": "file"}


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("export", help="write a network as ONNX or torch.export", description=DESCRIPTION)
    what = parser.add_argument_group("what is exported")
    what.add_argument("folder", type=Path, metavar="RUN", help="a folder that ifso prune or ifso finetune made")
    add_option(what, "original", None, "", "the network before pruning in place of the smaller one")
    add_option(what, "model", str, "MODEL", "of the run, if its file has moved")
    add_option(what, "weights", str, "FILE", "of the unpruned network, if they have moved")
    add_shared(what, "pretrained", "finetuned", "unverified")
    add_option(what, "data", str, "DATA", "of the run, if it has moved")
    how = parser.add_argument_group("where and how")
    how.add_argument("--to", choices=("onnx", "torch"), help="format (what the name of --out says)")
    add_option(how, "out", Path, "FILE", "ends with .onnx or .pt2 (model.onnx, model.pt2 in RUN)")
    add_option(how, "opset", int, "N", "of ONNX (PyTorch's choice)")
    add_option(how, "input", shape, "1,3,32,32", "shape of the input (the run's, or the data's)")
    add_option(how, "static", None, "", "fix the batch, too; it may vary otherwise")
    add_shared(how, "json")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Export, and show what became smaller."""
    _choose_format(args)
    with chatter_to_stderr():
        name_networks(args)
        document = _export(args)
    if args.json:
        print_json(document)
    else:
        console().print(_networks_table(document), *_remarks(document), sep="\n")
    return 0


def _choose_format(args: argparse.Namespace) -> None:
    """Format and place; refuse what cannot be done before anything is opened."""
    if args.out is None and args.to is None:
        raise IfsoError("say with --to onnx or --to torch what to export to, or name a file with --out")
    from ifso.exporting.export import SUFFIXES, kind_of, refuse_place
    from ifso.exporting.formats import need_packages

    if args.out is None:
        args.out = args.folder / f"{'original' if args.original else 'model'}{SUFFIXES[args.to]}"
    else:
        refuse_place(args.out)
    args.to = kind_of(args.out, args.to)
    if args.to == "onnx":
        need_packages()


def _export(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from ifso.exporting.export import bytes_of, export
    from ifso.runs.open import open_tuned
    from ifso.training.profiling import costs_of

    run = open_tuned(args.folder, model=args.model, unverified=args.unverified, finetuned=args.finetuned)
    data = _data(args, run)
    stage, model, notes = _chosen(args, run, data)
    example = _example(args, run, data, model)
    say(f"exporting the {stage} network to {args.out}")
    exported = export(model, args.out, example, to=args.to, opset=args.opset, static=args.static)
    networks = {stage: {**costs_of(model, example, "float32")[0].as_dict(), "bytes": exported.bytes}}
    whole = None if args.original else _unpruned(args, run, data, notes)
    if whole is not None:
        say("exporting the unpruned network to compare")
        size = bytes_of(whole, example, args.to, opset=exported.opset, static=args.static)
        networks = {ORIGINAL: {**costs_of(whole, example, "float32")[0].as_dict(), "bytes": size}, **networks}
    return {
        "run": str(run.folder), "network": stage, **exported.as_dict(), "counted_on": shapes_of(example),
        "networks": networks, "notes": [*notes, *exported.notes], "torch": str(torch.__version__),
    }  # fmt: skip


def _data(args: argparse.Namespace, run: OpenedRun) -> Data:
    """That of the run, which says how many classes there are; with --input it may be missing."""
    try:
        return run.open_data(data=args.data)
    except (RunError, DataError) as error:
        if args.input is None:
            raise type(error)(f"{error}, or export without it: --input says what the network takes") from error
        say(f"without the data, which is not there: {args.model or 'the network'} is built with the classes it names")
        return cast("Data", SimpleNamespace(num_classes=None))


def _example(args: argparse.Namespace, run: OpenedRun, data: Data, model: nn.Module) -> Any:
    import torch

    from ifso.models.detectors import is_detector

    sizes = args.input or run.arguments.get("input")
    if sizes is None:
        return data.example_inputs()
    if is_detector(model):
        return detector_images(sizes)
    check_size(sizes)
    return torch.randn(sizes, generator=torch.Generator().manual_seed(0))


def _chosen(args: argparse.Namespace, run: OpenedRun, data: Data) -> tuple[str, nn.Module, list[str]]:
    """The network that is exported, what it is called, and why it is that one if that needs saying."""
    if args.original:
        return ORIGINAL, run.original(weights=args.weights, pretrained=args.pretrained, data=data), []
    tuned = run.finetuned(data=data)
    if tuned is not None:
        return TUNED, tuned, []
    why = {"none": "was not fine-tuned", "unfinished": f"has a fine-tuning in {run.finetune} that is not finished"}
    return PRUNED, run.pruned(data=data), [f"The run {why[run.finetuning]}: the network is as ifso prune left it."]


def _unpruned(args: argparse.Namespace, run: OpenedRun, data: Data, notes: list[str]) -> nn.Module | None:
    """To compare with; a note if it is not there, unless that was asked for."""
    try:
        return run.original(weights=args.weights, pretrained=args.pretrained, data=data)
    except RunError as error:
        if args.weights:
            raise
        notes.append(f"No {ORIGINAL} network to compare with: {error}.")
        return None


def _networks_table(document: dict[str, Any]) -> Table:
    """One row for each number, one column for each network."""
    networks, rows = document["networks"], []
    for key, label in ROWS.items():
        whole = networks.get(ORIGINAL, {}).get(key) if len(networks) > 1 else None
        cells = [amount(each[key]) + "B" * (key == "bytes") for each in networks.values()]
        shares = [f" ({each[key] / whole:.1%})" if whole else "" for each in networks.values()]
        rows.append((label, *map(str.__add__, cells, shares)))
    return table(("", *networks), rows, title=f"{document['run']}: {document['network']} network")


def _remarks(document: dict[str, Any]) -> list[str]:
    inputs = ", ".join(f"{each['name']} {'×'.join(map(str, each['shape']))}" for each in document["inputs"])
    runner = "onnxruntime" if document["to"] == "onnx" else "a fresh process"
    sizes = ", ".join(map(str, dict.fromkeys(document["checked"])))
    opset = f", opset {document['opset']}" if document["opset"] else ""
    return [
        f"Written: {document['path']}{opset}; in: {inputs or NOT_THERE}; out: {', '.join(document['outputs'])}.",
        f"Checked in {runner} on batches of {sizes}: differs from PyTorch by {document['difference']:.1e} at most.",
        *document["notes"],
    ]
