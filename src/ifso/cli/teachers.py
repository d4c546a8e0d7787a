"""Who teaches in ``ifso finetune``: the network before pruning, or another one that is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ifso.cli.train_options import TEACHER
from ifso.errors import IfsoError

if TYPE_CHECKING:
    import argparse

    from torch import nn

    from ifso.cli.distributed import World
    from ifso.cli.finetune import FinetunePlan
    from ifso.data import Data
    from ifso.training.settings import TrainSettings


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


class Teachers:
    """Opens teachers, and measures what they are worth, once for all runs that share them."""

    def __init__(self, args: argparse.Namespace, world: World, say: Callable[[str], None]) -> None:
        self._args, self._world, self._say = args, world, say
        self._known: dict[Any, tuple[nn.Module, float | None]] = {}
        self._digests: dict[nn.Module, str] = {}

    def of(
        self, plan: FinetunePlan, data: Data, pruned: nn.Module
    ) -> tuple[nn.Module | None, dict[str, float], dict[str, str]]:
        """The teacher, what networks beside the pruned one are worth, and what must be the same on resume.

        A teacher that cannot teach ``pruned`` is refused before it is measured.
        """
        from ifso.common.distributed import together
        from ifso.surgery.recipe import digest_of

        if not plan.settings.distill:
            return None, {}, {}
        shared = plan.run.digest, plan.run.arguments.get("model"), plan.options.get("weights"), id(data)
        where = {"device": self._world.device, "pretrained": self._args.pretrained}
        original = partial(plan.run.original, weights=plan.changed("weights"), data=data, **where)
        if "teacher" not in plan.options:
            network, worth = self._judged(shared, original, plan, data)
            return network, _measured(unpruned=worth), {}
        network, worth = self._named(plan, data, pruned)
        if network not in self._digests:
            self._digests[network] = digest_of(network)
        unpruned = None
        try:
            model = self._known[shared][0] if shared in self._known else together(original)
        except IfsoError as error:
            self._say(f"{plan.run.folder}: the unpruned network is not measured, because {error}")
        else:
            _, unpruned = self._judged(shared, lambda: model, plan, data)
        before = _measured(unpruned=unpruned, teacher=worth)
        return network, before, {"teacher_weights": self._digests[network]}

    def _named(self, plan: FinetunePlan, data: Data, pruned: nn.Module) -> tuple[nn.Module, float | None]:
        """The network of ``--teacher``; a file that the run tells of is looked for as those of the run are."""
        from ifso.common.distributed import together
        from ifso.training.teachers import check_teacher

        name, weights = (self._option(plan, option) for option in TEACHER)
        key = name, weights, id(data)
        made = partial(self._made, str(name), weights, plan, data)
        model = self._known[key][0] if key in self._known else together(made)
        together(partial(check_teacher, model, pruned, data))
        return self._judged(key, lambda: model, plan, data)

    def _option(self, plan: FinetunePlan, option: str) -> str | None:
        given: str | None = getattr(self._args, option)
        return plan.run.there(option) if given is None and option in plan.options else given

    def _made(self, name: str, weights: str | None, plan: FinetunePlan, data: Data) -> nn.Module:
        import torch

        from ifso.models.registry import network_for

        where = {"device": self._world.device, "pretrained": self._args.pretrained}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(plan.settings.seed)
            return network_for(name, data.num_classes, weights=weights, **where)

    def _judged(
        self, key: Any, make: Callable[[], nn.Module], plan: FinetunePlan, data: Data
    ) -> tuple[nn.Module, float | None]:
        """The network in the memory layout of training, and its accuracy or mAP; known by its key from now on."""
        import torch

        from ifso.data.base import headline
        from ifso.training.evaluation import evaluate_once

        if key not in self._known:
            model = make()
            if plan.settings.channels_last:
                model = model.to(memory_format=torch.channels_last)
            worth = evaluate_once(model, data, plan.settings, validation=bool(plan.options.get("validation")))
            self._known[key] = model, worth.get(headline(data))
        return self._known[key]


def _measured(**worth: float | None) -> dict[str, float]:
    return {name: value for name, value in worth.items() if value is not None}
