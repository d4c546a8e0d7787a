"""The steps of an epoch: batch after batch, or each a replay of one CUDA graph that makes its batch itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from ifso.common.batches import BatchStream
from ifso.common.cuda_graphs import NotCaptured, capturing, draws
from ifso.common.distributed import gathered, is_distributed, together
from ifso.data.batches import Epochs
from ifso.errors import DataError, TrainingError
from ifso.training.optimizers import rate, rates
from ifso.training.settings import TrainSettings
from ifso.training.train_step import TrainStep

NO_GRAPH = "the step cannot be captured as a CUDA graph"

WARM_UP = 3

AHEAD = 6
"""Steps of a network that may wait on the GPU: enough to keep it busy, few enough to give other networks their turn."""


class Steps(Protocol):
    """``epoch(number)`` takes a step at each ``next()``, or yields False if it only waits; ``count`` are done."""

    count: int

    def epoch(self, number: int) -> Iterator[bool]:
        """The steps of epoch ``number`` from 0."""
        ...


class PlainSteps:
    """Every batch of an epoch, one after another.

    Without a length an epoch has one rate: that of its middle, so that no epoch is lost to a rate of 0. Milestones
    count from the beginning of an epoch.
    """

    def __init__(self, train_step: TrainStep, batches: Any) -> None:
        self._train_step, self._batches, self.count = train_step, batches, 0

    def epoch(self, number: int) -> Iterator[bool]:
        """Take the steps of epoch ``number`` from 0."""
        self.count, seed = 0, self._train_step.settings.seed
        steps = len(self._batches) if hasattr(self._batches, "__len__") else None
        for batch in same_count_on_all_ranks(batches_of(self._batches, seed, number), steps):
            self._train_step.set_rate(self._rate(number, steps))
            self._train_step(batch)
            self.count += 1
            yield True

    def _rate(self, number: int, steps: int | None) -> float:
        """The rate of the next step in epoch ``number``; batches beyond their length have that of the last one."""
        settings = self._train_step.settings
        if steps is None:
            return rate(settings, _middle_of_epoch(settings, number) / settings.epochs)
        done = min(self.count, steps - 1) / steps if steps else 0.0
        return rate(settings, (number + done) / settings.epochs, max(steps, 1))


def _middle_of_epoch(settings: TrainSettings, number: int) -> float:
    """The time, in epochs, whose rate all of epoch ``number`` has.

    >>> _middle_of_epoch(TrainSettings(schedule="cosine"), 3), _middle_of_epoch(TrainSettings(), 3)
    (3.5, 3)
    >>> [_middle_of_epoch(TrainSettings(warm_up=1.25), number) for number in range(3)]
    [0.5, 1.25, 2]
    """
    middle = number + 0.5
    return max(number, min(middle, settings.warm_up)) if settings.schedule == "step" else middle


def same_count_on_all_ranks(batches: Iterator[Any], length: int | None) -> Iterator[Any]:
    """The batches; ranks that do not have equally many are refused, since each step is one of all ranks."""
    if not is_distributed():
        yield from batches
        return
    lengths = gathered(-1 if length is None else length)
    if len(set(lengths)) > 1:
        raise DataError(f"ranks have {', '.join(map(str, lengths))} training batches; give each equally many")
    number = 0
    if length is None:
        while any(there := gathered((batch := together(lambda: next(batches, None))) is not None)):
            if not all(there):
                raise DataError(
                    f"rank {there.index(0)} has {number} training batches, and others have more; give each equally many"
                )
            number += 1
            yield batch
        return
    for number, batch in enumerate(batches, 1):
        if number <= length:
            yield batch
    if number != length:
        raise DataError(f"len() of the training batches is {length}, but {number} came; other ranks rely on it")


class CapturedSteps:
    """A step as a CUDA graph on its own stream, which gathers and augments its batch, learns, and counts on.

    Captured tensors must stay: weights, momenta and averages are written in place, here and in checkpoints.
    """

    def __init__(self, train_step: TrainStep, batches: Any, stream: torch.cuda.Stream) -> None:
        self._train_step, self._batches, self._stream = train_step, batches, stream
        self._steps, self.count = len(batches), 0
        order, moves = batches.plan(0)
        self._order, self._moves = order.clone(), None if moves is None else moves.clone()
        self._size = len(order) // self._steps
        table = [*rates(train_step.settings, self._steps), 0.0]
        self._rates = torch.tensor(table, dtype=torch.float32, device=train_step.device)
        self._within, self._overall = (torch.zeros(1, dtype=torch.int64, device=train_step.device) for _ in range(2))
        self._lanes = torch.arange(self._size, device=train_step.device)
        self._graph = self._captured()

    def epoch(self, number: int) -> Iterator[bool]:
        """Enqueue the steps of epoch ``number``; yields False while the GPU has enough to do."""
        waiting: deque[torch.cuda.Event] = deque()
        self._begin(number)
        for step in range(1, self._steps + 1):
            while len(waiting) >= AHEAD and not waiting[0].query():
                yield False
            if len(waiting) >= AHEAD:
                waiting.popleft()
            with torch.cuda.stream(self._stream):
                self._graph.replay()
                waiting.append(self._stream.record_event())
            self.count = step
            yield True
        while waiting and not waiting[-1].query():
            yield False

    def _begin(self, number: int) -> None:
        order, moves = self._batches.plan(number)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for held in (order, moves):
                if held is not None:
                    held.record_stream(self._stream)
            self._order.copy_(order)
            if self._moves is not None:
                self._moves.copy_(moves)
            self._within.zero_()
            self._overall.fill_(number * self._steps)

    def _work(self) -> None:
        places = self._within * self._size + self._lanes
        moves = None if self._moves is None else self._moves[places]
        assert isinstance(self._train_step.lr, Tensor)
        self._train_step.lr.copy_(self._rates.index_select(0, self._overall).squeeze(0))
        self._train_step(self._batches.make(self._order[places], moves))
        self._within += 1
        self._overall += 1

    def _captured(self) -> torch.cuda.CUDAGraph:
        """The graph; the steps that warm up for it are undone, and random states restored."""
        changed = [*self._train_step.state().values(), self._within, self._overall, self._train_step.total]
        before = [tensor.detach().clone() for tensor in changed]
        random = torch.cuda.get_rng_state(self._train_step.device)
        self._stream.wait_stream(torch.cuda.current_stream())
        drawn = draws(gpu=False)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP):
                self._work()
        graph = torch.cuda.CUDAGraph()
        try:
            if drawn():
                raise TrainingError(f"{NO_GRAPH} (the network or its loss draws random numbers on the CPU)")
            with capturing(graph, stream=self._stream):
                self._work()
        except NotCaptured as error:
            raise TrainingError(f"{NO_GRAPH} ({error})") from error
        finally:
            torch.cuda.synchronize()  # steps that still run would read what is restored here, or freed
            with torch.no_grad():
                for tensor, value in zip(changed, before, strict=True):
                    tensor.copy_(value)
            torch.cuda.set_rng_state(random, self._train_step.device)
        return graph


def can_capture(train_step: TrainStep, batches: Any) -> bool:
    """Return whether batches are made from tensors on the GPU, all of one size, and the step may be captured."""
    held = hasattr(batches, "plan") and hasattr(batches, "make") and getattr(batches, "drop_last", False)
    return held and train_step.capturable


class OneEpoch(BatchStream):
    """One epoch of ``batches`` as a :class:`BatchStream` has it.

    >>> list(OneEpoch([1, 2, 3], seed=0, epoch=5))
    [1, 2, 3]
    """

    def __init__(self, batches: Iterable[Any], seed: int, epoch: int) -> None:
        super().__init__(batches, seed, (epoch, 0))

    def _end_epoch(self) -> None:
        raise StopIteration


def batches_of(batches: Any, seed: int, epoch: int) -> Iterator[Any]:
    """Epoch ``epoch`` of ``batches``, with random numbers that follow the seed and the epoch.

    Ours have random numbers of their own, and a list has none. For others the global random states of torch, numpy and
    Python and the generator of a DataLoader are set, so that an interrupted training goes on as if it had not been;
    between two batches the states are as they were.
    """
    if isinstance(batches, Epochs):
        batches.set_epoch(epoch)
        return iter(batches)
    return iter(batches) if type(batches) in (list, tuple) else OneEpoch(batches, seed, epoch)
