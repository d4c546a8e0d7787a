"""What ``ifso prune`` is asked for: options of the command line, and those of the run that is resumed."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ifso.cli.inputs import name_networks
from ifso.cli.options import (
    BATCH,
    SHARED,
    WEIGHTS,
    add_option,
    add_shared,
    check_same_options,
    real,
    seed,
    shape,
    stored_options,
)
from ifso.common.text import literal
from ifso.errors import BudgetError, IfsoError, RunError, ScoreError
from ifso.runs.arguments import opened_with
from ifso.tasks import PRUNING_BATCH, PRUNING_RATE

COSTS = {
    "macs": "multiply-adds of convolutions, linear layers and matrix products",
    "conv_macs": "multiply-adds of convolutions only, as in the paper",
    "params": "parameters",
    "activations": "numbers that these operations write",
    "latency": "measured seconds of one forward pass",
}
FLOORS = ("min_units", "min_share")
ALL = "*"
"""The pattern of all layers."""
ALGORITHM_2 = ("accumulate", "accumulation", "batches_per_score", "units_per_step", "lr")
"""Options that only Algorithm 2 has: one of them asks for it."""
PASSED_ON = (
    "preset", "normalize", "update", "recover", "stop", "calibration", "accumulate", "accumulation",
    "batches_per_score", "units_per_step", "round_to", "min_units", "min_share", "ignore", "only", "seed",
    "recalibrate", "weight_update", "train_mode",
)  # fmt: skip
"""Options that ``ifso.prune`` has under the same name."""
STORED = (
    *("model", "weights", "data", "input", "batch", "lr", "device", "precision", "channels_last"),
    *("criterion", "criterion_option", "schedule"),
    *COSTS,
    *PASSED_ON,
)
"""Options that a run is resumed with."""

STAGED, ONE_SHOT, MIXED = "staged", "one-shot", "mixed"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare them all without defaults: what is not given is left to ``ifso.prune``."""
    _add_task(parser.add_argument_group("what is pruned"))
    budget = parser.add_argument_group("budget, one or more")
    for cost, words in COSTS.items():
        several = {} if cost == "latency" else {"nargs": "+"}
        add_option(budget, cost, float, "SHARE", f"kept of the {words}", **several)
    words = "the same as --macs: two FLOPs are a multiply-add, so that the share is the same"
    add_option(budget, "flops", float, "SHARE", words, nargs="+")
    _add_method(parser.add_argument_group("how units are chosen"))
    _add_stages(parser.add_argument_group("the staged run, which is the default"))
    _add_algorithm_2(parser.add_argument_group("Algorithm 2 of the paper; each of these asks for it"))
    _add_running(parser.add_argument_group("where and how it runs"))


def _add_task(group: Any) -> None:
    words = "the folder of a run or a training, whose network is pruned further; then nothing else is needed here"
    group.add_argument("source", nargs="?", type=Path, metavar="RUN", help=words)
    add_shared(group, "model")
    add_option(group, "weights", str, "FILE", f"{WEIGHTS} (random ones otherwise)")
    add_shared(group, "pretrained", "data", "download", "workers")
    add_option(group, "input", shape, "1,3,32,32", "shape of the input that costs are counted on (the data's)")
    few, many = PRUNING_BATCH["detection"], PRUNING_BATCH["classification"]
    add_option(group, "batch", int, "N", f"{BATCH} ({many}; {few} with boxes)")
    several: dict[str, Any] = {"nargs": "+", "action": "extend"}
    add_option(group, "ignore", str, "NAME", "modules to leave alone, by name or pattern", **several)
    add_option(group, "only", str, "NAME", "modules that may lose units (all)", **several)


def _add_method(group: Any) -> None:
    add_option(group, "criterion", str, "NAME", "what scores the units (true-loss; ifso in Algorithm 2)")
    words = "for example inverse=neumann; repeat it"
    add_option(group, "criterion_option", str, "KEY=VALUE", words, action="append")
    words = "Algorithm 2: paper as the paper has it, authors as its authors' program does"
    add_option(group, "preset", str, "NAME", words)
    add_option(group, "schedule", str, "NAME", "staged, incremental, one-shot or mixed:SHARE (staged)")
    words = "what scores are divided by (what the budget counts; sqrt-memory in Algorithm 2)"
    add_option(group, "normalize", str, "NAME", words)
    add_option(group, "round_to", int, "N", "channels of pruned layers are a multiple of this")
    words = "units that stay in every layer (1); NAME=N says it of layers by name or pattern"
    add_option(group, "min_units", functools.partial(floor, int), "N", words, nargs="+")
    words = "share of its units that every layer keeps (0.1; 0 in Algorithm 2); NAME=X of layers by name or pattern"
    add_option(group, "min_share", functools.partial(floor, real), "X", words, nargs="+")
    words = "score (and step) with the running statistics of batch norms and without dropout"
    group.add_argument("--eval-mode", action="store_const", const=False, dest="train_mode", help=words)
    words = "batches to renew batch-norm statistics with (20; all calibration batches in a staged run); 0: none"
    add_option(group, "recalibrate", int, "N", words)
    add_option(group, "weight_update", int, "N", "batches for ΔW of Proposition 1 (0: none)")


def _add_stages(group: Any) -> None:
    add_option(group, "update", bool, "", "fit the weights that are left in each stage (yes)")
    words = "steps of distillation from the unpruned network at the end, undone if they do harm (0)"
    add_option(group, "recover", int, "N", words)
    words = "end with the last network that lost at most X points on the test set (accuracy, or mAP with boxes)"
    add_option(group, "stop", real, "X", words)
    words = "training samples that each process looks at, in whole batches (1024; fewer for large networks)"
    add_option(group, "calibration", int, "N", words)


def _add_algorithm_2(group: Any) -> None:
    add_option(group, "accumulate", int, "K", "scores and steps before a removal (10)")
    add_option(group, "accumulation", str, "NAME", "sum of these scores, or last: only the K-th (sum)")
    add_option(group, "batches_per_score", int, "N", "batches of one score (2)")
    add_option(group, "units_per_step", int, "N", "units that go at a time (1)")
    rate, boxes = PRUNING_RATE["classification"], PRUNING_RATE["detection"]
    words = f"learning rate between removals ({rate:g}; 0.1 with --preset authors; {boxes:g} with boxes)"
    add_option(group, "lr", real, "RATE", words)


def _add_running(group: Any) -> None:
    add_option(group, "out", Path, "RUN", "the folder of the run")
    words = "write nothing: show the stages, about how long they take, and the smallest budget that can be reached"
    add_option(group, "dry_run", None, "", words)
    words = "go on with the run in RUN, which needs no other options; --resume auto: start one if there is none"
    add_option(group, "resume", str, "auto", words, nargs="?", const=True, choices=("auto",))
    add_option(group, "overwrite", None, "", "give up the run that RUN holds, once all is checked")
    add_option(group, "seed", seed, "N", "fixes everything that is random (0)")
    add_shared(group, "device")
    add_option(group, "precision", str, "NAME", "of the network (float32)")
    add_option(group, "channels_last", *SHARED["channels_last"], default=None)
    add_option(group, "tensorboard", None, "", "write scalars into RUN/tensorboard")
    add_shared(group, "json")


def floor(kind: Callable[[str], Any], text: str) -> tuple[str, Any]:
    """A floor of layers by the pattern of their names; ``*`` where none is said.

    >>> floor(int, "4"), floor(real, "layer1.*=0.5")
    (('*', 4), ('layer1.*', 0.5))
    """
    name, equals, number = text.rpartition("=")
    try:
        return name if equals else ALL, kind(number)
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"{text!r} is no floor; write a number, or NAME=NUMBER") from None


def gather(args: argparse.Namespace) -> dict[str, Any]:
    """The options that were given, as JSON values, with those of the run in ``--out`` if that is resumed."""
    if args.flops and args.macs:
        raise BudgetError("--macs and --flops mean the same; give one of them")
    args.macs = args.macs or args.flops
    args.said = name_networks(args, args.source)
    for name in FLOORS:
        floors = dict(getattr(args, name) or ())
        setattr(args, name, floors[ALL] if list(floors) == [ALL] else floors or None)
    given = {name: getattr(args, name) for name in STORED if getattr(args, name) not in (None, [])}
    single = {cost: given[cost][0] for cost in COSTS if isinstance(given.get(cost), list) and len(given[cost]) == 1}
    given = json.loads(json.dumps({**given, **single}))
    stored = _stored(args.out) if args.resume else {}
    if stored:
        check_same_options(given, stored, *opened_with(args.out, stored))
        from ifso.runs.open import found_again

        stored = found_again(args.out, stored, [*given, *(["data"] if args.download else ())])
    settings = {**stored, **given}
    for name in ("model", "data"):
        if name not in settings:
            raise IfsoError(f"--{name} is missing; ifso prune --help says what it can be")
    if not any(cost in settings for cost in COSTS):
        named = ", ".join(f"--{cost.replace('_', '-')}" for cost in COSTS)
        raise BudgetError(f"no budget; give the share KEPT of one of {named}: --macs 0.5 keeps half")
    return settings


def _stored(run: Path) -> dict[str, Any]:
    """The options that a run was started with. Where Algorithm 2 was the default then, it is named now."""
    from ifso.runs.files import CONFIG, TRAINING, is_there, read_config

    settings = read_config(run / CONFIG)["settings"] if is_there(run / CONFIG) else {}
    if TRAINING in settings:
        raise RunError(f"{run} holds a training and no pruning; go on with it: ifso train --resume --out {run}")
    stored = stored_options(run, STORED, "ifso prune")
    earlier = settings.get("schedule", STAGED) != STAGED and defaults_of(stored)["schedule"] == STAGED
    return {"preset": "paper", **stored} if earlier else stored


def defaults_of(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The defaults of options that were not given: of the staged run or, if that was asked for, of Algorithm 2.

    >>> defaults_of({"lr": 0.1})["schedule"], defaults_of({"schedule": "staged", "stop": 1})["criterion"]
    ('incremental', 'true-loss')
    """
    from ifso.pruning.budget import usual

    other = settings.get("schedule", STAGED)
    asked = {name: settings.get(name) for name in ALGORITHM_2}
    return usual(settings.get("preset"), {**asked, "schedule": None if other == STAGED else other})


def takes_default_steps(settings: Mapping[str, Any]) -> bool:
    """Whether there are steps of an optimizer, whose rate nobody chose.

    >>> [takes_default_steps(given) for given in ({}, {"preset": "paper"}, {"preset": "authors"}, {"lr": 0.1})]
    [False, True, False, False]
    """
    chosen = "lr" in settings or settings.get("preset") == "authors"
    return not chosen and _schedule(settings) != STAGED


def takes_steps(settings: Mapping[str, Any]) -> bool:
    """Whether there are steps of an optimizer between removals, each of one batch of all processes.

    >>> [takes_steps(given) for given in ({}, {"preset": "paper"}, {"schedule": "one-shot"}, {"schedule": "mixed:0.5"})]
    [False, True, False, True]
    """
    return _schedule(settings) not in (STAGED, ONE_SHOT)


def _schedule(settings: Mapping[str, Any]) -> str:
    return settings.get("schedule", defaults_of(settings)["schedule"])


def prune_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ``ifso.prune`` beside the task and the budget: only what was asked for."""
    from ifso.pruning.settings import sgd

    arguments = {name: settings[name] for name in PASSED_ON if name in settings}
    if "criterion" in settings or "criterion_option" in settings:
        name = settings.get("criterion", defaults_of(settings)["criterion"])
        arguments["criterion"] = criterion_of(name, settings.get("criterion_option", ()))
    if "schedule" in settings:
        arguments["schedule"] = schedule_of(settings["schedule"])
    if "lr" in settings:
        if not settings["lr"] > 0:
            raise IfsoError(f"--lr {settings['lr']}: give a learning rate above 0")
        arguments["optimizer"] = functools.partial(sgd, learning_rate=settings["lr"])
    return arguments


def criterion_of(name: str, options: Sequence[str]) -> Any:
    """The criterion with options ``KEY=VALUE``; a dot leads into an option that holds options itself.

    >>> criterion_of("ifso", ["inverse=neumann", "inverse_options.terms=2", "careful=true"])
    Ifso(inverse='neumann', coupled='shared', weights='layers', curvature='hessian', inverse_options={'terms': 2},
    micro_batch=None, careful=True)
    """
    from ifso.criteria.registry import create

    arguments: dict[str, Any] = {}
    for option in options:
        key, equals, text = option.partition("=")
        if not key or not equals:
            raise ScoreError(f"--criterion-option {option!r} is not KEY=VALUE, for example inverse=neumann")
        *path, last = key.split(".")
        level = arguments
        for part in path:
            level = level.setdefault(part, {})
            if not isinstance(level, dict):
                raise ScoreError(f"--criterion-option {option!r}: {part} was given a value of its own before")
        level[last] = literal(text)
    return create(name, **arguments)


def schedule_of(text: str) -> Any:
    """What ``ifso.prune`` takes as a schedule: ``mixed:0.75`` becomes ``ifso.Mixed(0.75)``, other names stay."""
    name, _, share = text.partition(":")
    if name != MIXED:
        return text
    from ifso.pruning.budget import Mixed

    try:
        return Mixed(float(share))
    except ValueError as error:
        raise IfsoError(
            f"--schedule {text!r}: write {MIXED}:SHARE, for example {MIXED}:0.75 for three quarters one by one"
        ) from error
