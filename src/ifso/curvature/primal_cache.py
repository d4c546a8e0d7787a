"""The primal half of a dual pass: the network's own outputs and gradients, computed carefully, and once."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ifso.common.torch_state import conv_settings, full_float32

NARROW = 64
"""Layers with at most so many channels cost the time that memory takes: for them full float32 is all but free."""


def is_careful(careful: bool | None, weight: Tensor) -> bool:
    """Whether one layer is computed carefully; ``careful=None`` leaves it to the layer's width."""
    return max(weight.shape[:2]) <= NARROW if careful is None else careful


@dataclass
class CachedCall:
    """One call of a layer: its output ``y`` and the gradient ``x̄`` of its input.

    With ``careful``, they are computed in full float32 also where TF32 is allowed: second derivatives taken at a
    rounded point are off by percents, while the rounding of the tangents themselves hardly shows (ResNet-32 with
    batch norm: Spearman of the scores 0.998 with TF32 everywhere, 1.0000 with a careful primal).
    """

    key: Any
    careful: bool = True
    shared: bool = False
    back: Tensor | None = None
    _output: Tensor | None = None
    _version: int = 0

    def needs_care(self, x: Tensor) -> bool:
        """Whether the layer would be rounded to TF32, though it should not."""
        rounded = conv_settings().fp32_precision == "tf32"
        return self.careful and x.is_cuda and x.dtype == torch.float32 and rounded

    def precision(self, x: Tensor) -> contextlib.AbstractContextManager[Any]:
        """A context in which no convolution is rounded to TF32."""
        return full_float32() if self.needs_care(x) else contextlib.nullcontext()

    def keep_output(self, y: Tensor) -> None:
        """Remember ``y``, and how often it had been written to."""
        if self.shared:
            self._output, self._version = y.detach(), y._version

    def output(self) -> Tensor | None:
        """``y`` under a new name, unless it is unknown or an activation has overwritten it in place."""
        if self._output is None or self._output._version != self._version:
            return None
        return alias(self._output)

    def keep_back(self, back: Tensor, *, half: bool = False) -> None:
        """Remember ``x̄``; a copy, if it is half of a larger piece of memory."""
        if self.shared:
            self.back = back.clone() if half else back


@dataclass
class PrimalCache:
    """The calls of layers of one batch in the order of the forward pass. The first pass writes, later ones read.

    ``captured`` are the captured calls of submodules (:class:`ifso.curvature.captured_call.CapturedCall`) that the
    first pass replayed, each with its number of replays: they hold the calls of their layers until the next replay.
    """

    calls: list[CachedCall] = field(default_factory=list)
    passes: int = 0
    captured: dict[Any, Any] = field(default_factory=dict)
    _next: int = 0

    def start(self) -> None:
        """A new forward pass begins."""
        self._next = 0
        self.passes += 1

    def clear(self) -> None:
        """Forget all calls."""
        self.calls.clear()
        self.captured.clear()

    def for_reading(self) -> PrimalCache:
        """A copy for a pass that may add to it."""
        return PrimalCache([replace(call) for call in self.calls])

    def next_call(self, key: Any, careful: bool) -> CachedCall:
        """The record of the next call; a new one if the model makes other calls than before."""
        if self._next < len(self.calls) and self.calls[self._next].key != key:
            del self.calls[self._next :]
        if self._next == len(self.calls):
            self.calls.append(CachedCall(key, careful, shared=True))
        self._next += 1
        return self.calls[self._next - 1]


def alias(x: Tensor, offset: int = 0, shape: Sequence[int] | None = None) -> Tensor:
    """A tensor on the memory of ``x`` that is no view of it, in the eyes of forward mode."""
    bare = torch.empty(0, dtype=x.dtype, device=x.device)
    return bare.set_(x.untyped_storage(), x.storage_offset() + offset, shape or x.shape, x.stride())
