"""A loss made of parts that have names, as a detector's, and what each part came to in an epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ifso.pruning.ranks import mean_over_ranks

LossesOf = Callable[[nn.Module, Any], Mapping[str, Tensor]]
"""``losses_of(model, batch)`` gives scalars by name."""


class NamedLosses:
    """A ``loss_fn(model, batch)``: the sum of what ``losses_of`` gives. Means of its parts are kept until asked for.

    >>> loss_fn = NamedLosses(lambda model, batch: {"class": model(batch).sum(), "box": model(batch).mean()})
    >>> [float(loss_fn(nn.Identity(), batch)) for batch in (torch.ones(2), torch.zeros(2))]
    [3.0, 0.0]
    >>> loss_fn.taken(), loss_fn.taken()
    ({'class': 1.0, 'box': 0.5}, {})
    """

    def __init__(self, losses_of: LossesOf) -> None:
        self.losses_of = losses_of
        self._sums: dict[str, Tensor] = {}
        self._count = 0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The sum of the losses."""
        found = self.losses_of(model, batch)
        for name, loss in found.items():
            self._sums[name] = self._sums.get(name, 0.0) + loss.detach()
        self._count += 1
        return torch.stack(list(found.values())).sum()

    def taken(self) -> dict[str, float]:
        """The mean of each part since the last time, over the batches of all processes."""
        if not self._count:
            return {}
        names, total = list(self._sums), torch.stack(list(self._sums.values()))
        means = mean_over_ranks(total, self._count)
        self._sums, self._count = {}, 0
        return dict(zip(names, means.tolist(), strict=True))
