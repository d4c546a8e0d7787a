"""A moving average of a network's weights, often better than the weights themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ifso.common.module_state import tensor_slots
from ifso.errors import TrainingError
from ifso.training.checkpoint import fill_

AVERAGE, UPDATES = "average.", "updates"


class Ema:
    """The exponential moving average ā of a model's parameters and of the statistics of its batch norms.

    At update t = 0, 1, …: ā ← δā + (1 − δ)w with δ = min(``decay``, (1 + t)/(10 + t)), so that what the model began
    with is soon forgotten. Other buffers (counters, tables, masks) are copied. Weights in half precision are averaged
    in float32, where small changes are not lost.

    ``update`` makes no decision on the CPU and writes in place, so that a CUDA graph may hold it; tensors of a kind are
    written by one kernel.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.constant_(model.weight, 1.0)
    >>> average = Ema(model, 0.9)
    >>> _ = nn.init.constant_(model.weight, 2.0)
    >>> average.update()
    >>> with average.applied():
    ...     print(round(model.weight.item(), 4))
    1.9
    >>> model.weight.item()
    2.0
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay = decay
        self._slots: dict[str, tuple[nn.Module, str]] = {}
        for name, module, key in tensor_slots(model):
            self._slots.setdefault(name, (module, key))
        live = self._live()
        self._averaged = [name for name in live if self._is_averaged(name)]
        self._copied = [name for name in live if not self._is_averaged(name)]
        self._average = {name: tensor.detach().to(_wide(tensor), copy=True) for name, tensor in live.items()}
        device = next(iter(live.values())).device if live else torch.device("cpu")
        self._updates = torch.zeros((), dtype=torch.int64, device=device)
        self._applied = False

    @torch.no_grad()
    def update(self) -> None:
        """Take the model's present weights into the average."""
        self._refuse_applied()
        live = self._live()
        weight = self._weight()
        for names in self._alike(self._averaged):
            own = [self._average[name] for name in names]
            step = torch._foreach_sub([live[name].to(mean.dtype) for name, mean in zip(names, own, strict=True)], own)
            torch._foreach_mul_(step, weight.to(own[0].device, own[0].dtype))
            torch._foreach_add_(own, step)
        for names in self._alike(self._copied):
            _copy_({name: self._average[name] for name in names}, live)
        self._updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within it the model holds the average, in the same memory; afterwards, whatever happens, its own weights."""
        self._refuse_applied()
        live = self._live()
        own = {name: tensor.detach().clone() for name, tensor in live.items()}
        self._applied = True
        try:
            _copy_(live, self._average)
            yield
        finally:
            _copy_(self._live(), own)
            self._applied = False

    def keep_(self) -> None:
        """The model holds the average from now on."""
        self._refuse_applied()
        _copy_(self._live(), self._average)

    def state_dict(self) -> dict[str, Tensor]:
        """The number of updates and the average of every tensor: not copied."""
        return {UPDATES: self._updates, **{f"{AVERAGE}{name}": mean for name, mean in self._average.items()}}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what :meth:`state_dict` gave for a model of the same shape."""
        fill_(self.state_dict(), state)

    def _weight(self) -> Tensor:
        """1 − δ, as a float64 scalar where the count of updates is."""
        updates = self._updates.double()
        return 1 - ((1 + updates) / (10 + updates)).clamp(max=self._decay)

    def _live(self) -> dict[str, Tensor]:
        """The model's tensors, looked up anew: buffers may be replaced when a model is moved."""
        return {name: _held(module, key) for name, (module, key) in self._slots.items()}

    def _is_averaged(self, name: str) -> bool:
        module, key = self._slots[name]
        statistics = isinstance(module, _NormBase) and key in {"running_mean", "running_var"}
        return _held(module, key).is_floating_point() and (key in module._parameters or statistics)

    def _alike(self, names: list[str]) -> list[list[str]]:
        """Names of averages of the same device and dtype together."""
        found: dict[tuple[torch.device, torch.dtype], list[str]] = {}
        for name in names:
            mean = self._average[name]
            found.setdefault((mean.device, mean.dtype), []).append(name)
        return list(found.values())

    def _refuse_applied(self) -> None:
        if self._applied:
            raise TrainingError("the model holds its average now; leave `applied()` before the next update")


def _held(module: nn.Module, key: str) -> Tensor:
    tensor = module._parameters[key] if key in module._parameters else module._buffers[key]
    assert tensor is not None
    return tensor


def _wide(tensor: Tensor) -> torch.dtype:
    """Of the average: float32 for half precision."""
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype


@torch.no_grad()
def _copy_(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
    torch._foreach_copy_(list(targets.values()), [sources[name] for name in targets])
