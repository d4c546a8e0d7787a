"""One step of training: forward, backward, optimizer, moving average."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ifso.common.batches import is_listed, part_of
from ifso.common.cuda_graphs import captures_go_to
from ifso.common.devices import out_of_memory
from ifso.common.distributed import among_ranks, gathered, is_distributed
from ifso.common.loss_fn import LossFn, checked
from ifso.common.text import describe_error
from ifso.common.torch_state import undisturbed
from ifso.errors import IfsoError, TrainingError
from ifso.training.losses import NamedLosses
from ifso.training.optimizers import Ema, momenta, optimizer_of, set_rate_
from ifso.training.precision import autocast, scaler, tensor_cores
from ifso.training.settings import TrainSettings
from ifso.training.triton_conv import narrow_layers


class TrainStep:
    """A step of training: ``train_step(batch)``, with all that it needs and changes.

    With ``narrow``, narrow layers have kernels of their own where they can be had (:mod:`ifso.training.triton_conv`),
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
                narrow_layers(precision, self.device) if self.narrow and not is_listed(part) else nullcontext(),
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
