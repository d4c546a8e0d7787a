"""``ifso prune``: from a trained network to a smaller one, at a budget."""

from __future__ import annotations

import argparse
import functools
import shlex
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifso.cli.console import chatter_to_stderr, console, place_of, print_json
from ifso.cli.distributed import Place, joined, leave
from ifso.cli.eval_options import real, seed
from ifso.cli.help import add_help
from ifso.cli.inspect import add_pretrained, images_of, shape, words_of, zeros_of
from ifso.cli.prune_path import path_of, path_table
from ifso.cli.prune_settings import COSTS, PASSED_ON, STAGED, criterion_of, gather, schedule_of, usual_of
from ifso.errors import IfsoError
from ifso.pruning.progress import progress
from ifso.tasks import PRUNING_BATCH, PRUNING_RATE

if TYPE_CHECKING:
    from torch import nn

    from ifso.data.base import Data

DESCRIPTION = (
    "Prune a trained network to a budget. Each budget is the share KEPT: --macs 0.5 keeps half, --macs 0.8 0.65 0.5 "
    "leaves a network for each share. By default units go in stages and the weights that are left are fitted in closed "
    "form, without training. --preset paper is Algorithm 2 of the paper; so is any option that only Algorithm 2 has."
)
DATA = "digits, cifar10:PATH, cifar100:PATH, imagenet:PATH, folder:PATH, jpegs:FILE.npz, coco:PATH or file.py:factory"

RANDOM = "the network has random weights; give trained ones with --weights FILE, or --pretrained for published ones"


def add_parser(commands: Any) -> None:
    """Register the command. Options have no defaults here: what is not given is left to ``ifso.prune``."""
    parser = commands.add_parser(
        "prune", help="prune a trained network to a budget", description=DESCRIPTION, add_help=False
    )
    add_help(parser, _names)
    _add_task(parser.add_argument_group("what is pruned"))
    _add_budget(parser.add_argument_group("budget, one or more"))
    _add_method(parser.add_argument_group("how units are chosen"))
    _add_stages(parser.add_argument_group("the staged run, which is the default"))
    _add_algorithm_2(parser.add_argument_group("Algorithm 2 of the paper; each of these asks for it"))
    _add_running(parser.add_argument_group("where and how it runs"))
    parser.set_defaults(run=run)


def _add_task(group: Any) -> None:
    group.add_argument("--model", metavar="MODEL", help="torchvision:NAME, timm:NAME, ifso:NAME or file.py:factory")
    group.add_argument("--weights", metavar="FILE", help="trained weights (random ones otherwise)")
    add_pretrained(group)
    group.add_argument("--data", metavar="DATA", help=DATA)
    group.add_argument("--download", action="store_true", help="fetch CIFAR into the folder of --data if need be")
    group.add_argument(
        "--input", type=shape, metavar="1,3,32,32", help="shape of the input that costs are counted on (the data's)"
    )
    group.add_argument(
        "--batch", type=int, metavar="N",
        help=f"samples in a batch, of each rank under torchrun "
        f"({PRUNING_BATCH['classification']}; {PRUNING_BATCH['detection']} with boxes)",
    )  # fmt: skip
    group.add_argument(
        "--ignore", nargs="+", action="extend", metavar="NAME", help="modules to leave alone, by name or pattern"
    )
    group.add_argument("--only", nargs="+", action="extend", metavar="NAME", help="modules that may lose units (all)")


def _add_budget(group: Any) -> None:
    words = {
        "macs": "multiply-adds of convolutions, linear layers and matrix products",
        "conv_macs": "multiply-adds of convolutions only, as in the paper",
        "params": "parameters",
        "activations": "numbers that these operations write",
        "latency": "measured seconds of one forward pass",
    }
    for cost in COSTS:
        option, several = f"--{cost.replace('_', '-')}", {} if cost == "latency" else {"nargs": "+"}
        group.add_argument(option, type=float, metavar="SHARE", help=f"kept of the {words[cost]}", **several)
    words_of_flops = "the same as --macs: two FLOPs are a multiply-add, so that the share is the same"
    group.add_argument("--flops", type=float, nargs="+", metavar="SHARE", help=words_of_flops)


def _add_method(group: Any) -> None:
    group.add_argument("--criterion", metavar="NAME", help="what scores the units (true-loss; ifso in Algorithm 2)")
    group.add_argument(
        "--criterion-option", action="append", metavar="KEY=VALUE", help="for example inverse=neumann; repeat it"
    )
    group.add_argument(
        "--preset", metavar="NAME", help="Algorithm 2: paper as the paper has it, authors as its authors' program does"
    )
    group.add_argument("--schedule", metavar="NAME", help="staged, incremental, one-shot or mixed:SHARE (staged)")
    group.add_argument(
        "--normalize", metavar="NAME",
        help="what scores are divided by (what the budget counts; sqrt-memory in Algorithm 2)",
    )  # fmt: skip
    group.add_argument("--round-to", type=int, metavar="N", help="channels of pruned layers are a multiple of this")
    group.add_argument("--min-units", type=int, metavar="N", help="units that stay in every layer (1)")
    group.add_argument(
        "--min-share",
        type=real,
        metavar="X",
        help="share of its units that every layer keeps (0.1; 0 in Algorithm 2)",
    )
    group.add_argument(
        "--eval-mode", action="store_const", const=False, dest="train_mode",
        help="score (and step) with the running statistics of batch norms and without dropout",
    )  # fmt: skip
    group.add_argument(
        "--recalibrate", type=int, metavar="N",
        help="batches to renew batch-norm statistics with (20; all calibration batches in a staged run); 0: none",
    )  # fmt: skip
    group.add_argument("--weight-update", type=int, metavar="N", help="batches for ΔW of Proposition 1 (0: none)")


def _add_stages(group: Any) -> None:
    group.add_argument(
        "--update", action=argparse.BooleanOptionalAction, help="fit the weights that are left in each stage (yes)"
    )
    group.add_argument(
        "--recover", type=int, metavar="N",
        help="steps of distillation from the unpruned network at the end, undone if they do harm (0)",
    )  # fmt: skip
    group.add_argument(
        "--stop", type=real, metavar="X",
        help="end with the last network that lost at most X points on the test set (accuracy, or mAP with boxes)",
    )  # fmt: skip
    group.add_argument(
        "--calibration", type=int, metavar="N", help="training samples it looks at (1024; fewer for large networks)"
    )


def _add_algorithm_2(group: Any) -> None:
    group.add_argument("--accumulate", type=int, metavar="K", help="scores and steps before a removal (10)")
    group.add_argument("--accumulation", metavar="NAME", help="sum of these scores, or last: only the K-th (sum)")
    group.add_argument("--batches-per-score", type=int, metavar="N", help="batches of one score (2)")
    group.add_argument("--units-per-step", type=int, metavar="N", help="units that go at a time (1)")
    group.add_argument(
        "--lr", type=real, metavar="RATE",
        help=f"learning rate between removals "
        f"({PRUNING_RATE['classification']:g}; 0.1 with --preset authors; {PRUNING_RATE['detection']:g} with boxes)",
    )  # fmt: skip


def _add_running(group: Any) -> None:
    group.add_argument("--out", type=Path, required=True, metavar="RUN", help="the folder of the run")
    group.add_argument(
        "--resume", nargs="?", const=True, choices=("auto",), metavar="auto",
        help="go on with the run in RUN, which needs no other options; --resume auto: start one if there is none",
    )  # fmt: skip
    group.add_argument("--overwrite", action="store_true", help="give up the run that RUN holds, once all is checked")
    group.add_argument("--seed", type=seed, metavar="N", help="fixes everything that is random (0)")
    group.add_argument("--device", metavar="NAME", help="cpu or cuda (cpu)")
    group.add_argument("--precision", metavar="NAME", help="of the network (float32)")
    group.add_argument("--channels-last", action="store_true", default=None, help="channels-last memory layout")
    group.add_argument("--tensorboard", action="store_true", help="write scalars into RUN/tensorboard")
    group.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Prune, and print what came out."""
    if args.overwrite and args.resume:
        raise IfsoError("--overwrite gives up the run that --resume would go on with; leave one of them out")
    if args.resume == "auto":
        args.resume = _holds_run(args.out)
    settings, here = gather(args), Path.cwd()
    with joined(settings.get("device", "cpu")) as place:
        result = _watched(settings, args, place)
    if place.speaks and args.json:
        print_json({**result.summary(), "path": [step.as_json() for step in path_of(result)]})
    elif place.speaks:
        print(result)
        if any(isinstance(settings.get(cost), list) for cost in COSTS):
            console().print("", path_table(path_of(result)), sep="\n")
        print(f"run folder: {place_of(args.out, here)}")
    return leave(0)


def _holds_run(folder: Path) -> bool:
    from ifso.runs.folder import holds_run

    return holds_run(folder)


def _watched(settings: dict[str, Any], args: argparse.Namespace, place: Place) -> Any:
    """The result; after Ctrl-C the command that goes on is shown."""
    try:
        with chatter_to_stderr():
            return _prune(settings, args, place)
    except KeyboardInterrupt:
        if place.speaks and (args.out / "config.json").is_file():
            print(f"to go on: {shlex.join(['ifso', 'prune', '--resume', '--out', str(args.out)])}", file=sys.stderr)
        raise


def _prune(settings: dict[str, Any], args: argparse.Namespace, place: Place) -> Any:
    """Open the data, make the model and prune it. Every rank has the same model, and its part of the joint batches."""
    import torch

    from ifso.cli.tensorboard import TensorBoardListener
    from ifso.cli.train_options import tell_notes
    from ifso.data import open_data
    from ifso.data.base import detects
    from ifso.models.registry import is_program, network_for
    from ifso.pruning.budget import FLOPS, Budget
    from ifso.pruning.events import Silent
    from ifso.pruning.prune import prune
    from ifso.training.precision import loss_in, tensor_cores

    budget = Budget(**{cost: settings[cost] for cost in COSTS if cost in settings})
    options = _options(settings)
    others = [TensorBoardListener(args.out / "tensorboard")] if args.tensorboard and place.speaks else []
    seed = settings.get("seed", 0)
    torch.manual_seed(seed)
    precision = settings.get("precision", "float32")
    with tensor_cores(precision), progress(*others) if place.speaks else nullcontext(Silent()) as listener:
        data = open_data(
            settings["data"],
            device=place.device,
            seed=seed,
            rank=place.rank,
            ranks=place.ranks,
            download=args.download,
        )
        tell_notes(data, listener.said)
        if detects(data) and not args.resume and _steps_as_usual(settings):
            settings = {**settings, "lr": PRUNING_RATE[data.task]}
            options = _options(settings)
        given = {name: settings[name] for name in ("weights", "channels_last") if name in settings}
        model = network_for(
            settings["model"], data.num_classes, pretrained=args.pretrained, device=place.device, **given
        )
        _check_fits(model, data)
        if not (args.pretrained or "weights" in settings or is_program(settings["model"])):
            listener.said(RANDOM)
        if args.flops:
            listener.said(FLOPS)
        model.train(settings.get("train_mode", True))
        example = _example_inputs(settings, data, place.device)
        return prune(
            model,
            data.train_batches(batch_size=settings.get("batch", PRUNING_BATCH[data.task])),
            loss_in(precision, data.loss_fn),
            budget=budget,
            example_inputs=example,
            evaluate=_evaluation(data, precision),
            listener=listener,
            about={"arguments": settings, **({"counted_on": words_of(example)} if detects(data) else {})},
            **options,
            **_place(args),
        )


def _place(args: argparse.Namespace) -> dict[str, Any]:
    """Where the run is, and whether it is there already."""
    if args.resume:
        return {"resume": args.out}
    return {"out": args.out, **({"overwrite": True} if args.overwrite else {})}


def _options(settings: dict[str, Any]) -> dict[str, Any]:
    """What ``ifso.prune`` is told beside the task: only what was asked for."""
    from ifso.pruning.settings import sgd

    options = {name: settings[name] for name in PASSED_ON if name in settings}
    if "criterion" in settings or "criterion_option" in settings:
        name = settings.get("criterion", usual_of(settings)["criterion"])
        options["criterion"] = criterion_of(name, settings.get("criterion_option", ()))
    if "schedule" in settings:
        options["schedule"] = schedule_of(settings["schedule"])
    if "lr" in settings:
        if not settings["lr"] > 0:
            raise IfsoError(f"--lr {settings['lr']}: give a learning rate above 0")
        options["optimizer"] = functools.partial(sgd, learning_rate=settings["lr"])
    return options


def _steps_as_usual(settings: dict[str, Any]) -> bool:
    """Are there steps of an optimizer, whose rate nobody chose?

    >>> [_steps_as_usual(given) for given in ({}, {"preset": "paper"}, {"preset": "authors"}, {"lr": 0.1})]
    [False, True, False, False]
    """
    chosen = "lr" in settings or settings.get("preset") == "authors"
    return not chosen and settings.get("schedule", usual_of(settings)["schedule"]) != STAGED


def _check_fits(model: nn.Module, data: Data) -> None:
    """A network that is no detector where there are boxes, or has too few classes, is refused before any work."""
    from ifso.data.base import detects
    from ifso.data.compatibility import check_detector_fits
    from ifso.errors import DataError
    from ifso.models.detectors import is_detector
    from ifso.tasks.classification import cross_entropy

    if detects(data):
        check_detector_fits(model, data)
    elif data.loss_fn is cross_entropy and is_detector(model):
        raise DataError(f"{data.name} has no boxes, but the network is a detector; give coco:PATH, or a classifier")


def _example_inputs(settings: dict[str, Any], data: Data, device: str) -> Any:
    from ifso.data.base import detects

    if "input" not in settings:
        return data.example_inputs()
    if detects(data):
        return images_of(settings["input"], device=device)
    return zeros_of(settings["input"], device)


def _evaluation(data: Data, precision: str) -> Callable[[nn.Module], dict[str, float]] | None:
    """Accuracy on the test set, or average precision; None for data without a test set, and of another kind."""
    from ifso.data.base import detects
    from ifso.errors import DataError
    from ifso.tasks.classification import cross_entropy
    from ifso.training.average_precision import check_evaluator
    from ifso.training.precision import autocast

    try:
        batches = data.test_batches()
    except DataError:
        return None
    if data.loss_fn is not cross_entropy and not detects(data):
        return None
    if detects(data):
        check_evaluator()
    values = _average_precision if detects(data) else _accuracy

    def measure(model: nn.Module) -> dict[str, float]:
        with autocast(precision, next(model.parameters()).device):
            return values(model, batches)

    return measure


def _accuracy(model: nn.Module, batches: Any) -> dict[str, float]:
    from ifso.training.evaluation import evaluate

    found = evaluate(model, batches, over_ranks=True)
    return {"accuracy": found.top1, "test_loss": found.loss}


def _average_precision(model: nn.Module, batches: Any) -> dict[str, float]:
    from ifso.training.average_precision import evaluate_detector

    found = evaluate_detector(model, batches, over_ranks=True)
    values = {"map": found.map, "map50": found.map50, "map75": found.map75}
    return {name: value for name, value in values.items() if value is not None}


def _names() -> str:
    """What can be chosen."""
    from ifso.criteria.registry import names
    from ifso.pruning.selection import NORMALIZERS
    from ifso.pruning.settings import PRESETS
    from ifso.training.precision import SCORE_PRECISIONS

    lists = {"criterion": names(), "preset": PRESETS, "normalize": NORMALIZERS, "precision": SCORE_PRECISIONS}
    return " ".join(f"--{option}: {', '.join(choices)}." for option, choices in lists.items())
