"""``ifso bench choose``: what is left of a network's accuracy without training, by method and share of MACs kept."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from ifso._version import __version__
from ifso.common.devices import usable_device
from ifso.common.text import one_line
from ifso.common.timing import machine
from ifso.costs import cost
from ifso.costs.cost import Cost
from ifso.criteria.registry import create
from ifso.data import open_data
from ifso.data.compatibility import check_fits
from ifso.errors import DataError, IfsoError
from ifso.graph.tracing import trace
from ifso.models.registry import network_for
from ifso.pruning.budget import Budget
from ifso.pruning.events import Listener, Silent, Stage
from ifso.pruning.prune import prune
from ifso.pruning.result import PruneResult
from ifso.training.evaluation import evaluate
from ifso.training.precision import tensor_cores
from ifso_repro.choose.record import Record
from ifso_repro.choose.rivals import RIVALS, Rivals


@dataclass(frozen=True)
class ChooseSetup:
    """A MODEL with the weights of a file, DATA, and how many of its images calibrate and measure."""

    model: str
    data: str
    weights: str | None = None
    calibration: int = 1000
    measured: int = 1000
    batch: int = 50
    device: str = "cpu"
    seed: int = 0


CRITERIA = ("true-loss", "ifso", "group-fisher", "taylor", "magnitude", "random")
DIVIDED_BY = {"ifso": "sqrt-memory", "group-fisher": "memory", "taylor": "none", "magnitude": "none", "random": "none"}
"""In one shot, scores are divided by what their papers divide by."""

METHODS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "default-no-update": {"update": False},
    **{name: {"criterion": name} for name in CRITERIA},
    **{
        f"{name}-one-shot": {"criterion": name, "schedule": "one-shot", "normalize": divisor}
        for name, divisor in DIVIDED_BY.items()
    },
}
"""What ``ifso.prune`` is told: nothing for ``default``, a criterion for its name."""


def options_of(name: str, batches: int) -> dict[str, Any]:
    """Keywords of ``ifso.prune`` where there are so many calibration batches; one shot looks at each once.

    >>> options_of("taylor-one-shot", 20)["batches_per_score"], options_of("default", 20)
    (20, {})
    """
    told = dict(METHODS[name])
    if "schedule" in told:
        told |= {"accumulate": 1, "batches_per_score": batches, "recalibrate": batches}
        if told["criterion"] == "ifso":
            told["criterion"] = create("ifso", coupled="layers")
    return told


def check(methods: Iterable[str], targets: Iterable[float]) -> None:
    """One line for a method that is none, or a share that is none."""
    known = (*METHODS, *RIVALS)
    for name in methods:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise IfsoError(f"no method {name!r}; choose from {', '.join(known)}{hint}")
    for target in targets:
        Budget(macs=target)


Batches = list[tuple[Tensor, Tensor]]
Add = Callable[[float, Mapping[str, Any]], None]


class _Networks(Silent):
    """Hands on the networks that a staged run leaves on its way: share, network, and seconds of the run alone."""

    def __init__(self, found: Callable[[float, Any, float], None]) -> None:
        self._found, self.away = found, 0.0

    def staged(self, stage: Stage) -> None:
        """Take the time that is not the run's."""
        if stage.network is not None:
            start = time.perf_counter()
            self._found(stage.network.targets["macs"], stage.network.model, stage.seconds - self.away)
            self.away += time.perf_counter() - start


class ChooseBench:
    """One trained network, of which every method gets a copy, and the same images for all of them."""

    def __init__(self, setup: ChooseSetup) -> None:
        self.setup, self.device = setup, usable_device(setup.device)
        torch.manual_seed(setup.seed)
        data = open_data(setup.data, device=self.device, seed=setup.seed)
        if data.task != "classification":
            raise DataError(f"bench choose measures the top-1 of classifiers; {setup.data} has boxes")
        self.model = network_for(setup.model, data.num_classes, weights=setup.weights, device=setup.device).eval()
        check_fits(self.model, data)
        self.example, self.loss_fn = data.example_inputs(), data.loss_fn
        train = data.train_batches(batch_size=setup.batch, augment=False, drop_last=False)
        self.calibration = gather(train, setup.calibration, f"--calibration {setup.calibration}")
        test = data.test_batches(batch_size=setup.batch)
        self.measured = gather(test, setup.measured, f"--measured {setup.measured}")
        self.rivals = Rivals(self.model, self.example, self.calibration, self.loss_fn, self.macs)
        self._whole = self._cost(self.model)

    def _cost(self, model: nn.Module) -> Cost:
        return cost(model, trace(model, self.example))

    def macs(self, model: nn.Module) -> float:
        """The share of the MACs that a smaller network has, traced and counted anew, whoever made it."""
        return self._cost(model).macs / self._whole.macs

    def top1(self, model: nn.Module) -> float:
        """In per cent of the images that are measured on."""
        return evaluate(model, self.measured).top1

    def unpruned(self) -> dict[str, Any]:
        """The network that all start from."""
        return {"top1": self.top1(self.model), "macs": self._whole.macs, "params": self._whole.params}

    def rows(self, name: str, targets: Sequence[float], add: Add, known: Sequence[float] = ()) -> None:
        """Call ``add`` with each target and what is left of its network, as soon as that is measured.

        A staged run passes through all targets, largest first, and through those that are ``known`` from before; all
        others begin anew for each.
        """
        if name in METHODS and "schedule" not in METHODS[name]:
            falling = sorted({*targets, *(target for target in known if target > min(targets))}, reverse=True)

            def reached(share: float, model: nn.Module, seconds: float) -> None:
                if share in targets:
                    add(share, self._row(model, seconds))

            networks = _Networks(reached)
            result = self._ours(name, tuple(falling), networks)
            add(falling[-1], self._row(result.model, result.seconds - networks.away))
            return
        for target in targets:
            torch.manual_seed(self.setup.seed)
            start = time.perf_counter()
            if name in RIVALS:
                found = self.rivals.prune(RIVALS[name], target)
                model, more = found.model, {"form": RIVALS[name].form, "pruning_ratio": found.ratio}
            else:
                model, more = self._ours(name, (target,)).model, {}
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            add(target, {**self._row(model, time.perf_counter() - start), **more})

    def _row(self, model: nn.Module, seconds: float) -> dict[str, Any]:
        left = self._cost(model.eval())
        shares = {"macs": left.macs / self._whole.macs, "params": left.params / self._whole.params}
        return {**shares, "top1": self.top1(model), "seconds": seconds}

    def _ours(self, name: str, targets: tuple[float, ...], listener: Listener | None = None) -> PruneResult:
        budget = Budget(macs=targets if len(targets) > 1 else targets[0])
        return prune(
            copy.deepcopy(self.model), self.calibration, self.loss_fn, budget=budget, example_inputs=self.example,
            seed=self.setup.seed, progress=False, listener=listener, **options_of(name, len(self.calibration)),
        )  # fmt: skip


def gather(batches: Iterable[Any], count: int, asked: str) -> Batches:
    """The first ``count`` images and their labels, in batches as they come.

    >>> [len(labels) for _, labels in gather([(torch.zeros(4, 1), torch.zeros(4))] * 3, 6, "--measured 6")]
    [4, 2]
    """
    found: Batches = []
    left = count
    for batch in batches:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not all(isinstance(x, Tensor) for x in batch):
            raise DataError("bench choose needs batches of (images, labels)")
        found.append((batch[0][:left], batch[1][:left]))
        left -= len(found[-1][1])
        if not left:
            return found
    raise DataError(f"{asked}: there are only {count - left} such images; give a smaller number")


def measure(
    setup: ChooseSetup, methods: Sequence[str], targets: Sequence[float], record: Record, say: Callable[[str], None]
) -> None:
    """Fill the record, which is written after every row; what it has already is not run again, failures are."""
    absent = Rivals.absent()
    record.left_out = {name: absent for name in methods if name in RIVALS} if absent else {}
    left = {
        name: [target for target in dict.fromkeys(targets) if not record.has(name, target)]
        for name in dict.fromkeys(methods)
        if name not in record.left_out
    }
    todo = {name: some for name, some in left.items() if some}
    for name, reason in record.left_out.items():
        say(f"{name} is left out. {reason}")
    with tensor_cores("float32"):
        if todo or record.unpruned is None:
            bench = ChooseBench(setup)
            record.unpruned = record.unpruned or bench.unpruned()
        record.write()
        for name, some in todo.items():
            say(f"{setup.model}: {name}, {', '.join(f'{target:.0%}' for target in some)} of the MACs")
            _fill(bench, name, some, record, say, known=[target for target in targets if record.has(name, target)])


def _fill(
    bench: ChooseBench, name: str, targets: list[float], record: Record, say: Callable[[str], None], known: list[float]
) -> None:
    """The rows of a method; for targets that it fails at, the reason."""
    left = list(targets)

    def add(target: float, row: Mapping[str, Any]) -> None:
        record.add(name, target, row)
        left.remove(target)
        known.append(target)

    while left:
        try:
            bench.rows(name, list(left), add, list(known))
        except Exception as error:
            reason = one_line(error) or type(error).__name__
            say(f"{name} failed: {reason}")
            reason = reason if isinstance(error, IfsoError) else f"{type(error).__name__}: {reason}"
            record.add(name, left.pop(0), {"failed": reason})


def about(device: str) -> dict[str, Any]:
    """Where it is run, and the versions of what is run."""
    here = machine(usable_device(device))
    versions = {"torch": str(here["torch"]), "ifso": __version__, "torch_pruning": Rivals.version()}
    return {"device_name": here["device_name"], **versions}
