"""``ifso repro``: studies of the paper, run again. Figure 1 is here, those of whole networks in ``repro_runs``."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifso.cli.console import chatter_to_stderr, complain, console, print_json, say
from ifso.cli.options import add_help
from ifso.errors import IfsoError

if TYPE_CHECKING:
    from rich.table import Table

FIGURE1 = "figure1"
COLUMNS = {
    "spearman": "Spearman",
    "spearman_equal_size": "equal size",
    "pearson": "Pearson",
    "median_error": "error",
    "gradients": "gradients",
    "share": "of L-BFGS",
    "share_adam": "of Adam",
}
CAPTION = (
    "Correlation with the loss change after retraining, mean over seeds (lowest…highest). Equal size: Spearman among "
    "masks that remove equally many units. Error: median of |estimate − truth| / |truth|. Gradients: median spent "
    "on a mask, and as a share of what retraining it took."
)


DESCRIPTION = (
    "Run studies of the paper again, or what is left of them: tables, figures (their names are below), "
    "or rows such as resnet32-cifar10-50 (network, data, per cent of MACs removed). "
    "What was interrupted goes on when the same command is given again. "
    "--draw makes pictures of what is there: figure1, figure3 … figure8."
)
ONLY_FIGURE1 = ("networks", "masks", "renew")
RECIPE = "recipe"
NOT_RECIPE = (
    *ONLY_FIGURE1, "resume", "workers", "table", "markdown", "list", "weights", "criteria", "recipes", "units_per_step",
    "prune", "one_pruning", "prune_precision", "lanes",
)  # fmt: skip
RECIPE_CAPTION = (
    "Top-1 in per cent on {held_out} training images held out, at the last of {epochs} epochs, after half of the MACs "
    "of {network} went at once; unpruned {unpruned:.2f}. Standard error of one accuracy: {standard_error:.2f}."
)
NOT_FIGURE1 = (
    "table", "markdown", "list", "weights", "criteria", "recipes", "epochs", "units_per_step", "prune", "one_pruning",
    "validation", "device", "precision", "prune_precision", "channels_last", "compile", "lanes",
)  # fmt: skip
DRAWN_ONLY = ("figure3", "figure4")
NOT_DRAWN = (
    *ONLY_FIGURE1, "resume", "table", "markdown", "list", "data", "weights", "seeds", "epochs", "units_per_step",
    "prune", "one_pruning", "validation", "device", "precision", "prune_precision", "channels_last", "compile", "lanes",
    "workers",
)  # fmt: skip


def add_parser(commands: Any) -> None:
    """Register the command. What is not given is None, so that each study has its own defaults."""
    parser = commands.add_parser(
        "repro", help="run studies of the paper again", description=DESCRIPTION, add_help=False
    )
    add_help(parser, _names)
    parser.add_argument("studies", nargs="*", metavar="STUDY", help="tables, figures or rows")
    parser.add_argument("--smoke", action="store_true", help="everything at a reduced size, a row in about a minute")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    _add_what(parser.add_argument_group("what is run"))
    _add_where(parser.add_argument_group("where and how"))
    _add_shown(parser.add_argument_group("instead of running"))
    _add_figure1(parser.add_argument_group("only for figure1"))
    parser.set_defaults(run=run)


def _names() -> str:
    """Of all studies; the rows of tables have names of their own."""
    from ifso_repro.rows import rows, studies

    named = ", ".join((*studies(), FIGURE1))
    return (
        f"STUDY: {named}; {RECIPE}: candidates for the recipe ours, on images that are held out. "
        f"Rows: {', '.join(rows())}; another per cent will do."
    )


def _add_what(group: Any) -> None:
    group.add_argument(
        "--data", action="append", metavar="NAME:PATH", help="cifar10, cifar100, imagenet, coco or bccd:PATH; repeat"
    )
    group.add_argument("--weights", type=Path, metavar="DIR", help="folder of weights that are given, not trained")
    group.add_argument("--seeds", type=int, metavar="N", help="runs of each kind (as the study says; 1 with --smoke)")
    group.add_argument("--criteria", nargs="+", metavar="NAME", help="only these")
    group.add_argument("--recipes", nargs="+", metavar="NAME", help="only these: paper, ours, patient, taught")
    group.add_argument("--epochs", type=int, metavar="N", help="of fine-tuning (as the recipe says)")
    group.add_argument("--units-per-step", type=int, metavar="N", help="units that go at a time (as the row says)")
    group.add_argument("--prune", action="append", metavar="KEY=VALUE", help="another setting of all prunings; repeat")
    group.add_argument("--one-pruning", action="store_true", help="all seeds fine-tune the pruning of seed 0")
    group.add_argument(
        "--validation", type=int, metavar="N", help="measure on N training images that are held out: for choices"
    )


def _add_where(group: Any) -> None:
    group.add_argument("--out", type=Path, metavar="DIR", help=f"default: repro ({FIGURE1}: ifso-{FIGURE1})")
    group.add_argument("--device", metavar="NAME", help="cpu or cuda (cpu); under torchrun each rank has its own GPU")
    group.add_argument("--precision", metavar="NAME", help="of training (float32; bf16 on cuda)")
    group.add_argument("--prune-precision", metavar="NAME", help="of pruning (float32)")
    group.add_argument(
        "--channels-last", action=argparse.BooleanOptionalAction, default=None, help="memory layout (on cuda: yes)"
    )
    group.add_argument("--compile", action="store_true", default=None, help="train with torch.compile")
    group.add_argument("--lanes", type=int, metavar="N", help="networks trained side by side (1; 8 on cuda)")
    group.add_argument("--workers", type=int, metavar="N", help=f"processes that prune (1; {FIGURE1}: all cores)")


def _add_shown(group: Any) -> None:
    group.add_argument("--table", action="store_true", help="show the tables of what is in DIR/results")
    group.add_argument("--markdown", type=Path, metavar="FILE", help="with --table: write them into a file")
    group.add_argument("--list", action="store_true", help="show what would be run and how far it is")
    group.add_argument("--draw", action="store_true", help="draw figures of what is there into DIR/figures")
    group.add_argument("--runs", nargs="+", type=Path, metavar="RUN", help="figure3 or figure4 of these runs")


def _add_figure1(group: Any) -> None:
    group.add_argument("--networks", nargs="+", metavar="NAME", help="only these networks of the study")
    group.add_argument("--masks", type=int, metavar="N", help="masks for each network (60; 14 with --smoke)")
    group.add_argument("--resume", action="store_true", help="go on in --out (the other studies always do)")
    group.add_argument("--renew", action="store_true", help="as --resume, but scores and estimates are computed again")


def run(args: argparse.Namespace) -> int:
    """Run the studies, or show what there is."""
    if args.draw:
        return _draw(args)
    _refuse(args, ("runs",), "only --draw has")
    for name in DRAWN_ONLY:
        if name in args.studies:
            raise IfsoError(f"{name} shows a pruned network and is not run but drawn: ifso repro {name} --draw")
    if args.workers is not None and args.workers < 1:
        raise IfsoError(f"--workers {args.workers}: give 1 or more")
    if FIGURE1 in args.studies:
        _refuse(args, NOT_FIGURE1, f"{FIGURE1} has no")
        if len(args.studies) > 1:
            raise IfsoError(f"{FIGURE1} is a study of its own kind; run it apart from {_others(args.studies)}")
        return _figure1(args)
    if RECIPE in args.studies:
        _refuse(args, NOT_RECIPE, f"{RECIPE} has no")
        if len(args.studies) > 1:
            raise IfsoError(f"{RECIPE} is a study of its own kind; run it alone")
        return _recipe(args)
    _refuse(args, ONLY_FIGURE1, f"only {FIGURE1} has")
    from ifso_repro import command_runs as repro_runs

    return repro_runs.run(args)


def _draw(args: argparse.Namespace) -> int:
    from ifso_repro import command_draw as repro_draw

    _refuse(args, NOT_DRAWN, "--draw has no")
    return repro_draw.run(args)


def _refuse(args: argparse.Namespace, options: tuple[str, ...], words: str) -> None:
    for name in options:
        if getattr(args, name) not in (None, False):
            raise IfsoError(f"{words} --{name.replace('_', '-')}; leave it out")


def _others(studies: list[str]) -> str:
    return ", ".join(name for name in studies if name != FIGURE1)


def _figure1(args: argparse.Namespace) -> int:
    """Run the study of small networks, write figure1.json and its pictures, and print the tables."""
    from ifso.common.plots import PlotUnavailable
    from ifso_repro.figure1.settings import checksum, choose, data_path
    from ifso_repro.figure1.study import figure1, write
    from ifso_repro.figures.loss_change import draw_loss_change

    if args.data is not None and len(args.data) > 1:
        raise IfsoError(f"{FIGURE1} takes one --data; {len(args.data)} were given")
    out = args.out or Path(f"ifso-{FIGURE1}")
    path = None if args.data is None else data_path(args.data[0])
    name = None if path is None else f"cifar10:{path.name}, sha256 {checksum(path)}"
    settings = choose(smoke=args.smoke, seeds=args.seeds, networks=args.networks, masks=args.masks, data=name)
    workers = args.workers or os.cpu_count() or 1
    document = {
        "command": _command(args, path),
        **figure1(settings, path, out, resume=args.resume, workers=workers, renew=args.renew),
    }
    written = [str(write(document, out))]
    try:
        written += map(str, draw_loss_change(document, out / FIGURE1))
    except PlotUnavailable as error:
        complain(str(error))
    if args.json:
        print_json(document)
    else:
        console().print(*tables(document), f"written: {', '.join(written)}", sep="\n")
    return 0


def _recipe(args: argparse.Namespace) -> int:
    """Compare the candidates for the recipe ``ours``, and write which one did best."""
    with chatter_to_stderr():
        from ifso_repro.command_runs import OUT
        from ifso_repro.recipe_search import keep

        choice = _chosen(args)
        place = (args.out or OUT) / "results" / ("smoke" if args.smoke else "") / RECIPE / "choice.json"
        keep(choice, place)
    if args.json:
        print_json(choice)
    else:
        console().print(_recipe_table(choice), f"best: {choice['best']}; written: {place}", sep="\n")
    return 0


def _chosen(args: argparse.Namespace) -> dict[str, Any]:
    from dataclasses import replace

    from ifso.common.devices import usable_device
    from ifso.data import open_data
    from ifso.training.profiling import hardware
    from ifso_repro.command_runs import ON_CUDA
    from ifso_repro.recipe_search import HELD_OUT, SMOKE, Effort, choose, smoke_images

    for name in ("epochs", "seeds", "validation"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise IfsoError(f"--{name} {getattr(args, name)}: give 1 or more")
    device = args.device or "cpu"
    usable = usable_device(device)
    effort, quick = SMOKE if args.smoke else Effort(), dict(ON_CUDA) if usable.type == "cuda" else {}
    asked = {name: getattr(args, name) for name in ("precision", "channels_last", "compile")}
    quick |= {**effort.quick, **{name: value for name, value in asked.items() if value is not None}}
    counts = {name: getattr(args, name) for name in ("epochs", "seeds") if getattr(args, name) is not None}
    effort = replace(effort, quick=quick, **counts)
    if args.smoke:
        data: Any = smoke_images(device)
    else:
        data = open_data(_images(args.data), device=device, validation=args.validation or HELD_OUT)
    choice = choose(data, effort, device=device, say=say)
    return {**choice, "smoke": args.smoke, "quick": quick, "hardware": hardware(usable)}


def _images(given: list[str] | None) -> str:
    if given is None or len(given) != 1 or given[0].partition(":")[0] not in ("cifar10", "cifar100"):
        raise IfsoError(f"{RECIPE} takes one data set; give --data cifar10:PATH or cifar100:PATH, or --smoke")
    return given[0]


def _recipe_table(choice: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(
        title=f"Candidates for the recipe of fine-tuning, {choice['seeds']} seed(s)", title_justify="left",
        caption=RECIPE_CAPTION.format(**choice), caption_justify="left",
    )  # fmt: skip
    for heading in ("candidate", "changes"):
        table.add_column(heading)
    for heading in ("mean", "lowest", "highest"):
        table.add_column(heading, justify="right")
    for name, mean in choice["mean"].items():
        found, changes = choice["validation_top1"][name], choice["candidates"][name]
        words = ", ".join(f"{key}={value}" for key, value in changes.items()) or "none"
        table.add_row(name, words, *(f"{value:.2f}" for value in (mean, min(found), max(found))))
    for name in choice["failed"]:
        table.add_row(name, "failed", "–", "–", "–")
    return table


def _command(args: argparse.Namespace, data: Path | None) -> str:
    """The command that gives this result, with names of files only."""
    words = ["ifso", "repro", FIGURE1]
    words += ["--smoke"] if args.smoke else []
    words += ["--data", f"cifar10:{data.name}"] if data else []
    for option in ("seeds", "masks"):
        value = getattr(args, option)
        words += [f"--{option}", str(value)] if value is not None else []
    words += ["--networks", *args.networks] if args.networks else []
    return shlex.join(words)


def tables(document: dict[str, Any]) -> list[Table | str]:
    """One table for each network, and below it what does not apply."""
    found: list[Table | str] = []
    for name in dict.fromkeys(row["network"] for row in document["summary"]):
        rows = [row for row in document["summary"] if row["network"] == name]
        found.append(_table(name, rows, [network for network in document["networks"] if network["name"] == name]))
        found += [f"not applicable: {row['method']}: {row['not_applicable']}" for row in rows if "masks" not in row]
    return found


def _table(name: str, rows: list[dict[str, Any]], networks: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    first = networks[0]
    size = f"{first['weights']} weights, {first['units']} units, {first['images']} images, {len(networks)} seed(s)"
    table = Table(title=f"{name}: {size}", caption=CAPTION, title_justify="left", caption_justify="left")
    table.add_column("method")
    for heading in ("masks", *COLUMNS.values()):
        table.add_column(heading, justify="right")
    for row in rows:
        if "masks" in row:
            cells = [_cell(measure, row.get(measure)) for measure in COLUMNS]
            table.add_row(row["method"], str(row["masks"]), *cells)
    return table


def _cell(measure: str, value: dict[str, float] | None) -> str:
    """Mean over seeds, for correlations with their range."""
    if value is None:
        return "–"
    if measure == "gradients":
        return f"{value['mean']:.0f}"
    if measure in ("spearman", "spearman_equal_size", "pearson"):
        spread = f" ({value['lowest']:.2f}…{value['highest']:.2f})" if value["lowest"] < value["highest"] else ""
        return f"{value['mean']:.2f}{spread}"
    return f"{value['mean']:.1%}" if value["mean"] < 10 else f"{value['mean']:.0f}×"
