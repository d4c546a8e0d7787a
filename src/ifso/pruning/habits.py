"""What a network, its loss and its optimizer do beside their work, as far as a CUDA graph cannot hold it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import SGD, Optimizer

from ifso.curvature.chance import draws


class Habits:
    """Seen in the passes within :meth:`watched`: do they draw random numbers, do they change buffers?

    Running statistics of batch norms do not count: whoever scores leaves them alone.
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


def counts_on_the_host(optimizer: Optimizer) -> bool:
    """May a step depend on a number that a CUDA graph would keep for ever, as that of the steps so far?

    >>> import torch
    >>> weights = [torch.zeros(1, requires_grad=True)]
    >>> [counts_on_the_host(make(weights, lr=0.1)) for make in (torch.optim.SGD, torch.optim.Adam)]
    [False, True]
    """
    return not isinstance(optimizer, SGD) and not all(group.get("capturable") for group in optimizer.param_groups)
