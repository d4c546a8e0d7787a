"""``ifso eval``: accuracy, costs, speed and memory of a network, or of those of a run before and after."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ifso.cli.console import chatter_to_stderr, console, print_json, say
from ifso.cli.distributed import Place, joined, leave
from ifso.cli.eval_options import BOXES, USUAL, add_measuring, add_task
from ifso.cli.eval_report import STAGES, Report, shown, write
from ifso.cli.inspect import images_of, words_of, zeros_of
from ifso.errors import DataError, IfsoError, RunError
from ifso.runs.open import OpenedRun, open_tuned

if TYPE_CHECKING:
    from torch import nn

    from ifso.data import Data
    from ifso.training.evaluation import Quality
    from ifso.training.profiling import Profile

DESCRIPTION = "Measure the networks of a run (unpruned, pruned, fine-tuned), or one network with --model and --data."
ALONE = "network"


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("eval", help="measure accuracy, costs, speed and memory", description=DESCRIPTION)
    add_task(parser.add_argument_group("what is measured"))
    add_measuring(parser.add_argument_group("where and how"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    _refuse_unclear(args)
    with chatter_to_stderr(), _threads(args.threads), joined(args.device) as place:
        report = _measure(args, place)
    if report is not None:
        if args.out is not None:
            write(args.out, report.as_json())
        if args.json:
            print_json(report.as_json())
        else:
            console().print(*shown(report), sep="\n")
    return leave(0)


def _refuse_unclear(args: argparse.Namespace) -> None:
    from ifso.training.precision import check_precision

    if args.folder is None and (args.model is None or args.data is None):
        raise IfsoError("give a RUN folder, or a network with --model and --data; ifso eval --help says what they are")
    if args.folder is None and args.only:
        raise IfsoError("--only chooses among the networks of a RUN; leave it out, or give the folder of a run")
    if args.validation is not None and args.split != "validation":
        raise IfsoError("--validation sets images apart for --split validation; give both or neither")
    if args.out is not None and not args.out.parent.is_dir():
        raise IfsoError(f"--out {args.out}: there is no folder {args.out.parent}; make it, or give another file")
    check_precision(args.precision)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _measure(args: argparse.Namespace, place: Place) -> Report | None:
    """Every rank evaluates its part of the images; the first one does the rest, and gives the report."""
    from ifso.common.batches import of_batch, size_of
    from ifso.data.compatibility import check_fits
    from ifso.training.evaluation import quality
    from ifso.training.profiling import in_memory_format

    tell = say if place.speaks else _silent
    run = None if args.folder is None else open_tuned(args.folder, model=args.model, unverified=args.unverified)
    data = _data(args, run, place)
    given = args.train_batch is not None
    _settle(args, data)
    for note in getattr(data, "notes", ()):
        tell(note)
    models, notes = _networks(args, run, data, place.device)
    batch = in_memory_format(_learned_from(data, args.train_batch, given), channels_last=args.channels_last)
    qualities = {}
    for name, model in models.items():
        tell(f"evaluating {f'the {name} network' if run else args.model} on {args.split} images of {data.name}")
        check_fits(model, data)
        batches = _batches(args, data)
        qualities[name] = quality(model, data, batches, args.precision, over_ranks=True)
    if not place.speaks:
        return None
    tell("counting costs, measuring time and memory")
    example = in_memory_format(_example(args, run, data, place.device), channels_last=args.channels_last)
    about = {
        **_about(args, run, data, place.device),
        "counted_on": words_of(of_batch(example, 1)),
        "train_batch": size_of(batch),
    }
    return Report(_measured(args, models, data, qualities, (example, batch)), about, tuple(notes))


def _learned_from(data: Data, size: int, given: bool) -> Any:
    """A batch for training, to measure memory with; a smaller one than usual of data that has fewer images."""
    while True:
        try:
            return next(iter(data.train_batches(size)))
        except DataError:
            if given or size == 1:
                raise
            size //= 2


def _settle(args: argparse.Namespace, data: Data) -> None:
    """Sizes of batches that were not given, as the data has them."""
    from ifso.data.base import detects

    for name, size in (BOXES if detects(data) else USUAL).items():
        if getattr(args, name) is None:
            setattr(args, name, size)


def _silent(line: str) -> None:
    """What other ranks say."""


def _data(args: argparse.Namespace, run: OpenedRun | None, place: Place) -> Data:
    from ifso.data import open_data

    options: dict[str, Any] = {"device": place.device, "validation": args.validation or 0, "download": args.download}
    if _ranks() > 1:
        options.update(rank=place.rank, ranks=_ranks())
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


def _ranks() -> int:
    """How many processes evaluate together."""
    import torch.distributed as dist

    from ifso.common.distributed import several

    return dist.get_world_size() if several() else 1


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

    from ifso.models.registry import network_for

    if run is None:
        torch.manual_seed(args.seed or 0)
        own = args.model.rpartition(":")[0].endswith(".py")
        model = network_for(
            args.model, data.num_classes, weights=args.weights, pretrained=args.pretrained, device=device
        )
        notes = (
            []
            if args.weights or args.pretrained or own
            else ["The weights are random: none were given with --weights."]
        )
        return {ALONE: _laid(model, args)}, notes
    found: dict[str, nn.Module] = {}
    notes = []
    for name, open_network in _stages(args, run, data, device).items():
        opened, why = open_network()
        if opened is not None:
            found[name] = _laid(opened, args)
        elif args.only:
            raise IfsoError(f"--only {name}: {why}")
        else:
            notes.append(f"No {name} network: {why}.")
    return found, notes


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
            if "data" in run.arguments:
                raise RunError(f"{error}, or measure the rest: --only pruned") from error
            return None, str(error)

    def finetuned() -> tuple[nn.Module | None, str]:
        why = {"none": "was not run", "unfinished": "is not finished"}.get(run.finetuning, "")
        return run.finetuned(device, data=data), f"the fine-tuning in {run.finetune} {why}"

    ways = (unpruned, lambda: (run.pruned(device, data=data), ""), finetuned)
    return {name: way for name, way in zip(STAGES, ways, strict=True) if not args.only or name in args.only}


def _laid(model: nn.Module, args: argparse.Namespace) -> nn.Module:
    import torch

    return model.to(memory_format=torch.channels_last) if args.channels_last else model


def _measured(
    args: argparse.Namespace,
    models: Mapping[str, nn.Module],
    data: Data,
    qualities: Mapping[str, Quality],
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
            tuple(found[name] for found in timings),
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
    return images_of(sizes, device=device) if detects(data) else zeros_of(sizes, device)


def _about(args: argparse.Namespace, run: OpenedRun | None, data: Data, device: str) -> dict[str, Any]:
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
        "ranks": _ranks(),
        "hardware": hardware(device),
        "torch": str(torch.__version__),
        "ifso": __version__,
    }
