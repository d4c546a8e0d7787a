"""One step of training, and those of an epoch: batch after batch, or replays of one CUDA graph that makes its batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ifso.common.batches import BatchStream, is_listed, part_of
from ifso.common.cuda_graphs import NotCaptured, captures_go_to, capturing, draws
from ifso.common.devices import out_of_memory
from ifso.common.distributed import among_ranks, gathered, is_distributed, together
from ifso.common.loss_fn import LossFn, checked
from ifso.common.text import describe_error
from ifso.common.torch_state import undisturbed
from ifso.data.batches import Epochs
from ifso.errors import DataError, IfsoError, TrainingError
from ifso.training.objective import NamedLosses
from ifso.training.optimizers import Ema, momenta, optimizer_of, rate, rates, set_rate_
from ifso.training.precision import autocast, scaler, tensor_cores
from ifso.training.settings import TrainSettings
from ifso.training.triton_layers import triton_layers


class TrainStep:
    """A step of training: ``train_step(batch)``, with all that it needs and changes.

    With ``narrow``, layers have kernels of ours where they can be had (:mod:`ifso.training.triton_layers`),
    unless batches are lists of images, whose sizes may differ. Under ``torch.distributed`` gradients are averaged over
    the processes, and statistics of norms are the first one's.
    """

    def __init__(self, model: nn.Module, settings: TrainSettings, loss_fn: LossFn) -> None:
        self.model, self.settings, self._loss_fn = model, settings, loss_fn
        self.device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        if settings.channels_last:
            model.to(memory_format=torch.channels_last)
        on_gpu = self.device.type == "cuda"
        self.lr: float | Tensor = torch.tensor(settings.lr, device=self.device) if on_gpu else settings.lr
        self.optimizer = optimizer_of(model, settings, lr=self.lr)
        self.ema = Ema(model, settings.ema) if settings.ema else None
        self.scaler = scaler(settings.precision, self.device)
        self.total = torch.zeros((), device=self.device)
        self.narrow = True
        self._net = None if is_distributed() else _compiled(model, settings)

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph may hold the step: not if it asks other processes or looks at its own result."""
        return captures_go_to(self.device) and not is_distributed() and not self.scaler.is_enabled()

    def __call__(self, batch: Any) -> None:
        """Take a step on ``batch`` and add its loss to ``total``."""
        self.optimizer.zero_grad()
        with tensor_cores(self.settings.precision), among_ranks():
            if self._net is None:
                self._net = _compiled(_exchanging(self.model, self._has_spare(batch)), self.settings)
            self._differentiate(batch)
        if self.settings.clip:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.ema is not None:
            self.ema.update()

    def _differentiate(self, batch: Any) -> None:
        """Compute gradients of the mean loss over all micro-batches of ``batch``."""
        parts, precision = self.settings.accumulate, self.settings.precision
        net = self.model if self._net is None else self._net
        for number in range(parts):
            part = part_of(batch, number, parts)
            unsynced = is_distributed() and number < parts - 1
            with (
                autocast(precision, self.device),
                triton_layers(precision, self.device) if self.narrow and not is_listed(part) else nullcontext(),
                net.no_sync() if unsynced else nullcontext(),  # type: ignore[operator]
            ):
                loss = checked(self._loss_fn(net, part)) / parts
            with _differentiating():
                self.scaler.scale(loss).backward()
            self.total += loss.detach()

    def _has_spare(self, batch: Any) -> bool:
        """Return whether a parameter has no part in the loss of any rank, which DDP must know. It leaves no trace."""
        wanted = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        with undisturbed(self.model), autocast(self.settings.precision, self.device):
            loss = checked(self._loss_fn(self.model, part_of(batch, 0, self.settings.accumulate)))
            with _differentiating():
                found = torch.autograd.grad(loss, wanted, allow_unused=True)
        if isinstance(self._loss_fn, NamedLosses):
            self._loss_fn.pop_means()
        return any(gathered(any(gradient is None for gradient in found)))

    def set_rate(self, lr: float) -> None:
        """Set the learning rate of the next step."""
        set_rate_(self.optimizer, lr)

    def state(self) -> dict[str, Tensor]:
        """Everything that a step changes, by name: the tensors themselves."""
        state = {f"model.{name}": value for name, value in self.model.state_dict().items() if isinstance(value, Tensor)}
        state |= {f"momentum.{name}": value for name, value in momenta(self.model, self.optimizer).items()}
        if self.ema is not None:
            state |= {f"ema.{name}": value for name, value in self.ema.state_dict().items()}
        return state

    def averaged(self) -> AbstractContextManager[None]:
        """Let the model hold what is evaluated and kept for a while: the average, where there is one."""
        return nullcontext() if self.ema is None else self.ema.applied()


@contextmanager
def _differentiating() -> Iterator[None]:
    """Explain why a loss cannot be differentiated; errors of memory that has run out pass."""
    try:
        yield
    except Exception as error:
        if isinstance(error, IfsoError) or out_of_memory(error):
            raise
        in_place = "let the network and its loss change no tensors in place (x += y, ReLU(inplace=True))"
        hint = in_place if "inplace operation" in str(error) else "check that backward() of the loss works"
        raise TrainingError(
            f"the loss of a batch cannot be differentiated ({describe_error(error)}); {hint}"
        ) from error


def _exchanging(model: nn.Module, spare: bool) -> nn.Module:
    """The model with gradients averaged over the processes; with ``spare``, some parameters get none."""
    device = next(model.parameters()).device
    ids = [device.index] if device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=ids, find_unused_parameters=spare)


def _compiled(model: nn.Module, settings: TrainSettings) -> nn.Module:
    return torch.compile(model) if settings.compile else model  # type: ignore[return-value]


NO_GRAPH = "the step cannot be captured as a CUDA graph"

WARM_UP = 3

AHEAD = 6
"""Steps of a network that may wait on the GPU: enough to keep it busy, few enough to give other networks their turn."""


class PlainSteps:
    """Every batch of an epoch, one after another; ``count`` are done.

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


Steps = PlainSteps | CapturedSteps


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
