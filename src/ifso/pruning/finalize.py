"""The end of a run: the last surgery, what helps before training, every check, and the result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from torch import nn

from ifso.common.batch_stream import not_finite, on_device
from ifso.common.distributed import average_over_ranks_, copy_from_first_, from_first, sum_over_ranks, together
from ifso.common.module_state import named_tensors
from ifso.common.torch_state import same_modes
from ifso.costs.cost import count
from ifso.costs.latency import LatencyModel, measure_latency
from ifso.costs.verify import recount
from ifso.errors import DataError, IfsoError
from ifso.pruning.budget import Budget, phases
from ifso.pruning.cost_tracker import Ledger
from ifso.pruning.distillation import distil_, is_better
from ifso.pruning.reconstruction import reconstruct_
from ifso.pruning.recovery import Evaluate, Measure, Undo, mean_loss, norms_of, numbers, recalibrate_, update_weights_
from ifso.pruning.result import UNDONE, Network, PruneResult, networks_of
from ifso.pruning.run import Run
from ifso.pruning.selection import TOLERANCE, Target, smallest_shares
from ifso.pruning.shrinking_network import ShrinkingNetwork
from ifso.pruning.verify import Check, compare, outputs, refuse_failed, worst

LOSS_BATCHES = 4
"""Batches whose mean loss is measured where a user gives no ``evaluate``."""
MOST_CALIBRATIONS = 3
MOST_SHOWN = 4
TIMES = 3


class Finisher:
    """Brings a run to its end. ``evaluate`` gives numbers about a model; by default the loss of a few batches."""

    def __init__(self, run: Run, evaluate: Evaluate | None, about: Mapping[str, Any]) -> None:
        self._run, self._about = run, about
        self._evaluate = evaluate or self._loss
        self._networks: list[Network] = []
        run.measure, run.reached = self._measure_here, self._reached

    def _loss(self, model: nn.Module) -> Mapping[str, float]:
        return {"loss": mean_loss(model, self._run.loss_fn, self._run.examples)}

    def _values(self, model: nn.Module) -> dict[str, float]:
        with self._run.progress.timed("measures"), same_modes(model):
            model.eval()
            return numbers(self._evaluate(model))

    def _measure_here(self) -> dict[str, float]:
        """What the network of a staged run is worth now, units that are gone still in place as zeros."""
        run = self._run
        self._recalibrate(run.batches_here())
        with run.network.running():
            return self._values(run.network.model)

    def _recalibrate(self, batches: Iterable[Any]) -> None:
        """New statistics for batch norms, the same on all ranks, if there are any and the user wants that."""
        run, model = self._run, self._run.network.model
        if not run.settings.recalibrate or not norms_of(model):
            return
        with run.progress.timed("recovery"):
            recalibrate_(model, run.loss_fn, batches)
            average_over_ranks_(buffer for buffer in model.buffers() if buffer.is_floating_point())

    def _reached(self, budget: Budget, values: Mapping[str, float]) -> dict[str, Any]:
        """A budget of the path is met: the network for it is checked and kept."""
        run = self._run
        if len(run.settings.budget.path) == 1:
            return {}
        name = "-".join(f"{kind}-{share:g}" for kind, share in budget.targets.items())
        if budget != run.settings.budget.path[-1]:
            before = outputs(run.network, run.loss_fn, run.examples[0])
            model, recipe = run.network.compacted_copy()
            smaller = ShrinkingNetwork(model, run.network.original)
            check = compare(before, outputs(smaller, run.loss_fn, run.examples[0]))
            refuse_failed([check])
            if self._reconstruct(model):
                values = self._values(model)
            folder = None if run.folder is None else run.folder.write_network(name, model, recipe)
            kept = None if folder is not None else model
            self._networks.append(Network(budget.targets, run.ledger.shares(), values, folder, kept))
        return {"budget": budget.targets, "network": name, "values": values}

    def measure(self, stage: str) -> dict[str, float]:
        """What the network is worth now."""
        values = self._values(self._run.network.model)
        self._tell(stage, values)
        return values

    def _tell(self, stage: str, values: dict[str, float]) -> None:
        """Put a measure on record."""
        self._run.progress.measures.append({"stage": stage, "values": values})
        self._run.listener.said(f"{stage}: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items()))

    def finish(self) -> PruneResult:
        """Surgery, recovery, checks, files."""
        run, network = self._run, self._run.network
        run.finish_surgery()
        if run.settings.budget.latency is not None:
            self._keep_latency()
        recipe = network.recipe()
        run.checks = [worst(run.checks)]
        self._check()
        self.measure("pruned")
        self._recover()
        measures = tuple(Measure(one["stage"], one["values"]) for one in run.progress.measures)
        result = PruneResult(
            model=network.model, graph=network.original, keep=network.keep, recipe=recipe,
            before=count(network.original, network.original.kept(None)), after=count(network.original, network.kept),
            targets=run.settings.budget.targets, shares=run.ledger.shares(), removals=run.progress.removals,
            seconds=run.seconds, timings=dict(run.progress.timings), checks=tuple(run.checks),
            measures=measures,
            notes=tuple(run.progress.notes), latency=self._latency(),
            scores=network.by_group(run.scores, network.original), metrics=tuple(run.metrics), config=dict(self._about),
            folder=None if run.folder is None else run.folder.path, networks=self._all_networks(measures),
            stages=tuple(run.progress.stages), floors=run.moves.at_floor(network.kept),
        )  # fmt: skip
        if run.folder is not None:
            run.folder.write_scores(result.scores)
            run.folder.write_model(result.model, result.recipe)
            run.folder.finish(result.summary())
        refuse_failed(result.checks)
        return result

    def _all_networks(self, measures: tuple[Measure, ...]) -> tuple[Network, ...]:
        """Those for all budgets, the ones from before a resume too; with models where there is no folder."""
        run = self._run
        folder = None if run.folder is None else run.folder.path
        found = networks_of(run.progress.stages, folder, measures, run.ledger.shares())
        if folder is not None:
            return found
        models = [*(network.model for network in self._networks), run.network.model]
        return tuple(replace(network, model=model) for network, model in zip(found, models, strict=False))

    def _check(self) -> None:
        """The cost of the smaller network, traced and counted anew, and the budget."""
        run = self._run
        promised = count(run.network.original, run.network.kept)
        wrong = recount(run.network.original, run.network.kept, run.network.graph)
        text = "; ".join(wrong[:MOST_SHOWN]) or f"{promised.macs:,} MACs, {promised.params:,} parameters"
        run.checks.append(Check("cost recounted", not wrong, text))
        target, shares = Target(run.settings.budget), run.ledger.shares()
        gap = target.gap(shares)
        kept = ", ".join(
            f"{shares[kind]:.2%} of {kind} kept, {share:.2%} asked" for kind, share in target.shares.items()
        )
        stopped = f"; {run.progress.stopped}" if run.progress.stopped else ""
        run.checks.append(Check("budget met", gap <= 0 or bool(stopped), kept + stopped))
        if gap < -TOLERANCE:
            run.say(f"{-gap:.2%} more than asked was removed: one unit fewer would have missed the budget")

    def _recover(self) -> None:
        """Statistics of batch norms, and the step that Proposition 1 says retraining would take."""
        run, model = self._run, self._run.network.model
        if run.folder is not None:
            run.folder.write_model(model, run.network.recipe())
        staged = bool(run.calibration)
        batches = max(run.settings.recalibrate if norms_of(model) and not staged else 0, run.settings.weight_update)
        data = together(lambda: [self._next() for _ in range(batches)])
        if staged and not run.progress.removals:
            return  # every stage was undone: the network stays as it was
        if run.settings.recalibrate and norms_of(model):
            self._recalibrate(run.batches_here() if staged else data[: run.settings.recalibrate])
            self.measure("batch norms recalibrated")
        if self._reconstruct(model):
            self.measure("layers fitted to the unpruned network")
        if run.settings.weight_update:
            self._update_weights(data[: run.settings.weight_update])
        if run.settings.recover:
            self._distil()
        copy_from_first_(named_tensors(model).values())

    def _next(self) -> Any:
        batch = on_device(next(self._run.stream), self._run.network.device)
        if bool(not_finite(batch)):
            self._refuse(*self._run.stream.position)
        return batch

    def _refuse(self, epoch: int, index: int) -> NoReturn:
        """A batch for the recovery is bad: what was pruned is not lost."""
        run = self._run
        if run.folder is not None:
            run.folder.write_model(run.network.model, run.network.recipe())
        raise DataError(
            f"batch {index - 1} of epoch {epoch} holds NaN or infinity; the model is pruned, but was not recovered"
        )

    def _update_weights(self, data: list[Any]) -> None:
        """ΔW, kept only if a loss it was not made from gets lower."""
        run, model = self._run, self._run.network.model
        undo, before = Undo(model), self._loss(model)["loss"]
        try:
            with run.progress.timed("recovery"):
                size = update_weights_(model, run.network.graph, run.loss_fn, data, run.settings.damping)
        except IfsoError as error:
            undo()
            run.say(f"ΔW could not be computed: {error}")
            return
        after = self._loss(model)["loss"]
        self.measure(f"weights updated by ΔW{'' if after < before else UNDONE}")
        if not after < before:
            undo()
            run.say(
                f"ΔW ({size:.1%} of the weights' norm) was undone: the loss of other batches went from {before:.4g} "
                f"to {after:.4g}; a larger damping makes it smaller"
            )

    def _reconstruct(self, model: nn.Module) -> bool:
        """Fit the layers of a compacted network to the outputs of the unpruned one; False if that does no good."""
        run = self._run
        if run.teacher is None or not run.settings.update or (norms_of(model) and not run.settings.recalibrate):
            return False
        with run.progress.timed("update"):
            return reconstruct_(
                model, run.teacher, run.network.original, run.network.kept, run.loss_fn, run.batches_here,
                reduce=sum_over_ranks,
            )  # fmt: skip

    def _distil(self) -> None:
        """Steps of distillation from the unpruned network, kept only if they do good."""
        run, model = self._run, self._run.network.model
        assert run.teacher is not None
        undo, before = Undo(model), run.progress.measures[-1]["values"]
        with run.progress.timed("recovery"):
            distil_(model, run.teacher, run.loss_fn, run.calibration, run.settings.recover, run.settings.seed)
        self._recalibrate(run.batches_here())
        self._reconstruct(model)
        after = self._values(model)
        good = is_better(after, before)
        self._tell(f"{run.settings.recover} steps of distillation{'' if good else UNDONE}", after)
        if not good:
            undo()
            run.say(f"{run.settings.recover} steps of distillation were undone: they did harm")

    def _keep_latency(self) -> None:
        """Measure; where the network is slower than its model said, correct the model and go on."""
        run = self._run
        last = phases(run.settings.schedule, run.settings.budget, run.settings.units_per_step)[-1]
        for left in range(MOST_CALIBRATIONS, -1, -1):
            known = run.progress.latency
            assert known is not None
            known |= self._timed(known["before"])
            share, wanted = known["share"], run.settings.budget.latency or 1.0
            if share <= wanted + max(TOLERANCE, known["spread"] / known["before"]):
                return
            modelled = run.ledger.shares()["latency"]
            corrected = LatencyModel.from_json(known["model"]).calibrated(modelled, share)
            why = self._no_further(corrected) if left else f"{MOST_CALIBRATIONS} corrections were made"
            if why:
                run.say(f"latency: measured {share:.1%}, modelled {modelled:.1%}; the run ends here, since {why}")
                return
            run.say(
                f"latency: measured {share:.1%}, modelled {modelled:.1%}; the model was corrected and the run goes on"
            )
            known["model"] = corrected.to_json()
            run.reopen()
            run.reach(last)
            run.finish_surgery()

    def _no_further(self, latency: LatencyModel) -> str | None:
        """Why a run cannot go on by a corrected model of latency; None if it can."""
        run, original = self._run, self._run.network.original
        if not run.network.told_apart:
            return "its units can no longer be told apart"
        ledger = Ledger(original, extra={"latency": latency.weights(original)})
        smallest = smallest_shares(ledger, run.moves, Target(run.settings.budget))["latency"]
        if smallest > (run.settings.budget.latency or 1.0):
            return f"no smaller network is below {smallest:.1%}"
        return None

    def _latency(self) -> dict[str, Any] | None:
        known = self._run.progress.latency
        if known is None:
            return None
        if "after" not in known:
            known |= self._timed(known["before"])
        return {name: known[name] for name in ("before", "after", "share", "spread")}

    def _timed(self, before: float) -> dict[str, float]:
        """Seconds of the smaller network, on the first rank, when the machine was least busy with other things."""
        network = self._run.network
        times = [measure_latency(network.model, network.graph.inputs) for _ in range(TIMES)]
        now = min(times, key=lambda latency: latency.median)
        return from_first({"after": now.median, "share": now.median / before, "spread": now.spread})
