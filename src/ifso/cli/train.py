"""``ifso train``: a network from scratch, or from weights, for ``ifso prune`` to begin with."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifso.cli.console import path_from, print_json
from ifso.cli.distributed import World, joined, leave
from ifso.cli.finetune import show_trained, train_each
from ifso.cli.inputs import data_options, name_networks, report_notes
from ifso.cli.options import WEIGHTS, add_option, add_shared, seed
from ifso.cli.resume import resumable
from ifso.cli.train_options import add_data, add_recipe, add_running, gather, settings_of
from ifso.errors import IfsoError
from ifso.runs.arguments import PATHS, without_folders
from ifso.runs.open import found_again

if TYPE_CHECKING:
    from ifso.training.runs import Training

DESCRIPTION = (
    "Train a network; DIR/model.safetensors is then what ifso prune takes as --weights. "
    "What is not given is as in the recipe. Under torchrun, all ranks train it together."
)


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("train", help="train a network to be pruned", description=DESCRIPTION)
    task = parser.add_argument_group("what is trained")
    add_shared(task, "model")
    add_option(task, "weights", str, "FILE", f"{WEIGHTS}, to begin with (random ones otherwise)")
    add_shared(task, "pretrained", "data")
    add_option(task, "out", Path, "DIR", "the folder of the training", required=True)
    add_data(task)
    how = parser.add_argument_group("how it is trained")
    add_recipe(how)
    add_option(how, "seed", seed, "N", "fixes everything that is random (0)")
    add_running(parser.add_argument_group("where and how it runs"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train, and print what came out."""
    start = Path.cwd()
    args.said = name_networks(args)
    options = gather(args, args.out, {"distill": 0.0}, "ifso train")
    if args.resume:
        given = [name for name in PATHS if getattr(args, name) is not None]
        options = found_again(args.out, options, [*given, *(["data"] if args.download else ())])
    for name in ("model", "data"):
        if name not in options:
            raise IfsoError(f"--{name} is missing; ifso train --help says what it can be")
    command = ["train", "--resume", "--out", str(args.out)]
    with joined(options["device"]) as world, resumable(command, args.out, shown=world.is_first):
        prepare = partial(_training, args, options, world)
        (summary,) = train_each("train", [args.out], lambda _, say: [prepare(say)], args, world)
        if isinstance(summary, IfsoError):
            raise summary
    if world.is_first and args.json:
        print_json(summary)
    elif world.is_first:
        show_trained([summary])
        print(f"weights: {path_from(args.out, start) / 'model.safetensors'}")
    return leave(0)


def _training(args: argparse.Namespace, options: dict[str, Any], world: World, say: Callable[[str], None]) -> Training:
    """All that it takes: data, network, settings."""
    import torch

    from ifso.data import open_data
    from ifso.models.registry import network_for
    from ifso.surgery.recipe import digest_of
    from ifso.training.runs import Training

    settings, validation, weights = settings_of(options), options.get("validation", 0), options.get("weights")
    data = open_data(options["data"], **data_options(args, world, settings.seed, validation))
    report_notes(data, say)
    given = {"weights": weights, "pretrained": args.pretrained}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = network_for(options["model"], data.num_classes, device=world.device, **given)
    fixed = {
        "model": without_folders(options["model"]), "data": without_folders(data.name), "validation": validation,
        **({"weights": digest_of(model)} if any(given.values()) else {}),
    }  # fmt: skip
    return Training(
        name=options["model"], folder=args.out, model=model, data=data, settings=settings,
        validation=bool(validation), every=options.get("evaluate_every", 1), fixed=fixed,
        about={"arguments": options}, start="weights given" if any(given.values()) else None,
    )  # fmt: skip
