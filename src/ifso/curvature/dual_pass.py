"""One forward and one backward pass on dual numbers, and what it collected."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointError

from ifso.curvature.dual_mode import DualMode, Manner, Plan, below_other_modes
from ifso.curvature.losses import LossFn, checked, undisturbed
from ifso.errors import ScoreError


@dataclass(frozen=True)
class Elsewhere:
    """The gradient of a parameter from its uses other than as a layer's weight, and the gradient's tangent."""

    grad: Tensor | None = None
    tangent: Tensor | None = None


class DualPass:
    """Give every parameter its plan, call with a batch, then read what the taps collected."""

    def __init__(self, model: nn.Module, loss_fn: LossFn, manner: Manner) -> None:
        self._model, self._loss_fn, self._manner = model, loss_fn, manner
        self._plans: dict[int, Plan] = {}
        self._tensors: dict[str, Tensor] = {}
        self._weight_taps: dict[str, Tensor] = {}
        self._mask_taps: dict[tuple[str, int], Tensor] = {}
        self._stand_ins: dict[str, Tensor] = {}
        self._collected: dict[int, Tensor | None] = {}
        self._elsewhere: dict[str, Elsewhere] = {}
        self.loss: Tensor | None = None

    def plan(self, name: str, tensor: Tensor, dot: Callable[[], Tensor] | Tensor | None) -> Plan:
        """The plan of a parameter; ``dot`` is its tangent where it is used other than as a layer's weight.

        Few are, so that a tangent which takes memory of its own is given as what computes it.
        """
        self._tensors[name] = tensor
        plan = self._plans[id(tensor)] = Plan(stand_in=lambda: self._stand_in(name, dot), in_layers=self._manner.fused)
        return plan

    def weight_tap(self, name: str) -> Tensor:
        """An input that collects the tangent of ∂L/∂W."""
        tensor = self._tensors[name]
        tap = torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
        return self._weight_taps.setdefault(name, tap.requires_grad_())

    def mask_tap(self, name: str, groups: int, channels: int) -> Tensor:
        """An input that collects the tangent of ∂L/∂m per input channel."""
        if (name, groups) not in self._mask_taps:
            like = self._tensors[name]
            tap = torch.zeros((), dtype=like.dtype, device=like.device).expand(channels)
            self._mask_taps[name, groups] = tap.requires_grad_()
        return self._mask_taps[name, groups]

    def _stand_in(self, name: str, dot: Callable[[], Tensor] | Tensor | None) -> Tensor:
        if name not in self._stand_ins:
            leaf = self._tensors[name].detach().requires_grad_()
            tangent = dot() if callable(dot) else dot
            self._stand_ins[name] = leaf if tangent is None else forward_ad.make_dual(leaf, tangent)
        return self._stand_ins[name]

    def __call__(self, batch: Any) -> None:
        """Run the pass."""
        _load_forward_mode()
        with (
            explained(),
            undisturbed(self._model),
            torch.enable_grad(),
            sdpa_kernel(SDPBackend.MATH),
            forward_ad.dual_level(),
        ):
            self._run(batch)
        self._plans.clear()  # they hold this pass, and with it all activations, until garbage is collected

    def _run(self, batch: Any) -> None:
        with below_other_modes(DualMode(self._plans, self._manner)):
            loss = checked(self._loss_fn(self._model, batch))
        taps = [*self._weight_taps.values(), *self._mask_taps.values(), *self._stand_ins.values()]
        grads = torch.autograd.grad(loss, taps, allow_unused=True) if taps else ()
        self._collected = {id(tap): grad for tap, grad in zip(taps, grads, strict=True)}
        for name, stand_in in self._stand_ins.items():
            grad = self._collected[id(stand_in)]
            if grad is not None:
                self._elsewhere[name] = Elsewhere(*forward_ad.unpack_dual(grad))
        self.loss = loss.detach()

    def weight_tangent(self, name: str) -> Tensor | None:
        """What the weight tap collected."""
        return self._collected[id(self._weight_taps[name])]

    def mask_tangents(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """(groups, tangent per input channel) of every mask tap of a parameter."""
        for (owner, groups), tap in self._mask_taps.items():
            tangent = self._collected[id(tap)]
            if owner == name and tangent is not None:
                yield groups, tangent

    def elsewhere(self, name: str) -> Elsewhere:
        """What came from other uses of the parameter."""
        return self._elsewhere.get(name, Elsewhere())


@cache
def _load_forward_mode() -> None:
    """Let torch load its formulas now: it warns of a deprecated function that it calls itself in doing so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        import_module("torch._decomp.decompositions_for_jvp")


_SIGNS = ("forward AD", "jvp", "forward-mode", "forward mode", "Batching rule", "functorch", "checkpoint")


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """A part of the model that cannot be differentiated twice is refused in one line; other errors pass."""
    try:
        yield
    except (NotImplementedError, CheckpointError, RuntimeError) as error:
        text = " ".join(str(error).split())
        if not isinstance(error, (NotImplementedError, CheckpointError)) and not any(sign in text for sign in _SIGNS):
            raise
        raise ScoreError(
            f"the model or loss uses something that cannot be differentiated twice this way: {text[:200]}; "
            "write that operation out in plain tensor operations, or switch off checkpointing and compilation"
        ) from error
