"""One call of a submodule in a dual pass, captured once and replayed: forward and backward, on static tensors.

``x + ε·ẋ`` is copied in and ``z + ε·ż`` out; on the way back ``λ + ε·λ̇`` goes in, and out comes what the
inputs and taps get. The kernels are those of the plain pass, in the same order. Parameters are read where they are,
so that a replay sees their present values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import _set_fwd_grad_enabled, make_dual, unpack_dual
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ifso.common.cuda_graphs import Pair, Record
from ifso.common.torch_state import no_autocast_cache
from ifso.curvature.dual_layers import DualFunction, dual_zero, give_tangent
from ifso.curvature.dual_mode import DualMode, PassOptions
from ifso.curvature.primal_cache import PrimalCache
from ifso.curvature.taps import GradientTaps, TapKey


@dataclass(frozen=True)
class SubmoduleCall:
    """A call of a submodule: its function, and its arguments as leaves of a tree."""

    function: Callable[..., Any]
    leaves: Sequence[Any]
    spec: TreeSpec

    def eagerly(self) -> Any:
        """Its result, one operation after another."""
        args, kwargs = tree_unflatten(list(self.leaves), self.spec)
        return self.function(*args, **kwargs)


@dataclass(frozen=True)
class StaticInput:
    """Static memory for a tensor argument, into which the arguments of each replay are copied."""

    number: Tensor
    dot: Tensor | None
    asked: bool
    """Whether the gradient goes on to it."""

    @classmethod
    def like(cls, leaf: Tensor) -> StaticInput:
        """Memory for such a tensor."""
        number, dot = unpack_dual(leaf)
        return cls(torch.zeros_like(number), None if dot is None else torch.zeros_like(number), leaf.requires_grad)

    def fill(self, leaf: Tensor) -> None:
        """Copy a tensor in."""
        number, dot = unpack_dual(leaf)
        self.number.copy_(number)
        if self.dot is not None and dot is not None:
            self.dot.copy_(dot)

    def enter(self) -> tuple[Tensor, Tensor]:
        """The leaf to differentiate by, and what the network may take and write into."""
        leaf = self.number.detach().requires_grad_(self.asked)
        return leaf, (leaf if self.dot is None else make_dual(leaf, self.dot)).clone()


class _ForwardBackward:
    """The two passes through a submodule, to be recorded. The backward pass follows the forward pass.

    The call that ``leads`` fills the cache of its layers, which later passes over the batch read.
    """

    def __init__(
        self, call: SubmoduleCall, plan: Callable[[GradientTaps], None], options: PassOptions, leads: bool
    ) -> None:
        self._function, self._spec, self._plan = call.function, call.spec, plan
        self._options, self._leads = options, leads
        self.inputs = [StaticInput.like(leaf) if isinstance(leaf, Tensor) else leaf for leaf in call.leaves]
        self.lams: list[tuple[Tensor, Tensor]] = []
        self.outputs: list[Any] = []
        """Leaves of the result; for a tensor whether it is differentiated."""
        self.keys: list[TapKey] = []

    def warm_up(self) -> None:
        """Both passes once as they will be recorded, so that kernels are chosen and compiled, and room for ``λ``."""
        tensors = [number for number, _ in self.forward() if number is not None]
        pairs = zip(tensors, _differentiated(self.outputs), strict=True)
        self.lams = [(torch.zeros_like(one), torch.zeros_like(one)) for one, differentiated in pairs if differentiated]
        self.backward()

    def forward(self) -> list[Pair]:
        """The tensors of the result."""
        taps, options = GradientTaps(self._options.fused), self._options
        if options.cache is not None and self._leads:
            options.cache.calls.clear()
        elif options.cache is not None:
            options = replace(options, cache=options.cache.for_reading())
        self._plan(taps)
        with torch.enable_grad(), _set_fwd_grad_enabled(True), DualMode(taps.plans, options):
            entered = [each.enter() if isinstance(each, StaticInput) else (None, each) for each in self.inputs]
            args, kwargs = tree_unflatten([given for _, given in entered], self._spec)
            leaves, self.spec = tree_flatten(self._function(*args, **kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.outputs = [StaticOutput(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._results = [tensor for tensor in tensors if tensor.requires_grad]
        asked = [leaf for leaf, _ in entered if leaf is not None and leaf.requires_grad]
        self._wanted, self.keys = [*asked, *taps.inputs.values()], list(taps.inputs)
        return [_pair(tensor) for tensor in tensors]

    def backward(self) -> list[Pair]:
        """What comes back to the inputs, and what the taps collect."""
        with _set_fwd_grad_enabled(True):
            lams = [make_dual(lam, lam_dot) for lam, lam_dot in self.lams]
            grads = torch.autograd.grad(self._results, self._wanted, lams, allow_unused=True) if lams else ()
            pairs = [(None, None) if grad is None else _pair(grad) for grad in grads]
        self._results, self._wanted = [], []
        return pairs


@dataclass(frozen=True)
class StaticOutput:
    """Stands for a tensor in a result."""

    differentiated: bool


class CapturedCall:
    """A recorded call. ``cache`` is what a later pass over the same batch reads, ``replays`` counts its calls.

    No torch function mode may be on where it is made and called.
    """

    def __init__(
        self,
        call: SubmoduleCall,
        plan: Callable[[GradientTaps], None],
        options: PassOptions,
        leads: bool,
        record: Record,
        pool: Any,
    ) -> None:
        self.cache: PrimalCache | None = options.cache
        with no_autocast_cache():  # a cached weight may have been forgotten by the next replay
            work = _ForwardBackward(call, plan, options, leads)
            _fill(work.inputs, call.leaves)
            work.warm_up()
            self._numbers, self._forward = record(work.forward, pool)
            self._back, self._backward = record(work.backward, pool)
        self._inputs, self._outputs, self._lams = work.inputs, work.outputs, work.lams
        self._spec, self._keys = work.spec, work.keys
        self.replays = 0

    def __call__(self, taps: GradientTaps, leaves: Sequence[Any]) -> Any:
        """The result for other arguments of the same kind; the taps will collect on the way back."""
        self.replays += 1
        _fill(self._inputs, leaves)
        self._forward()
        pairs = [_copied(pair) for pair in self._numbers]
        kinds = _differentiated(self._outputs)
        moving = [pair for pair, differentiated in zip(pairs, kinds, strict=True) if differentiated]
        beside = zip(leaves, self._inputs, strict=True)
        asked = [unpack_dual(leaf).primal for leaf, mine in beside if isinstance(mine, StaticInput) and mine.asked]
        through = iter(_Replayed.apply(self, taps, moving, taps.uncollected(), dual_zero(), *asked) if moving else ())
        tensors = iter([next(through) if kind else _dual(pair) for pair, kind in zip(pairs, kinds, strict=True)])
        results = [next(tensors) if isinstance(output, StaticOutput) else output for output in self._outputs]
        return tree_unflatten(results, self._spec)

    def back(self, taps: GradientTaps, lams: Sequence[Tensor | None]) -> list[Tensor | None]:
        """What comes back to the inputs that are asked; the taps collect."""
        for buffers, lam in zip(self._lams, lams, strict=True):
            pair = (None, None) if lam is None else unpack_dual(lam)
            for buffer, part in zip(buffers, pair, strict=True):
                if part is None:
                    buffer.zero_()
                else:
                    buffer.copy_(part)
        self._backward()
        count = len(self._back) - len(self._keys)
        for key, (grad, tangent) in zip(self._keys, self._back[count:], strict=True):
            taps.collect(key, grad, tangent)
        return [None if pair[0] is None else _dual(_copied(pair)) for pair in self._back[:count]]


class _Replayed(DualFunction):
    """The result of a captured call, for autograd and for forward mode."""

    @staticmethod
    def forward(
        ctx: Any, call: CapturedCall, taps: GradientTaps, pairs: list[tuple[Tensor, Tensor | None]],
        uncollected: Tensor, dual_zero: Tensor, *asked: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """``z`` with the tangents ``ż``."""
        ctx.call, ctx.taps = call, taps
        give_tangent(ctx, tuple(torch.zeros_like(number) if dot is None else dot for number, dot in pairs))
        return tuple(number for number, _ in pairs)

    @staticmethod
    def backward(ctx: Any, *lams: Tensor | None) -> tuple[Any, ...]:
        """To the inputs and the taps."""
        with torch.no_grad():
            return None, None, None, None, None, *ctx.call.back(ctx.taps, lams)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Switch all torch function modes off."""
    modes = _get_current_function_mode_stack()
    for _ in modes:
        _pop_mode()
    try:
        yield
    finally:
        for mode in modes:
            _push_mode(mode)


@torch.no_grad()
def _fill(inputs: Sequence[Any], leaves: Sequence[Any]) -> None:
    """Copy arguments in."""
    for mine, leaf in zip(inputs, leaves, strict=True):
        if isinstance(mine, StaticInput):
            mine.fill(leaf)


def _differentiated(outputs: Sequence[Any]) -> list[bool]:
    """For each tensor of a result whether it is differentiated."""
    return [output.differentiated for output in outputs if isinstance(output, StaticOutput)]


def _pair(tensor: Tensor) -> Pair:
    number, dot = unpack_dual(tensor)
    return number.detach(), None if dot is None or dot._is_zerotensor() else dot.detach()


def _copied(pair: Pair) -> tuple[Tensor, Tensor | None]:
    number, dot = pair
    assert number is not None
    return number.clone(), None if dot is None else dot.clone()


def _dual(pair: tuple[Tensor, Tensor | None]) -> Tensor:
    return pair[0] if pair[1] is None else make_dual(*pair)
