"""``ifso repro --draw``: the figures of the paper as SVG and PNG, from what is there."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ifso.cli.console import print_json, say
from ifso.errors import IfsoError

if TYPE_CHECKING:
    from ifso_repro.figures.drawing import Drawn, Source

OUT, FIGURE1_OUT = Path("repro"), Path("ifso-figure1")


def run(args: argparse.Namespace) -> int:
    """Draw the figures that were named, or all of which something was run."""
    from ifso_repro.figures.drawing import STRUCTURES

    if args.recipes and len(args.recipes) > 1:
        raise IfsoError(f"--recipes {' '.join(args.recipes)}: a picture shows one of them; draw it once for each")
    if args.runs and (not args.studies or not set(args.studies) <= set(STRUCTURES)):
        raise IfsoError(f"--runs shows the layers of runs: name {' or '.join(STRUCTURES)}, and nothing else")
    drawn = _drawn(args, _source(args))
    if args.json:
        listed = [{"figure": d.figure, "files": [str(f) for f in d.files], "not_run": list(d.missing)} for d in drawn]
        print_json({"figures": listed})
        return 0
    for each in drawn:
        print(f"{each.figure}: {', '.join(map(str, each.files))}")
        for words in each.missing:
            print(f"  not run: {words}")
    return 0


def _source(args: argparse.Namespace) -> Source:
    from ifso_repro.figures.drawing import Source

    recipe = args.recipes[0] if args.recipes else None
    runs = tuple(args.runs or ())
    return Source(args.out or OUT, args.out or FIGURE1_OUT, runs, recipe, args.criteria, args.smoke)


def _drawn(args: argparse.Namespace, source: Source) -> list[Drawn]:
    """Named figures must be there; of all others, those that are."""
    from ifso_repro.figures.drawing import FIGURES, NothingToDraw, draw_figure

    if args.studies:
        return [draw_figure(name, source) for name in dict.fromkeys(args.studies)]
    drawn = []
    for name in FIGURES:
        try:
            drawn.append(draw_figure(name, source))
        except NothingToDraw as error:
            say(f"{name}: {error}")
    if not drawn:
        raise NothingToDraw(f"there is nothing to draw in {source.out}; say with --out where results are")
    return drawn
