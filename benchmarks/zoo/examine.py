"""One network after the other is scored, pruned a little and trained, in train mode on a device.

Networks have random weights. What is found out about one comes in stages, and a stage that fails leaves the others.
"""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

import ifso
from benchmarks.zoo import float64 as zoo_float64
from benchmarks.zoo.cases import SEED, Case, moved_, native_case, native_options, on, small_case, still_
from benchmarks.zoo.float64 import CRITERIA, Sample
from benchmarks.zoo.networks import Entry
from benchmarks.zoo.worker import serving
from ifso.common.devices import let_go_of, out_of_memory, usable_device
from ifso.common.text import one_line
from ifso.common.timing import Ready, in_turns, middle, peak_bytes
from ifso.criteria.base import Task
from ifso.criteria.registry import create
from ifso.errors import IfsoError, ScoreError
from ifso.graph.channel_graph import ChannelGraph
from ifso.training.precision import tensor_cores

KEPT = 0.95
"""Share of the MACs that the one stage keeps."""

CALIBRATION_BATCHES = 2
LEARNING_RATE = 1e-4
PACKAGES = ("torch", "torchvision", "timm")
NO_ROOM = "out of memory"
POISONED = ("CUDA error", "device-side assert", "CUBLAS_STATUS", "CUDNN_STATUS")
"""Words of errors after which a process can do nothing more on its GPU."""

Found = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """How networks are examined.

    ``float64`` compares ranks with scores in float64: those of a CPU in the folder ``kept``, if they are of these
    weights, else computed on the device. ``only_float64`` does nothing but fill that folder. ``processes`` share the
    device; that is only told.
    """

    batch: int = 2
    device: str = "cpu"
    repeats: int = 2
    threads: int | None = None
    float64: bool = True
    kept: str | None = None
    only_float64: bool = False
    processes: int = 1

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for name in ("batch", "repeats"):
            if getattr(self, name) < (2 if name == "batch" else 1):
                raise IfsoError(f"{name} must be {'2' if name == 'batch' else '1'} or more, got {getattr(self, name)}")
        if torch.device(self.device).type == "cuda" and not torch.cuda.is_available():
            raise IfsoError(f"device must be there, got {self.device!r}: no CUDA device was found; use cpu")
        if self.only_float64 and (self.kept is None or not self.float64):
            raise IfsoError("scores in float64 alone need a folder to keep them in")


def about(device: str) -> dict[str, str]:
    """Where networks are examined, and with which versions."""
    place = usable_device(device)
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else "CPU"
    versions = {"python": platform.python_version(), "ifso": ifso.__version__}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {"device_name": name, **versions}


def examine(entry: Entry, setup: Setup) -> Iterator[Found]:
    """What is found out about a network, piece by piece; ``{"stage": name}`` comes before each stage.

    ``failed`` maps stages to reasons. Stages that need what a failed one makes are left out.
    """
    exam = _Exam(entry, setup)
    stages = exam.float64_stages() if setup.only_float64 else exam.stages()
    failed: dict[str, str] = {}
    with tensor_cores("float32"):
        for name, needs, work in stages:
            parts = [getattr(exam, need) for need in needs]
            if any(part is None for part in parts):
                continue
            yield {"stage": name}
            begun = time.perf_counter()
            try:
                found = work(*parts)
                exam.synchronize()
                yield {**found, f"{name}_s": round(time.perf_counter() - begun, 2)}
            except Exception as error:
                failed[name] = reason_of(error)
                let_go_of(error)
                yield {"failed": dict(failed)}
                if poisoned(failed[name]):
                    return
            exam.tidy()


def reason_of(error: BaseException) -> str:
    """Why a stage failed, in one line."""
    words = one_line(error) or type(error).__name__
    if out_of_memory(error):
        return f"{NO_ROOM}: {words}"
    return words if isinstance(error, IfsoError) else f"{type(error).__name__}: {words}"


def poisoned(reason: str) -> bool:
    """Has the process lost its GPU?

    >>> poisoned("AcceleratorError: CUDA error: an illegal memory access was encountered")
    True
    """
    return any(words in reason for words in POISONED) and not reason.startswith(NO_ROOM)


def serve(pipe: Connection, setup: Setup) -> None:
    """Examine what comes; for :class:`benchmarks.zoo.worker.Worker`."""

    def answers(entry: Entry) -> Iterator[Found]:
        try:
            yield {"about": about(setup.device)}
            yield from examine(entry, setup)
        except Exception as error:
            yield {"failed": {"start": reason_of(error)}}

    if setup.threads is not None:
        torch.set_num_threads(setup.threads)
    serving(pipe, answers)


T = TypeVar("T")
Stage = tuple[str, tuple[str, ...], Callable[..., Found]]
"""Its name, the parts of an examination that it needs, and what it does with them."""


class _Exam:
    """One network on its way through the stages."""

    def __init__(self, entry: Entry, setup: Setup) -> None:
        self.entry, self.setup = entry, setup
        self.device = usable_device(setup.device)
        if self.device.type == "cuda" and self.device.index is not None:
            torch.cuda.set_device(self.device)
        self.small: Case | None = None
        self.native: Case | None = None
        self.graph: ChannelGraph | None = None
        self.sample: Sample | None = None
        self.found: dict[str, Tensor] | None = None
        self._small_graph: ChannelGraph | None = None
        self._sums = torch.empty(0)
        self._refused: dict[str, str] = {}
        self._peaks: dict[str, int] = {}

    def _each(self, work: Callable[[str], T]) -> dict[str, T]:
        """What ``work`` gives for each criterion; one that refuses the network is left out from then on."""
        found = {}
        for name in CRITERIA:
            if name not in self._refused:
                try:
                    found[name] = work(name)
                except ScoreError as error:
                    if out_of_memory(error):
                        raise
                    self._refused[name] = reason_of(error)
        if not found:
            raise IfsoError("; ".join(self._refused.values()))
        return found

    def stages(self) -> list[Stage]:
        """All, in order: a step warms the device up for the scores, which are measured after it."""
        compared: list[Stage] = [
            ("small", (), self._build_small),
            ("small_scores", ("small",), self._score_small),
            ("rank", ("small", "sample", "found"), self._rank),
        ]
        own: list[Stage] = [
            ("build", (), self._build),
            ("trace", ("native",), self._trace),
            ("step", ("native", "graph"), self._first_step),
            ("score", ("native", "graph"), self._score),
            ("times", ("native", "graph"), self._times),
            ("prune", ("native", "graph"), self._prune),
        ]
        return [*compared, *own] if self.setup.float64 else own

    def float64_stages(self) -> list[Stage]:
        """Those that fill the folder with scores in float64."""
        return [("small", (), self._build_small), ("float64", ("small",), self._only_float64)]

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def tidy(self) -> None:
        """Give memory back that nothing needs any more: other processes may share the GPU."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _build_small(self) -> Found:
        self.small = small_case(self.entry, self.device)
        self._sums = zoo_float64.sums_of(self.small.model, _images(self.small.feed(SEED)))
        return {"small_input": self.small.words}

    def _score_small(self, small: Case) -> Found:
        """Scores of the small batch in float32 on the device."""
        batch = on(self.device, small.feed(SEED))
        model, loss_fn = moved_(small.model, self.device), small.loss_fn
        graph = self._trace_small(small, batch)
        sample = self.sample = Sample.of(graph)
        still_(model)
        self.found = self._each(lambda name: sample.taken(graph, ifso.score(model, graph, loss_fn, [batch], name)))
        return {}

    def _trace_small(self, small: Case, batch: Any) -> ChannelGraph:
        self._small_graph = ifso.trace(small.model.eval(), small.example(batch))
        return self._small_graph

    def _in_float64(self, small: Case, device: torch.device) -> dict[str, Tensor]:
        """The same scores in float64."""
        assert self._small_graph is not None
        graph, sample, loss_fn = self._small_graph, Sample.of(self._small_graph), small.loss_fn
        model, refused = still_(moved_(small.model, device, torch.float64)), dict(self._refused)
        batch = on(device, small.feed(SEED), torch.float64)
        try:
            with _float64_by_default():
                return self._each(lambda name: sample.taken(graph, ifso.score(model, graph, loss_fn, [batch], name)))
        finally:
            self._refused = refused  # what cannot be had in float64 alone may still be in float32
            moved_(model, device, torch.float32)

    def _only_float64(self, small: Case) -> Found:
        assert self.setup.kept is not None
        self._trace_small(small, small.feed(SEED))
        scores = self._in_float64(small, torch.device("cpu"))
        path = zoo_float64.path_of(Path(self.setup.kept), self.entry)
        zoo_float64.write(path, scores, self._sums, {**about("cpu"), "network": self.entry.key})
        return {}

    def _rank(self, small: Case, sample: Sample, scores: dict[str, Tensor]) -> Found:
        exact = None
        if self.setup.kept is not None:
            path = zoo_float64.path_of(Path(self.setup.kept), self.entry)
            exact = zoo_float64.read(path, self._sums, len(sample.units))
        where = "cpu" if exact is not None else self.device.type
        exact = exact or self._in_float64(small, self.device)
        ranks = {name: sample.rank(scores[name], exact[name]) for name in scores if name in exact}
        return {
            "float64_on": where,
            "compared_units": len(sample.units),
            "rank": {name: rank[0] for name, rank in ranks.items()},
            "rank_in_groups": {name: rank[1] for name, rank in ranks.items()},
        }

    def _build(self) -> Found:
        made = None
        if self.small is not None and self.small.options == native_options(self.entry):
            made = self.small.model
        self.small = self._small_graph = None
        self.native = native_case(self.entry, self.setup.batch, self.device, made)
        params = sum(parameter.numel() for parameter in self.native.model.parameters())
        return {"input": self.native.words, "params": params}

    def _trace(self, native: Case) -> Found:
        model = native.model.eval()
        graph = ifso.trace(model, self._example(native))
        if not graph.num_units:
            raise IfsoError("nothing in the network can be pruned")
        model.train()
        self.graph = graph
        return {"groups": len(graph.groups), "units": graph.num_units}

    def _example(self, native: Case) -> Any:
        return on(self.device, native.example(native.feed(SEED)))

    def _score(self, native: Case, graph: ChannelGraph) -> Found:
        """Both scores as a user gets them, finite or an error, and the memory they take."""
        batch = on(self.device, native.feed(SEED))

        def share_of_zeros(name: str) -> float:
            scores = dict[str, Tensor]()
            self._peaks[name] = peak_bytes(
                lambda: scores.update(ifso.score(native.model, graph, native.loss_fn, [batch], name)), self.device
            )
            return float((torch.cat(list(scores.values())) == 0).double().mean())

        zeros = self._each(share_of_zeros)
        refused = {"refused": self._refused} if self._refused else {}
        return {"scored": list(zeros), "zero_scores": zeros, "peak_bytes": dict(self._peaks), **refused}

    def _functions(self, native: Case, graph: ChannelGraph) -> dict[str, Callable[[], Any]]:
        """A gradient and the scores, of the same batch."""
        model, loss_fn = native.model.train(), native.loss_fn
        batch = on(self.device, native.feed(SEED))
        weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        task = Task(model, graph, loss_fn, graph.kept(None))
        functions: dict[str, Callable[[], Any]] = {
            "gradient": lambda: torch.autograd.grad(loss_fn(model, batch), weights, allow_unused=True)
        }
        for name in CRITERIA:
            if name not in self._refused:
                functions[name] = partial(create(name).units, task, batch)
        return functions

    def _times(self, native: Case, graph: ChannelGraph) -> Found:
        ready = {
            name: Ready(each, each, self.device, captured=False)
            for name, each in self._functions(native, graph).items()
        }
        self.synchronize()
        return {"seconds": _seconds(in_turns(ready, self.setup.repeats))}

    def _first_step(self, native: Case, _: ChannelGraph) -> Found:
        told = dict[str, float]()
        self._peaks["step"] = peak_bytes(lambda: told.update(self._step(native)), self.device)
        return {"step": told, "peak_bytes": dict(self._peaks)}

    def _step(self, native: Case) -> dict[str, float]:
        """A step of training: its loss, and the share of the weights' tensors that have a gradient."""
        model, batch = native.model.train(), on(self.device, native.feed(SEED))
        weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(weights, lr=LEARNING_RATE, momentum=0.9)
        loss = native.loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        grads = [weight.grad for weight in weights if weight.grad is not None]
        optimizer.zero_grad()
        sizes = torch.stack([grad.detach().abs().max() for grad in grads]) if grads else torch.zeros(1)
        loss = loss.detach()
        if not bool(loss.isfinite()) or not bool(sizes.isfinite().all()):
            raise IfsoError(f"a loss of {float(loss):g} or its gradients are not finite")
        return {"loss": float(loss), "gradients": float((sizes > 0).sum()) / len(weights)}

    def _prune(self, native: Case, _: ChannelGraph) -> Found:
        """One stage of the default run, and a step of training after it."""
        batches = [native.feed(SEED + 1 + number) for number in range(CALIBRATION_BATCHES)]
        self.graph = None
        result = ifso.prune(
            native.model.eval(), batches, native.loss_fn, budget=ifso.Budget(macs=KEPT),
            example_inputs=self._example(native), calibration=CALIBRATION_BATCHES * self.setup.batch, progress=False,
        )  # fmt: skip
        pruned = {
            "macs": result.shares["macs"], "params": result.shares["params"], "stages": len(result.stages),
            "removed_units": result.removed_units, "seconds": result.seconds,
        }  # fmt: skip
        return {"pruned": pruned, "step_after": self._step(native)}


@contextmanager
def _float64_by_default() -> Iterator[None]:
    """Tensors that a network makes on its way, without saying of which dtype, are float64 as well."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _images(batch: Any) -> Tensor:
    images = batch[0]
    return images if isinstance(images, Tensor) else torch.stack(list(images))


def _seconds(rounds: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and the median over rounds of a score's time ÷ the gradient's of the same round."""
    medians: dict[str, Any] = {name: middle(times)[0] for name, times in rounds.items()}
    ratios = {
        name: middle([own / one for own, one in zip(rounds[name], rounds["gradient"], strict=True)])[0]
        for name in CRITERIA
        if name in rounds
    }
    return {**medians, "in_gradients": ratios}
