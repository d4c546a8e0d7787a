"""The unpruned network as an aim, and how near to it another one is, by batches that nothing is fitted to."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ifso.common.loss_fn import LossFn, output_tensors, outputs_of, scalar
from ifso.common.torch_state import undisturbed
from ifso.pruning.recovery import distance, norms_of, recalibrate_

REMEMBERED = 2**28
"""Bytes of the aim's outputs that are held, not to be computed again."""


class Judged(NamedTuple):
    """How far outputs are from those of the aim, and the loss of either, added up over batches."""

    distance: float
    loss: float
    unpruned: float


class Aim:
    """The unpruned ``network``, and what it gives for every other batch.

    Args:
        network: in the modes in which it runs.
        loss_fn: ``loss_fn(network, batch)`` runs a network.
        batches: gives the batches, each time in the same order.
        reduce: a sum over all processes.
    """

    def __init__(
        self, network: nn.Module, loss_fn: LossFn, batches: Callable[[], Iterable[Any]],
        reduce: Callable[[Tensor], Tensor],
    ) -> None:  # fmt: skip
        self.network, self._loss_fn, self._batches, self._reduce = network, loss_fn, batches, reduce
        self._answers: dict[int, tuple[list[Tensor], Tensor]] = {}
        self._room = REMEMBERED

    def better_calibrated(self) -> Aim:
        """This one, or one with new statistics in its batch norms if its loss is lower with them.

        It is this one where there is nothing to judge by.
        """
        first = next(self._judging(), None)
        if first is None or not norms_of(self.network) or not self._answer(*first)[0]:
            return self
        network = copy.deepcopy(self.network)
        recalibrate_(network, self._loss_fn, self._batches())
        other = Aim(network, self._loss_fn, self._batches, self._reduce)
        return other if other._loss() < self._loss() else self

    def judged(self, model: nn.Module) -> Judged | None:
        """How near a model is.

        None if there are no such batches, no outputs beside the loss, or others in number (boxes that were found).
        """
        total: list[Tensor] = []
        for number, batch in self._judging():
            outputs, loss = self._answer_of(model, batch)
            wanted, unpruned = self._answer(number, batch)
            if [output.shape for output in outputs] != [output.shape for output in wanted] or not outputs:
                return None
            apart = [distance(one, other).double() for one, other in zip(outputs, wanted, strict=True)]
            total.append(torch.stack([torch.stack(apart).sum(), loss, unpruned]))
        return Judged(*self._reduce(torch.stack(total).sum(0)).tolist()) if total else None

    def _loss(self) -> float:
        losses = [self._answer(number, batch)[1] for number, batch in self._judging()]
        return float(self._reduce(torch.stack(losses).sum())) if losses else 0.0

    def _judging(self) -> Iterator[tuple[int, Any]]:
        return (each for each in enumerate(self._batches()) if each[0] % 2)

    def _answer(self, number: int, batch: Any) -> tuple[list[Tensor], Tensor]:
        """The outputs and the loss of the aim itself."""
        if number in self._answers:
            return self._answers[number]
        outputs, loss = self._answer_of(self.network, batch)
        size = sum(output.nbytes for output in outputs)
        if size <= self._room:
            self._room -= size
            self._answers[number] = outputs, loss
        return outputs, loss

    def _answer_of(self, network: nn.Module, batch: Any) -> tuple[list[Tensor], Tensor]:
        with torch.no_grad(), undisturbed(network), outputs_of(network) as caught:
            torch.manual_seed(0)
            loss = scalar(self._loss_fn(network, batch)).double()
        return output_tensors(caught), loss
