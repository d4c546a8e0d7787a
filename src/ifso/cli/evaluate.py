"""``ifso eval``: accuracy, costs, speed and memory of a network, or of those of a run before and after."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifso.cli.console import chatter_to_stderr, console, print_json, say, table, write_json
from ifso.cli.distributed import World, device_of, joined, leave
from ifso.cli.inputs import compute_threads, data_options, example_input, name_networks, report_notes, shapes_of
from ifso.cli.options import BATCH, add_option, add_shared, positive, seed, shape, share
from ifso.common.text import amount, with_error
from ifso.errors import DataError, IfsoError, RunError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType
    from torch import nn

    from ifso.common.loss_fn import LossFn
    from ifso.data import Data
    from ifso.runs.open import OpenedRun
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
    group = parser.add_argument_group("what is measured")
    words = "a folder that ifso prune --out or ifso finetune --out made"
    group.add_argument("folder", nargs="?", type=Path, metavar="RUN", help=words)
    add_shared(group, "model")
    add_option(group, "weights", str, "FILE", "trained weights of the unpruned network (those of the run)")
    add_shared(group, "pretrained")
    add_option(group, "data", str, "DATA", "what ifso prune takes as --data (that of the run)")
    add_shared(group, "download", "workers")
    add_option(group, "only", str, "NAME", f"{', '.join(STAGES)}; repeat it (all)", action="append", choices=STAGES)
    add_shared(group, "finetuned", "unverified")
    group.add_argument("--split", choices=("test", "validation"), default="test", help="which images (test)")
    add_option(group, "validation", share, "SHARE", "of the training set, or number of images, set apart")
    add_option(group, "seed", seed, "N", "that these were drawn with (that of the run)")
    group = parser.add_argument_group("where and how")
    usual = {name: f"{BATCHES[name]}; {BOXES_BATCHES[name]} with boxes" for name in BATCHES}
    add_shared(group, "device")
    add_option(group, "precision", str, "NAME", "float32, tf32, bf16 or fp16 (float32)", default="float32")
    add_shared(group, "channels_last")
    add_option(group, "batch", positive, "N", f"{BATCH} ({usual['batch']})")
    words = "images to time; repeat it (1 and 128; 1 and 8 with boxes)"
    add_option(group, "latency_batch", positive, "N", words, action="append")
    words = "that costs and time are measured on (the run's, or the data's)"
    add_option(group, "input", shape, "1,3,32,32", words)
    add_option(group, "repeats", positive, "N", "timed runs of each (15)", default=15)
    add_option(group, "train_batch", positive, "N", f"of the training step ({usual['train_batch']})")
    add_option(group, "threads", positive, "N", "of the CPU (as many as torch takes)")
    add_shared(group, "json")
    add_option(group, "out", Path, "FILE", "write the JSON document into a file, too")
    parser.set_defaults(run=run)


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
    from ifso.runs.open import open_tuned
    from ifso.training.evaluation import quality
    from ifso.training.profiling import in_memory_format

    progress = say if world.is_first else lambda _: None
    run = None
    if args.folder is not None:
        run = open_tuned(args.folder, model=args.model, unverified=args.unverified, finetuned=args.finetuned)
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
    sizes = args.input or (None if run is None else run.arguments.get("input"))
    example = in_memory_format(example_input(sizes, data, world.device), channels_last=args.channels_last)
    about = {
        **_about(args, run, data, world),
        "counted_on": shapes_of(of_batch(example, 1)),
        "train_batch": size_of(batch),
    }
    timed = {"batches": args.latency_batch, "repeats": args.repeats}
    measured = profiles(models, qualities, example, batch, data.loss_fn, args.precision, **timed)
    return Report(measured, about, tuple(notes))


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
    """The images set apart are those that the fine-tuning was not shown, where there is one that held some back."""
    from ifso.data import open_data

    if run is None:
        return open_data(args.data, **data_options(args, world, args.seed or 0, args.validation or 0))
    apart = {"validation": args.validation, "seed": args.seed}
    if args.split == "validation" and args.data is None:
        for name, tuned in run.set_apart.items():
            if apart[name] not in (None, tuned):
                raise IfsoError(
                    f"--{name} {apart[name]}: the fine-tuning in {run.finetune} had {tuned}, and was trained on some "
                    f"of these images; leave --{name} out"
                )
            apart[name] = tuned
    return run.open_data(data=args.data, **data_options(args, world, apart["seed"], apart["validation"] or 0))


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
        given = {"weights": args.weights, "pretrained": args.pretrained}
        networks[ALONE] = network_for(args.model, data.num_classes, device=device, **given)
        if not (args.weights or args.pretrained or is_program(args.model)):
            notes.append("The weights are random: none were given with --weights.")
    else:
        for name in STAGES if not args.only else [name for name in STAGES if name in args.only]:
            opened, why = _opened(name, args, run, data, device)
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


def _opened(
    name: str, args: argparse.Namespace, run: OpenedRun, data: Data, device: str
) -> tuple[nn.Module | None, str]:
    """One of the :data:`STAGES`, or None and why it is not there."""
    if name == "pruned":
        return run.pruned(device, data=data), ""
    if name == "fine-tuned":
        why = {"none": "was not run", "unfinished": "is not finished"}.get(run.finetuning, "")
        return run.finetuned(device, data=data), f"the fine-tuning in {run.finetune} {why}"
    try:
        return run.original(device=device, weights=args.weights, pretrained=args.pretrained, data=data), ""
    except RunError as error:
        if args.weights or args.only:
            raise
        if not run.by_python or "weights" in run.arguments:
            raise RunError(f"{error}, or measure the rest: --only pruned") from error
        return None, str(error)


def profiles(
    models: Mapping[str, nn.Module],
    qualities: Mapping[str, Evaluation],
    example: Any,
    train_batch: Any,
    loss_fn: LossFn,
    precision: str,
    *,
    batches: Sequence[int] = (1,),
    **repeats: int,
) -> dict[str, Profile]:
    """Costs and times of networks on an example, times in ``batches`` of it; memory on a training batch."""
    from ifso.training.profiling import Profile, costs_of, time_forward, training_peak

    timings = [time_forward(models, example, batch, precision, **repeats) for batch in batches]
    found = {}
    for name, model in models.items():
        costs, times = costs_of(model, example, precision), tuple(timing[name] for timing in timings)
        found[name] = Profile(qualities[name], *costs, times, training_peak(model, train_batch, loss_fn, precision))
    return found


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


STAGES = ("unpruned", "pruned", "fine-tuned")
COSTS = {"macs": "MACs", "params": "parameters"}
AVERAGES = {
    "map": "mAP",
    "map50": "mAP50",
    "map75": "mAP75",
    "map_small": "mAP, small boxes",
    "map_medium": "mAP, medium boxes",
    "map_large": "mAP, large boxes",
}
SHARES = ("macs", "conv_macs", "params", "activations")
NOT_THERE = "—"


@dataclass(frozen=True)
class Report:
    """What was measured, by the name of the network; ``about`` says on what and how, ``notes`` what is left out."""

    measured: dict[str, Profile]
    about: dict[str, Any]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """As plain values."""
        from ifso.common.serialization import finite

        networks = {name: {**network.as_dict(), **self.shares(network)} for name, network in self.measured.items()}
        return finite({**self.about, "networks": networks, "notes": list(self.notes)})

    def shares(self, network: Profile) -> dict[str, float]:
        """What is left of the costs of the unpruned network, if that was measured."""
        whole = self.measured.get(STAGES[0])
        if whole is None:
            return {}
        return {f"{kind}_share": getattr(network.cost, kind) / max(getattr(whole.cost, kind), 1) for kind in SHARES}


def report_parts(report: Report) -> list[RenderableType]:
    """What is printed: a title, a table with one row for each number, and remarks."""
    about, some = report.about, next(iter(report.measured.values()))
    title = f"{about['model']} on {some.quality.samples:,} {about['split']} images of {about['data']}"
    rows = [(label, *cells) for label, cells in _rows(report)]
    return [title, table(("", *report.measured), rows), *_remarks(report)]


def _rows(report: Report) -> Iterator[tuple[str, list[str]]]:
    networks = list(report.measured.values())
    yield from _qualities([network.quality for network in networks])
    for kind, label in COSTS.items():
        yield label, [amount(getattr(network.cost, kind)) + _share(report, network, kind) for network in networks]
    memory = [_bytes(network.activation_bytes) + _share(report, network, "activations") for network in networks]
    yield "activations of one image", memory
    for index, timing in enumerate(networks[0].timings):
        timings = [network.timings[index] for network in networks]
        times = [f"{each.latency.median * 1e3:.2f} ms ± {each.latency.spread * 5e2:.2f}" for each in timings]
        yield f"latency, batch {timing.batch}", times
        if timing.batch > 1:
            speeds = [_speed(timing.throughput) for timing in timings]
            yield f"throughput, batch {timing.batch}", speeds
    label = f"peak of a training step, batch {report.about['train_batch']}"
    yield label, [_bytes(network.training_peak) for network in networks]


def _qualities(qualities: list[Evaluation]) -> Iterator[tuple[str, list[str]]]:
    """Accuracies and losses of classifiers; of detectors average precision, whole, by area and by category."""
    detected = [quality.detection for quality in qualities if quality.detection is not None]
    if not detected:
        yield "top-1", [accuracy(quality.top1, quality.samples) for quality in qualities]
        if any(quality.top5 is not None for quality in qualities):
            yield "top-5", [accuracy(quality.top5, quality.samples) for quality in qualities]
        yield "loss", [NOT_THERE if quality.loss is None else f"{quality.loss:.4f}" for quality in qualities]
        return
    for name, label in AVERAGES.items():
        yield label, [accuracy(getattr(each, name)) for each in detected]
    for category in detected[0].by_category:
        yield f"mAP of {category}", [accuracy(each.by_category.get(category)) for each in detected]


def _remarks(report: Report) -> list[str]:
    """How it was measured, and what is missing."""
    from ifso.training.profiling import CPU_PEAK, GPU_PEAK

    about, hardware = report.about, report.about["hardware"]
    on_gpu = hardware["device"] != hardware["cpu"]
    threads = "" if on_gpu else f", {hardware['threads']} thread{'' if hardware['threads'] == 1 else 's'}"
    layout = ", channels-last" if about["channels_last"] else ""
    counts = sorted({len(timing.latency.samples) for network in report.measured.values() for timing in network.timings})
    runs = " or ".join(map(str, counts))
    has_accuracy = any(network.quality.top1 is not None for network in report.measured.values())
    return [
        f"Measured on {hardware['device']}{threads}, with torch {about['torch']}, {about['precision']}{layout}.",
        f"Costs and latency: of inputs {about['counted_on']}.",
        *(["Accuracy: ± its standard error."] if has_accuracy else []),
        f"Latency: median of {runs} warm runs ± half the width of their middle half.",
        f"Peak of a training step: {GPU_PEAK if on_gpu else CPU_PEAK}.",
        *report.notes,
    ]


def accuracy(share: float | None, samples: int | None = None) -> str:
    """With its standard error, if it is known on how many samples.

    >>> accuracy(90.0, 900), accuracy(90.0)
    ('90.00 ± 1.00 %', '90.00 %')
    """
    return NOT_THERE if share is None else f"{with_error(share, samples)} %"


def _share(report: Report, network: Profile, kind: str) -> str:
    shares = report.shares(network)
    return f" ({shares[f'{kind}_share']:.1%})" if shares and len(report.measured) > 1 else ""


def _bytes(count: int) -> str:
    return f"{amount(count)}B" if count >= 1000 else f"{count} B"


def _speed(throughput: float) -> str:
    """Images a second.

    >>> _speed(12345.6), _speed(2.345)
    ('12,346 images/s', '2.3 images/s')
    """
    return f"{throughput:,.0f} images/s" if throughput >= 10 else f"{throughput:.1f} images/s"
