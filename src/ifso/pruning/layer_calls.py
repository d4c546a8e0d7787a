"""Calls of conv, transposed conv and linear layers while a model runs: inputs as columns, kernels as matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ifso.criteria.reader_hooks import LAYERS, TRANSPOSED, argument, as_layer, inside_of, is_composite, tensors_in
from ifso.curvature.dual_mode import per_dim

_READER = "_ifso_read_by"
"""An attribute of a layer's output: the name of its weight."""


@dataclass(frozen=True)
class LayerCall:
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
    def of(cls, function: Any, args: Any, kwargs: Any) -> LayerCall:
        """From the arguments of a torch function."""
        dims = LAYERS[function]
        transposed = function in TRANSPOSED
        stride, padding = _given(args, kwargs, "stride", 3, 1), _given(args, kwargs, "padding", 4, 0)
        dilation = _given(args, kwargs, "dilation", 7 if transposed else 5, 1)
        extra = _given(args, kwargs, "output_padding", 5, 0) if transposed else 0
        return cls(
            function, argument(args, kwargs, "input").detach(), argument(args, kwargs, "weight").detach(),
            per_dim(stride, dims), padding if isinstance(padding, str) else per_dim(padding, dims),
            per_dim(dilation, dims), per_dim(extra, dims),
            _given(args, kwargs, "groups", 6, 1) if dims else 1, argument(args, kwargs, "bias"),
        )  # fmt: skip

    @property
    def samples(self) -> int:
        """How many the input holds, its first dim; one where it has no batch."""
        dims = LAYERS[self.function]
        return len(self.x) if self.x.dim() > (dims + 1 if dims else 1) else 1

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

    def rows(self, most: int) -> int:
        """How many rows :meth:`columns` has."""
        one = replace(self, x=self.x[: len(self.x) // max(self.samples, 1)])
        return self.samples * one.columns(most, torch.Generator(device="cpu")).shape[1]

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
        return F.pad(x, _flat(borders)) if any(map(any, borders)) else x, self.stride


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


class LayerCalls(TorchFunctionMode):
    """Within it ``see(name, call)`` hears of each call of a layer whose weight is one of ``weights``.

    ``normed`` are the names of weights whose outputs went straight into a batch norm, and nowhere else; ``norms`` has
    the gains and running means of those. ``other_uses`` has the weights that something else than such a layer made use
    of, and what that was.
    """

    def __init__(self, weights: Mapping[str, Tensor], see: Callable[[str, LayerCall], None]) -> None:
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
        func, args, kwargs = as_layer(func, args, kwargs)
        weight = argument(args, kwargs, "weight") if func in LAYERS else None
        name = self._names.get(id(weight))
        if name is not None:
            with torch._C.DisableTorchFunction():
                self._see(name, LayerCall.of(func, args, kwargs))
        result = func(*args, **kwargs)
        if name is not None:
            self._outputs[name] = self._outputs.get(name, 0) + 1
            setattr(result, _READER, name)
        elif func is F.batch_norm:
            known = _given(args, kwargs, "running_mean", 1, None), _given(args, kwargs, "weight", 3, None)
            self._into_norm(argument(args, kwargs, "input"), known)
        elif tensors_in(result):
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


def _chosen(total: int, most: int, generator: torch.Generator) -> Tensor | None:
    return None if total <= most else torch.randperm(total, generator=generator, device="cpu")[:most]


def _given(args: Any, kwargs: Any, name: str, place: int, usual: Any) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, usual)


def _flat(borders: Sequence[tuple[int, int]]) -> list[int]:
    """As ``F.pad`` takes them: the last dim first."""
    return [size for pair in reversed(borders) for size in pair]
