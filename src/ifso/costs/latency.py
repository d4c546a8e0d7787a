"""Seconds of a forward pass: measured, and as a sum over what is left, by which units can be ranked and budgets kept.

The model of latency is linear in the counts of :class:`ifso.graph.layouts.Term`, as MACs and activations are:

    latency(keep) = Σ weight · count(keep) + constant.

Every convolution and matrix product gets the time spent in the module that runs it. The time of all other modules, and
of what runs between modules, is laid on the activations in proportion of their size: norms, ReLUs and sums cost what
they read and write. Real hardware is not that linear; :meth:`LatencyModel.calibrated` corrects it by a measurement.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor, nn

from ifso.common.module_state import device_of
from ifso.common.tensors import WatchedCalls, WatchedLeavings, map_tensors
from ifso.common.timing import between, middle, now, wait
from ifso.common.torch_state import preserved
from ifso.costs.cost import MAC_KINDS, check_fits
from ifso.errors import IfsoError, RunError, StaleGraphError
from ifso.graph.channel_graph import ChannelGraph, Keep
from ifso.graph.execution import call_model, explain, written_back

REPEATS = 15
WARM_UP = 3
SLOPES = (0.05, 1.5)


@dataclass(frozen=True)
class Latency:
    """Seconds of one forward pass: the median, the width of the middle half, and every sample."""

    median: float
    spread: float
    samples: tuple[float, ...]

    def __str__(self) -> str:
        return f"{self.median * 1e3:.3f} ms ± {self.spread * 5e2:.3f} ({len(self.samples)} runs)"


def measure_latency(model: nn.Module, inputs: Any, *, repeats: int = REPEATS, warm_up: int = WARM_UP) -> Latency:
    """Time ``model`` on ``inputs``, in eval mode and without gradients, on the device where it is.

    Modes, weights, buffers and random state are as before afterwards. On a GPU the time between two events is taken.

    >>> found = measure_latency(nn.Linear(8, 4), torch.zeros(2, 8), repeats=5)
    >>> min(found.samples) <= found.median <= max(found.samples)
    True
    """
    with _ready(model, inputs, repeats, warm_up) as run:
        samples = tuple(sum(seconds for _, seconds in run([])) for _ in range(repeats))
    return Latency(*middle(samples), samples)


@dataclass(frozen=True)
class LatencyModel:
    """Latency as a sum over the terms of a graph. ``total`` is the measured latency of the whole network.

    ``terms`` are (kind, where) of every term, ``per_element`` the seconds for each of its elements. A graph of the same
    network after a compaction has the same terms with fewer elements, so the model holds for it, too.
    """

    terms: tuple[tuple[str, str], ...]
    per_element: tuple[float, ...]
    constant: float
    total: float

    @classmethod
    def measure(
        cls, model: nn.Module, graph: ChannelGraph, *, repeats: int = REPEATS, warm_up: int = WARM_UP
    ) -> LatencyModel:
        """Time every module of ``model`` on the inputs it was traced with.

        The seconds of a module do not count those of the modules it calls. Watching takes time, too, so the parts are
        scaled to sum up to the latency without it.
        """
        check_fits(model, graph)
        total = measure_latency(model, graph.inputs, repeats=repeats, warm_up=warm_up).median
        own = _own_seconds(model, graph.inputs, repeats, warm_up)
        scale = total / max(sum(own.values()), 1e-12)
        seconds, unassigned = _dealt_out(graph, {name: part * scale for name, part in own.items()})
        kept = graph.kept(None)
        weights = tuple(part / max(term.count(kept), 1) for part, term in zip(seconds, graph.terms, strict=True))
        return cls(_kinds(graph), weights, unassigned, total)

    def weights(self, graph: ChannelGraph) -> Tensor:
        """Seconds per surviving element of each term of ``graph``, and last the constant: float64 [terms + 1]."""
        if _kinds(graph) != self.terms:
            raise StaleGraphError(
                f"the latency was measured on another network ({len(self.terms)} terms, the graph has "
                f"{len(graph.terms)}); measure it again"
            )
        return torch.tensor([*self.per_element, self.constant], dtype=torch.float64, device="cpu")

    def seconds(self, graph: ChannelGraph, keep: Keep | None = None) -> float:
        """Latency of what ``keep`` leaves."""
        kept = graph.kept(keep)
        counts = [float(term.count(kept)) for term in graph.terms]
        return float(self.weights(graph) @ torch.tensor([*counts, 1.0], dtype=torch.float64, device="cpu"))

    def calibrated(self, modelled_share: float, measured_share: float) -> Self:
        """A model in which the part that did not shrink as modelled is constant, so that it gives what was measured.

        share → 1 − a·(1 − share) with a = (1 − measured) / (1 − modelled), clipped to [0.05, 1.5]. A network of which
        nothing was removed tells nothing: the model stays.

        >>> half = LatencyModel((("conv", "a"),), (0.01,), 0.0, 1.0).calibrated(0.5, 0.75)
        >>> half.per_element, half.constant
        ((0.005,), 0.5)
        """
        if not (math.isfinite(modelled_share) and math.isfinite(measured_share)):
            raise IfsoError(
                f"latency shares must be numbers, not {modelled_share} (modelled) and {measured_share} (measured); "
                "measure again"
            )
        if modelled_share >= 1:
            return self
        low, high = SLOPES
        slope = min(max((1 - measured_share) / (1 - modelled_share), low), high)
        constant = slope * self.constant + (1 - slope) * self.total
        return replace(self, per_element=tuple(slope * part for part in self.per_element), constant=constant)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values; numbers come back bit for bit."""
        rows = [[*term, weight] for term, weight in zip(self.terms, self.per_element, strict=True)]
        return {"terms": rows, "constant": self.constant, "total": self.total}

    @classmethod
    def from_json(cls, document: Any) -> LatencyModel:
        """What :meth:`to_json` gave."""
        try:
            terms = tuple((kind, where) for kind, where, _ in document["terms"])
            numbers = [*(weight for _, _, weight in document["terms"]), document["constant"], document["total"]]
            right = all(type(word) is str for term in terms for word in term) and all(
                type(number) in (int, float) and math.isfinite(number) for number in numbers
            )
        except (KeyError, TypeError, ValueError, OverflowError):
            right = False
        if not right:
            raise RunError("the latencies stored with the run are damaged; start the run again")
        *weights, constant, total = map(float, numbers)
        if min(weights, default=0.0) < 0 or total <= 0:
            raise RunError("the latencies stored with the run are not positive; start the run again")
        return cls(terms, tuple(weights), constant, total)


Spans = list[tuple[str, float]]
Marks = list[tuple[str, Any]]


@contextlib.contextmanager
def _ready(model: nn.Module, inputs: Any, repeats: int, warm_up: int) -> Iterator[Callable[[Marks], Spans]]:
    """A function that runs the warm model once and says what took how long, given a list that hooks add marks to."""
    if repeats < 1 or warm_up < 0:
        raise IfsoError(f"{repeats} repeats after {warm_up} to warm up; give at least 1 and 0")
    device = _device(model)

    def run(marks: Marks) -> Spans:
        copies = map_tensors(inputs, lambda tensor: tensor.detach().to(device, copy=True))
        wait(device)
        marks[:] = [("", now(device))]
        try:
            call_model(model, copies)
        except Exception as error:
            raise explain(error, model, copies) from error
        marks.append(("", now(device)))
        wait(device)
        return [(name, between(start, end)) for (name, start), (_, end) in pairwise(marks)]

    gpus = [device] if device.type == "cuda" else []
    on_device = torch.cuda.device(device) if gpus else contextlib.nullcontext()
    with (
        preserved(model) as image,
        written_back(model, image) as writes,
        torch.no_grad(),
        torch.random.fork_rng(gpus),
        on_device,
    ):
        model.eval()
        with WatchedLeavings(writes), WatchedCalls(writes):
            run([])
        for _ in range(warm_up - 1):
            run([])
        yield run


def _device(model: nn.Module) -> torch.device:
    device = device_of(model)
    if device.type not in {"cpu", "cuda"}:
        raise IfsoError(f"latency is measured on the CPU or a CUDA GPU, and the model is on {device}; move it there")
    return device


def _own_seconds(model: nn.Module, inputs: Any, repeats: int, warm_up: int) -> dict[str, float]:
    """For each module the seconds of one pass spent in it but in none of its children: medians over the runs."""
    device = _device(model)
    marks: Marks = []
    stack = [""]

    def entering(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            stack.append(name)
            marks.append((name, now(device)))

        return hook

    def leaving(*_: Any) -> None:
        stack.pop()
        marks.append((stack[-1], now(device)))

    with _ready(model, inputs, repeats, warm_up) as run:
        for name, module in model.named_modules():
            if name:
                module.register_forward_pre_hook(entering(name), prepend=True)
                module.register_forward_hook(leaving)
        runs = [run(marks) for _ in range(1 + repeats)][1:]
    names = sorted({name for spans in runs for name, _ in spans})
    sums = [dict.fromkeys(names, 0.0) for _ in runs]
    for found, spans in zip(sums, runs, strict=True):
        for name, seconds in spans:
            found[name] += seconds
    return {name: statistics.median(found[name] for found in sums) for name in names}


def _dealt_out(graph: ChannelGraph, own: dict[str, float]) -> tuple[list[float], float]:
    """Seconds of every term, and those that no term takes because nothing is written by a product."""
    kept = graph.kept(None)
    counts = [term.count(kept) for term in graph.terms]
    macs: dict[str, int] = {}
    for term, count in zip(graph.terms, counts, strict=True):
        if term.kind in MAC_KINDS:
            macs[term.where] = macs.get(term.where, 0) + count
    written = sum(count for term, count in zip(graph.terms, counts, strict=True) if term.kind == "activation")
    rest = sum(seconds for name, seconds in own.items() if not macs.get(name))
    seconds = [0.0] * len(counts)
    for place, (term, count) in enumerate(zip(graph.terms, counts, strict=True)):
        if term.kind in MAC_KINDS and macs[term.where]:
            seconds[place] = own.get(term.where, 0.0) * count / macs[term.where]
        elif term.kind == "activation" and written:
            seconds[place] = rest * count / written
    return seconds, 0.0 if written else rest


def _kinds(graph: ChannelGraph) -> tuple[tuple[str, str], ...]:
    return tuple((term.kind, term.where) for term in graph.terms)
