"""Replay submodules as CUDA graphs where the loss as a whole cannot be captured.

Matching boxes to anchors waits for the GPU and depends on the values of every batch. But images of one size go through
backbone and heads in always the same way, and all that is pruned lies there: these submodules are replayed, forward and
backward (:mod:`ifso.curvature.captured_call`), and the loss between them runs as ever.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual
from torch.overrides import _get_current_function_mode_stack
from torch.utils._pytree import tree_flatten

from ifso.common.cuda_graphs import CONSTANTS, GraphRecord, NotCaptured, Record, captures_go_to, draws
from ifso.common.devices import out_of_memory
from ifso.common.distributed import is_distributed
from ifso.common.text import describe_error
from ifso.common.torch_state import conv_settings
from ifso.curvature.captured_call import CapturedCall, SubmoduleCall, without_modes
from ifso.curvature.dual_mode import PassOptions
from ifso.curvature.primal_cache import PrimalCache
from ifso.curvature.taps import GradientTaps, ProductPass
from ifso.graph.channel_graph import ChannelGraph

LEAST_WEIGHTS = 4
"""A submodule with fewer weights takes no longer to run than to copy its inputs and outputs."""

MOST_SHAPES = 4
"""Sizes of images that are recorded; further ones run one operation after another."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)

_CallNumber = tuple[str, int]
"""The name of a submodule, and the number of its call in a pass."""


@dataclass
class _Pass:
    """One pass through the network."""

    kind: ProductPass
    taps: GradientTaps
    options: PassOptions
    calls: Counter[str] = field(default_factory=Counter)
    inside: bool = False
    """Whether a submodule is running; one that it calls belongs to it."""


class CapturedSubmodules:
    """The submodules that passes replay: those with at least :data:`LEAST_WEIGHTS` weights among ``names``.

    A submodule runs plainly the first time that it meets arguments of some shape, so that kernels are chosen and
    compiled, and is recorded the second time. One that cannot be recorded is replaced by its children, and ``refused``
    says why. ``replayed`` are those that the last pass replayed. Recorded calls hold the memory of all activations.
    """

    def __init__(self, model: nn.Module, names: Collection[str], record: Record) -> None:
        self._names, self._record = names, record
        self._parts, self._device = self._children(model, ""), next(model.parameters()).device
        self._states: dict[str, Hashable] = {}
        self._vector: Tensor | None = None
        self._calls: dict[Any, CapturedCall] = {}
        self._seen: set[Any] = set()
        self.refused: dict[str, str] = {}
        self.replayed: set[str] = set()

    def free(self) -> bool:
        """Give the memory back and record no more; return whether anything was recorded."""
        held = bool(self._calls)
        self.refused.update(dict.fromkeys(self._parts, "there is too little memory to hold its activations"))
        self._parts, self._calls, self._vector = {}, {}, None
        return held

    @contextlib.contextmanager
    def within(self, kind: ProductPass, taps: GradientTaps, options: PassOptions) -> Iterator[None]:
        """A pass that is made within it takes what is recorded, and records."""
        self.replayed = set()
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            yield
            return
        if kind.vector is not None and self._vector is not None:
            self._vector.copy_(kind.vector)
        current = _Pass(kind, taps, options)
        with contextlib.ExitStack() as stack:
            for name, part in self._parts.items():
                stack.enter_context(_forward_of(part, partial(self._forward, current, name, part, part.forward)))
            yield

    def _forward(
        self, current: _Pass, name: str, part: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """What runs in the place of a submodule's own ``forward``."""
        leaves, spec = tree_flatten((args, kwargs))
        call = SubmoduleCall(forward, leaves, spec)
        number = (name, current.calls[name])
        current.calls[name] += 1
        if current.inside or not torch.is_grad_enabled() or len(_get_current_function_mode_stack()) != 1:
            return call.eagerly()
        current.inside = True
        try:
            with without_modes():
                captured = self._captured(current, number, part, call)
                if captured is not None:
                    self.replayed.add(name)
                    result, cache = captured(current.taps, leaves), current.options.cache
                    if cache is not None:
                        cache.captured.setdefault(number, (captured, captured.replays))
                    return result
            return self._watched(name, part, call)
        finally:
            current.inside = False

    def _captured(
        self, current: _Pass, number: _CallNumber, part: nn.Module, call: SubmoduleCall
    ) -> CapturedCall | None:
        """The recorded call, if it can be recorded and such arguments were met before."""
        name, cache = number[0], current.options.cache
        modules = list(part.modules())
        reason = _obstacle(modules)
        if any(id(leaf) in current.taps.plans for leaf in call.leaves):
            reason = "it is called with a parameter"
        if reason is not None:
            self.refused[name] = reason
            return None
        self._check_state(name, _state(modules))
        signature = _signature(call)
        met = (number, current.kind.name, signature)
        if met not in self._seen:
            self._seen.add(met)
            return None
        leader, replays = (None, 0) if cache is None else cache.captured.get(number, (None, 0))
        if leader is None and cache is not None and cache.passes > 1:
            return None
        if leader is not None and leader.replays != replays:
            return None
        key = (*met, cache is None, id(leader))
        if key not in self._calls:
            shapes = {other[0] for (one, _, other, *_) in self._calls if one == number}
            if len(shapes | {signature[0]}) > MOST_SHAPES:
                self.refused[name] = f"it was called with inputs of more than {MOST_SHAPES} shapes"
                return None
            captured = self._capture(current, number, call, leader)
            if captured is None:
                return None
            self._calls[key] = captured
        return self._calls[key]

    def _capture(
        self, current: _Pass, number: _CallNumber, call: SubmoduleCall, leader: CapturedCall | None
    ) -> CapturedCall | None:
        kind, options = current.kind, current.options
        if kind.vector is not None and self._vector is None:
            self._vector = kind.vector.clone()
        cache = None if options.cache is None else PrimalCache() if leader is None else leader.cache
        own = PassOptions(options.fused, options.careful, cache)
        vector = None if kind.vector is None else self._vector
        try:
            return CapturedCall(call, lambda taps: kind.plan(taps, vector), own, leader is None, self._record, number)
        except RuntimeError as error:
            if out_of_memory(error):
                self.free()
            else:
                reason = str(error) if isinstance(error, NotCaptured) else describe_error(error)
                self._replace_by_children(number[0], reason)
            return None

    def _watched(self, name: str, part: nn.Module, call: SubmoduleCall) -> Any:
        """A plain call; if there is more to it than tensors that go in and come out, it will not be recorded."""
        tensors = [leaf for leaf in call.leaves if isinstance(leaf, Tensor)]
        versions, drawn = [tensor._version for tensor in tensors], draws()
        result = call.eagerly()
        leaves = (*call.leaves, *tree_flatten(result)[0])
        strange = [leaf for leaf in leaves if not isinstance(leaf, (Tensor, *CONSTANTS))]
        reason = ""
        if strange:
            reason = f"takes or gives a {type(strange[0]).__name__}"
        elif any(leaf.device != self._device for leaf in leaves if isinstance(leaf, Tensor)):
            reason = "takes or gives a tensor on another device"
        elif versions != [tensor._version for tensor in tensors]:
            reason = "writes into its input"
        elif drawn():
            reason = "draws random numbers"
        if reason:
            self._replace_by_children(name, f"{type(part).__name__} {reason}")
        return result

    def _replace_by_children(self, name: str, reason: str) -> None:
        """Replay the children of a submodule in its place, from the next pass on."""
        self.refused[name] = reason
        part = self._parts.get(name)
        if part is not None:
            del self._parts[name]
            self._parts.update(self._children(part, f"{name}."))

    def _children(self, module: nn.Module, prefix: str) -> dict[str, nn.Module]:
        """The modules below that have enough weights."""
        children = {}
        for key, child in module.named_children():
            name = f"{prefix}{key}"
            if sum(one.startswith(f"{name}.") for one in self._names) < LEAST_WEIGHTS:
                continue
            if isinstance(child, _CONTAINERS):
                children.update(self._children(child, f"{name}."))
            else:
                children[name] = child
        return children

    def _check_state(self, name: str, state: Hashable) -> None:
        """Forget what was recorded with weights elsewhere in memory, in another mode or precision."""
        if self._states.setdefault(name, state) != state:
            self._states[name] = state
            self._seen = {key for key in self._seen if key[0][0] != name}
            self._calls = {key: captured for key, captured in self._calls.items() if key[0][0] != name}


def capture_submodules(
    model: nn.Module, graph: ChannelGraph, names: Collection[str], record: Record | None = None
) -> CapturedSubmodules | None:
    """Submodules to replay, for a network on one GPU that had to be traced on real tensors; None for any other.

    ``names`` are the weights that passes look at. Other networks can be captured as a whole.
    """
    on_gpu = all(captures_go_to(parameter.device) for parameter in model.parameters())
    if record is None and on_gpu and not is_distributed() and graph.on_real_tensors and not graph.reductions:
        record = GraphRecord()
    return None if record is None else CapturedSubmodules(model, names, record)


@contextlib.contextmanager
def _forward_of(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """Exchange the ``forward`` of a module."""
    own = vars(module).get("forward")
    module.forward = function
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def _signature(call: SubmoduleCall) -> tuple[Hashable, ...]:
    """What two calls must have in common; first the shapes."""
    shapes = tuple(tuple(leaf.shape) for leaf in call.leaves if isinstance(leaf, Tensor))
    return (shapes, str(call.spec), *(_kind(leaf) for leaf in call.leaves))


def _kind(leaf: Any) -> Hashable:
    if not isinstance(leaf, Tensor):
        return (leaf,) if isinstance(leaf, CONSTANTS) else (type(leaf),)
    dotted = unpack_dual(leaf).tangent is not None
    return leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad, dotted


def _obstacle(modules: Sequence[nn.Module]) -> str | None:
    """Why a submodule, the first of the modules, cannot be replayed as it is now."""
    for module in modules[1:]:
        if module._forward_hooks or module._forward_pre_hooks:
            return f"there is a hook on a {type(module).__name__} in it"
    return None


def _state(modules: Sequence[nn.Module]) -> Hashable:
    """Where the modules' tensors are, their modes, and in which precision they would compute."""
    tensors = [
        tensor
        for one in modules
        for tensor in (*one._parameters.values(), *one._buffers.values())
        if tensor is not None
    ]
    precision = (
        conv_settings().fp32_precision,
        torch.backends.cuda.matmul.fp32_precision,
        *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")),
    )
    return tuple(one.training for one in modules), tuple(one.data_ptr() for one in tensors), precision
