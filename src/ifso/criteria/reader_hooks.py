"""The feature maps that units are read from, seen while the model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ifso.criteria.base import Task
from ifso.curvature.weight_space import Reader
from ifso.errors import ScoreError

Visit = Callable[[str, Tensor, int, Tensor], Tensor]
"""``visit(parameter, x, dim, owner)`` gets a feature map, its channel dim and the unit of each channel; what it returns
takes the place of ``x``."""

CONVS: dict[Any, int] = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}
TRANSPOSED: dict[Any, int] = {torch.conv_transpose1d: 1, torch.conv_transpose2d: 2, torch.conv_transpose3d: 3}
LAYERS: dict[Any, int] = {F.linear: 0, **CONVS, **TRANSPOSED}
_REGIONS = frozenset({"torchvision.roi_align", "torchvision.ps_roi_align", "torchvision.roi_pool"})
"""Names of operators that cut regions [regions, 5] (image, x1, y1, x2, y2), their second argument, out of images."""
_COMPOSITES = frozenset({F.multi_head_attention_forward})
"""Functions written in Python that are one call to a mode, though layers run within them."""
_IN_PLACE_ORDER = frozenset(
    {
        "add",
        "sub",
        "mul",
        "div",
        "truediv",
        "radd",
        "rsub",
        "rmul",
        "weight_norm",
        "split",
        "chunk",
        "to",
        "clone",
        "reshape_as",
    }
)
"""Functions of a weight that leave every number in its place."""
_COMPUTED_FROM = "_ifso_readers"
"""An attribute of a tensor: the readers of the parameter that it was computed from."""
ROUNDING = 1e-12
"""A variance that is so small a share of E[x²] stands for a constant."""
_ARGUMENTS = {"input": 0, "weight": 1, "bias": 2, "groups": 6}


def is_composite(func: Any) -> bool:
    """Return whether layers run within that torch function."""
    return func in _COMPOSITES


def inside_of(mode: TorchFunctionMode, func: Any, args: Any, kwargs: Any) -> Any:
    """What a composite function returns, with ``mode`` seeing the functions that it calls."""
    with mock.patch.object(F, "has_torch_function", return_value=False), mode:
        return func(*args, **kwargs)


class ReadingLayers(TorchFunctionMode):
    """Within it ``visit`` is called with the input of every conv, transposed conv or linear layer that reads units.

    Units that no layer reads (queries and keys) are visited at the output of the layer that makes them.
    ``everywhere=True`` refuses a reading parameter that is differentiated in any other use. Without it, and within
    attention, weights that are computed from such a parameter, number by number, are followed (weight norm, the parts
    of ``in_proj_weight``); :meth:`refuse_unseen` refuses parameters that no layer ran with, though something else did.

    ``regions`` holds, where regions were cut out of images since the last layer before (``roi_align``), the image that
    each comes from, in the order of the images; else it is None. Layers that see as many rows see these regions.
    While ``visit`` runs, ``reader`` and ``groups`` are those of the layer.

    A model whose attention takes tokens first has layers that see [tokens, samples, features], and others that see
    samples first. With ``in_rows`` they are visited in rows [tokens · samples, features], and ``grid`` is the shape
    [tokens, samples], or the other way round. ``samples`` is how many attention has seen.
    """

    def __init__(self, task: Task, visit: Visit, everywhere: bool, in_rows: bool = False) -> None:
        super().__init__()
        self._visit, self._everywhere = visit, everywhere
        self._in_rows = in_rows and any(_takes_tokens_first(module) for module in task.model.modules())
        self.grid: tuple[int, int] | None = None
        self.samples = 0
        self.regions: Tensor | None = None
        self.reader: Reader | None = None
        self.groups = 1
        self._samples = 0
        self._cutting = False
        self._seen: set[str] = set()
        self._other_uses: dict[str, str] = {}
        self._readers: dict[int, list[Reader]] = {}
        for reader in task.readers:
            self._readers.setdefault(id(task.tensors[reader.parameter]), []).append(reader)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One call of a torch function."""
        kwargs = kwargs or {}
        if is_composite(func):
            return self._attention(func, args, kwargs)
        self._follow_regions(func, args)
        found = self._readers_of(argument(args, kwargs, "weight")) if func in LAYERS else []
        if found:
            return self._layer(func, args, kwargs, found)
        result = func(*args, **kwargs)
        if self._everywhere and not self._samples:
            self._refuse_other_uses(func, (args, kwargs), result)
        else:
            self._follow(func, (args, kwargs), result)
        return result

    def _readers_of(self, tensor: Any) -> list[Reader]:
        """Those of a parameter, or of what was computed from it."""
        return self._readers.get(id(tensor)) or getattr(tensor, _COMPUTED_FROM, [])

    def _follow(self, func: Any, arguments: Any, result: Any) -> None:
        """Weights computed from a reading parameter read the same units, if none has changed its place."""
        name = getattr(func, "__name__", str(func)).strip("_")
        for tensor in tensors_in(arguments):
            readers = self._readers_of(tensor)
            with torch._C.DisableTorchFunction():
                made = [one for one in tensors_in(result) if one.requires_grad or not torch.is_grad_enabled()]
                if not readers or not made:
                    continue
                if id(tensor) in self._readers:
                    self._other_uses[readers[0].parameter] = name
                for one in made if name in _IN_PLACE_ORDER else ():
                    same = [reader for reader in readers if _as_long(one, tensor, reader)]
                    setattr(one, _COMPUTED_FROM, same)

    def refuse_unseen(self) -> None:
        """Raise if a parameter reads units in a way that was not visited."""
        for parameter, use in self._other_uses.items():
            if parameter not in self._seen:
                raise _used_otherwise(parameter, use)

    def _attention(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Attention has [tokens, samples, features] within: what is visited has the samples first."""
        query = args[0] if args else kwargs["query"]
        before, self._samples = self._samples, query.shape[1] if query.dim() == 3 else 1
        self.samples = self._samples
        try:
            return inside_of(self, func, args, kwargs)
        finally:
            self._samples = before

    def _follow_regions(self, func: Any, args: Any) -> None:
        """Add up the regions of all levels of a pyramid."""
        if func in LAYERS:
            self._cutting = False
        elif str(func) in _REGIONS:
            with torch._C.DisableTorchFunction():
                images = args[1][:, 0].detach().long()
                earlier = [self.regions] if self._cutting and self.regions is not None else []
                self.regions = torch.cat([*earlier, images]).sort().values
            self._cutting = True

    def _layer(self, func: Any, args: Any, kwargs: Any, readers: list[Reader]) -> Any:
        transposed, groups = func in TRANSPOSED, argument(args, kwargs, "groups") or 1
        for reader in readers:
            if (reader.dim == 0) == transposed:
                x = self._visited(func, argument(args, kwargs, "input"), reader, groups)
                args, kwargs = ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "input": x})
        result = func(*args, **kwargs)
        for reader in readers:
            if (reader.dim == 0) != transposed:
                result = self._visited(func, result, reader, groups)
                with torch._C.DisableTorchFunction():
                    result = result.clone()  # the model may write into it
        return result

    def _visited(self, func: Any, x: Tensor, reader: Reader, groups: int) -> Tensor:
        """Other modes count torch functions: nothing done here may be seen by them."""
        self.reader, self.groups = reader, groups
        self._seen.add(reader.parameter)
        with torch._C.DisableTorchFunction():
            owner = reader.owner if reader.dim == 0 else reader.channels(groups)
            if not self._samples and self._in_rows and func is F.linear and x.dim() == 3:
                self.grid = (x.shape[0], x.shape[1])
                rows = self._visit(reader.parameter, x.flatten(0, 1), 1, owner)
                self.grid = None
                return rows.view(x.shape)
            if not self._samples:
                return self._visit(reader.parameter, x, x.dim() - LAYERS[func] - 1, owner)
            tokens = x.unflatten(0, (-1, self._samples)) if x.dim() == 2 else x
            tokens = self._visit(reader.parameter, tokens.transpose(0, 1), 2, owner).transpose(0, 1)
            return tokens.flatten(0, 1) if x.dim() == 2 else tokens

    def _refuse_other_uses(self, func: Any, arguments: Any, result: Any) -> None:
        used = [self._readers[id(tensor)][0] for tensor in tensors_in(arguments) if id(tensor) in self._readers]
        with torch._C.DisableTorchFunction():
            if used and any(tensor.requires_grad for tensor in tensors_in(result)):
                raise _used_otherwise(used[0].parameter, getattr(func, "__name__", str(func)))


def _takes_tokens_first(module: nn.Module) -> bool:
    return isinstance(module, nn.MultiheadAttention) and not module.batch_first


def _used_otherwise(parameter: str, use: str) -> ScoreError:
    return ScoreError(
        f"{parameter} reads units but is used by {use}, not as the weight of a conv or linear layer; "
        "use ifso, taylor or magnitude, which allow for any use"
    )


def _as_long(made: Tensor, tensor: Tensor, reader: Reader) -> bool:
    """Return whether a computed tensor has the slices of a weight that read units."""
    if made.dim() != tensor.dim():
        return False
    dims = (0, reader.dim) if reader.owner.dim() > 1 else (reader.dim,)
    return all(made.shape[dim] == tensor.shape[dim] for dim in dims)


def argument(args: Any, kwargs: Any, name: str) -> Any:
    """An argument of a conv or linear layer; None if it was not given."""
    place = _ARGUMENTS[name]
    return args[place] if len(args) > place else kwargs.get(name)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Every tensor in nested containers."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, dict):
        yield from tensors_in(list(tree.values()))


def in_rows(x: Tensor, dim: int) -> Tensor:
    """A feature map as [rows, channels, …]; without a batch dim it is one row.

    >>> in_rows(torch.zeros(4, 7, 8), 2).shape, in_rows(torch.zeros(3, 5, 5), 0).shape
    (torch.Size([4, 8, 7]), torch.Size([1, 3, 5, 5]))
    """
    return x.unsqueeze(0) if dim == 0 else x.movedim(dim, 1)


@dataclass
class Moments:
    """Sums over rows a of what layers read, in groups that do not meet: Σ d dᵀ [groups, k, k] and Σ d [groups, k].

    d = a − ``shift``, the mean of the first rows: so nothing is lost in float32 where a mean is far larger than the
    spread around it.

    >>> moments = Moments.of(torch.tensor([[[1.0, 1000.0], [3.0, 1001.0]]]))
    >>> moments.mean(), moments.matrix(centred=True)
    (tensor([[   2.0000, 1000.5000]], dtype=torch.float64), tensor([[[1.0000, 0.5000],
             [0.5000, 0.2500]]], dtype=torch.float64))
    """

    products: Tensor
    sums: Tensor
    shift: Tensor
    rows: int = 0

    @classmethod
    def of(cls, rows: Tensor) -> Moments:
        """Those of [groups, rows, k], in float32 or better."""
        groups, _, columns = rows.shape
        dtype = torch.promote_types(rows.dtype, torch.float32)
        found = cls(
            torch.zeros(groups, columns, columns, dtype=dtype, device=rows.device),
            torch.zeros(groups, columns, dtype=dtype, device=rows.device),
            rows.to(dtype).mean(1).nan_to_num(0, 0, 0),
        )
        found.add(rows)
        return found

    def empty(self) -> Moments:
        """Those of no rows, with the same shift."""
        return Moments(torch.zeros_like(self.products), torch.zeros_like(self.sums), self.shift)

    def add(self, rows: Tensor) -> None:
        """Take in [groups, rows, k]."""
        rows = rows.to(self.products.dtype) - self.shift.unsqueeze(1)
        self.products.baddbmm_(rows.transpose(1, 2), rows)
        self.sums += rows.sum(1)
        self.rows += rows.shape[1]

    def over(self, reduce: Callable[[Tensor], Tensor]) -> Moments:
        """Those of the rows of all processes, in float64 and without a shift; ``reduce`` is a sum over them."""
        sums, shift = self.sums.double(), self.shift.double()
        cross = sums.unsqueeze(2) * shift.unsqueeze(1)
        squares = self.rows * shift.unsqueeze(2) * shift.unsqueeze(1)
        products = reduce(self.products.double() + cross + cross.transpose(1, 2) + squares)
        total = reduce(sums + self.rows * shift)
        rows = int(reduce(torch.tensor(float(self.rows), device=sums.device)))
        return Moments(products, total, torch.zeros_like(total), rows)

    def mean(self) -> Tensor:
        """E[a] [groups, k], in float64."""
        return self.sums.double() / self.rows + self.shift.double()

    def matrix(self, centred: bool) -> Tensor:
        """Covariance, or second moment, [groups, k, k], in float64; zero where only rounding is left."""
        shifted, mean = self.sums.double() / self.rows, self.mean()
        found = self.products.double() / self.rows - shifted.unsqueeze(2) * shifted.unsqueeze(1)
        variance = found.diagonal(dim1=1, dim2=2)
        rounding = 16 * torch.finfo(self.products.dtype).eps * shifted.square()
        constant = (variance <= ROUNDING * (variance + mean.square())) | (variance <= rounding)
        found = found.masked_fill(constant.unsqueeze(2) | constant.unsqueeze(1), 0)
        return found if centred else found + mean.unsqueeze(2) * mean.unsqueeze(1)


@dataclass
class Halves:
    """Moments of two halves of the samples, with one shift: what one half says can be tried on the other.

    >>> halves = Halves.of(torch.arange(12.0).view(1, 6, 2), samples=3, number=0)
    >>> [half.rows for half in halves.parts], halves.whole().mean()
    ([2, 4], tensor([[5., 6.]], dtype=torch.float64))
    """

    parts: tuple[Moments, Moments]

    @classmethod
    def of(cls, rows: Tensor, samples: int, number: int) -> Halves:
        """Those of the first rows [groups, samples · positions, k] that are seen."""
        shift = Moments.of(rows)
        found = cls((shift.empty(), shift.empty()))
        found.add(rows, samples, number)
        return found

    def add(self, rows: Tensor, samples: int, number: int) -> None:
        """Take in [groups, samples · positions, k] of batch ``number``."""
        first = in_first_half(samples, number) * (rows.shape[1] // max(samples, 1))
        for half, part in zip(self.parts, (rows[:, :first], rows[:, first:]), strict=True):
            if part.shape[1]:
                half.add(part)

    @property
    def rows(self) -> int:
        """How many were added."""
        return sum(half.rows for half in self.parts)

    def over(self, reduce: Callable[[Tensor], Tensor]) -> Halves:
        """Those of the rows of all processes, see :meth:`Moments.over`."""
        one, other = self.parts
        return Halves((one.over(reduce), other.over(reduce)))

    def whole(self) -> Moments:
        """Those of all samples."""
        one, other = self.parts
        return Moments(one.products + other.products, one.sums + other.sums, one.shift, one.rows + other.rows)

    def apart(self) -> tuple[Moments, Moments]:
        """For either half what is known without it, or the whole if that is nothing."""
        one, other = self.parts
        return (other, one) if one.rows and other.rows else (self.whole(), self.whole())


def in_first_half(samples: int, number: int) -> int:
    """How many of the samples of batch ``number`` are in the first half: a single one in every other batch.

    >>> in_first_half(8, 0), in_first_half(1, 0), in_first_half(1, 1)
    (4, 1, 0)
    """
    return samples // 2 if samples > 1 else samples * (1 - number % 2)


def mean_size(diagonal: Tensor, counted: Tensor) -> Tensor:
    """The mean of a matrix's diagonal over the columns that are ``counted`` and not constant; 1 if there are none.

    >>> mean_size(torch.tensor([2.0, 4.0, 0.0, 9.0]), torch.tensor([True, True, True, False]))
    tensor(3.)
    """
    alive = counted & (diagonal > 0)
    return diagonal[alive].mean() if bool(alive.any()) else diagonal.new_ones(())
