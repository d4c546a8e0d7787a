"""The work of a run: scores added up over batches, and steps of the optimizer between them."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ifso.common.batch_stream import not_finite, on_device
from ifso.common.batches import num_samples, pieces
from ifso.common.devices import out_of_memory
from ifso.common.distributed import average_over_ranks_, mean_over_ranks, together
from ifso.common.loss_fn import LossFn, WatchedLoss, checked, scalar
from ifso.common.torch_state import not_reentrant, same_modes, undisturbed
from ifso.criteria.base import Criterion, Task
from ifso.criteria.ifso import Ifso
from ifso.curvature.submodule_capture import CapturedSubmodules, Uncut
from ifso.errors import IfsoError, ScoreError
from ifso.graph.layouts import surviving
from ifso.pruning.cuda_round import Habits, Replay, can_capture, counts_on_the_host, side_by_side
from ifso.pruning.shrinking_network import ShrinkingNetwork
from ifso.pruning.state import fill_, tensors_of

EAGER_ROUNDS = 2
"""Rounds before one is captured as a CUDA graph: kernels get compiled, momenta made, and habits seen."""

MOST_MISSES = 10
"""Rounds in a row whose batches are not like those of the captured one, before it is given up."""

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
_Found = tuple[Tensor, Tensor, list[Tensor | None]]


class Worker:
    """Does rounds: scores of some batches and, if asked, one step of the optimizer on the first of them.

    On a GPU rounds are captured as a CUDA graph, in which the batches are scored side by side; where that cannot be,
    they run one operation after another, but for the parts of a detector that the score replays. A criterion that needs
    no batches is asked once a round, outside the graph. If memory runs out, batches are cut into micro-batches.
    ``tell`` hears of it.
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
        if not isinstance(self.optimizer, Optimizer):
            raise IfsoError(f"optimizer gave a {type(self.optimizer).__name__}; it must return a torch.optim.Optimizer")
        self._micro: int | None = None
        self._refused: dict[str, str] = {}
        self._noted = False
        self._capture = capture and can_capture(network)
        self._apart = not criterion.needs_batches
        self._ghosts = _Ghosts(network) if criterion.masks_itself else None
        self.renew()

    def renew(self) -> None:
        """The network has another shape now: nothing that was prepared for the old one holds."""
        self._replays: dict[bool, Replay] = {}
        self._habits = Habits(self.network.model)
        self._rounds = self._misses = 0
        device = self.network.device
        self._kept = self.network.kept_here.to(device if self.criterion.masks_itself else "cpu")
        self._alive = self._masks()
        named = self.network.model.named_parameters()
        self._sliced = [(tensor, self._alive[name]) for name, tensor in named if name in self._alive]
        self._task = self._new_task()
        self._surviving = self._whole()
        self._narrow(self._alive)
        units = self.network.graph.num_units
        self._scores = torch.zeros(units, dtype=torch.float64, device=device)
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._spoilt = torch.zeros((), dtype=torch.long, device=device)
        self._counts = [0, 0]

    @property
    def spoilt(self) -> Tensor:
        """How many batches held NaN or infinity."""
        return self._spoilt

    def remove_(self, units: Sequence[int]) -> None:
        """Take units away softly, from the optimizer's memory too."""
        if self._ghosts is not None:
            self._ghosts.remember(units)
        self.network.remove_(units, self.optimizer)
        self._narrow(self.network.sliced_by(units))

    def tensors(self) -> dict[str, Tensor]:
        """Everything that changes during a run, by name: not copied."""
        ghosts = {} if self._ghosts is None else self._ghosts.tensors()
        return {**tensors_of(self.network, self.optimizer), **ghosts}

    def fill_(self, tensors: Mapping[str, Tensor], plain: Any) -> None:
        """Put stored numbers there; ``plain`` is from :func:`~ifso.pruning.state.plain_state_of`."""
        fill_(self.network, self.optimizer, tensors, plain)
        self._narrow(self._alive)
        for name, tensor in ({} if self._ghosts is None else self._ghosts.tensors()).items():
            tensor.copy_(tensors[name])

    def prepare(self, batches: Sequence[Any]) -> None:
        """Let the criterion look at all batches before it scores them, if it wants to."""
        if self.criterion.prepares:
            with same_modes(self.network.model), self.network.running():
                self.criterion.prepare(self._task, (on_device(batch, self.network.device) for batch in batches))

    def round(self, batches: Sequence[Any], *, train: bool | None) -> None:
        """Add the scores of the batches up and, if asked, take a step; with None not even the loss is computed."""
        batches = [on_device(batch, self.network.device) for batch in batches]
        self._spoilt += torch.stack([not_finite(batch).to(self._spoilt.device) for batch in batches]).sum()
        self._rounds += 1
        if self._apart:
            self._scores += len(batches) * together(partial(self._score, batches[0]))
        replay = self._replay(batches, train)
        if replay is not None:
            replay(batches)
        else:
            self._add(together(lambda: self._patiently(batches, train)), train)
            self._tell_refused()
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

    def _new_task(self) -> Task:
        """For ``ifso`` all units are there: those removed are zero, and ``surviving`` says which weights count."""
        everything = isinstance(self.criterion, Ifso)
        kept = torch.ones_like(self._kept) if everything else self._kept
        return Task(self.network.model, self.network.graph, self.loss_fn, kept)

    def _masks(self) -> dict[str, Tensor]:
        """Ones in the shape of each parameter that units have slices of."""
        graph = self.network.graph
        return {
            name: torch.ones_like(parameter, requires_grad=False)
            for name, parameter in self.network.model.named_parameters()
            if graph.masking(name) is not None
        }

    def _whole(self) -> dict[str, Tensor]:
        """For ``ifso`` the parts, by name, of the vector that says which weights survive."""
        if not isinstance(self.criterion, Ifso):
            return {}
        products = self.criterion.products(self._task)
        products.surviving = torch.ones_like(products.space.current())
        return products.space.split(products.surviving)

    @torch.no_grad()
    def _narrow(self, names: Collection[str]) -> None:
        """What is left of units, and of these weights; in place, for rounds that were captured."""
        kept = self.network.kept_here
        self._kept.copy_(kept)
        for name in self._alive.keys() & names:
            layout = self.network.graph.masking(name)
            assert layout is not None
            self._alive[name].copy_(surviving(layout, kept))
            if name in self._surviving:
                self._surviving[name].copy_(self._alive[name])

    def _replay(self, batches: Sequence[Any], train: bool | None) -> Replay | None:
        """The captured round for such batches, made when it is time for it."""
        if not self._capture or train is None or self._rounds <= EAGER_ROUNDS or self._micro is not None:
            return None
        if train not in self._replays:
            made = self._hindrance(train) or Replay.make(
                lambda held: self._add(self._work(held, train), train), batches
            )
            if isinstance(made, str):
                self._give_up_capturing(made)
                return None
            self._replays[train] = made
        if self._replays[train].takes(batches):
            self._misses = 0
            return self._replays[train]
        self._misses += 1
        if self._misses == MOST_MISSES:
            self._give_up_capturing(f"{MOST_MISSES} batches in a row differ in shapes, or in what is no tensor")
        return None

    def _hindrance(self, train: bool) -> str:
        """Why a captured round would not be what it is now."""
        if self._habits.draws:
            return "the model or its loss draws random numbers"
        if train and counts_on_the_host(self.optimizer):
            return f"{type(self.optimizer).__name__} counts its steps on the host (capturable=True may be an option)"
        return ""

    def _give_up_capturing(self, reason: str) -> None:
        self._capture = False
        self._replays.clear()
        self.tell(f"rounds run without a CUDA graph: {reason}")

    def _patiently(self, batches: Sequence[Any], train: bool | None) -> _Found:
        """What a round finds; if memory runs out, again with smaller and smaller parts of the batches."""
        while True:
            try:
                return self._work(batches, train)
            except (RuntimeError, MemoryError, ScoreError) as error:
                if not out_of_memory(error):
                    raise
                if not self._replayed_parts.let_go() and not self._cut(batches):
                    raise ScoreError("out of memory with a single sample; prune on a larger device") from error
            gc.collect()  # the frames of what failed may hold its tensors in a ring
            torch.cuda.empty_cache()

    @property
    def _replayed_parts(self) -> CapturedSubmodules | Uncut:
        """The parts of a detector that scores replay."""
        return self.criterion.products(self._task).cut if isinstance(self.criterion, Ifso) else Uncut()

    def _tell_refused(self) -> None:
        """Say, once, which parts of a detector run without a CUDA graph, and why; and if scores go another way."""
        for name, reason in self._replayed_parts.refused.items():
            if self._refused.get(name) != reason:
                self._refused[name] = reason
                self.tell(f"{name} is scored without a CUDA graph: {reason}")
        note = self.criterion.note(self._task)
        if note and not self._noted:
            self._noted = True
            self.tell(note)

    def _cut(self, batches: Sequence[Any]) -> bool:
        """Halve the micro-batches from now on. False if they cannot be smaller."""
        if self._micro == 1:
            return False
        now = self._micro or max(num_samples(batch) for batch in batches)
        self._micro = (now + 1) // 2
        self._replays.clear()
        if isinstance(self.criterion, Ifso):
            self.criterion = dataclasses.replace(self.criterion, micro_batch=self._micro)
        self.tell(
            f"out of memory: from now on batches are cut into micro-batches of {self._micro} "
            "(batch norm in train mode takes its statistics over each)"
        )
        return True

    def _work(self, batches: Sequence[Any], train: bool | None) -> _Found:
        scored = [] if self._apart else batches
        jobs: list[Callable[[], Any]] = [lambda batch=batch: self._score(batch) for batch in scored]  # type: ignore[misc]
        if train is None:
            jobs.append(lambda: (torch.zeros_like(self._loss), []))
        else:
            jobs.append(lambda: self._gradient(batches[0]) if train else self._loss_only(batches[0]))
        apart = self._ghosts is None and not self._habits.changes_buffers
        *scores, (loss, gradients) = side_by_side(jobs, apart=apart)
        return torch.stack([torch.zeros_like(self._scores), *scores]).sum(0), loss, gradients

    def _add(self, found: _Found, train: bool | None) -> None:
        """Add up what a round has found; every rank takes the same step, and has the running statistics of all."""
        scores, loss, gradients = found
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
        with same_modes(self.network.model), self._ghosts or self.network.running():
            found = [
                self.criterion.units(self._task, part).to(self._scores) * share for part, share in self._parts(batch)
            ]
        return torch.stack(found).sum(0)

    def _parts(self, batch: Any) -> Iterator[tuple[Any, float]]:
        """Micro-batches with their shares of the samples; ``ifso`` cuts batches itself, and exactly."""
        if self._micro is None or isinstance(self.criterion, Ifso):
            yield batch, 1.0
        else:
            yield from _cut(batch, self._micro)

    def _gradient(self, batch: Any) -> tuple[Tensor, list[Tensor | None]]:
        loss = torch.zeros_like(self._loss)
        gradients: list[Tensor | None] = [None] * len(self._parameters)
        for part, share in _cut(batch, self._micro):
            with self.network.running(), torch.enable_grad(), not_reentrant():
                found = checked(self._asked(part))
                new = torch.autograd.grad(found, self._parameters, allow_unused=True)
            loss = loss + share * found.detach().double()
            gradients = [_added(old, grad, share) for old, grad in zip(gradients, new, strict=True)]
        return loss, gradients

    def _loss_only(self, batch: Any) -> tuple[Tensor, list[Tensor | None]]:
        loss = torch.zeros_like(self._loss)
        for part, share in _cut(batch, self._micro):
            with undisturbed(self.network.model), self.network.running(), torch.no_grad():
                loss = loss + share * scalar(self._asked(part)).double()
        return loss, []

    def _asked(self, batch: Any) -> Tensor:
        """The loss; in the first rounds the network is watched meanwhile."""
        with self._habits.watched() if self._capture and self._rounds <= EAGER_ROUNDS else nullcontext():
            return self.loss_fn(self.network.model, batch)


class _Ghosts:
    """The weights of removed units, for a criterion that wants to see them: put back within the context."""

    def __init__(self, network: ShrinkingNetwork) -> None:
        self._network = network
        self._tensors = [parameter.data for parameter in network.model.parameters()]
        self._away = [torch.zeros_like(tensor) for tensor in self._tensors]

    def remember(self, units: Sequence[int]) -> None:
        """Units are about to go."""
        with torch.no_grad():
            before = [tensor.clone() for tensor in self._tensors]
            self._network.remove_(units)
            for away, old, now in zip(self._away, before, self._tensors, strict=True):
                away.add_(old - now)

    def tensors(self) -> dict[str, Tensor]:
        """By name, for a checkpoint."""
        return {f"ghost.{number}": tensor for number, tensor in enumerate(self._away)}

    def __enter__(self) -> None:
        torch._foreach_add_(self._tensors, self._away)

    def __exit__(self, *exc: object) -> None:
        torch._foreach_sub_(self._tensors, self._away)


def _cut(batch: Any, size: int | None) -> Iterator[tuple[Any, float]]:
    if size is None:
        yield batch, 1.0
        return
    total = num_samples(batch)
    for part in pieces(batch, size):
        yield part, num_samples(part) / total


def _added(old: Tensor | None, new: Tensor | None, share: float) -> Tensor | None:
    if new is None:
        return old
    new = new if share == 1 else share * new
    return new if old is None else old + new
