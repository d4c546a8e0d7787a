"""The commands of ``ifso repro`` and their options. What is not given is None: every study has its own defaults."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ifso.cli.options import add_help, positive

FIGURE1, RECIPE = "figure1", "recipe"
COMMANDS = {
    "run": ("train, prune and fine-tune whatever of STUDY is not done yet", "commands.run"),
    "list": ("show what would be run and how far it is; without a name, all studies", "commands.list_runs"),
    "table": ("show the tables of what is in DIR/results", "commands.show_tables"),
    "draw": ("draw the figures of what is there into DIR/figures: figure1, figure3 … figure8", "drawing.run"),
    FIGURE1: ("compare estimates with losses after retraining, on small networks", "figure1.study.run"),
    RECIPE: ("compare candidates for the recipe ours on images that are held out", "recipe_search.run"),
}
"""What a command does, and the function that does it."""

FLAGS = {"--draw": "draw", "--table": "table", "--list": "list"}
"""Older spellings: ``ifso repro table2 --list`` is ``ifso repro list table2``."""


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Give ``ifso repro`` its commands; the words of older spellings are put in order first."""
    add_help(parser, _names)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    parsers = {}
    for name, (words, function) in COMMANDS.items():
        parsers[name] = commands.add_parser(name, help=words, description=f"{words[0].upper()}{words[1:]}.")
        parsers[name].set_defaults(run=_lazily(function))
        add_options = _OPTIONS.get(name, _add_run)
        add_options(parsers[name])
    original = parser.parse_known_args

    def parse(words: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        args, unknown = original(command_first(words, parsers["run"]), namespace)
        if unknown:
            parser.exit(2, f"ifso: error: unrecognized arguments: {' '.join(unknown)}; see ifso repro --help\n")
        return args, []

    parser.parse_known_args = parse  # type: ignore[method-assign, assignment]


def command_first(words: Sequence[str], run: argparse.ArgumentParser) -> list[str]:
    """The words with the command first, which older spellings name by an option or as a study."""
    if words and words[0] in ("-h", "--help"):
        return list(words)
    for flag, command in FLAGS.items():
        if flag in words and words[0] != command:
            return [command, *words]
    if words and words[0] in COMMANDS:
        return list(words)
    studies = run.parse_known_args(words)[0].studies
    return [next((name for name in (FIGURE1, RECIPE) if name in studies), "run"), *words]


def _lazily(function: str) -> Callable[[argparse.Namespace], int]:
    """The function of a command, whose module is imported when the command is run."""

    def run(args: argparse.Namespace) -> int:
        module, _, name = function.rpartition(".")
        status: int = getattr(import_module(f"ifso_repro.{module}"), name)(args)
        return status

    return run


def _names() -> str:
    """All studies; the rows of tables have names of their own."""
    from ifso_repro.config import rows, studies

    return f"STUDY: {', '.join(studies())}. Rows: {', '.join(rows())}; any other per cent is a row, too."


def _add_common(parser: argparse.ArgumentParser, out: str = "repro") -> None:
    parser.add_argument("--smoke", action="store_true", help="everything at a reduced size, a row in about a minute")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"folder for work and results ({out})")


def _add_device(group: Any) -> None:
    group.add_argument("--device", metavar="NAME", help="cpu or cuda (cpu); under torchrun each rank has its own GPU")
    group.add_argument("--precision", metavar="NAME", help="of training (float32; bf16 on cuda)")
    group.add_argument(
        "--channels-last", action=argparse.BooleanOptionalAction, default=None, help="memory layout (on cuda: yes)"
    )
    group.add_argument("--compile", action="store_true", default=None, help="train with torch.compile")


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("studies", nargs="*", metavar="STUDY", help="tables, figures or rows")
    _add_common(parser)
    what = parser.add_argument_group("what is run")
    what.add_argument(
        "--data", action="append", metavar="NAME:PATH", help="cifar10, cifar100, imagenet, coco or bccd:PATH; repeat"
    )
    what.add_argument("--weights", type=Path, metavar="DIR", help="folder of weights that are given, not trained")
    what.add_argument("--seeds", type=positive, metavar="N", help="runs of each kind (the study's; 1 with --smoke)")
    what.add_argument("--criteria", nargs="+", metavar="NAME", help="only these")
    what.add_argument("--recipes", nargs="+", metavar="NAME", help="only these: short, paper, patient, taught")
    what.add_argument("--epochs", type=positive, metavar="N", help="of fine-tuning (as the recipe says)")
    what.add_argument("--units-per-step", type=positive, metavar="N", help="units that go at a time (as the row says)")
    what.add_argument("--prune", action="append", metavar="KEY=VALUE", help="another setting of all prunings; repeat")
    what.add_argument("--one-pruning", action="store_true", help="all seeds fine-tune the pruning of seed 0")
    what.add_argument(
        "--validation", type=positive, metavar="N", help="measure on N training images that are held out: for choices"
    )
    how = parser.add_argument_group("where and how")
    _add_device(how)
    how.add_argument("--prune-precision", metavar="NAME", help="of pruning (float32)")
    how.add_argument("--lanes", type=positive, metavar="N", help="networks trained side by side (1; 8 on cuda)")
    how.add_argument("--workers", type=positive, metavar="N", help="processes that prune (1)")
    for flag in ("--resume", "--list", "--table"):
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)


def _add_table(parser: argparse.ArgumentParser) -> None:
    """Beside its own options, those of runs, which have no meaning for a table."""
    _add_run(parser)
    for action in parser._actions:
        if action.dest not in ("help", "studies", "json", "out"):
            action.help = argparse.SUPPRESS
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables into a file, too")


def _add_draw(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("studies", nargs="*", metavar="FIGURE", help="all that can be drawn, if none is named")
    _add_common(parser)
    parser.add_argument("--criteria", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--recipes", nargs="+", metavar="NAME", help="the recipe to show (the study's)")
    parser.add_argument("--runs", nargs="+", type=Path, metavar="RUN", help="figure3 or figure4 of these runs")
    parser.add_argument("--draw", action="store_true", help=argparse.SUPPRESS)


def _add_figure1(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("studies", nargs="*", help=argparse.SUPPRESS)
    _add_common(parser, f"ifso-{FIGURE1}")
    parser.add_argument("--data", action="append", metavar="cifar10:PATH.npz", help="images for a ResNet, too")
    parser.add_argument("--seeds", type=int, metavar="N", help="runs of each network (2; 1 with --smoke)")
    parser.add_argument("--networks", nargs="+", metavar="NAME", help="only these networks of the study")
    parser.add_argument("--masks", type=int, metavar="N", help="masks for each network (60; 9 with --smoke)")
    parser.add_argument("--workers", type=positive, metavar="N", help="processes (all cores)")
    parser.add_argument("--resume", action="store_true", help="go on in --out")
    parser.add_argument("--renew", action="store_true", help="as --resume, but scores and estimates are computed again")


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("studies", nargs="*", help=argparse.SUPPRESS)
    _add_common(parser)
    parser.add_argument("--data", action="append", metavar="NAME:PATH", help="cifar10:PATH or cifar100:PATH")
    parser.add_argument("--seeds", type=positive, metavar="N", help="runs of each candidate (1)")
    parser.add_argument("--epochs", type=positive, metavar="N", help="of fine-tuning (60)")
    parser.add_argument("--validation", type=positive, metavar="N", help="training images that are held out (10000)")
    _add_device(parser)


_OPTIONS = {"table": _add_table, "draw": _add_draw, FIGURE1: _add_figure1, RECIPE: _add_recipe}
