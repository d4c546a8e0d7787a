"""One run of a study, :class:`Job`: what it is called, how it prunes and how it fine-tunes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from ifso.errors import IfsoError
from ifso_repro.schema import DEFAULT_RUN, PRUNE_OPTIONS, SCRATCH, STEP, TAUGHT, UNPRUNED, Row, Variant

if TYPE_CHECKING:
    from ifso.training.settings import TrainSettings

OURS_TO_USE = ("lr", "batch", "path")
"""Options of pruning that are no keyword of ``ifso.prune``: they go into its optimizer, its batches and its budget."""

OF_THE_NETWORK = ("batch", "round_to", "min_units")
"""Options of pruning that the default run takes from a row, too: the others are those of Algorithm 2."""

PRESET = "paper"
"""What stands for options of pruning that a row does not name."""

DETECTORS_RECIPES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "detection": ("detection", {}),
    "distilled": ("detection", {"distill": 0.5}),
}
"""How detectors are fine-tuned, by boxes alone or by what the unpruned network says as well, as changes to a recipe."""

RECIPES_BY_CHANGES = {**DETECTORS_RECIPES, TAUGHT: ("patient", {})}
"""Recipes of rows only, as changes to one that a training has."""


@dataclass(frozen=True)
class Job:
    """One run: a row pruned by one criterion (with a variant of its options), fine-tuned by one recipe from a seed.

    ``path`` are the shares removed for which its pruning may leave a network, if that is for other rows, too.
    """

    row: Row
    criterion: str
    recipe: str
    seed: int = 0
    variant: Variant = field(default_factory=Variant)
    path: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """What the run and its file are called, such as ``resnet32-cifar10-50.ifso+normalize=none.paper.0``."""
        return job_name(self.row.name, self.criterion, self.changes, self.recipe, self.seed)

    @property
    def changes(self) -> dict[str, Any]:
        """The options of the variant that differ from what the row has anyway."""
        usual = {**self._usual_prune, **self._usual_criterion}
        return {key: value for key, value in self.variant.options.items() if usual.get(key) != value}

    @property
    def prune(self) -> dict[str, Any]:
        """All options of pruning but those of the criterion, as plain values."""
        changed = {key: value for key, value in self.changes.items() if key in PRUNE_OPTIONS}
        return {**self._usual_prune, **changed, **({"path": STEP} if self.passes else {})}

    @property
    def passes(self) -> tuple[float, ...]:
        """The shares removed for each of which the pruning leaves a network; empty where it has one end only."""
        schedule = {**self._usual_prune, **self.changes}.get("schedule", "incremental")
        return self.path if self.prunes and schedule == "incremental" else ()

    @property
    def criterion_options(self) -> dict[str, Any]:
        """Options of the criterion that the row and the variant give."""
        changed = {key: value for key, value in self.changes.items() if key not in PRUNE_OPTIONS}
        return {**self._usual_criterion, **changed}

    @property
    def teacher(self) -> Row | None:
        """The row whose unpruned network teaches, where that is another than the job's own."""
        if self.recipe != TAUGHT:
            return None
        if self.row.teacher is None:
            raise IfsoError(f"{self.name}: {self.row.name} has no teacher of its own; take another recipe")
        return self.row.teacher

    @property
    def _usual_prune(self) -> dict[str, Any]:
        if self.criterion == UNPRUNED:
            return {}
        if self.criterion in (DEFAULT_RUN, SCRATCH):
            return {key: self.row.prune[key] for key in OF_THE_NETWORK if key in self.row.prune}
        return {**self.row.prune, "normalize": self.row.normalize[self.criterion]}

    @property
    def _usual_criterion(self) -> Mapping[str, Any]:
        return self.row.criterion.get(self.criterion, {})

    @property
    def prunes(self) -> bool:
        """Whether anything is removed."""
        return self.criterion != UNPRUNED

    def prune_keywords(self) -> dict[str, Any]:
        """What :func:`ifso.prune` is called with, beside the network, its data and where to write."""
        from ifso.cli.prune_options import schedule_of
        from ifso.criteria.registry import create
        from ifso.pruning.budget import STAGED, Budget
        from ifso.pruning.settings import sgd

        keywords = {key: value for key, value in self.prune.items() if key not in OURS_TO_USE}
        if self.criterion == DEFAULT_RUN:
            keywords = {**{key: STAGED[key] for key in ("schedule", "update", "min_share")}, **keywords}
        else:
            keywords = {
                "preset": PRESET,
                **keywords,
                "schedule": schedule_of(self.prune.get("schedule", "incremental")),
            }
        if "lr" in self.prune:
            keywords["optimizer"] = partial(sgd, learning_rate=self.prune["lr"])
        kept = tuple(round(1 - share, 12) for share in self.passes or (self.row.removed,))
        budget = Budget(macs=kept if self.passes else kept[0])
        chance = {"seed": self.seed} if self.criterion == "random" else {}
        criterion = create(self.criterion, **self.criterion_options, **chance)
        return {**keywords, "budget": budget, "criterion": criterion, "seed": self.seed}

    def recorded_settings(self) -> dict[str, Any]:
        """The settings of a pruning as its ``config.json`` has them, and the rate of its optimizer."""
        from ifso.pruning.budget import PRESETS
        from ifso.pruning.settings import Settings

        keywords, known = self.prune_keywords(), {entry.name for entry in fields(Settings)}
        settings = Settings(**{key: value for key, value in keywords.items() if key in known}).as_dict()
        return {**json.loads(json.dumps(settings)), "lr": self.prune.get("lr", PRESETS[PRESET]["learning_rate"])}

    def train_settings(self) -> TrainSettings:
        """How the pruned network is fine-tuned; the epochs of the row are the paper's, other recipes have their own."""
        from ifso.training.settings import training_recipe

        changes = dict(self.row.finetune)
        if self.recipe not in ("paper", *DETECTORS_RECIPES):
            changes.pop("epochs", None)
        name, more = RECIPES_BY_CHANGES.get(self.recipe, (self.recipe, {}))
        return training_recipe(name, **{**changes, **more}, seed=self.seed)


def teacher_of(job: Job) -> dict[str, Any]:
    """What decides on the teacher of a job, as its result tells it; empty where it is the row's own network."""
    return {} if job.teacher is None else {"task": job.teacher.task, "base": job.teacher.base.made}


def job_name(row: str, criterion: str, changes: Mapping[str, Any], recipe: str, seed: int) -> str:
    """The name of a run, which is that of its file, too.

    >>> job_name("resnet32-cifar10-50", "ifso", {"inverse": "neumann", "inverse_options": {"terms": 2}}, "paper", 0)
    'resnet32-cifar10-50.ifso+inverse=neumann+terms=2.paper.0'
    """
    return f"{row}.{method_name(criterion, changes)}.{recipe}.{seed}"


def method_name(criterion: str, changes: Mapping[str, Any]) -> str:
    """A criterion with the options that differ.

    >>> method_name("ifso", {"schedule": "mixed:0.75"})
    'ifso+schedule=mixed-0.75'
    """
    return criterion + "".join(f"+{key}={str(value).replace(':', '-')}" for key, value in _leaves(changes))


def _leaves(options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in options.items():
        if isinstance(value, Mapping):
            yield from _leaves(value)
        else:
            yield key, value
