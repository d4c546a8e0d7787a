"""Where the loss cannot be captured as a CUDA graph, the parts of the network before it can.

Matching boxes to anchors waits for the GPU and takes a course of its own for every batch. But images of one size go
through backbone and heads in always the same way, and all that is pruned lies there. Each pass is cut where these parts
end: they are replayed, forward and backward (:mod:`ifso.curvature.captured_call`), and the loss between runs as ever.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
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
from ifso.common.distributed import several
from ifso.common.text import describe_error
from ifso.curvature.captured_call import CapturedCall, SubmoduleCall, without_modes
from ifso.curvature.dual_mode import PassOptions
from ifso.curvature.primal_cache import PrimalCache, conv_settings
from ifso.curvature.taps import GradientTaps, ProductPass
from ifso.graph.channel_graph import ChannelGraph

LEAST_WEIGHTS = 4
"""A part with fewer weights takes no longer to run than to copy its inputs and outputs."""

MOST_SHAPES = 4
"""So many sizes of images are recorded; further ones run one operation after another."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)

_Place = tuple[str, int]
"""The name of a part, and which of its calls in a pass."""


@dataclass
class _Pass:
    """One pass through the network."""

    course: ProductPass
    taps: GradientTaps
    manner: PassOptions
    calls: Counter[str] = field(default_factory=Counter)
    inside: bool = False
    """Is a part at work? One that it calls belongs to it."""


class CapturedSubmodules:
    """The parts of a network that passes replay: those of at least :data:`LEAST_WEIGHTS` weights among ``names``.

    A part runs plainly the first time that it meets arguments of some shape, so that kernels are chosen and compiled,
    and is recorded the second time. What cannot be recorded is given up for its children, and ``refused`` says why.
    ``replayed`` are the parts that the last pass replayed. Recorded passes hold the memory of all their activations.
    """

    def __init__(self, model: nn.Module, names: Collection[str], record: Record) -> None:
        self._names, self._record = names, record
        self._parts, self._device = self._children(model, ""), next(model.parameters()).device
        self._states: dict[str, Hashable] = {}
        self._vector: Tensor | None = None
        self._pieces: dict[Any, CapturedCall] = {}
        self._seen: set[Any] = set()
        self.refused: dict[str, str] = {}
        self.replayed: set[str] = set()

    def let_go(self) -> bool:
        """Give the memory back and record no more; was anything recorded?"""
        held = bool(self._pieces)
        self.refused.update(dict.fromkeys(self._parts, "there is too little memory to hold its activations"))
        self._parts, self._pieces, self._vector = {}, {}, None
        return held

    @contextlib.contextmanager
    def within(self, course: ProductPass, taps: GradientTaps, manner: PassOptions) -> Iterator[None]:
        """A pass that is made within it takes what is recorded, and records."""
        self.replayed = set()
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            yield
            return
        if course.vector is not None and self._vector is not None:
            self._vector.copy_(course.vector)
        visit = _Pass(course, taps, manner)
        with contextlib.ExitStack() as stack:
            for name, part in self._parts.items():
                stack.enter_context(_forward_of(part, partial(self._run, visit, name, part, part.forward)))
            yield

    def _run(
        self, visit: _Pass, name: str, part: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """One call of a part."""
        leaves, spec = tree_flatten((args, kwargs))
        call = SubmoduleCall(forward, leaves, spec)
        place = (name, visit.calls[name])
        visit.calls[name] += 1
        if visit.inside or not torch.is_grad_enabled() or len(_get_current_function_mode_stack()) != 1:
            return call.eagerly()
        visit.inside = True
        try:
            with without_modes():
                piece = self._piece(visit, place, part, call)
                if piece is not None:
                    return self._replay(visit, place, piece, leaves)
            return self._watched(name, part, call)
        finally:
            visit.inside = False

    def _replay(self, visit: _Pass, place: _Place, piece: CapturedCall, leaves: Sequence[Any]) -> Any:
        self.replayed.add(place[0])
        result, primal = piece(visit.taps, leaves), visit.manner.primal
        if primal is not None:
            primal.leaders.setdefault(place, (piece, piece.turn))
        return result

    def _piece(self, visit: _Pass, place: _Place, part: nn.Module, call: SubmoduleCall) -> CapturedCall | None:
        """The recorded call, if it can be and it is time for it."""
        modules = list(part.modules())
        reason = _in_the_way(modules)
        if any(id(leaf) in visit.taps.plans for leaf in call.leaves):
            reason = "it is called with a parameter"
        if reason is not None:
            self.refused[place[0]] = reason
            return None
        self._check_state(place[0], _state(modules))
        key = (place, visit.course.kind, _signature(call))
        if key not in self._seen:
            self._seen.add(key)
            return None
        primal = visit.manner.primal
        leader, turn = (None, 0) if primal is None else primal.leaders.get(place, (None, 0))
        if leader is None and primal is not None and primal.passes > 1:
            return None
        if leader is not None and leader.turn != turn:
            return None
        whole = (*key, primal is None, id(leader))
        if whole not in self._pieces:
            shapes = {signature[0] for (one, _, signature, *_) in self._pieces if one == place}
            if len(shapes | {key[2][0]}) > MOST_SHAPES:
                self.refused[place[0]] = f"it was called with inputs of more than {MOST_SHAPES} shapes"
                return None
            made = self._make(visit, place, call, leader)
            if made is None:
                return None
            self._pieces[whole] = made
        return self._pieces[whole]

    def _make(
        self, visit: _Pass, place: _Place, call: SubmoduleCall, leader: CapturedCall | None
    ) -> CapturedCall | None:
        course, manner = visit.course, visit.manner
        if course.vector is not None and self._vector is None:
            self._vector = course.vector.clone()
        primal = None if manner.primal is None else PrimalCache() if leader is None else leader.primal
        own = PassOptions(manner.fused, manner.careful, primal)
        vector = None if course.vector is None else self._vector
        try:
            return CapturedCall(call, lambda taps: course.plan(taps, vector), own, leader is None, self._record, place)
        except RuntimeError as error:
            if out_of_memory(error):
                self.let_go()
            else:
                self._give_up(place[0], str(error) if isinstance(error, NotCaptured) else describe_error(error))
            return None

    def _watched(self, name: str, part: nn.Module, call: SubmoduleCall) -> Any:
        """A plain call; if there is more to it than tensors that go in and come out, it will not be recorded."""
        tensors = [leaf for leaf in call.leaves if isinstance(leaf, Tensor)]
        versions, drawn = [tensor._version for tensor in tensors], draws()
        result = call.eagerly()
        leaves = (*call.leaves, *tree_flatten(result)[0])
        strange = [leaf for leaf in leaves if not isinstance(leaf, (Tensor, *CONSTANTS))]
        kind = type(part).__name__
        if strange:
            self._give_up(name, f"{kind} takes or gives a {type(strange[0]).__name__}")
        elif any(leaf.device != self._device for leaf in leaves if isinstance(leaf, Tensor)):
            self._give_up(name, f"{kind} takes or gives a tensor on another device")
        elif versions != [tensor._version for tensor in tensors]:
            self._give_up(name, f"{kind} writes into its input")
        elif drawn():
            self._give_up(name, f"{kind} draws random numbers")
        return result

    def _give_up(self, name: str, reason: str) -> None:
        """From the next pass on the children of a part take its place."""
        self.refused[name] = reason
        part = self._parts.get(name)
        if part is not None:
            del self._parts[name]
            self._parts.update(self._children(part, f"{name}."))

    def _children(self, module: nn.Module, prefix: str) -> dict[str, nn.Module]:
        """The modules below that are worth it."""
        found = {}
        for key, child in module.named_children():
            name = f"{prefix}{key}"
            if sum(one.startswith(f"{name}.") for one in self._names) < LEAST_WEIGHTS:
                continue
            if isinstance(child, _CONTAINERS):
                found.update(self._children(child, f"{name}."))
            else:
                found[name] = child
        return found

    def _check_state(self, name: str, state: Hashable) -> None:
        """Forget what was recorded with weights elsewhere in memory, in another mode or precision."""
        if self._states.setdefault(name, state) != state:
            self._states[name] = state
            self._seen = {key for key in self._seen if key[0][0] != name}
            self._pieces = {key: piece for key, piece in self._pieces.items() if key[0][0] != name}


class Uncut:
    """No part is recorded."""

    refused: Mapping[str, str] = {}
    replayed: Collection[str] = ()

    def within(self, *_: Any) -> contextlib.AbstractContextManager[None]:
        """Nothing changes."""
        return contextlib.nullcontext()

    def let_go(self) -> bool:
        """There is nothing."""
        return False


def capture_submodules(
    model: nn.Module, graph: ChannelGraph, names: Collection[str], record: Record | None = None
) -> CapturedSubmodules | Uncut:
    """A network on one GPU whose course is decided by values is cut; any other can be captured as a whole.

    ``names`` are the weights that passes look at.
    """
    on_gpu = all(captures_go_to(parameter.device) for parameter in model.parameters())
    if record is None and on_gpu and not several() and graph.on_real_tensors and not graph.reductions:
        record = GraphRecord()
    return Uncut() if record is None else CapturedSubmodules(model, names, record)


@contextlib.contextmanager
def _forward_of(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """Within it a module runs another function."""
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


def _in_the_way(modules: Sequence[nn.Module]) -> str | None:
    """Why a part, the first of the modules, cannot be replayed as it is now."""
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
