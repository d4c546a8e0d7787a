"""``ifso eval``: accuracy, costs, speed and memory of a network, or of those of a run before and after."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifso.cli.console import chatter_to_stderr, console, print_json, say, write_json
from ifso.cli.distributed import World, add_device, device_of, joined, leave
from ifso.cli.evaluation_report import STAGES, Report, report_parts
from ifso.cli.options import (
    BATCH,
    MODEL,
    add_json,
    add_opening,
    add_pretrained,
    compute_threads,
    detector_images,
    name_networks,
    positive,
    seed,
    shape,
    shapes_of,
    share,
    zeros,
)
from ifso.cli.train_options import report_notes
from ifso.errors import DataError, IfsoError, RunError
from ifso.runs.open import OpenedRun, add_finetuned, add_unverified, open_tuned

if TYPE_CHECKING:
    from torch import nn

    from ifso.data import Data
    from ifso.training.evaluation import Evaluation
    from ifso.training.profiling import Profile

DESCRIPTION = "Measure the networks of a run (unpruned, pruned, fine-tuned), or one network with --model and --data."
ALONE = "network"
BATCHES: Mapping[str, Any] = {"batch": 500, "train_batch": 128, "latency_batch": (1, 128)}
BOXES_BATCHES: Mapping[str, Any] = {"batch": 8, "train_batch": 2, "latency_batch": (1, 8)}
"""Sizes of batches that are not given, and for data with boxes."""


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("eval", help="measure accuracy, costs, speed and memory", description=DESCRIPTION)
    _add_task(parser.add_argument_group("what is measured"))
    _add_measuring(parser.add_argument_group("where and how"))
    parser.set_defaults(run=run)


def _add_task(group: Any) -> None:
    group.add_argument(
        "folder", nargs="?", type=Path, metavar="RUN", help="a folder that ifso prune --out or ifso finetune --out made"
    )
    group.add_argument("--model", metavar="MODEL", help=MODEL)
    group.add_argument("--weights", metavar="FILE", help="trained weights of the unpruned network (those of the run)")
    add_pretrained(group)
    group.add_argument("--data", metavar="DATA", help="what ifso prune takes as --data (that of the run)")
    add_opening(group)
    group.add_argument(
        "--only", action="append", choices=STAGES, metavar="NAME", help=f"{', '.join(STAGES)}; repeat it (all)"
    )
    add_finetuned(group)
    add_unverified(group)
    group.add_argument("--split", choices=("test", "validation"), default="test", help="which images (test)")
    group.add_argument(
        "--validation", type=share, metavar="SHARE", help="of the training set, or number of images, set apart"
    )
    group.add_argument("--seed", type=seed, metavar="N", help="that these were drawn with (that of the run)")


def _add_measuring(group: Any) -> None:
    usual = {name: f"{BATCHES[name]}; {BOXES_BATCHES[name]} with boxes" for name in BATCHES}
    add_device(group)
    group.add_argument("--precision", default="float32", metavar="NAME", help="float32, tf32, bf16 or fp16 (float32)")
    group.add_argument("--channels-last", action="store_true", help="channels-last memory layout")
    group.add_argument("--batch", type=positive, metavar="N", help=f"{BATCH} ({usual['batch']})")
    group.add_argument(
        "--latency-batch", action="append", type=positive, metavar="N",
        help="images to time; repeat it (1 and 128; 1 and 8 with boxes)",
    )  # fmt: skip
    group.add_argument(
        "--input",
        type=shape,
        metavar="1,3,32,32",
        help="that costs and time are measured on (the run's, or the data's)",
    )
    group.add_argument("--repeats", type=positive, default=15, metavar="N", help="timed runs of each (15)")
    group.add_argument(
        "--train-batch", type=positive, metavar="N",
        help=f"of the training step ({usual['train_batch']})",
    )  # fmt: skip
    group.add_argument("--threads", type=positive, metavar="N", help="of the CPU (as many as torch takes)")
    add_json(group)
    group.add_argument("--out", type=Path, metavar="FILE", help="write the JSON document into a file, too")


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    args.said = name_networks(args)
    _check_arguments(args)
    with chatter_to_stderr(), compute_threads(args.threads), joined(device_of(args.device, args.said)) as world:
        report = _measure(args, world)
    if report is not None:
        if args.out is not None:
            write_json(args.out, report.as_json())
        if args.json:
            print_json(report.as_json())
        else:
            console().print(*report_parts(report), sep="\n")
    return leave(0)


def _check_arguments(args: argparse.Namespace) -> None:
    from ifso.training.precision import check_precision

    if args.folder is None and (args.model is None or args.data is None):
        raise IfsoError("give a RUN folder, or a network with --model and --data; ifso eval --help says what they are")
    if args.folder is None and args.finetuned:
        raise IfsoError("--finetuned says where the fine-tuned network of a RUN is; give the RUN, too")
    if args.folder is None and args.only:
        raise IfsoError("--only chooses among the networks of a RUN; leave it out, or give the folder of a run")
    if args.validation is not None and args.split != "validation":
        raise IfsoError("--validation sets images apart for --split validation; give both or neither")
    if args.out is not None and not args.out.parent.is_dir():
        raise IfsoError(f"--out {args.out}: there is no folder {args.out.parent}; make it, or give another file")
    check_precision(args.precision)


def _measure(args: argparse.Namespace, world: World) -> Report | None:
    """Every rank evaluates its part of the images; the first one does the rest, and gives the report."""
    from ifso.common.batches import of_batch, size_of
    from ifso.data.base import detects
    from ifso.data.compatibility import check_fits
    from ifso.training.evaluation import quality
    from ifso.training.profiling import in_memory_format

    progress = say if world.is_first else lambda _: None
    run = (
        None
        if args.folder is None
        else open_tuned(args.folder, model=args.model, unverified=args.unverified, finetuned=args.finetuned)
    )
    data = _data(args, run, world)
    given = args.train_batch is not None
    for name, size in (BOXES_BATCHES if detects(data) else BATCHES).items():
        if getattr(args, name) is None:
            setattr(args, name, size)
    report_notes(data, progress)
    for line in args.said:
        progress(line)
    models, notes = _networks(args, run, data, world.device)
    batch = in_memory_format(_train_batch(data, args.train_batch, given), channels_last=args.channels_last)
    qualities = {}
    for name, model in models.items():
        progress(f"evaluating {f'the {name} network' if run else args.model} on {args.split} images of {data.name}")
        check_fits(model, data)
        qualities[name] = quality(model, data, _batches(args, data), args.precision, over_ranks=True)
    if not world.is_first:
        return None
    progress("counting costs, measuring time and memory")
    example = in_memory_format(_example(args, run, data, world.device), channels_last=args.channels_last)
    about = {
        **_about(args, run, data, world),
        "counted_on": shapes_of(of_batch(example, 1)),
        "train_batch": size_of(batch),
    }
    return Report(_measured(args, models, data, qualities, (example, batch)), about, tuple(notes))


def _train_batch(data: Data, size: int, given: bool) -> Any:
    """A batch for training, to measure memory with; a smaller one than usual of data that has fewer images."""
    while True:
        try:
            return next(iter(data.train_batches(size)))
        except DataError:
            if given or size == 1:
                raise
            size //= 2


def _data(args: argparse.Namespace, run: OpenedRun | None, world: World) -> Data:
    from ifso.data import open_data

    options: dict[str, Any] = {"device": world.device, "validation": args.validation or 0}
    options |= {"download": args.download, "workers": args.workers}
    if world.ranks > 1:
        options.update(rank=world.rank, ranks=world.ranks)
    if run is None:
        return open_data(args.data, seed=args.seed or 0, **options)
    seed = args.seed
    if args.split == "validation" and args.data is None:
        apart = _as_tuned(args, run)
        seed, options["validation"] = apart["seed"], apart["validation"] or 0
    return run.open_data(data=args.data, seed=seed, **options)


def _as_tuned(args: argparse.Namespace, run: OpenedRun) -> dict[str, Any]:
    """Which images to set apart: those that the fine-tuning was not shown, where there is one that held some back."""
    given = {"validation": args.validation, "seed": args.seed}
    for name, tuned in run.set_apart.items():
        if given[name] not in (None, tuned):
            raise IfsoError(
                f"--{name} {given[name]}: the fine-tuning in {run.finetune} had {tuned}, and was trained on some of "
                f"these images; leave --{name} out"
            )
        given[name] = tuned
    return given


def _batches(args: argparse.Namespace, data: Data) -> Any:
    from ifso.data.from_file import FileData

    if args.split == "test":
        return data.test_batches(args.batch)
    apart = isinstance(data, FileData) or getattr(data, "validation", None) is not None
    if not apart:
        raise IfsoError("--split validation: say with --validation how much of the training set was set apart")
    return data.validation_batches(args.batch)


def _networks(
    args: argparse.Namespace, run: OpenedRun | None, data: Data, device: str
) -> tuple[dict[str, nn.Module], list[str]]:
    """Those that there are, and notes on those that there are not."""
    import torch

    from ifso.models.registry import is_program, network_for
    from ifso.surgery.recipe import recipe_of

    networks: dict[str, nn.Module] = {}
    notes = []
    if run is None:
        torch.manual_seed(args.seed or 0)
        networks[ALONE] = network_for(
            args.model, data.num_classes, weights=args.weights, pretrained=args.pretrained, device=device
        )
        if not (args.weights or args.pretrained or is_program(args.model)):
            notes.append("The weights are random: none were given with --weights.")
    else:
        for name, open_network in _stages(args, run, data, device).items():
            opened, why = open_network()
            if opened is not None:
                networks[name] = opened
            elif args.only:
                raise IfsoError(f"--only {name}: {why}")
            else:
                notes.append(f"No {name} network: {why}.")
        earlier = recipe_of(networks[STAGES[0]]) if STAGES[0] in networks else None
        if earlier is not None and earlier.removed_units:
            notes.append(
                f"The run began with the network of {run.arguments.get('weights', 'an earlier run')}, pruned before."
            )
    if args.channels_last:
        networks = {name: model.to(memory_format=torch.channels_last) for name, model in networks.items()}
    return networks, notes


def _stages(
    args: argparse.Namespace, run: OpenedRun, data: Data, device: str
) -> dict[str, Callable[[], tuple[nn.Module | None, str]]]:
    """By the names that are asked for: what gives the network, or None and why there is none."""

    def unpruned() -> tuple[nn.Module | None, str]:
        try:
            return run.original(device=device, weights=args.weights, pretrained=args.pretrained, data=data), ""
        except RunError as error:
            if args.weights or args.only:
                raise
            if not run.by_python or "weights" in run.arguments:
                raise RunError(f"{error}, or measure the rest: --only pruned") from error
            return None, str(error)

    def finetuned() -> tuple[nn.Module | None, str]:
        why = {"none": "was not run", "unfinished": "is not finished"}.get(run.finetuning, "")
        return run.finetuned(device, data=data), f"the fine-tuning in {run.finetune} {why}"

    ways = (unpruned, lambda: (run.pruned(device, data=data), ""), finetuned)
    return {name: way for name, way in zip(STAGES, ways, strict=True) if not args.only or name in args.only}


def _measured(
    args: argparse.Namespace,
    models: Mapping[str, nn.Module],
    data: Data,
    qualities: Mapping[str, Evaluation],
    inputs: tuple[Any, Any],
) -> dict[str, Profile]:
    """Costs and times on the first of ``inputs``, an example; memory on the second, a training batch."""
    from ifso.training.profiling import Profile, costs_of, time_forward, training_peak

    example, train_batch = inputs
    timings = [
        time_forward(models, example, batch, args.precision, repeats=args.repeats) for batch in args.latency_batch
    ]
    return {
        name: Profile(
            qualities[name],
            *costs_of(model, example, args.precision),
            tuple(timing[name] for timing in timings),
            training_peak(model, train_batch, data.loss_fn, args.precision),
        )
        for name, model in models.items()
    }


def _example(args: argparse.Namespace, run: OpenedRun | None, data: Data, device: str) -> Any:
    """What costs are counted on: the input that was named, here or for the run, or the first one of the data."""
    from ifso.data.base import detects

    sizes = args.input or (None if run is None else run.arguments.get("input"))
    if sizes is None:
        return data.example_inputs()
    return detector_images(sizes, device=device) if detects(data) else zeros(sizes, device)


def _about(args: argparse.Namespace, run: OpenedRun | None, data: Data, world: World) -> dict[str, Any]:
    """On what and how it was measured."""
    import torch

    from ifso._version import __version__
    from ifso.training.profiling import hardware

    return {
        "run": None if run is None else str(run.folder),
        "model": args.model or (run.arguments["model"] if run else None),
        "data": data.name,
        "split": args.split,
        "precision": args.precision,
        "channels_last": args.channels_last,
        "ranks": world.ranks,
        "hardware": hardware(world.device),
        "torch": str(torch.__version__),
        "ifso": __version__,
    }
