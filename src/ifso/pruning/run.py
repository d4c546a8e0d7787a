"""A pruning run: score, remove, adapt, until the budget is met. In stages, or as Algorithm 2 of the paper has it."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from ifso.common.batches import BatchStream, on_device, rough_count, seed_of
from ifso.common.distributed import from_first, gathered, together
from ifso.common.loss_fn import LossFn, steady_
from ifso.common.serialization import finite
from ifso.common.torch_state import same_modes
from ifso.costs.cost import count
from ifso.costs.latency import LatencyModel
from ifso.errors import DataError, DivergedError, RankError, RunError, ScoreError
from ifso.graph.channel_graph import by_group, group_of
from ifso.pruning.budget import Phase, phases
from ifso.pruning.cost_tracker import Ledger
from ifso.pruning.events import Listener, Plan, Removal
from ifso.pruning.measures import compare, keep_on_the_way, outputs
from ifso.pruning.moves import Move, Moves
from ifso.pruning.recovery import Evaluate, Snapshot, norms_of
from ifso.pruning.result import Check, Network
from ifso.pruning.scoring_loop import ScoringLoop
from ifso.pruning.selection import Target, normalized, select, smallest_shares
from ifso.pruning.settings import Settings
from ifso.pruning.shrinking_network import ShrinkingNetwork, plain_state_of
from ifso.pruning.staged import run_stage
from ifso.runs.folder import RunFolder

SHRINK_AT = {"cpu": 0.15, "cuda": 0.2}
"""Units are taken out for real once that saves so much of the present MACs …"""

WORTH_IT = {"cpu": 1e10, "cuda": 2e12}
"""… and so many of them in every step. No clock decides, so that a resumed run does as the first one did."""

MULTIPLE = {"cpu": 1, "cuda": 8}
"""Then groups keep a multiple of so many, zeros among them."""

SCORES = "scores"
"""The last scores among the tensors of a checkpoint."""


@dataclass
class Progress:
    """Where a run stands; what of it is kept in a checkpoint beside tensors."""

    step: int = 0
    removals: int = 0
    rounds: int = 0
    seconds: float = 0.0
    timings: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    measures: list[dict[str, Any]] = field(default_factory=list)
    latency: dict[str, Any] | None = None
    stages: list[dict[str, Any]] = field(default_factory=list)
    stopped: str = ""

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """As a checkpoint has it; those of earlier versions know of no stages."""
        if not vars(cls()).keys() - {"stages", "stopped"} <= stored.keys() <= vars(cls()).keys():
            raise RunError("the checkpoint is of another version of ifso; resume with the one that began the run")
        return cls(**stored)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds within to a part of the run."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.timings[part] = self.timings.get(part, 0.0) + time.perf_counter() - start


@dataclass
class Run:
    """A run in progress. ``folder`` is None on all ranks but the first, and where nothing is to be written.

    ``examples`` are the first batches of all, on the device, for checks and measures: the same after a resume.
    ``calibration`` are the batches of a staged run, wherever they are; ``teacher`` is the unpruned network, if weights
    are fitted or steps of distillation are asked for. ``evaluate`` gives numbers about a model, by default its loss on
    the examples; ``networks`` are those for budgets on the way, ``config`` is what stands in ``config.json``.
    """

    network: ShrinkingNetwork
    scoring: ScoringLoop
    settings: Settings
    stream: BatchStream
    examples: Sequence[Any]
    loss_fn: LossFn
    moves: Moves
    progress: Progress
    listener: Listener
    folder: RunFolder | None = None
    checkpoint_every: float = 30.0
    shrink: bool = True
    calibration: Sequence[Any] = ()
    teacher: nn.Module | None = None
    evaluate: Evaluate | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    networks: list[Network] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scoring.tell = self.say
        self.checks: list[Check] = []
        self.metrics: list[dict[str, Any]] = []
        self.scores = torch.zeros(self.network.original.num_units, dtype=torch.float64, device="cpu")
        self._began = time.perf_counter() - self.progress.seconds
        self._written = time.perf_counter()
        self._shrunk_at = count(self.network.graph, self.network.graph.kept(None)).macs
        self._open_ledgers()
        self._good = Snapshot(lambda: {**self.scoring.tensors(), SCORES: self.scores})
        self._remember()

    def _remember(self) -> None:
        """This is a good state: to return to, and to be written."""
        self._good_state: dict[str, Any] | None = None
        self._good.renew()
        self.progress.seconds = self.seconds
        self._good_state = {
            "progress": copy.deepcopy(finite(vars(self.progress))),
            "position": list(self.stream.position),
            "optimizer": plain_state_of(self.scoring.optimizer),
            "can_shrink": self.network.can_shrink,
        }

    def _open_ledgers(self) -> None:
        extra = {}
        if self.progress.latency is not None:
            model = LatencyModel.from_json(self.progress.latency["model"])
            extra["latency"] = model.weights(self.network.original)
        self.ledger = Ledger(self.network.original, self.network.kept, extra)
        self._trail = self.ledger.copy()

    def reopen(self) -> None:
        """The model of latency is another one, and the network smaller: count from now on by what holds now."""
        self._open_ledgers()
        self.scoring.renew()
        self._remember()

    def undo(self) -> None:
        """Back to the last good state, which must be of the same shape."""
        self._good.restore_()
        self.scoring.renew()
        self._open_ledgers()

    def refuse_zeros(self, scores: Tensor) -> None:
        """ScoreError if nothing can be chosen by these scores."""
        if not bool(scores.any()) and not self.progress.removals:
            raise ScoreError(
                f"all scores of {self.scoring.criterion.name!r} are zero, so that nothing can be chosen by them; "
                "loss_fn must use the model that it is given, and the data must not be constant; nothing was pruned"
            )

    @contextmanager
    def calibrating(self) -> Iterator[None]:
        """Nothing is left out at random, and batch norms take the statistics of each batch (if ``train_mode``)."""
        model = self.network.model
        with same_modes(model):
            steady_(model, self.loss_fn, self.examples[0])
            for norm in norms_of(model) if self.settings.train_mode else ():
                norm.train()
            yield

    def batches_here(self) -> Iterator[Any]:
        """The calibration batches, each on the device when its turn comes."""
        return (on_device(batch, self.network.device) for batch in self.calibration)

    def say(self, line: str) -> None:
        """One line for a person, also in the result."""
        if line not in self.progress.notes:
            self.progress.notes.append(line)
            self.listener.said(line)

    def go(self) -> None:
        """Remove units until the budget is met."""
        targets, whole = self.settings.budget.targets, self.network.original
        course = phases(self.settings.schedule, self.settings.budget, self.settings.units_per_step)
        self.calibration = self.calibration[: min(gathered(len(self.calibration)))]
        self.listener.started(
            Plan(
                type(self.network.model).__name__, whole.num_units, targets,
                self.ledger.shares(), self.progress.removals, None if self.folder is None else str(self.folder.path),
                max(phase.stage for phase in course), count(whole, whole.kept(None)).as_dict(),
                partial(smallest_shares, self.ledger, self.moves, Target(self.settings.budget)),
            )
        )  # fmt: skip
        if self.progress.removals == 0:
            self._remember()
            self.write_checkpoint()
        try:
            for phase in course:
                if not phase.stage:
                    self.reach(phase)
                elif len(self.progress.stages) < phase.stage and not self.progress.stopped:
                    run_stage(self, phase, course[-1].stage)
        except (KeyboardInterrupt, RankError):
            self.write_checkpoint()
            raise
        self.write_checkpoint()

    def reach(self, phase: Phase) -> None:
        """Steps until the budget of a phase is met, whose network is kept if it is one of several."""
        target = Target(phase.budget)
        while target.gap(self.ledger.shares()) > 0:
            self._step(phase, target)
        several = phase.ends_at is not None and len(self.settings.budget.path) > 1
        if several and phase.budget.targets not in [stage["budget"] for stage in self.progress.stages]:
            self.progress.stages.append(keep_on_the_way(self, phase.budget))
            self.keep_state(write=True)

    def _step(self, phase: Phase, target: Target) -> None:
        with self.progress.timed("rounds"):
            scores, loss = self._collect(phase.train)
        made, ranked = self.choose(scores, target, phase.most)
        with self.progress.timed("selection"):
            self.scoring.remove_([unit for move in made for unit in move.units])
        self.scores.copy_(scores)
        self.record(made, ranked, loss)
        if self.shrink and target.gap(self.ledger.shares()) > 0:
            self.shrink_if_it_pays()
        self.keep_state()

    def choose(self, scores: Tensor, target: Target, most: int | None = None) -> tuple[list[Move], Tensor]:
        """What is to go by these scores, gone from the ledger already; and the scores by which it was chosen."""
        with self.progress.timed("selection"):
            ranked = normalized(scores, self.ledger, self.settings.normalize or "none")
            return select(self.ledger, self.moves, ranked, target, most=most), ranked

    def keep_state(self, write: bool = False) -> None:
        """This is where the run goes on if it is interrupted; ``write`` it at once, or if the last one is old."""
        with self.progress.timed("state"):
            self._remember()
            if write or time.perf_counter() - self._written >= self.checkpoint_every:
                self.write_checkpoint()

    def _collect(self, train: bool) -> tuple[Tensor, float]:
        """Scores [original units], of all rounds or of the last, and the mean loss of ``accumulate`` rounds."""
        needed = self.settings.accumulate if self.scoring.criterion.needs_batches or train else 1
        for number in range(needed):
            if self.settings.accumulation == "last" and number == needed - 1:
                self.scoring.forget_scores()
            batches = together(lambda: [next(self.stream) for _ in range(self.settings.batches_per_score)])
            torch.manual_seed(seed_of(self.settings.seed, self.progress.rounds))
            self.scoring.round(batches, train=train)
            self.progress.rounds += 1
        scores, loss = self.scoring.collect()
        if not math.isfinite(loss) or not bool(scores.isfinite().all()):
            self.stop(loss)
        self.refuse_zeros(scores)
        return scores, loss

    def stop(self, loss: float) -> NoReturn:
        """The last good state is put back, made smaller, and saved; then an error says what happened."""
        spoilt, (epoch, index) = gathered(int(self.scoring.spoilt)), self.stream.position
        self._good.restore_()
        self.compact_()
        kept = f"{self.ledger.shares()['macs']:.1%} of the MACs"
        where = "the model holds it"
        if self.folder is not None:
            self.folder.write_model(self.network.model, self.network.recipe())
            where = f"it is saved in {self.folder.path}"
        good = f"the run stopped at its last good state, after {self.progress.removals} removals with {kept}: {where}"
        if any(spoilt):
            bad = ", ".join(str(number) for number, count in enumerate(spoilt) if count)
            where = f"{sum(spoilt)} of them{f', on rank {bad}' if len(spoilt) > 1 else ''}"
            raise DataError(f"batches up to {index} of epoch {epoch} hold NaN or infinity ({where}); {good}")
        raise DivergedError(f"the loss is no longer finite ({loss}); {good}; a smaller learning rate may help")

    def record(self, made: Sequence[Move], ranked: Tensor, loss: float) -> None:
        """Tell everybody, and the folder, what went in this step, and by which scores the first units went."""
        self.progress.step += 1
        if self.folder is not None and self.progress.step == 1:
            self.folder.write_first_scores(by_group(self.network.original, ranked.float()))
        for move in made:
            self._trail.remove(move.units)
            self.progress.removals += 1
            self.progress.seconds = self.seconds
            removal = Removal(
                self.progress.removals, self.progress.step, self._places(move.units), move.score,
                self._trail.costs(), self._trail.shares(), loss, round(self.progress.seconds, 3),
            )  # fmt: skip
            self.metrics.append(removal.as_line())
            if self.folder is not None:
                self.folder.append(removal.as_line())
            self.listener.removed(removal)

    def _places(self, units: Sequence[int]) -> dict[str, tuple[int, ...]]:
        found: dict[str, list[int]] = {}
        for unit in units:
            group = group_of(self.network.original, unit)
            found.setdefault(group.name, []).append(unit - group.first)
        return {name: tuple(sorted(places)) for name, places in found.items()}

    def shrink_if_it_pays(self) -> None:
        """Take out for real what is zero, if that saves enough of the work to come."""
        kind = "cuda" if self.network.device.type == "cuda" else "cpu"
        multiple = MULTIPLE[kind]
        if self.ledger.costs()["macs"] > (1 - SHRINK_AT[kind]) * self._shrunk_at or not self.network.can_shrink:
            return
        with self.progress.timed("compaction"):
            saving = self.network.saving(multiple)
            if saving < SHRINK_AT[kind] or saving * self._shrunk_at * self._passes < WORTH_IT[kind]:
                return
            if not self.network.rehearse(multiple):
                self.say("units stay in memory until the end: a smaller network could not be told apart unit by unit")
                return
        self.compact_(multiple)
        self.scoring.renew()

    @cached_property
    def _passes(self) -> float:
        """Forward passes of the example inputs that a step is worth: a score counts 12, a gradient 3."""
        rounds = 12 * len(self.calibration)
        if not self.calibration:
            rounds = self.settings.accumulate * (12 * self.settings.batches_per_score + 3)
        return from_first(rounds * rough_count(self.examples[0]) / rough_count(self.network.original.inputs))

    def compact_(self, multiple: int = 1) -> None:
        """Take units out for real, and look whether the network still does the same."""
        with self.progress.timed("compaction"):
            self.network.zero_(self.scoring.optimizer)
            before = outputs(self.network, self.loss_fn, self.examples[0])
            self.network.compact_(self.scoring.optimizer, multiple)
            self.checks.append(compare(before, outputs(self.network, self.loss_fn, self.examples[0])))
            self._shrunk_at = count(self.network.graph, self.network.graph.kept(None)).macs

    def write_checkpoint(self) -> None:
        """Keep the last good state in the folder."""
        if self.folder is None or self._good_state is None:
            return
        self.folder.write_checkpoint(self._good_state["progress"]["removals"], self._good.copies, self._good_state)
        self._written = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since the run began, earlier parts of a resumed run included."""
        return time.perf_counter() - self._began

    def go_on_(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Take up what a checkpoint holds beside the network, the optimizer and the progress."""
        self.network.can_shrink = state["can_shrink"]
        self.scores.copy_(tensors[SCORES])
        self._remember()
