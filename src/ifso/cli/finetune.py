"""``ifso finetune``: trains the pruned networks of runs, several side by side, with or without their teachers."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifso.cli.console import complain, print_json
from ifso.cli.distributed import World, joined, leave
from ifso.cli.inputs import data_options, name_networks, report_notes
from ifso.cli.options import add_option, add_shared, real, resumable, seed
from ifso.cli.train import (
    TEACHER,
    add_data,
    add_recipe,
    add_running,
    gather,
    has_boxes,
    settings_of,
    show_trained,
    train_each,
)
from ifso.errors import IfsoError
from ifso.runs.arguments import FINETUNE, without_folders

if TYPE_CHECKING:
    from torch import nn

    from ifso.cli.train import Say
    from ifso.data import Data
    from ifso.runs.open import OpenedRun
    from ifso.training.runs import Training
    from ifso.training.settings import TrainSettings

DESCRIPTION = (
    "Fine-tune the pruned network of a run, or those of several side by side, into RUN/finetune. "
    "What is not given is as in the recipe. Under torchrun, one run is trained by all ranks."
)
DISTILL, DISTILL_BOXES = 0.9, 0.5
"""The weight of the teacher in ``--distill`` without one, for labels and for boxes."""


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("finetune", help="fine-tune pruned networks", description=DESCRIPTION)
    group = parser.add_argument_group("what is fine-tuned")
    group.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a folder that ifso prune --out made")
    add_option(group, "out", Path, "DIR", "another folder than RUN/finetune, for one run")
    add_option(group, "model", str, "MODEL", "if its file has moved, or the run does not tell it")
    add_option(group, "weights", str, "FILE", "of the unpruned network, if they have moved")
    add_shared(group, "pretrained")
    add_option(group, "data", str, "DATA", "what ifso prune takes as --data (that of the run)")
    add_shared(group, "unverified")
    add_data(group)
    how = parser.add_argument_group("how it is trained")
    add_recipe(how)
    words = (
        f"learn from the unpruned network, too, with this weight ({DISTILL}, or {DISTILL_BOXES} on coco: data; "
        "0 without --distill, 0.9 in ours)"
    )
    add_option(how, "distill", _weight, "WEIGHT", words, nargs="?", const=True)
    add_option(how, "teacher", str, "MODEL", "another teacher than the unpruned network, with --distill")
    add_option(how, "teacher_weights", str, "FILE", "its weights, safetensors or .pth")
    add_option(how, "temperature", real, "T", "that softens what the teacher says (4)")
    add_option(how, "seed", seed, "N", "fixes everything that is random (that of the run)")
    where = parser.add_argument_group("where and how it runs")
    add_running(where)
    words = "train in the shape before pruning, with zeros, where that is the same: quicker on a GPU (cuda: yes)"
    add_option(where, "padded", bool, "", words)
    parser.set_defaults(run=run)


def _weight(text: str) -> float:
    try:
        return real(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no weight; write --distill after the runs, or --distill=0.9"
        ) from None


@dataclass(frozen=True)
class FinetunePlan:
    """One of the runs, where its fine-tuning goes, and how it is done."""

    run: OpenedRun
    folder: Path
    options: Mapping[str, Any]
    settings: TrainSettings

    def changed(self, name: str) -> str | None:
        """An option, if it is another than that of the run."""
        value = self.options.get(name)
        return None if value == self.run.arguments.get(name) else value


def run(args: argparse.Namespace) -> int:
    """Fine-tune, and print what came out."""
    _check_arguments(args)
    args.said = name_networks(args)
    plans = [_plan(args, folder) for folder in args.runs]
    options = [plan.options for plan in plans]
    common_option(options, "precision", "float32")
    command = ["finetune", "--resume", *([] if args.out is None else ["--out", str(args.out)]), *map(str, args.runs)]
    device, folders = common_option(options, "device", "cpu"), [plan.folder for plan in plans]
    with joined(device) as world, resumable(command, *folders, shown=world.is_first):

        def prepare(numbers: Sequence[int], say: Say) -> list[Training]:
            preparation = _Preparation(args, world, say)
            return [preparation.training(plans[number]) for number in numbers]

        outcomes = train_each("finetune", folders, prepare, args, world)
    pairs = zip(plans, outcomes, strict=True)
    failures = {str(plan.folder): each for plan, each in pairs if isinstance(each, IfsoError)}
    if failures and len(outcomes) == 1:
        raise next(iter(failures.values()))
    summaries = [each for each in outcomes if isinstance(each, dict)]
    if world.is_first and args.json:
        words = {folder: " ".join(str(failure).split()) for folder, failure in failures.items()}
        print_json({"runs": summaries, "failures": words})
    elif world.is_first and summaries:
        show_trained(summaries)
    for folder, failure in failures.items() if world.is_first else ():
        complain(f"error: {folder}: {failure}")
    return leave(max((failure.exit_status for failure in failures.values()), default=0))


def common_option(options: Sequence[Mapping[str, Any]], name: str, default: str) -> str:
    """The value that all trainings side by side have of an option."""
    values = sorted({str(each.get(name, default)) for each in options})
    if len(values) > 1:
        raise IfsoError(f"trainings with --{name} {' and '.join(values)} cannot go on side by side; resume them apart")
    return values[0] if values else default


def _check_arguments(args: argparse.Namespace) -> None:
    if len({folder.resolve() for folder in args.runs}) < len(args.runs):
        raise IfsoError("the same RUN is given twice; give each one once")
    if len(args.runs) > 1 and args.out is not None:
        raise IfsoError("--out is for one RUN; leave it out, and each is fine-tuned into RUN/finetune")
    if len(args.runs) > 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise IfsoError("under torchrun all ranks train one network; give one RUN, or run without torchrun")


def _plan(args: argparse.Namespace, folder: Path) -> FinetunePlan:
    """How a run is fine-tuned. Detectors are padded on request only: they fill a GPU, and take less memory without."""
    from ifso.runs.open import open_run

    run = open_run(folder, model=args.model, unverified=args.unverified)
    target = args.out or folder / FINETUNE
    known = {name: run.arguments[name] for name in ("model", "weights", "data", "seed") if name in run.arguments}
    if args.distill is True:
        usual = DISTILL_BOXES if has_boxes(args.data or known.get("data")) else DISTILL
        args = argparse.Namespace(**{**vars(args), "distill": usual})
    options = gather(args, target, known, "ifso finetune", folder)
    on_gpu = options["device"].partition(":")[0] == "cuda"
    options.setdefault("padded", on_gpu and not args.resume and not has_boxes(options.get("data")))
    settings = settings_of(options)
    check_teacher_options(options, settings, pretrained=args.pretrained)
    told = {name: options[name] for name in ("model", *TEACHER) if name in options}
    return FinetunePlan(replace(run, arguments={**run.arguments, **told}), target, options, settings)


class _Preparation:
    """Opens data and teachers, and measures what these are worth, once for all runs that share them."""

    def __init__(self, args: argparse.Namespace, world: World, say: Say) -> None:
        self._args, self._world, self._say = args, world, say
        self._known: dict[Any, Any] = {}

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def training(self, plan: FinetunePlan) -> Training:
        """All that it takes to fine-tune the network of a run."""
        from ifso.surgery.recipe import digest_of
        from ifso.training.runs import Training

        data, validation = self._opened(plan), bool(plan.options.get("validation"))
        model = plan.run.pruned(self._world.device, data=data)
        teacher, before, fixed = self._taught(plan, data, model)
        told = {"data": without_folders(data.name), "validation": plan.options.get("validation", 0)}
        return Training(
            name=str(plan.run.folder), folder=plan.folder, model=model, data=data, settings=plan.settings,
            teacher=teacher, validation=validation, every=plan.options.get("evaluate_every", 1),
            fixed={"weights": digest_of(model), **told, **fixed},
            about={"run": str(plan.run.folder), "arguments": dict(plan.options)}, start="pruned",
            before=before, wide=self._wide(plan, data),
        )  # fmt: skip

    def _wide(self, plan: FinetunePlan, data: Data) -> nn.Module | None:
        """A network as that of a run was before pruning, to train the pruned one in; its weights do not matter."""
        from ifso.data.base import detects

        if not plan.options["padded"] or (detects(data) and not self._args.padded):
            return None
        return plan.run._network(data, None).to(self._world.device)

    def _opened(self, plan: FinetunePlan) -> Data:
        options = data_options(self._args, self._world, plan.settings.seed, plan.options.get("validation", 0))

        def opened() -> Data:
            data = plan.run.open_data(data=plan.changed("data"), **options)
            report_notes(data, self._say)
            return data

        near = plan.run.folder.resolve().parent
        return self._once((plan.options.get("data"), near, options["seed"], options["validation"]), opened)

    def _taught(
        self, plan: FinetunePlan, data: Data, pruned: nn.Module
    ) -> tuple[nn.Module | None, dict[str, float], dict[str, str]]:
        """The teacher, what networks beside the pruned one are worth, and what must be the same on resume.

        A teacher that cannot teach ``pruned`` is refused before it is measured.
        """
        from ifso.common.distributed import together
        from ifso.surgery.recipe import digest_of
        from ifso.training.distillation import check_teacher

        if not plan.settings.distill:
            return None, {}, {}
        if "teacher" not in plan.options:
            network = self._unpruned(plan, data)
            return network, self._worth(plan, data, unpruned=network), {}
        network = self._named(plan, data)
        together(partial(check_teacher, network, pruned, data))
        before, fixed = self._worth(plan, data, teacher=network), self._once(network, partial(digest_of, network))
        try:
            unpruned = self._unpruned(plan, data)
        except IfsoError as error:
            self._say(f"{plan.run.folder}: the unpruned network is not measured, because {error}")
        else:
            before = {**self._worth(plan, data, unpruned=unpruned), **before}
        return network, before, {"teacher_weights": fixed}

    def _unpruned(self, plan: FinetunePlan, data: Data) -> nn.Module:
        from ifso.common.distributed import together

        where = {"device": self._world.device, "pretrained": self._args.pretrained}
        make = partial(plan.run.original, weights=plan.changed("weights"), data=data, **where)
        key = plan.run.digest, plan.run.arguments.get("model"), plan.options.get("weights"), id(data)
        return self._once(key, partial(together, make))

    def _named(self, plan: FinetunePlan, data: Data) -> nn.Module:
        """The network of ``--teacher``; a file that the run tells of is looked for as those of the run are."""
        from ifso.common.distributed import together
        from ifso.models.registry import network_for

        name, weights = (self._option(plan, option) for option in TEACHER)
        where = {"device": self._world.device, "pretrained": self._args.pretrained}
        make = partial(network_for, str(name), data.num_classes, weights=weights, seed=plan.settings.seed, **where)
        return self._once((name, weights, id(data)), partial(together, make))

    def _option(self, plan: FinetunePlan, option: str) -> str | None:
        given: str | None = getattr(self._args, option)
        return plan.run.there(option) if given is None and option in plan.options else given

    def _worth(self, plan: FinetunePlan, data: Data, **networks: nn.Module) -> dict[str, float]:
        """The accuracy or mAP of networks, by the same names, in the memory layout of training; where it is known."""
        import torch

        from ifso.data.base import headline
        from ifso.training.evaluation import evaluate_once

        found = {}
        for name, network in networks.items():
            if plan.settings.channels_last:
                network.to(memory_format=torch.channels_last)
            validation = bool(plan.options.get("validation"))
            judge = partial(evaluate_once, network, data, plan.settings, validation=validation)
            measures = self._once(("worth", network), judge)
            if headline(data) in measures:
                found[name] = measures[headline(data)]
        return found


def check_teacher_options(options: Mapping[str, Any], settings: TrainSettings, *, pretrained: bool) -> None:
    """One line where a teacher has no weights, no name, or nothing to say."""
    from ifso.models.registry import is_program

    teacher = options.get("teacher")
    if teacher is None:
        if "teacher_weights" in options:
            raise IfsoError("--teacher-weights without --teacher; give the MODEL that they are of")
        return
    if not settings.distill:
        raise IfsoError(f"--teacher {teacher}, but nothing is distilled; add --distill, or --recipe ours")
    if "teacher_weights" not in options and not pretrained and not is_program(teacher):
        raise IfsoError(
            f"--teacher {teacher} has random weights; give trained ones with --teacher-weights, or published ones with "
            "--pretrained"
        )
