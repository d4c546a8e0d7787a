"""Second derivatives of a loss that forward mode cannot take: by double backward, or by differences of gradients.

Both give what :class:`ifso.curvature.products.Products` gives, and more slowly: double backward is exact wherever the
backward pass of every operation can be differentiated; central differences need nothing but gradients.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only

from ifso.common.devices import let_go_of, out_of_memory
from ifso.common.loss_fn import LossFn, checked
from ifso.common.text import describe_error
from ifso.common.torch_state import differentiable, undisturbed, without_checkpoints
from ifso.curvature.dual_mode import DualMode, ParameterPlan, PassOptions, below_other_modes
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
        found = dict(tensors)
        for reader, mask in zip(self.readers, masks, strict=True):
            tensor, entries = found[reader.parameter], torch.cat([mask, mask.new_ones(1)])
            found[reader.parameter] = tensor * reader.spread(entries, tensor.shape)
        return found

    def by_reader(self, numbers: Mapping[str, Tensor]) -> Tensor:
        """Sums over the slices of each unit [readers, units] of numbers in the shapes of the parameters."""
        count = len(self.moving)
        return self.stacked([reader.gather(numbers[reader.parameter], count) for reader in self.readers])

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

    def mixed(self, batch: Any) -> Tensor:
        """1ᵀ ∂²L/∂M∂W, over ``W``."""
        return self._product("mixed", batch)

    def hessian(self, batch: Any, vector: Tensor) -> Tensor:
        """H·vector, over ``W``."""
        return self._product("hessian", batch, vector)

    def sensitivity(self, batch: Any, vector: Tensor) -> Tensor:
        """∂/∂M ⟨vector, ∂L/∂W⟩ [readers, units]."""
        return self._product("sensitivity", batch, vector)

    def _product(self, kind: str, *arguments: Any) -> Tensor:
        if self._exact is not None and kind in self._apart:
            return getattr(self._exact, kind)(*arguments)
        rough = getattr(self._rough, kind)(*arguments)
        exact = self._exactly(kind, arguments)
        if exact is None:
            return rough
        self._apart[kind] = _relative(exact, rough)
        if self._apart[kind] <= max(AGREEMENT, 4 * self._rough.error):
            return exact
        self._exact = None
        return rough

    def _exactly(self, kind: str, arguments: Sequence[Any]) -> Tensor | None:
        """The product by double backward; None, from then on, if there is none."""
        if self._exact is None:
            return None
        try:
            return getattr(self._exact, kind)(*arguments)
        except Exception as error:
            if out_of_memory(error):
                raise
            let_go_of(error)
        self._exact = None
        return None


def can_fall_back(error: Exception) -> bool:
    """Is it about the pass, not about memory, and is there time for another one?"""
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return not out_of_memory(error) and not capturing


@dataclass
class DoubleBackward:
    """The backward pass of the backward pass."""

    masked: MaskedLoss

    def mixed(self, batch: Any) -> Tensor:
        """1ᵀ ∂²L/∂M∂W."""
        with self._first(batch) as (weights, _, _, to_masks):
            moved = [(one * self.masked.moving).sum() for one in to_masks]
            return self._over_weights(_second_gradient(moved, list(weights.values())))

    def hessian(self, batch: Any, vector: Tensor) -> Tensor:
        """H·vector."""
        with self._first(batch) as (weights, _, to_weights, _):
            return self._over_weights(_second_gradient(self._along(vector, to_weights), list(weights.values())))

    def sensitivity(self, batch: Any, vector: Tensor) -> Tensor:
        """∂/∂M ⟨vector, ∂L/∂W⟩."""
        with self._first(batch) as (_, masks, to_weights, _):
            rows = _second_gradient(self._along(vector, to_weights), masks)
            return self.masked.stacked(rows)

    def _over_weights(self, grads: list[Tensor]) -> Tensor:
        return self.masked.space.flat(dict(zip(self.masked.space.tensors, grads, strict=True)))

    def _along(self, vector: Tensor, to_weights: Mapping[str, Tensor]) -> list[Tensor]:
        """⟨vector, ∂L/∂W⟩, by parameter."""
        dots = self.masked.space.split(vector)
        return [(dots[name] * grad).sum() for name, grad in to_weights.items()]

    @contextlib.contextmanager
    def _first(self, batch: Any) -> Iterator[tuple[dict[str, Tensor], list[Tensor], dict[str, Tensor], list[Tensor]]]:
        """``W`` and ``M`` as leaves, ∂L/∂W and ∂L/∂M, to be differentiated again."""
        masked = self.masked
        leaves = {name: tensor.detach() for name, tensor in masked.tensors.items()}
        weights = {name: leaves[name].requires_grad_() for name in masked.space.tensors}
        masks = [torch.ones_like(masked.moving).requires_grad_() for _ in masked.readers]
        with undisturbed(masked.model), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), without_checkpoints():
            scaled = masked.scaled(leaves, masks)
            plans = {
                id(tensor): ParameterPlan(stand_in=lambda name=name: scaled[name], in_layers=False)  # type: ignore[misc]
                for name, tensor in masked.tensors.items()
            }
            with below_other_modes(DualMode(plans, PassOptions(fused=False))):
                loss = checked(masked.loss_fn(masked.model, batch))
            inputs = [*weights.values(), *masks]
            found = torch.autograd.grad(loss, inputs, create_graph=True, allow_unused=True)
            grads = _zeros_for_none(found, inputs)
            count = len(weights)
            yield weights, masks, dict(zip(weights, grads[:count], strict=True)), grads[count:]


def _second_gradient(values: Sequence[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The gradient of the sum of the values; zeros where they do not depend on an input."""
    moving = [value for value in values if value.requires_grad]
    found = torch.autograd.grad(moving, inputs, allow_unused=True) if moving and inputs else [None] * len(inputs)
    return _zeros_for_none(found, inputs)


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

    def mixed(self, batch: Any) -> Tensor:
        """1ᵀ ∂²L/∂M∂W."""

        def gradient(tensors: Mapping[str, Tensor], amount: float) -> Tensor:
            ones = {name: torch.ones_like(tensor) for name, tensor in tensors.items()}
            mask = 1 + amount * self.masked.moving.to(self.dtype)
            factors = self.masked.scaled(ones, [mask] * len(self.masked.readers))
            grads = self._gradient({name: tensor * factors[name] for name, tensor in tensors.items()}, batch)
            return self.masked.space.flat({name: grads[name] * factors[name] for name in self.masked.space.tensors})

        return self._difference("mixed", gradient, 1.0)

    def hessian(self, batch: Any, vector: Tensor) -> Tensor:
        """H·vector."""

        def gradient(tensors: Mapping[str, Tensor], amount: float) -> Tensor:
            grads = self._gradient(self._moved(tensors, vector, amount), batch)
            return self.masked.space.flat({name: grads[name] for name in self.masked.space.tensors})

        return self._difference("hessian", gradient, self._scale(vector))

    def sensitivity(self, batch: Any, vector: Tensor) -> Tensor:
        """∂/∂M ⟨vector, ∂L/∂W⟩."""

        def gradient(tensors: Mapping[str, Tensor], amount: float) -> Tensor:
            moved = self._moved(tensors, vector, amount)
            grads = self._gradient(moved, batch)
            return self.masked.by_reader({name: tensor * grads[name] for name, tensor in moved.items()})

        return self._difference("sensitivity", gradient, self._scale(vector))

    def _moved(self, tensors: Mapping[str, Tensor], vector: Tensor, amount: float) -> dict[str, Tensor]:
        dots = self.masked.space.split(vector.to(self.dtype))
        return {name: tensor + amount * dots[name] if name in dots else tensor for name, tensor in tensors.items()}

    def _scale(self, vector: Tensor) -> float:
        """How far to go along a vector to move the weights by their own size."""
        length = float(vector.norm())
        return float(self.masked.space.current().norm()) / length if length else 1.0

    def _difference(self, kind: str, gradient: Callable[[Mapping[str, Tensor], float], Tensor], scale: float) -> Tensor:
        """[f(step) − f(−step)] / 2 step, in the precision of the weights."""
        if self.dtype is not None:
            return self._in(self.dtype, kind, gradient, scale)
        own = self.masked.moving.dtype
        try:
            return self._in(torch.float64, kind, gradient, scale)
        except Exception as error:
            if own == torch.float64 or out_of_memory(error):
                raise
            let_go_of(error)
        return self._in(own, kind, gradient, scale)

    def _in(
        self, dtype: torch.dtype, kind: str, gradient: Callable[[Mapping[str, Tensor], float], Tensor], scale: float
    ) -> Tensor:
        self.dtype, before = dtype, self.dtype
        step = STEPS.get(dtype, STEPS[torch.float32]) * scale
        tensors = {name: tensor.detach().to(dtype) for name, tensor in self.masked.tensors.items()}

        def between(step: float) -> Tensor:
            return (gradient(tensors, step) - gradient(tensors, -step)) / (2 * step)

        try:
            with in_precision(self.masked.model, dtype), differentiable(self.masked.tensors.values()):
                found = between(step)
                if kind not in self._measured:
                    self._measured.add(kind)
                    self.error = max(self.error, _relative(between(step / 2), found))
        except BaseException:
            self.dtype = before
            raise
        return found.to(self.masked.moving.dtype)

    def _gradient(self, tensors: Mapping[str, Tensor], batch: Any) -> dict[str, Tensor]:
        """∇L where the model has these tensors."""
        mine = self.masked.tensors
        for name, tensor in tensors.items():
            mine[name].data = tensor
        batch = tree_map_only(Tensor, lambda leaf: leaf.to(self.dtype) if leaf.is_floating_point() else leaf, batch)
        with undisturbed(self.masked.model), torch.enable_grad():
            loss = checked(self.masked.loss_fn(self.masked.model, batch))
            grads = torch.autograd.grad(loss, list(mine.values()), allow_unused=True)
        return {
            name: torch.zeros_like(tensors[name]) if grad is None else grad
            for name, grad in zip(mine, grads, strict=True)
        }


@contextlib.contextmanager
def in_precision(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Within it the model computes in another precision; afterwards every tensor is the one that it was."""
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    before = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.to(dtype)
        yield
    finally:
        for tensor, data in zip(tensors, before, strict=True):
            tensor.data = data


def _relative(found: Tensor, wanted: Tensor) -> float:
    """‖found − wanted‖ / ‖wanted‖."""
    apart, size = float((found - wanted).norm()), float(wanted.norm())
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
