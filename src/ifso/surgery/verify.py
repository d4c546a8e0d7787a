"""Is the smaller model the same function as the masked one? Both are run on real inputs before anything is removed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ifso.common.module_state import set_tensors
from ifso.common.tensors import map_tensors, tensors_in
from ifso.common.torch_state import in_precision, preserved
from ifso.errors import CompactionError, KeepError
from ifso.graph.balancing import check_keep
from ifso.graph.channel_graph import ChannelGraph
from ifso.graph.execution import call_model, on_real_tensors
from ifso.graph.removal import UnitRemoval
from ifso.surgery.mask import left_of, masked

UNSEEN = 1e-5
"""Differences up to this, relative to the largest output, are rounding in any precision."""
EXACT = 1e-6
"""What float64 may differ by."""
ROUGH = {torch.float64: EXACT, torch.float32: 1e-3}
HALF = 5e-2
SMALL = 2**20
"""Inputs with more elements are cut to two samples."""
MOST_GROUPS = 32
"""Groups that are tried one by one to find the one to name."""

Answers = list[Tensor]


def check_same_function(model: nn.Module, graph: ChannelGraph, removal: UnitRemoval) -> None:
    """CompactionError if the smaller model gives something else than the masked one on the example inputs."""
    error = _Comparison(model, graph, removal).difference()
    if error is None:
        return
    name = _first_group(model, graph, removal)
    what = f"removing units of {name!r}" if name else "the units taken together"
    hint = f"trace with ignore=({name!r},)" if name else "trace with ignore= to leave layers alone"
    raise CompactionError(
        f"the smaller model computes something else than the masked one: {what} changes the outputs by {error:.1e} of "
        f"the largest; the model was left as it was ({hint})"
    )


def _first_group(model: nn.Module, graph: ChannelGraph, removal: UnitRemoval) -> str | None:
    """The first group whose removal alone changes the outputs."""
    changed = [group for group in graph.groups if not bool(removal.kept[group.units].all())]
    for group in changed[:MOST_GROUPS]:
        kept = torch.ones_like(removal.kept)
        kept[group.units] = removal.kept[group.units]
        with suppress(KeepError):
            check_keep(graph, kept)
            if _Comparison(model, graph, replace(removal, kept=kept)).difference() is not None:
                return group.name
    return None


@dataclass(frozen=True)
class _Comparison:
    """A model with a removal, masked beside really without the units."""

    model: nn.Module
    graph: ChannelGraph
    removal: UnitRemoval

    def difference(self) -> float | None:
        """The largest relative one of the outputs, if it is more than rounding; None also where none can be told."""
        inputs = _samples(self.graph.inputs)
        soft = self._try(inputs, smaller=False)
        if soft is None and inputs is not self.graph.inputs:
            inputs = self.graph.inputs
            soft = self._try(inputs, smaller=False)
        if soft is None:
            return None
        error = _error(soft, self._try(inputs, smaller=True))
        if error <= UNSEEN:
            return None
        with suppress(Exception), in_float64(self.model):
            doubled = map_tensors(inputs, as_float64)
            soft = self._run(doubled, smaller=False)
            error, limit = _error(soft, self._run(doubled, smaller=True)), EXACT
            return None if error <= limit or self._is_random(doubled, soft) else error
        limit = max((ROUGH.get(tensor.dtype, HALF) for tensor in soft), default=HALF)
        if self.graph.on_real_tensors or error <= limit or self._is_random(inputs, soft):
            return None
        return error

    def _is_random(self, inputs: Any, soft: Answers) -> bool:
        """Return whether the masked model itself gives something else with other random numbers."""
        again = self._try(inputs, smaller=False, seed=1)
        return again is None or _error(soft, again) > EXACT

    def _try(self, inputs: Any, smaller: bool, seed: int = 0) -> Answers | None:
        with suppress(Exception):
            return self._run(inputs, smaller, seed)
        return None

    def _run(self, inputs: Any, smaller: bool, seed: int = 0) -> Answers:
        """Numbers that the model gives, masked or really without the units."""
        model, kept = self.model, self.removal.kept

        def run() -> Answers:
            torch.manual_seed(seed)
            if smaller:
                set_tensors(model, left_of(model, self.graph, kept))
                self.removal.set_numbers(model)
            output = call_model(model, map_tensors(inputs, lambda tensor: tensor.detach().clone()))
            return [tensor.detach().clone() for tensor in tensors_in(output)]

        if smaller:
            return on_real_tensors(model, run)
        with masked(model, self.graph, {group.name: kept[group.units] for group in self.graph.groups}):
            return on_real_tensors(model, run)


def _error(wanted: Answers, found: Answers | None) -> float:
    """The largest difference relative to the largest number of a tensor; infinite where shapes or a run differ."""
    if found is None or [tensor.shape for tensor in wanted] != [tensor.shape for tensor in found]:
        return float("inf")
    largest = 0.0
    for one, other in zip(wanted, found, strict=True):
        one, other = one.to("cpu", torch.complex128), other.to("cpu", torch.complex128)
        finite = one.isfinite() & other.isfinite()
        if bool(finite.any()):
            scale = one[finite].abs().max().clamp(min=1e-12)
            largest = max(largest, float((one - other)[finite].abs().max() / scale))
    return largest


def _samples(inputs: Any) -> Any:
    """The example inputs, at most two samples if they are large; numbers that are all alike become random ones."""
    tensors = tensors_in(inputs)
    first = {tuple(tensor.shape[:1]) for tensor in tensors}
    large = sum(tensor.numel() for tensor in tensors) > SMALL and len(first) == 1 and first != {()}
    random = torch.Generator().manual_seed(0)

    def sample(tensor: Tensor) -> Tensor:
        tensor = tensor[:2] if large else tensor
        if tensor.is_floating_point() and tensor.numel() > 1 and bool((tensor == tensor.flatten()[0]).all()):
            return torch.randn(tensor.shape, generator=random, device="cpu").to(tensor)
        return tensor

    return map_tensors(inputs, sample)


@contextlib.contextmanager
def in_float64(model: nn.Module) -> Iterator[None]:
    """Within it parameters, buffers and new tensors are float64; afterwards all is exactly as before."""
    default = torch.get_default_dtype()
    with preserved(model), in_precision(model, torch.float64):
        try:
            torch.set_default_dtype(torch.float64)
            yield
        finally:
            torch.set_default_dtype(default)


def as_float64(tensor: Tensor) -> Tensor:
    """The tensor in float64, if it holds real numbers."""
    return tensor.double() if tensor.is_floating_point() else tensor
