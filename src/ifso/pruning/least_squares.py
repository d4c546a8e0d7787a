"""The weights that fit best when inputs go: W_K = W A[:, K] A[K, K]⁻¹, layer by layer, from what the layers see.

Proposition 1 gives, beside the change of the loss, the weights that the others adapt to. With the curvature of a layer
taken as a Kronecker product, that update is the least-squares answer: the layer's outputs z = W a + b stay as near as
they can to what they were when only the columns K of its input a are left,

    W_K = W Ã[:, K] Ã[K, K]⁻¹,   Ã = A + λI,   λ = damping · mean diag A,   b_K = b + (W − W_K) E[a],

for the whole removed set at once: of all V that are zero outside K, W_K has the least E|(W − V)a|² + λ|W − V|², so that
what the data do not tell stays as it was. A is the covariance of a over samples and positions where something behind
the layer takes a shift away (its bias, or a batch norm), else its second moment. Convolutions are linear in patches; a
transposed one is a convolution of the input with zeros between.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ifso.criteria.reading import LAYERS, TRANSPOSED, Moments, argument, inside_of, is_composite, mean_size, tensors_in
from ifso.curvature.weights import Reader
from ifso.errors import ScoreError
from ifso.graph.slots import named_tensors

DAMPING = 0.01
"""λ as a share of the mean of A's diagonal."""

POSITIONS = 64
"""Positions of a feature map, drawn at random, that an image adds to A."""

PIECE = 2 * 2**30
"""Bytes of moments that are held at a time; layers beyond that wait for another pass over the data."""

_READER = "_ifso_read_by"
"""An attribute of a layer's output: the name of its weight."""


@dataclass(frozen=True)
class Call:
    """One call of a layer: what kind it is, its input and the options of a convolution."""

    function: Any
    x: Tensor
    weight: Tensor
    stride: Sequence[int]
    padding: Sequence[int] | str
    dilation: Sequence[int]
    output_padding: Sequence[int]
    groups: int
    bias: Tensor | None

    @classmethod
    def of(cls, function: Any, args: Any, kwargs: Any) -> Call:
        """From the arguments of a torch function."""
        dims = LAYERS[function]
        transposed = function in TRANSPOSED
        places = {"stride": 3, "padding": 4, "dilation": 7 if transposed else 5}
        usual = {"stride": 1, "padding": 0, "dilation": 1}
        given = {name: _given(args, kwargs, name, place, usual[name]) for name, place in places.items()}
        extra = _given(args, kwargs, "output_padding", 5, 0) if transposed else 0
        padding = given["padding"] if isinstance(given["padding"], str) else _per_dim(given["padding"], dims)
        return cls(
            function, argument(args, kwargs, "input").detach(), argument(args, kwargs, "weight").detach(),
            _per_dim(given["stride"], dims), padding, _per_dim(given["dilation"], dims), _per_dim(extra, dims),
            _given(args, kwargs, "groups", 6, 1) if dims else 1, argument(args, kwargs, "bias"),
        )  # fmt: skip

    def columns(self, most: int, generator: torch.Generator) -> Tensor:
        """Inputs as rows of columns [groups, rows, k], at up to ``most`` positions of each sample."""
        dims = LAYERS[self.function]
        if not dims:
            rows = self.x.reshape(len(self.x), -1, self.x.shape[-1]) if self.x.dim() > 1 else self.x[None, None]
            chosen = _chosen(rows.shape[1], most, generator)
            rows = rows if chosen is None else rows[:, chosen.to(rows.device)]
            return rows.reshape(1, -1, rows.shape[-1])
        x = self.x if self.x.dim() == dims + 2 else self.x.unsqueeze(0)
        x, stride = self._padded(x)
        for dim, (length, step, gap) in enumerate(zip(self.weight.shape[2:], stride, self.dilation, strict=True)):
            x = x.unfold(2 + dim, gap * (length - 1) + 1, step)[..., ::gap]
        size = tuple(x.shape[2 : 2 + dims])
        chosen = _chosen(math.prod(size), most, generator)
        flat = torch.arange(math.prod(size), device="cpu") if chosen is None else chosen
        places = [place.to(x.device) for place in torch.unravel_index(flat, size)]
        where: tuple[Any, ...] = (slice(None), slice(None), *places)
        patches = x[where]  # [N, C, positions, *kernel]
        grouped = patches.unflatten(1, (self.groups, -1)).movedim(3, 2).movedim(1, 0)
        return grouped.reshape(self.groups, -1, math.prod(grouped.shape[3:]))

    def _padded(self, x: Tensor) -> tuple[Tensor, Sequence[int]]:
        """The input with its border, and the stride of the windows; zeros between its values if transposed."""
        kernel = self.weight.shape[2:]
        reach = [gap * (size - 1) for gap, size in zip(self.dilation, kernel, strict=True)]
        if self.function in TRANSPOSED:
            assert not isinstance(self.padding, str)
            sizes = [(size - 1) * step + 1 for size, step in zip(x.shape[2:], self.stride, strict=True)]
            spread = x.new_zeros(*x.shape[:2], *sizes)
            between: tuple[Any, ...] = (..., *(slice(None, None, step) for step in self.stride))
            spread[between] = x
            borders = [(far - pad, far - pad + more)
                       for far, pad, more in zip(reach, self.padding, self.output_padding, strict=True)]  # fmt: skip
            return F.pad(spread, _flat(borders)), [1] * len(kernel)
        if self.padding == "same":
            borders = [(far // 2, far - far // 2) for far in reach]
        else:
            borders = (
                [(0, 0)] * len(kernel) if self.padding == "valid" else [(int(pad), int(pad)) for pad in self.padding]
            )
        return F.pad(x, _flat(borders)), self.stride


def as_matrix(weight: Tensor, transposed: bool, groups: int) -> Tensor:
    """A kernel as [groups, outputs, k], its columns in the order of :meth:`Call.columns`."""
    if not transposed:
        return weight.reshape(groups, weight.shape[0] // groups, -1)
    kernel = weight.flip(list(range(2, weight.dim()))) if weight.dim() > 2 else weight
    return kernel.unflatten(0, (groups, -1)).transpose(1, 2).flatten(2)


def as_kernel(matrix: Tensor, shape: torch.Size, transposed: bool) -> Tensor:
    """A matrix [groups, outputs, k] as the kernel of that shape."""
    if not transposed:
        return matrix.reshape(shape)
    groups = len(matrix)
    kernel = matrix.unflatten(2, (shape[0] // groups, *shape[2:])).transpose(1, 2).reshape(shape)
    return kernel.flip(list(range(2, len(shape)))) if len(shape) > 2 else kernel


def fitted(weight: Tensor, moments: Tensor, kept: Tensor, damping: float = DAMPING) -> Tensor:
    """W_K in place of W: zero in the columns that go. One group.

    Args:
        weight: W [outputs, k], in float64.
        moments: A [k, k], covariance or second moment, in float64.
        kept: bool [k], the columns that stay.
        damping: λ as a share of the mean of A's diagonal over the columns that are not constant, nor gone before
            (nothing reads those any more); more, if A is so far from regular that this will not do.

    Returns:
        [outputs, k]. Columns that are always zero (dead channels) keep their weights, as nothing is known of them.

    >>> a = torch.tensor([[2.0, 2.0], [2.0, 2.0]], dtype=torch.float64)  # the second input equals the first
    >>> fitted(torch.tensor([[1.0, 3.0]], dtype=torch.float64), a, torch.tensor([True, False]), damping=1e-9)
    tensor([[4.0000, 0.0000]], dtype=torch.float64)
    """
    if not bool(moments.isfinite().all()):
        raise ScoreError("the inputs of a layer are not finite, so that its weights cannot be updated; check the data")
    left = kept.nonzero().flatten()
    result = torch.zeros_like(weight)
    if not left.numel():
        return result
    size = mean_size(moments.diagonal(), kept | weight.any(0))
    inner, cross = moments[left][:, left], moments[:, left]
    while True:
        damped = inner.clone()
        damped.diagonal().add_(damping * size)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not bool(failed):
            break
        damping = max(10 * damping, 1e-12)
    cross[left, torch.arange(len(left), device=cross.device)] += damping * size
    result[:, left] = torch.cholesky_solve((weight @ cross).t(), factor).t()
    return result


class LayerCalls(TorchFunctionMode):
    """Within it ``see(name, call)`` hears of each call of a layer whose weight is one of ``weights``.

    ``normed`` are the names of weights whose outputs went straight into a batch norm, and nowhere else; ``norms`` has
    the gains and running means of those. ``other_uses`` has the weights that something else than such a layer made use
    of, and what that was.
    """

    def __init__(self, weights: Mapping[str, Tensor], see: Callable[[str, Call], None]) -> None:
        super().__init__()
        self._names = {id(tensor): name for name, tensor in weights.items()}
        self._see = see
        self._outputs: dict[str, int] = {}
        self._into_norms: dict[str, int] = {}
        self.norms: dict[str, list[Tensor]] = {}
        self.other_uses: dict[str, str] = {}

    @property
    def ran(self) -> set[str]:
        """Weights that a layer ran with."""
        return set(self._outputs)

    @property
    def normed(self) -> set[str]:
        """Weights behind which a batch norm takes every shift away."""
        return {name for name, number in self._outputs.items() if self._into_norms.get(name) == number}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One call of a torch function."""
        kwargs = kwargs or {}
        if is_composite(func):
            return inside_of(self, func, args, kwargs)
        weight = argument(args, kwargs, "weight") if func in LAYERS else None
        name = self._names.get(id(weight))
        if name is not None:
            with torch._C.DisableTorchFunction():
                self._see(name, Call.of(func, args, kwargs))
        result = func(*args, **kwargs)
        if name is not None:
            self._outputs[name] = self._outputs.get(name, 0) + 1
            setattr(result, _READER, name)
        elif func is F.batch_norm:
            known = _given(args, kwargs, "running_mean", 1, None), _given(args, kwargs, "weight", 3, None)
            self._into_norm(argument(args, kwargs, "input"), known)
        elif next(tensors_in(result), None) is not None:
            self._elsewhere(func, (args, kwargs))
        return result

    def _into_norm(self, x: Tensor, known: Sequence[Tensor | None]) -> None:
        name = getattr(x, _READER, None)
        if name is not None:
            self._into_norms[name] = self._into_norms.get(name, 0) + 1
            self.norms.setdefault(name, []).extend(tensor for tensor in known if tensor is not None)

    def _elsewhere(self, func: Any, arguments: Any) -> None:
        for tensor in tensors_in(arguments):
            read_by = getattr(tensor, _READER, None)
            if read_by is not None:
                self._outputs[read_by] += 1
            if id(tensor) in self._names:
                self.other_uses[self._names[id(tensor)]] = getattr(func, "__name__", str(func))


@dataclass
class Update:
    """New weights and biases by name, and the layers that were left alone, each with the reason."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    left_alone: dict[str, str] = field(default_factory=dict)

    @torch.no_grad()
    def apply_(self, model: nn.Module) -> None:
        """Put the new numbers into the model."""
        live = named_tensors(model)
        for name, new in self.tensors.items():
            live[name].copy_(new)


@dataclass
class _Seen:
    """What is known of a layer after a pass."""

    reader: Reader
    moments: Moments
    transposed: bool
    groups: int
    bias: str


def least_squares(
    model: nn.Module,
    readers: Iterable[Reader],
    kept: Tensor,
    run: Callable[[], Iterator[None]],
    *,
    damping: float = DAMPING,
    positions: int = POSITIONS,
    reduce: Callable[[Tensor], Tensor] = lambda total: total,
) -> Update:
    """The weights (and biases) of all layers that lose inputs when units go. The model is not changed.

    Of a layer without a bias in front of a batch norm, the running mean takes the bias's place.

    Args:
        model: as it is before the units go.
        readers: where layers read units that go.
        kept: bool [units + 1], with a last entry True: the units that stay.
        run: runs the model on one batch after the other, yielding after each; called once for each piece of layers.
        damping: λ as a share of the mean of A's diagonal.
        positions: of a feature map that each sample adds to A.
        reduce: a sum over all processes.

    Returns:
        Update, with a reason for each layer that has no closed form here.
    """
    tensors = named_tensors(model)
    update = Update()
    by_name: dict[str, list[Reader]] = {}
    for reader in readers:
        if tensors[reader.parameter].dim() > 1:
            by_name.setdefault(reader.parameter, []).append(reader)
    for piece in _pieces(by_name, tensors, update):
        seen, calls = _pass(piece, tensors, run, positions)
        for name in piece:
            if name in calls.other_uses:
                update.left_alone[name] = f"its weight is also used by {calls.other_uses[name]}"
            elif name not in calls.ran:
                update.left_alone[name] = "its weight is not that of a conv or linear layer that ran"
            elif name in seen:
                norms = calls.norms.get(name, []) if name in calls.normed else []
                found = _fit(tensors[name].detach(), seen[name], name in calls.normed, tensors, kept, damping, reduce)
                _add_to(update, name, *found, seen[name].bias, norms, tensors)
    return update


def _fit(
    weight: Tensor, seen: _Seen, normed: bool, tensors: Mapping[str, Tensor], kept: Tensor, damping: float,
    reduce: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The new weight of a layer, and what has to be added to its outputs."""
    moments = seen.moments.over(reduce)
    matrix = as_matrix(weight, seen.transposed, seen.groups).double()
    stays = _columns_kept(seen.reader, seen, kept, matrix.shape[2]).to(matrix.device)
    seen_moments = moments.matrix(centred=normed or seen.bias in tensors)
    new = torch.stack([fitted(*one, damping) for one in zip(matrix, seen_moments, stays, strict=True)])
    shift = ((matrix - new) @ moments.mean().unsqueeze(2)).flatten()
    return as_kernel(new, weight.shape, seen.transposed).to(weight.dtype), shift


def _add_to(
    update: Update, name: str, weight: Tensor, shift: Tensor, bias: str, norms: Sequence[Tensor],
    tensors: Mapping[str, Tensor],
) -> None:  # fmt: skip
    """The shift goes into the bias or, without one, out of the running means of the batch norms behind."""
    update.tensors[name] = weight
    if bias in tensors:
        old = tensors[bias].detach()
        update.tensors[bias] = (old.double() + shift).to(old.dtype)
        return
    known = {id(tensor) for tensor in norms}
    for module in {other.rpartition(".")[0] for other, tensor in tensors.items() if id(tensor) in known}:
        mean = tensors.get(f"{module}.running_mean")
        if mean is not None:
            update.tensors[f"{module}.running_mean"] = (mean.double() - shift).to(mean.dtype)


def _columns_kept(reader: Reader, seen: _Seen, kept: Tensor, columns: int) -> Tensor:
    """Which columns stay, bool [groups, k]."""
    owner = (reader.owner if seen.transposed else reader.channels(seen.groups)).cpu()
    channels = kept[owner].reshape(seen.groups, -1)
    return channels.repeat_interleave(columns // channels.shape[1], 1)


def _pieces(
    by_name: Mapping[str, list[Reader]], tensors: Mapping[str, Tensor], update: Update
) -> Iterator[dict[str, list[Reader]]]:
    """Layers whose moments fit into memory together; one that is too large by itself is left alone."""
    piece: dict[str, list[Reader]] = {}
    total = 0
    for name, found in by_name.items():
        columns, size = _size(tensors[name], found[0])
        if size > PIECE:
            update.left_alone[name] = f"{columns} columns are too many for their moments to be held"
            continue
        if piece and total + size > PIECE:
            yield piece
            piece, total = {}, 0
        piece[name] = found
        total += size
    if piece:
        yield piece


def _size(weight: Tensor, reader: Reader) -> tuple[int, int]:
    """How many columns a layer has, and the bytes of its moments, at most: groups are as many as they can be."""
    columns = weight.numel() // weight.shape[1 - reader.dim]
    groups = weight.shape[0] if reader.owner.dim() > 1 else 1
    return columns, max(weight.element_size(), 4) * groups * columns**2


def _pass(
    piece: Mapping[str, list[Reader]], tensors: Mapping[str, Tensor], run: Callable[[], Iterator[None]], positions: int
) -> tuple[dict[str, _Seen], LayerCalls]:
    """One pass over the data: the moments of each layer of a piece."""
    seen: dict[str, _Seen] = {}
    biases = {id(tensor): name for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)}

    def see(name: str, call: Call) -> None:
        transposed = call.function in TRANSPOSED
        reader = next((reader for reader in piece[name] if (reader.dim == 0) == transposed), None)
        if reader is None:
            return
        number = seen[name].moments.rows if name in seen else 0
        generator = torch.Generator(device="cpu").manual_seed(zlib.crc32(name.encode()) + number)
        columns = call.columns(positions, generator)
        if name in seen:
            seen[name].moments.add(columns)
        else:
            bias = biases.get(id(call.bias), "")
            seen[name] = _Seen(reader, Moments.of(columns), transposed, call.groups, bias)

    calls = LayerCalls({name: tensors[name] for name in piece}, see)
    with torch.no_grad(), calls:
        for _ in run():
            pass
    return seen, calls


def _chosen(total: int, most: int, generator: torch.Generator) -> Tensor | None:
    return None if total <= most else torch.randperm(total, generator=generator, device="cpu")[:most]


def _given(args: Any, kwargs: Any, name: str, place: int, usual: Any) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, usual)


def _per_dim(value: Any, dims: int) -> tuple[int, ...]:
    return (
        (int(value),) * dims
        if isinstance(value, int)
        else tuple(int(one) for one in value) * (dims if len(value) == 1 else 1)
    )


def _flat(borders: Sequence[tuple[int, int]]) -> list[int]:
    """As ``F.pad`` takes them: the last dim first."""
    return [size for pair in reversed(borders) for size in pair]
