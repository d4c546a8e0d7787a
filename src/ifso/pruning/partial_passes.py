"""Forward passes that end at a layer, and go on from there the next time: what ran before is not computed again.

A network is Python code, which cannot be entered in its middle. So it runs from its first line each time, but the torch
functions before the place where a pass goes on compute nothing: they give what they gave before. Of that, tensors which
something behind the place makes use of are held; all others are NaN of the same shape, which takes no memory. Which
ones those are is read off a whole pass of the first batch.

A batch goes on only where that is sure to be the same: the functions were those of the first batch, all that they read
was the batch's, the network's or made by them, nobody wrote into what they did not make, and no address of a tensor was
asked for. Otherwise, or where too much would have to be held, it goes on from a place before, or begins anew.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from ifso.common.loss_fn import LossFn
from ifso.common.torch_state import undisturbed
from ifso.criteria.reader_hooks import inside_of, is_composite, tensors_in
from ifso.pruning.layer_calls import LayerCall, LayerCalls

See = Callable[[str, LayerCall], None]

_ADDRESSES = (
    Tensor.data_ptr, Tensor.storage, Tensor.untyped_storage, Tensor.__dlpack__, Tensor.numpy, Tensor.__array__,
)  # fmt: skip
"""Behind these a tensor may be read or written unseen."""

_RUNS_AGAIN = object()
"""Given in place of what a function gave that has to do with no tensor, but with a setting perhaps."""


class Enough(BaseException):
    """The layers that are asked for have run; past every handler of errors on the way."""


class _OtherWay(BaseException):
    """The pass does not come by where it came before."""


class Asked(NamedTuple):
    """Layers by their ``weights``, how many ``calls`` a pass has of all of them, and the ``last`` of them to begin."""

    weights: Mapping[str, Tensor]
    calls: int
    last: str


class PartialPasses:
    """Passes of a network over the same batches, each further into it than the one before.

    Args:
        network: in the modes in which it runs. In between, layers may change that come after all that were asked for,
            and the last of those.
        loss_fn: ``loss_fn(network, batch)`` runs it.
        batches: gives the batches, each time in the same order.
        room: bytes that may be held of all batches together; with 0 every pass begins anew.
    """

    def __init__(self, network: nn.Module, loss_fn: LossFn, batches: Callable[[], Iterable[Any]], room: int) -> None:
        self._network, self._loss_fn, self.batches = network, loss_fn, batches
        self._room, self._course, self._places = float(room), _Course(), dict[int, _Place]()

    def over(self, asked: Asked, begin: Callable[[int], See]) -> Iterator[int]:
        """Run each batch until all calls of the layers were seen; yield its number.

        ``begin`` gets that number and returns what hears of the calls; it is called again if a batch has to be run
        again from the start.
        """
        if self._room and not self._course.functions:
            self._see_course()
        for number, batch in enumerate(self.batches()):
            if not self._room or not self._goes_on(number, batch, asked, begin):
                self._pass(number, batch, asked, begin)
            yield number

    def _see_course(self) -> None:
        """What a whole pass of the first batch calls and makes use of."""
        first = next(iter(self.batches()))
        recorder = _Recorder(self._course, tensors_of(first))
        run(self._network, self._loss_fn, first, recorder)
        self._room = 0 if recorder.broken else self._room / sum(1 for _ in self.batches())

    def _goes_on(self, number: int, batch: Any, asked: Asked, begin: Callable[[int], See]) -> bool:
        """Return whether the pass of a batch went well; if not, all begin anew from now on, and nothing is held."""
        anew = number not in self._places
        with contextlib.suppress(_OtherWay, Exception):
            if self._pass(number, batch, asked, begin) or anew:
                return True
        self._room = 0
        self._places.clear()
        return False

    def _pass(self, number: int, batch: Any, asked: Asked, begin: Callable[[int], See]) -> bool:
        """Run a batch from its place, and keep the next one; return whether all calls were seen."""
        see, left, place = begin(number), asked.calls, self._places.get(number)
        recorder = _Recorder(self._course, tensors_of(batch), place or _Place()) if self._room else None
        found: list[_Place] = []

        def hear(name: str, call: LayerCall) -> None:
            nonlocal left
            if place is not None and bool(call.x.sum().isnan()):
                raise _OtherWay
            if recorder is not None and name == asked.last and not found:
                found.append(recorder.place())
            see(name, call)
            left -= 1
            if not left:
                raise Enough

        run(self._network, self._loss_fn, batch, LayerCalls(asked.weights, hear), *([recorder] if recorder else []))
        if recorder is not None and not recorder.broken and found and found[0].fits(self._room):
            self._places[number] = found[0]
        return not left


def run(network: nn.Module, loss_fn: LossFn, batch: Any, *modes: TorchFunctionMode) -> None:
    """Run a network without gradients, until somebody has seen enough."""
    with torch.no_grad(), undisturbed(network), contextlib.ExitStack() as stack:
        torch.manual_seed(0)
        for mode in modes:
            stack.enter_context(mode)
        with contextlib.suppress(Enough):
            loss_fn(network, batch)


@dataclass
class _Course:
    """What a whole pass calls, which of the tensors it makes were used last by which call, and what it else reads.

    Tensors have numbers in the order in which they appear, those of the batch first.
    """

    functions: list[Any] = field(default_factory=list)
    last_use: dict[int, int] = field(default_factory=dict)
    outside: dict[int, Tensor] = field(default_factory=dict)

    def storages(self) -> set[int]:
        """Of what was neither the batch's nor made on the way."""
        return {_storage(tensor)._cdata for tensor in self.outside.values()}

    def random_states(self) -> list[tuple[torch.device, Tensor]]:
        """Where random numbers stand."""
        devices = {tensor.device for tensor in self.outside.values() if tensor.is_cuda}
        states = [(device, torch.cuda.get_rng_state(device)) for device in sorted(devices, key=str)]
        return [(torch.device("cpu"), torch.get_rng_state()), *states]


@dataclass(frozen=True)
class _Made:
    """Stands, in what a function gave, for the tensor of that number."""

    number: int


@dataclass
class _Place:
    """Where a batch goes on: what was called before and gave what, tensors that are still used, and all others."""

    past: Sequence[tuple[Any, Any]] = ()
    held: Mapping[int, Tensor] = field(default_factory=dict)
    others: Mapping[int, Tensor] = field(default_factory=dict)
    random: Sequence[tuple[torch.device, Tensor]] = ()
    shared: Set[int] = frozenset()

    def __post_init__(self) -> None:
        self._versions = [tensor._version for tensor in self.held.values()]

    def fits(self, room: float) -> bool:
        """Whether it takes no more bytes than that, and nobody has written into it."""
        storages = [_storage(tensor) for tensor in (*self.held.values(), *self.others.values())]
        sizes = {storage._cdata: storage.nbytes() for storage in storages if storage._cdata not in self.shared}
        now = [tensor._version for tensor in self.held.values()]
        return sum(sizes.values()) <= room and now == self._versions

    def tensors(self) -> dict[int, Tensor]:
        """All by number: those that are held in new memory, but for the network's own."""
        copies: dict[int, Any] = {}
        found = dict(self.others)
        for number, tensor in self.held.items():
            storage = _storage(tensor)
            if storage._cdata in self.shared:
                found[number] = tensor
                continue
            if storage._cdata not in copies:
                copies[storage._cdata] = storage.clone()
            empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            found[number] = empty.set_(copies[storage._cdata], tensor.storage_offset(), tensor.shape, tensor.stride())
        return found

    def restore_random(self) -> None:
        """Random numbers go on as they did from here."""
        for device, state in self.random:
            if device.type == "cuda":
                torch.cuda.set_rng_state(state, device)
            else:
                torch.set_rng_state(state)


class _Recorder(TorchFunctionMode):
    """Gives again what functions gave before ``start``, and takes down what the others give.

    ``broken`` says that a pass cannot go on from there. Without a ``start`` the pass is a whole one, and goes into the
    course.
    """

    def __init__(self, course: _Course, batch: Sequence[Tensor], start: _Place | None = None) -> None:
        super().__init__()
        self.broken = self._ended = False
        self._course, self._start, self._first = course, start, len(batch)
        self._past: list[tuple[Any, Any]] = []
        self._versions: dict[int, tuple[Tensor, int]] = {}
        self._numbers: MutableMapping[Tensor, int] = WeakIdKeyDictionary()
        before = {} if start is None else {**start.held, **start.others}
        self._others = {number: _kind(tensor) for number, tensor in before.items()}
        self._again = dict(enumerate(batch)) | ({} if start is None else start.tensors())
        for number, tensor in self._again.items():
            self._numbers[tensor] = number
        self._count = len(self._again)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One call of a torch function."""
        kwargs = kwargs or {}
        if is_composite(func):
            return inside_of(self, func, args, kwargs)
        if self._start is not None and len(self._past) < len(self._start.past):
            gave = self._as_before(func, self._start)
            return func(*args, **kwargs) if gave is _RUNS_AGAIN else gave
        if self.broken or self._ended:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            self._reads(func, (args, kwargs))
        try:
            result = func(*args, **kwargs)
        except BaseException as error:
            self._ended = True
            self.broken |= isinstance(error, Exception)
            raise
        with torch._C.DisableTorchFunction():
            apart = not tensors_in([args, kwargs, result])
            self._past.append((func, _RUNS_AGAIN if apart else _mapped(self._gave, result)))
        return result

    def place(self) -> _Place:
        """Where the call begins that is under way."""
        with torch._C.DisableTorchFunction():
            alive = {number: tensor for tensor, number in self._numbers.items()}
            last, at = self._course.last_use, len(self._past)
            used = {number for number in range(self._first, self._count) if last.get(number, -1) >= at}
            changed = any(tensor._version != version for tensor, version in self._versions.values())
            if self.broken or changed or not used <= alive.keys() or any(map(_odd, (alive[number] for number in used))):
                self.broken = True
                return _Place()
            held = {number: alive[number].detach() for number in sorted(used)}
            others = {number: _stand_in(kind) for number, kind in self._others.items() if number not in used}
            shared = self._course.storages()
            return _Place(list(self._past), held, others, self._course.random_states(), shared)

    def _as_before(self, func: Any, start: _Place) -> Any:
        before, gave = start.past[len(self._past)]
        if func != before:
            raise _OtherWay
        self._past.append((before, gave))
        if len(self._past) == len(start.past):
            with torch._C.DisableTorchFunction():
                start.restore_random()
        return _mapped(lambda leaf: self._again[leaf.number] if isinstance(leaf, _Made) else leaf, gave)

    def _reads(self, func: Any, arguments: Any) -> None:
        """Take down what a function reads, or compare it with the course."""
        course, at = self._course, len(self._past)
        if self._start is None:
            course.functions.append(func)
            self.broken |= func in _ADDRESSES
        elif at >= len(course.functions) or func != course.functions[at]:
            self.broken = True
            return
        for tensor in tensors_in(arguments):
            number = self._numbers.get(tensor)
            if self._start is None and number is not None:
                course.last_use[number] = at
            elif self._start is None:
                course.outside[id(tensor)] = tensor
                self.broken |= _odd(tensor)
            elif number is None:
                self.broken |= id(tensor) not in course.outside
            if (number is None or number < self._first) and not self.broken:
                self._versions.setdefault(id(tensor), (tensor, tensor._version))

    def _gave(self, leaf: Any) -> Any:
        """What stands for a part of a function's result."""
        if not isinstance(leaf, Tensor) or (id(leaf) in self._course.outside and leaf not in self._numbers):
            return leaf
        if leaf not in self._numbers:
            self._numbers[leaf] = self._count
            self._others[self._count] = _kind(leaf)
            self._count += 1
        return _Made(self._numbers[leaf])


def tensors_of(batch: Any) -> list[Tensor]:
    """Those of a batch, each once."""
    return list({id(leaf): leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)}.values())


def _mapped(change: Callable[[Any], Any], result: Any) -> Any:
    """What a function gave, with each part changed."""
    several = isinstance(result, (tuple, list, dict)) and not isinstance(result, torch.Size)
    return tree_map(change, result) if several else change(result)


def _odd(tensor: Tensor) -> bool:
    """Return whether it is a tensor of which no copy can be made from its memory, or nobody knows who wrote into it."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_quantized
    return not plain or tensor.is_inference() or tensor.is_conj() or tensor.is_neg()


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def _kind(tensor: Tensor) -> Tensor | tuple[Any, ...]:
    """What is kept of a tensor until nobody uses it: of numbers their shape, of anything else the whole of it."""
    return (tensor.shape, tensor.dtype, tensor.device) if tensor.is_floating_point() else tensor


def _stand_in(kind: Tensor | tuple[Any, ...]) -> Tensor:
    """NaN wherever a tensor had numbers."""
    if isinstance(kind, Tensor):
        return kind
    shape, dtype, device = kind
    return torch.full((), math.nan, dtype=dtype, device=device).expand(shape)
