"""Second derivatives of a loss that forward mode cannot take: by double backward, or by differences of gradients.

Both give what :class:`ifso.curvature.products.Products` gives, and more slowly: double backward is exact wherever the
backward pass of every operation can be differentiated; central differences need nothing but gradients.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ifso.common.devices import let_go_of, out_of_memory
from ifso.common.loss_fn import LossFn, checked
from ifso.common.text import describe_error
from ifso.common.torch_state import differentiable, in_precision, undisturbed
from ifso.curvature.dual_mode import DualMode, ParameterPlan, PassOptions, below_other_modes, twice_differentiable
from ifso.curvature.weight_space import Reader, WeightSpace

AGREEMENT = 0.01
"""Double backward and central differences may differ by so much, relative to their size, or by four times what the
differences are off by. A backward pass that is not differentiable, and does not say so, is off by far more."""

STEPS = {torch.float64: 1e-6, torch.float32: 5e-3}
"""The step of differences, relative to the size of the weights, by precision; half precision takes that of float32."""


@dataclass(frozen=True)
class MaskedLoss:
    """L(M ⊙ W): the loss, ``tensors`` that move or are masked, those of them that are ``W``, and where masks act.

    ``moving`` [units] is 1 for the masks that move.
    """

    model: nn.Module
    loss_fn: LossFn
    tensors: Mapping[str, Tensor]
    space: WeightSpace
    readers: Sequence[Reader]
    moving: Tensor

    def scaled(self, tensors: Mapping[str, Tensor], masks: Sequence[Tensor]) -> dict[str, Tensor]:
        """M ⊙ W with a mask [units] for each reader."""
        scaled = dict(tensors)
        for reader, mask in zip(self.readers, masks, strict=True):
            tensor, entries = scaled[reader.parameter], torch.cat([mask, mask.new_ones(1)])
            scaled[reader.parameter] = tensor * reader.spread(entries, tensor.shape)
        return scaled

    def stacked(self, rows: Sequence[Tensor]) -> Tensor:
        """Rows [units] of all readers, zero where masks do not move."""
        return torch.stack([row * self.moving for row in rows]) if rows else self.moving.new_zeros(0, len(self.moving))


class Fallback:
    """Products by double backward where that is right, by differences where it is not, after forward mode has failed.

    Double backward is compared with differences once for each kind of product: a backward pass that cannot be
    differentiated need not say so. ``note`` tells which of the two it is, why, and how exact.
    """

    def __init__(self, masked: MaskedLoss, error: Exception) -> None:
        let_go_of(error)
        self._reason = _reason(error)
        self._exact: DoubleBackward | None = DoubleBackward(masked)
        self._rough = Differences(masked)
        self._apart: dict[str, float] = {}

    @property
    def note(self) -> str:
        """One line."""
        if self._exact is not None:
            return (
                f"scored by double backward, as {self._reason}; "
                f"central differences of gradients agree to {max(self._apart.values(), default=0.0):.0e}"
            )
        return (
            f"scored by central differences of gradients in {str(self._rough.dtype).removeprefix('torch.')}, as "
            f"{self._reason}; estimated relative error {self._rough.error:.0e}"
        )

    def product(self, kind: str, batch: Any, vector: Tensor | None = None) -> Tensor:
        """The product of that kind: a method of :class:`ifso.curvature.products.Products`."""
        if self._exact is not None and kind in self._apart:
            return self._exact.product(kind, batch, vector)
        rough = self._rough.product(kind, batch, vector)
        if self._exact is None:
            return rough
        try:
            exact = self._exact.product(kind, batch, vector)
        except Exception as error:
            if out_of_memory(error):
                raise
            let_go_of(error)
        else:
            self._apart[kind] = _relative(exact, rough)
            if self._apart[kind] <= max(AGREEMENT, 4 * self._rough.error):
                return exact
        self._exact = None
        return rough


def can_fall_back(error: Exception) -> bool:
    """Return whether the error is about the pass, not about memory, and nothing is being captured."""
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return not out_of_memory(error) and not capturing


def was_interrupted(error: Exception) -> bool:
    """Return whether Ctrl-C fell within TorchScript, which makes a RuntimeError without words of it."""
    words = str(error).rstrip()
    return "TorchScript interpreter" in words and words.endswith("RuntimeError:")


@dataclass
class DoubleBackward:
    """The backward pass of the backward pass."""

    masked: MaskedLoss

    def product(self, kind: str, batch: Any, vector: Tensor | None) -> Tensor:
        """The gradient of 1ᵀ ∂L/∂M ("mixed") or of ⟨vector, ∂L/∂W⟩, over ``M`` ("sensitivity") or ``W``."""
        masked = self.masked
        with self._gradients(batch) as (weights, masks, to_weights, to_masks):
            if vector is None:
                values = [(grad * masked.moving).sum() for grad in to_masks]
            else:
                dots = masked.space.split(vector)
                values = [(dots[name] * grad).sum() for name, grad in to_weights.items()]
            inputs = masks if kind == "sensitivity" else list(weights.values())
            values = [value for value in values if value.requires_grad]
            grads = (
                torch.autograd.grad(values, inputs, allow_unused=True) if values and inputs else [None] * len(inputs)
            )
            gradients = _zeros_for_none(grads, inputs)
        return (
            masked.stacked(gradients)
            if kind == "sensitivity"
            else masked.space.flat(dict(zip(weights, gradients, strict=True)))
        )

    @contextlib.contextmanager
    def _gradients(
        self, batch: Any
    ) -> Iterator[tuple[dict[str, Tensor], list[Tensor], dict[str, Tensor], list[Tensor]]]:
        """``W`` and ``M`` as leaves, ∂L/∂W and ∂L/∂M, to be differentiated again."""
        masked = self.masked
        leaves = {name: tensor.detach() for name, tensor in masked.tensors.items()}
        weights = {name: leaves[name].requires_grad_() for name in masked.space.tensors}
        masks = [torch.ones_like(masked.moving).requires_grad_() for _ in masked.readers]
        with twice_differentiable(masked.model):
            scaled = masked.scaled(leaves, masks)
            plans = {
                id(tensor): ParameterPlan(stand_in=lambda name=name: scaled[name], in_layers=False)  # type: ignore[misc]
                for name, tensor in masked.tensors.items()
            }
            with below_other_modes(DualMode(plans, PassOptions(fused=False))):
                loss = checked(masked.loss_fn(masked.model, batch))
            inputs = [*weights.values(), *masks]
            grads = torch.autograd.grad(loss, inputs, create_graph=True, allow_unused=True)
            gradients = _zeros_for_none(grads, inputs)
            yield weights, masks, dict(zip(weights, gradients, strict=False)), gradients[len(weights) :]


def _zeros_for_none(grads: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(one) if grad is None else grad for one, grad in zip(inputs, grads, strict=True)]


@dataclass
class Differences:
    """Central differences of gradients, in float64 where the model, the loss and the batch can be taken there.

    The first difference of each kind is taken with two steps: by how much they disagree is ``error``, relative to the
    result.
    """

    masked: MaskedLoss
    error: float = 0.0
    dtype: torch.dtype | None = None
    _measured: set[str] = field(default_factory=set)

    def product(self, kind: str, batch: Any, vector: Tensor | None) -> Tensor:
        """[f(step) − f(−step)] / 2 step, in the precision of the weights."""
        if self.dtype is not None:
            return self._difference(self.dtype, kind, batch, vector)
        own = self.masked.moving.dtype
        try:
            return self._difference(torch.float64, kind, batch, vector)
        except Exception as error:
            if own == torch.float64 or out_of_memory(error):
                raise
            let_go_of(error)
        return self._difference(own, kind, batch, vector)

    def _difference(self, dtype: torch.dtype, kind: str, batch: Any, vector: Tensor | None) -> Tensor:
        self.dtype, before = dtype, self.dtype
        step = STEPS.get(dtype, STEPS[torch.float32]) * self._scale(vector)
        tensors = {name: tensor.detach().to(dtype) for name, tensor in self.masked.tensors.items()}

        def between(step: float) -> Tensor:
            ahead, behind = (self._at(kind, batch, vector, tensors, amount) for amount in (step, -step))
            return (ahead - behind) / (2 * step)

        try:
            with in_precision(self.masked.model, dtype), differentiable(self.masked.tensors.values()):
                difference = between(step)
                if kind not in self._measured:
                    self._measured.add(kind)
                    self.error = max(self.error, _relative(between(step / 2), difference))
        except BaseException:
            self.dtype = before
            raise
        return difference.to(self.masked.moving.dtype)

    def _scale(self, vector: Tensor | None) -> float:
        """How far to go along a vector to move the weights by their own size."""
        length = 0.0 if vector is None else float(vector.norm())
        return float(self.masked.space.current().norm()) / length if length else 1.0

    def _at(self, kind: str, batch: Any, vector: Tensor | None, tensors: Mapping[str, Tensor], amount: float) -> Tensor:
        """∂L/∂W where all masks ("mixed") or the weights have moved by an amount, or ∂L/∂M ("sensitivity") there."""
        masked = self.masked
        if vector is None:
            ones = {name: torch.ones_like(tensor) for name, tensor in tensors.items()}
            mask = 1 + amount * masked.moving.to(self.dtype)
            factors = masked.scaled(ones, [mask] * len(masked.readers))
            grads = self._gradient({name: tensor * factors[name] for name, tensor in tensors.items()}, batch)
            return masked.space.flat({name: grads[name] * factors[name] for name in masked.space.tensors})
        dots = masked.space.split(vector.to(self.dtype))
        moved = {name: tensor + amount * dots[name] if name in dots else tensor for name, tensor in tensors.items()}
        grads = self._gradient(moved, batch)
        if kind == "hessian":
            return masked.space.flat({name: grads[name] for name in masked.space.tensors})
        slopes = {name: tensor * grads[name] for name, tensor in moved.items()}
        count = len(masked.moving)
        return masked.stacked([reader.gather(slopes[reader.parameter], count) for reader in masked.readers])

    def _gradient(self, tensors: Mapping[str, Tensor], batch: Any) -> dict[str, Tensor]:
        """∇L where the model has these tensors."""
        mine = self.masked.tensors
        for name, tensor in tensors.items():
            mine[name].data = tensor
        batch = tree_map_only(Tensor, lambda leaf: leaf.to(self.dtype) if leaf.is_floating_point() else leaf, batch)
        with undisturbed(self.masked.model), torch.enable_grad():
            loss = checked(self.masked.loss_fn(self.masked.model, batch))
            grads = torch.autograd.grad(loss, list(mine.values()), allow_unused=True)
        return dict(zip(mine, _zeros_for_none(grads, list(tensors.values())), strict=True))


def _relative(one: Tensor, other: Tensor) -> float:
    """‖one − other‖ / ‖other‖."""
    apart, size = float((one - other).norm()), float(other.norm())
    return apart / size if size else apart


def _reason(error: BaseException) -> str:
    """What forward mode lacks, in a few words.

    >>> _reason(NotImplementedError("Trying to use forward AD with _ctc_loss that does not support it because …"))
    'PyTorch has no forward mode for _ctc_loss'
    """
    while error.__cause__ is not None:
        error = error.__cause__
    operator = re.search(r"forward AD with (?:aten::)?(\w+)", str(error))
    if operator is not None:
        return f"PyTorch has no forward mode for {operator[1]}"
    if "implement the jvp function" in str(error):
        return "a custom autograd.Function has no jvp"
    return f"forward mode failed ({describe_error(error)[:160]})"
