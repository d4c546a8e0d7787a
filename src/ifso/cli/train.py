"""``ifso train``: a network from scratch, or from weights, for ``ifso prune`` to begin with."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ifso.cli.console import path_from, print_json
from ifso.cli.distributed import World, joined, leave
from ifso.cli.finetune import show_trained
from ifso.cli.inputs import data_options, name_networks, report_notes
from ifso.cli.options import WEIGHTS, add_option, add_shared, seed
from ifso.cli.progress import training_progress
from ifso.cli.resume import resumable, without_folders
from ifso.cli.train_options import add_data, add_recipe, add_running, gather, settings_of
from ifso.errors import IfsoError
from ifso.runs.arguments import PATHS
from ifso.runs.open import found_again

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
        summary = _train(args, options, world)
    if world.is_first and args.json:
        print_json(summary)
    elif world.is_first:
        show_trained([summary])
        print(f"weights: {path_from(args.out, start) / 'model.safetensors'}")
    return leave(0)


def _train(args: argparse.Namespace, options: dict[str, Any], world: World) -> dict[str, Any]:
    import torch

    from ifso.data import open_data
    from ifso.models.registry import network_for
    from ifso.surgery.recipe import digest_of
    from ifso.training.runs import SilentTraining, Training, finished_summary, remove_checkpoint, train_side_by_side

    settings = settings_of(options)
    summary = finished_summary(args.out) if args.resume else None
    if summary is not None:
        if world.is_first:
            remove_checkpoint(args.out)
        return summary
    with training_progress("train") if world.is_first else nullcontext(SilentTraining()) as listener:
        data = open_data(options["data"], **data_options(args, world, settings.seed, options.get("validation", 0)))
        report_notes(data, listener.said)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            weights = options.get("weights")
            model = network_for(
                options["model"], data.num_classes, weights=weights, pretrained=args.pretrained, device=world.device
            )
        validation, given = options.get("validation", 0), bool(weights or args.pretrained)
        fixed = {
            "model": without_folders(options["model"]),
            "data": without_folders(data.name),
            "validation": validation,
            **({"weights": digest_of(model)} if given else {}),
        }
        training = Training(
            name=options["model"], folder=args.out, model=model, data=data, settings=settings,
            validation=bool(validation), every=options.get("evaluate_every", 1), fixed=fixed,
            about={"arguments": options}, start="weights given" if given else None,
        )  # fmt: skip
        for line in args.said:
            listener.said(line)
        outcome = train_side_by_side([training], listener, resume=args.resume, ranks=world.ranks)[0]
    if isinstance(outcome, IfsoError):
        raise outcome
    return outcome
