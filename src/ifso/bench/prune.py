"""``ifso bench prune``: whole pruning runs, in one process, beside the plain training step they are made of."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ifso.common.devices import usable_device
from ifso.common.loss_fn import LossFn
from ifso.common.timing import in_turns, machine, make_ready, middle, peak_bytes
from ifso.criteria.registry import find
from ifso.data import Data, open_data
from ifso.errors import DataError, IfsoError
from ifso.graph.channel_graph import ChannelGraph
from ifso.graph.printing import layers
from ifso.graph.tracing import trace
from ifso.models import default_inputs
from ifso.models.registry import network_for
from ifso.pruning.budget import STAGED, Budget, usual
from ifso.pruning.prune import prune
from ifso.pruning.result import PruneResult
from ifso.pruning.settings import CALIBRATION
from ifso.tasks.classification import cross_entropy
from ifso.training.evaluation import evaluate
from ifso.training.precision import loss_in, tensor_cores

ROUNDS = 20
"""How often the plain training step is timed."""

RANDOM_BATCHES = 8
"""At least; a staged run gets all samples that it looks at."""


@dataclass(frozen=True)
class PruneSetup:
    """What is pruned, with which settings, where and in which precision and layout.

    ``data`` is a DATA of the command line; without it, images are random. ``weights`` is a file.
    """

    model: str = "ifso:resnet32"
    macs: float = 0.6
    data: str | None = None
    weights: str | None = None
    batch: int = 128
    accumulate: int = 10
    batches_per_score: int = 2
    device: str = "cpu"
    precision: str = "float32"
    channels_last: bool = False
    seed: int = 0


@dataclass(frozen=True)
class PruneMethod:
    """A criterion, or a preset that names one, and a schedule: ``"staged"``, or one of Algorithm 2."""

    criterion: str
    schedule: str
    preset: str | None = None

    @classmethod
    def of_preset(cls, preset: str, schedule: str) -> PruneMethod:
        """What a preset says."""
        return cls(usual(preset, {})["criterion"], schedule, preset)

    @classmethod
    def default(cls) -> PruneMethod:
        """What ``ifso.prune`` does if it is told nothing."""
        return cls(STAGED["criterion"], STAGED["schedule"])

    @property
    def staged(self) -> bool:
        """Whether it goes in stages, without steps of an optimizer."""
        return self.schedule == STAGED["schedule"]

    @property
    def name(self) -> str:
        """As it stands in the table."""
        return f"{f'preset {self.preset}' if self.preset else self.criterion}, {self.schedule}"

    def options(self, setup: PruneSetup) -> dict[str, Any]:
        """What ``ifso.prune`` is told."""
        if self.staged:
            return {"criterion": self.criterion, "schedule": self.schedule}
        rounds = {"accumulate": setup.accumulate, "batches_per_score": setup.batches_per_score}
        chosen = {"preset": self.preset} if self.preset else {"preset": "paper", "criterion": self.criterion}
        return {**rounds, **chosen, "schedule": self.schedule}


class PruneBench:
    """One trained model, of which every method gets a copy, and its batches."""

    def __init__(self, setup: PruneSetup) -> None:
        self.setup, self.device = setup, usable_device(setup.device)
        torch.manual_seed(setup.seed)
        self.data: Data | None = None
        if setup.data is not None:
            self.data = open_data(setup.data, device=self.device, seed=setup.seed)
        self.model = network_for(
            setup.model, None if self.data is None else self.data.num_classes,
            weights=setup.weights, device=setup.device, channels_last=setup.channels_last,
        )  # fmt: skip
        self.example = default_inputs(setup.model, self.model) if self.data is None else self.data.example_inputs()
        self.batches = self._random_batches() if self.data is None else []
        self.graph: ChannelGraph = trace(self.model, self.example)

    @property
    def counts_memory(self) -> bool:
        """Whether the memory of runs is counted: on a GPU, as on a CPU that takes time."""
        return self.device.type == "cuda"

    def _random_batches(self) -> list[tuple[Tensor, Tensor]]:
        if not isinstance(self.example, Tensor):
            raise IfsoError(f"bench prune measures image classifiers; {self.setup.model} takes something else")
        self.example = self.example.to(self.device)
        with torch.no_grad():
            classes = copy.deepcopy(self.model).eval()(self.example).shape[1]
        shape = self.setup.batch, *self.example.shape[1:]
        found = []
        for _ in range(max(RANDOM_BATCHES, math.ceil(CALIBRATION / self.setup.batch))):
            images, labels = torch.randn(shape), torch.randint(0, classes, shape[:1])
            found.append((images.to(self.device), labels.to(self.device)))
        return found

    def train_batches(self) -> Iterable[Any]:
        """The batches from their beginning."""
        return self.batches if self.data is None else self.data.train_batches(batch_size=self.setup.batch)

    @property
    def loss_fn(self) -> LossFn:
        """The task's loss, in the precision that is asked for."""
        return loss_in(self.setup.precision, cross_entropy if self.data is None else self.data.loss_fn)

    def step(self) -> dict[str, Any]:
        """``step_seconds`` of a training step (loss, gradients, SGD) of the model, without Python's share on a GPU.

        ``step_peak_bytes`` is the most memory that it takes beside the model: gradients and momenta are part of it.
        """
        model = copy.deepcopy(self.model).train()
        parameters = list(model.parameters())
        optimizer = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=1e-4)
        batch, loss_fn = next(iter(self.train_batches())), self.loss_fn

        def step() -> None:
            gradients = torch.autograd.grad(loss_fn(model, batch), parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()

        peak = peak_bytes(step, self.device)
        seconds, _ = middle(in_turns({"step": make_ready(step, self.device)}, ROUNDS)["step"])
        return {"step_seconds": seconds, "step_peak_bytes": peak}

    def run(self, method: PruneMethod) -> dict[str, Any]:
        """One whole run: what it took and what is left."""
        model, setup = copy.deepcopy(self.model), self.setup
        batches, loss_fn = self.train_batches(), self.loss_fn
        found: list[PruneResult] = []

        def whole_run() -> None:
            result = prune(
                model, batches, loss_fn, budget=Budget(macs=setup.macs), example_inputs=self.example,
                seed=setup.seed, progress=False, **method.options(setup),
            )  # fmt: skip
            found.append(result)

        start = time.perf_counter()
        peak = peak_bytes(whole_run, self.device) if self.counts_memory else None
        if peak is None:
            whole_run()
        seconds, result = time.perf_counter() - start, found[0]
        if method.staged:
            whole = sum(1 for _ in self.train_batches())
            rounds = len(result.stages) * min(math.ceil(CALIBRATION / setup.batch), whole)
        else:  # weights alone need be looked at only once where nothing changes them
            many = method.schedule != "one-shot" or find(method.criterion).needs not in ("nothing", "weights")
            rounds = result.metrics[-1]["step"] * (setup.accumulate if many else 1)
        spent = result.timings["scores" if method.staged else "rounds"]
        return {
            "seconds": seconds,
            "peak_bytes": peak,
            "timings": dict(result.timings),
            "removals": result.removals,
            "rounds": rounds,
            "round_seconds": spent / rounds,
            "scores_per_second": rounds * (1 if method.staged else setup.batches_per_score) / spent,
            "macs": result.after.macs / result.before.macs,
            "params": result.after.params / result.before.params,
            "weights": _weights(result.model) / _weights(self.model),
            "stream_units_removed": stream_units_removed(self.graph, result.keep),
            "accuracy": self._accuracy(result.model),
        }

    def _accuracy(self, model: nn.Module) -> float | None:
        """On the test set, if there is one; not part of the time."""
        try:
            return None if self.data is None else evaluate(model, self.data.test_batches()).top1
        except DataError:
            return None


def stream_units_removed(graph: ChannelGraph, keep: Mapping[str, Tensor]) -> int:
    """How many units went of those that several layers make together, such as the channels of a residual stream."""
    streams = [group.name for group in graph.groups if len(layers(group, "produces")) > 1]
    return sum(int((~keep[name]).sum()) for name in streams if name in keep)


def _weights(model: nn.Module) -> int:
    """Entries of kernels and matrices: biases and norms are not counted."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 1)


def measure(setup: PruneSetup, methods: Iterable[PruneMethod], say: Callable[[str], None]) -> dict[str, Any]:
    """All methods one after the other, and seconds and memory of a plain training step in the same process."""
    with tensor_cores(setup.precision):
        bench = PruneBench(setup)
        say(f"{setup.model}: a plain training step")
        step = bench.step()
        rows = {}
        for method in methods:
            say(f"{setup.model}: {method.name}")
            rows[method.name] = bench.run(method)
    for row in rows.values():
        row["ratio"] = row["round_seconds"] / step["step_seconds"]
        row["memory_in_steps"] = row["peak_bytes"] and row["peak_bytes"] / step["step_peak_bytes"]
    about = machine(bench.device)
    names = {key: value and Path(value).name for key, value in (("weights", setup.weights), ("data", setup.data))}
    found = {"units": bench.graph.num_units, **step, "methods": rows}
    return {**asdict(setup), **names, **about, **found}
