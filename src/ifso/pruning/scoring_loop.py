"""The scoring loop of a run: scores added up over batches and steps between them, on a GPU as a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import SGD, Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from ifso.common.batches import micro_batches, not_finite, num_samples, on_device
from ifso.common.cuda_graphs import CONSTANTS, NotCaptured, captures_go_to, capturing, draws
from ifso.common.devices import out_of_memory
from ifso.common.distributed import average_over_ranks_, is_distributed, mean_over_ranks, together
from ifso.common.loss_fn import LossFn, WatchedLoss, checked, scalar
from ifso.common.torch_state import not_reentrant, undisturbed
from ifso.criteria.base import Criterion
from ifso.criteria.scorer import Scorer
from ifso.errors import ScoreError
from ifso.graph.layouts import surviving
from ifso.pruning.shrinking_network import RemovedWeights, ShrinkingNetwork

EAGER_ROUNDS = 2
"""Rounds before one is captured as a CUDA graph: kernels get compiled, momenta made, and side effects seen."""

MOST_MISSES = 10
"""Rounds in a row whose batches are not like those of the captured one, before it is given up."""

T = TypeVar("T")
MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
_RoundResult = tuple[Tensor, Tensor, list[Tensor | None]]


class ScoringLoop:
    """Runs rounds: each scores some batches and, if asked, takes one step of the optimizer on the first of them.

    On a GPU rounds are captured as a CUDA graph, in which the batches are scored side by side. A round that cannot be
    captured runs one operation after another, except for the submodules of a detector that the score replays. A
    criterion that needs no batches is asked once a round, outside the graph. If memory runs out, batches are cut into
    micro-batches. ``tell`` gets one line about each of these.
    """

    def __init__(
        self,
        network: ShrinkingNetwork,
        criterion: Criterion,
        loss_fn: LossFn,
        make_optimizer: MakeOptimizer,
        *,
        capture: bool = True,
    ) -> None:
        self.network, self.criterion = network, criterion
        self.tell: Callable[[str], None] = lambda _: None
        self.loss_fn = WatchedLoss(loss_fn)
        self._parameters = [parameter for parameter in network.model.parameters() if parameter.requires_grad]
        self.optimizer = make_optimizer(self._parameters)
        self._micro_batch: int | None = None
        self._told: set[str] = set()
        self._capture = capture and can_capture(network)
        self._apart = not criterion.needs_batches
        self._removed = RemovedWeights(network) if criterion.masks_itself else None
        self.renew()

    def renew(self) -> None:
        """Prepare everything anew, for a network of another shape or in another state."""
        self._captured: dict[bool, CapturedRound] = {}
        self._side_effects = SideEffects(self.network.model)
        self._rounds = self._misses = 0
        device = self.network.device
        self._alive = self._masks()
        named = self.network.model.named_parameters()
        self._sliced = [(tensor, self._alive[name]) for name, tensor in named if name in self._alive]
        kept = self.network.kept_here.to(device if self.criterion.masks_itself else "cpu")
        graph = self.network.graph
        self._scorer = Scorer(self.criterion, self.network.model, graph, self.loss_fn, kept, shrinks=True)
        if self._micro_batch is not None:
            self._scorer.cut_batches(self._micro_batch)
        self._narrow(self._alive)
        self._scores = torch.zeros(graph.num_units, dtype=torch.float64, device=device)
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self.spoilt = torch.zeros((), dtype=torch.long, device=device)
        self._counts = [0, 0]

    def remove_(self, units: Sequence[int]) -> None:
        """Take units away softly, from the optimizer's memory too."""
        if self._removed is not None:
            self._removed.remember(units)
        self.network.remove_(units, self.optimizer)
        self._narrow(self.network.sliced_by(units))

    def tensors(self) -> dict[str, Tensor]:
        """Everything that changes during a run, by name: not copied."""
        removed = {} if self._removed is None else self._removed.tensors()
        return {**self.network.tensors(self.optimizer), **removed}

    def fill_(self, tensors: Mapping[str, Tensor], plain: Any) -> None:
        """Load stored tensors; ``plain`` is from :func:`~ifso.pruning.shrinking_network.plain_state_of`."""
        self.network.fill_(self.optimizer, tensors, plain)
        self._narrow(self._alive)
        for name, tensor in ({} if self._removed is None else self._removed.tensors()).items():
            tensor.copy_(tensors[name])

    def prepare(self, batches: Sequence[Any]) -> None:
        """Let the criterion look at all batches before it scores them, if it wants to."""
        with self.network.running():
            self._scorer.prepare(on_device(batch, self.network.device) for batch in batches)

    def round(self, batches: Sequence[Any], *, train: bool | None) -> None:
        """Add the scores of the batches up and, if asked, take a step; with None not even the loss is computed."""
        batches = [on_device(batch, self.network.device) for batch in batches]
        self.spoilt += torch.stack([not_finite(batch).to(self.spoilt.device) for batch in batches]).sum()
        self._rounds += 1
        if self._apart:
            self._scores += len(batches) * together(partial(self._score, batches[0]))
        replay = self._captured_round(batches, train)
        if replay is not None:
            replay(batches)
        else:
            self._add(together(lambda: self._work_in_memory(batches, train)), train)
            for key, line in self._scorer.notes():
                if key not in self._told:
                    self._told.add(key)
                    self.tell(line)
        self._counts[0] += len(batches)
        self._counts[1] += 1

    def forget_scores(self) -> None:
        """What was scored since last time does not count; losses do."""
        self._scores.zero_()
        self._counts[0] = 0

    def collect(self) -> tuple[Tensor, float]:
        """The mean score of every original unit since last time, and the mean loss, over all ranks.

        Either may be NaN or infinite.
        """
        scores, loss = mean_over_ranks(self._scores, self._counts[0]), mean_over_ranks(self._loss, self._counts[1])
        self._scores.zero_()
        self._loss.zero_()
        self._counts = [0, 0]
        return self.network.in_original(scores), float(loss)

    def _masks(self) -> dict[str, Tensor]:
        """Ones in the shape of each parameter that units have slices of."""
        graph = self.network.graph
        return {
            name: torch.ones_like(parameter, requires_grad=False)
            for name, parameter in self.network.model.named_parameters()
            if graph.masking(name) is not None
        }

    @torch.no_grad()
    def _narrow(self, names: Collection[str]) -> None:
        """What is left of units, and of these weights; in place, for rounds that were captured."""
        kept = self.network.kept_here
        narrowed = {name: self._alive[name] for name in self._alive.keys() & names}
        for name, alive in narrowed.items():
            layout = self.network.graph.masking(name)
            assert layout is not None
            alive.copy_(surviving(layout, kept))
        self._scorer.narrow_(kept, narrowed)

    def _captured_round(self, batches: Sequence[Any], train: bool | None) -> CapturedRound | None:
        """The captured round for such batches, captured after the first eager rounds; None if there is none."""
        if not self._capture or train is None or self._rounds <= EAGER_ROUNDS or self._micro_batch is not None:
            return None
        if train not in self._captured:
            made = self._capture_obstacle(train) or CapturedRound.make(
                lambda held: self._add(self._work(held, train), train), batches
            )
            if isinstance(made, str):
                self._give_up_capturing(made)
                return None
            self._captured[train] = made
        if self._captured[train].takes(batches):
            self._misses = 0
            return self._captured[train]
        self._misses += 1
        if self._misses == MOST_MISSES:
            self._give_up_capturing(f"{MOST_MISSES} batches in a row differ in shapes, or in what is no tensor")
        return None

    def _capture_obstacle(self, train: bool) -> str:
        """Why a captured round would not repeat what the round does now; empty if it would."""
        if self.criterion.prepares:
            return f"criterion {self.criterion.name!r} does not score every batch in the same way"
        if self._side_effects.draws:
            return "the model or its loss draws random numbers"
        if train and has_host_counters(self.optimizer):
            return f"{type(self.optimizer).__name__} counts its steps on the host (capturable=True may be an option)"
        return ""

    def _give_up_capturing(self, reason: str) -> None:
        self._capture = False
        self._captured.clear()
        self.tell(f"rounds run without a CUDA graph: {reason}")

    def _work_in_memory(self, batches: Sequence[Any], train: bool | None) -> _RoundResult:
        """The result of a round; if memory runs out, again with smaller and smaller parts of the batches."""
        while True:
            try:
                return self._work(batches, train)
            except (RuntimeError, MemoryError, ScoreError) as error:
                if not out_of_memory(error):
                    raise
                if not self._scorer.free_captured() and not self._halve_batches(batches):
                    raise ScoreError("out of memory with a single sample; prune on a larger device") from error
            gc.collect()  # the frames of what failed may hold its tensors in a ring
            torch.cuda.empty_cache()

    def _halve_batches(self, batches: Sequence[Any]) -> bool:
        """Halve the micro-batches from now on; return whether they can be smaller."""
        if self._micro_batch == 1:
            return False
        now = self._micro_batch or max(num_samples(batch) for batch in batches)
        self._micro_batch = (now + 1) // 2
        self._captured.clear()
        self._scorer.cut_batches(self._micro_batch)
        self.tell(
            f"out of memory: from now on batches are cut into micro-batches of {self._micro_batch} "
            "(batch norm in train mode takes its statistics over each)"
        )
        return True

    def _work(self, batches: Sequence[Any], train: bool | None) -> _RoundResult:
        scored = [] if self._apart else batches
        jobs: list[Callable[[], Any]] = [lambda batch=batch: self._score(batch) for batch in scored]  # type: ignore[misc]
        if train is None:
            jobs.append(lambda: (torch.zeros_like(self._loss), []))
        else:
            jobs.append(lambda: self._gradient(batches[0]) if train else self._loss_only(batches[0]))
        apart = self._removed is None and not self._side_effects.changes_buffers
        *scores, (loss, gradients) = side_by_side(jobs, apart=apart)
        return torch.stack([torch.zeros_like(self._scores), *scores]).sum(0), loss, gradients

    def _add(self, result: _RoundResult, train: bool | None) -> None:
        """Add a round's result up; every rank takes the same step, and has the running statistics of all."""
        scores, loss, gradients = result
        self._scores += scores
        self._loss += loss
        average_over_ranks_(buffer for buffer in self.network.model.buffers() if buffer.is_floating_point())
        if train:
            average_over_ranks_(gradient for gradient in gradients if gradient is not None)
            self._step(gradients)

    def _step(self, gradients: Sequence[Tensor | None]) -> None:
        """One step of what is left. Weights that read removed units have gradients where act(0) ≠ 0 (a sigmoid)."""
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        moving = [(tensor.grad, alive) for tensor, alive in self._sliced if tensor.grad is not None]
        if moving:
            torch._foreach_mul_([gradient for gradient, _ in moving], [alive for _, alive in moving])
        self.optimizer.step()

    def _score(self, batch: Any) -> Tensor:
        with self._removed or self.network.running():
            return self._scorer.units(batch)

    def _gradient(self, batch: Any) -> tuple[Tensor, list[Tensor | None]]:
        loss = torch.zeros_like(self._loss)
        gradients: list[Tensor | None] = [None] * len(self._parameters)
        for part, share in micro_batches(batch, self._micro_batch):
            with self.network.running(), torch.enable_grad(), not_reentrant():
                part_loss = checked(self._watched_loss(part))
                new = torch.autograd.grad(part_loss, self._parameters, allow_unused=True)
            loss = loss + share * part_loss.detach().double()
            gradients = [_added(old, grad, share) for old, grad in zip(gradients, new, strict=True)]
        return loss, gradients

    def _loss_only(self, batch: Any) -> tuple[Tensor, list[Tensor | None]]:
        loss = torch.zeros_like(self._loss)
        for part, share in micro_batches(batch, self._micro_batch):
            with undisturbed(self.network.model), self.network.running(), torch.no_grad():
                loss = loss + share * scalar(self._watched_loss(part)).double()
        return loss, []

    def _watched_loss(self, batch: Any) -> Tensor:
        """The loss; in the first rounds side effects are looked for meanwhile."""
        with self._side_effects.watched() if self._capture and self._rounds <= EAGER_ROUNDS else nullcontext():
            return self.loss_fn(self.network.model, batch)


def _added(old: Tensor | None, new: Tensor | None, share: float) -> Tensor | None:
    if new is None:
        return old
    new = new if share == 1 else share * new
    return new if old is None else old + new


def can_capture(network: ShrinkingNetwork) -> bool:
    """Return whether rounds can be captured: on the current GPU alone, without data-dependent control flow."""
    plain = not (network.graph.reductions or network.graph.on_real_tensors)
    return captures_go_to(network.device) and not is_distributed() and plain


def side_by_side(jobs: Sequence[Callable[[], T]], apart: bool = True) -> list[T]:
    """The results of all jobs; while a CUDA graph is captured, on parallel streams if they may run ``apart``."""
    if not apart or not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing():
        return [job() for job in jobs]
    main, results = torch.cuda.current_stream(), []
    streams = [torch.cuda.Stream() for _ in jobs]
    for job, stream in zip(jobs, streams, strict=True):
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            results.append(job())
    for stream in streams:
        main.wait_stream(stream)
    return results


class CapturedRound:
    """A captured round. What it was made from must live as long as it does."""

    def __init__(self, work: Callable[[Sequence[Any]], None], held: Sequence[Any], graph: torch.cuda.CUDAGraph) -> None:
        self._work, self._graph = work, graph
        self._leaves, self._spec = tree_flatten(list(held))

    @classmethod
    def make(cls, work: Callable[[Sequence[Any]], None], batches: Sequence[Any]) -> CapturedRound | str:
        """Capture ``work`` on batches like these, without running it; or why that cannot be."""
        leaves, spec = tree_flatten(list(batches))
        odd = [leaf for leaf in leaves if not isinstance(leaf, (Tensor, *CONSTANTS))]
        if odd:
            return f"a batch holds a {type(odd[0]).__name__}"
        held = tree_unflatten([leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
        graph = torch.cuda.CUDAGraph()
        try:
            with capturing(graph):
                work(held)
        except NotCaptured as error:
            return str(error)
        return cls(work, held, graph)

    def takes(self, batches: Sequence[Any]) -> bool:
        """Return whether these batches have the shapes and types of the captured ones."""
        leaves, spec = tree_flatten(list(batches))
        return spec == self._spec and all(map(_alike, leaves, self._leaves))

    def __call__(self, batches: Sequence[Any]) -> None:
        """The round on these batches."""
        leaves, _ = tree_flatten(list(batches))
        for mine, leaf in zip(self._leaves, leaves, strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(leaf, non_blocking=True)
        self._graph.replay()


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
    return type(one) is type(other) and one == other


class SideEffects:
    """Whether passes within :meth:`watched` draw random numbers or change buffers.

    Running statistics of batch norms do not count: scores leave them alone.
    """

    def __init__(self, model: nn.Module) -> None:
        others = (module for module in model.modules() if not isinstance(module, _BatchNorm))
        self._buffers = [buffer for module in others for buffer in module.buffers(recurse=False)]
        self.draws = self.changes_buffers = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A pass."""
        drawn, versions = draws(), [buffer._version for buffer in self._buffers]
        yield
        self.draws |= drawn()
        self.changes_buffers |= versions != [buffer._version for buffer in self._buffers]


def has_host_counters(optimizer: Optimizer) -> bool:
    """Return whether a step may depend on a number on the host, such as that of the steps so far.

    A CUDA graph would keep that number for ever.

    >>> import torch
    >>> weights = [torch.zeros(1, requires_grad=True)]
    >>> [has_host_counters(make(weights, lr=0.1)) for make in (torch.optim.SGD, torch.optim.Adam)]
    [False, True]
    """
    return not isinstance(optimizer, SGD) and not all(group.get("capturable") for group in optimizer.param_groups)
