"""The feature maps that units are read from, seen while the model runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ifso.criteria.base import Task
from ifso.curvature.weight_space import Reader
from ifso.errors import ScoreError

Visit = Callable[["ReadingLayers", Tensor, int, Tensor], Tensor]
"""``visit(layers, x, dim, owner)`` gets a feature map, its channel dim and the unit of each channel; what it returns
takes the place of ``x``. ``layers`` says which reader it is for."""


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight + bias``: a linear layer written by hand, its weight [inputs, outputs] (GPT-2's ``Conv1D``)."""
    return x @ weight if bias is None else torch.addmm(bias, x, weight)


_PRODUCTS = frozenset({torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm})
CONVS: dict[Any, int] = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}
TRANSPOSED: dict[Any, int] = {
    torch.conv_transpose1d: 1, torch.conv_transpose2d: 2, torch.conv_transpose3d: 3, product: 0,
}  # fmt: skip
LAYERS: dict[Any, int] = {F.linear: 0, **CONVS, **TRANSPOSED}
_REGIONS = frozenset({"torchvision.roi_align", "torchvision.ps_roi_align", "torchvision.roi_pool"})
"""Names of operators that cut regions [regions, 5] (image, x1, y1, x2, y2), their second argument, out of images."""
_COMPOSITES = frozenset({F.multi_head_attention_forward})
"""Functions written in Python that are one call to a mode, though layers run within them."""
_IN_PLACE_ORDER = frozenset({
    "add", "sub", "mul", "div", "truediv", "radd", "rsub", "rmul", "weight_norm", "split", "chunk", "to", "clone",
    "reshape_as",
})  # fmt: skip
"""Functions of a weight that leave every number in its place."""
_COMPUTED_FROM = "_ifso_readers"
"""An attribute of a tensor: the readers of the parameter that it was computed from."""
_ARGUMENTS = {"input": 0, "weight": 1, "bias": 2, "groups": 6}


def is_composite(func: Any) -> bool:
    """Return whether layers run within that torch function."""
    return func in _COMPOSITES


def inside_of(mode: TorchFunctionMode, func: Any, args: Any, kwargs: Any) -> Any:
    """What a composite function returns, with ``mode`` seeing the functions that it calls."""
    with mock.patch.object(F, "has_torch_function", return_value=False), mode:
        return func(*args, **kwargs)


class ReadingLayers(TorchFunctionMode):
    """Call ``visit`` with the input of every conv, transposed conv or linear layer that reads units.

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

    reader: Reader
    groups: int

    def __init__(self, task: Task, visit: Visit, everywhere: bool, in_rows: bool = False) -> None:
        super().__init__()
        self._visit, self._everywhere = visit, everywhere
        self._in_rows = in_rows and any(
            isinstance(module, nn.MultiheadAttention) and not module.batch_first for module in task.model.modules()
        )
        self.grid: tuple[int, int] | None = None
        self.samples = 0
        self.regions: Tensor | None = None
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
        func, args, kwargs = as_layer(func, args, kwargs)
        readers = self._readers_of(argument(args, kwargs, "weight")) if func in LAYERS else []
        if readers:
            return self._layer(func, args, kwargs, readers)
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

    def unseen(self) -> dict[str, str]:
        """Parameters that read units in a way that was not visited: the function that uses each."""
        return {parameter: use for parameter, use in self._other_uses.items() if parameter not in self._seen}

    @property
    def key(self) -> tuple[str, int]:
        """The parameter and the dim of the reader that is visited."""
        return self.reader.parameter, self.reader.dim

    def refuse_unseen(self) -> None:
        """Raise if there are any."""
        for parameter, use in self.unseen().items():
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
                rows = self._visit(self, x.flatten(0, 1), 1, owner)
                self.grid = None
                return rows.view(x.shape)
            if not self._samples:
                return self._visit(self, x, x.dim() - LAYERS[func] - 1, owner)
            tokens = x.unflatten(0, (-1, self._samples)) if x.dim() == 2 else x
            tokens = self._visit(self, tokens.transpose(0, 1), 2, owner).transpose(0, 1)
            return tokens.flatten(0, 1) if x.dim() == 2 else tokens

    def _refuse_other_uses(self, func: Any, arguments: Any, result: Any) -> None:
        used = [self._readers[id(tensor)][0] for tensor in tensors_in(arguments) if id(tensor) in self._readers]
        with torch._C.DisableTorchFunction():
            if used and any(tensor.requires_grad for tensor in tensors_in(result)):
                raise _used_otherwise(used[0].parameter, getattr(func, "__name__", str(func)))


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


def as_layer(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """The call of a function, a product with a matrix as one of :func:`product`."""
    if func in _PRODUCTS and len(args) == 2 and _is_matrix(args[1]):
        return product, args, {}
    if func is torch.addmm and len(args) == 3 and not kwargs and _is_matrix(args[2]):
        return product, (args[1], args[2], args[0]), {}
    return func, args, kwargs


def _is_matrix(weight: Any) -> bool:
    return isinstance(weight, nn.Parameter) and weight.dim() == 2


def argument(args: Any, kwargs: Any, name: str) -> Any:
    """An argument of a conv or linear layer; None if it was not given."""
    position = _ARGUMENTS[name]
    return args[position] if len(args) > position else kwargs.get(name)


def tensors_in(tree: Any) -> list[Tensor]:
    """Every tensor in nested containers."""
    if isinstance(tree, Tensor):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (tuple, list)) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


def in_rows(x: Tensor, dim: int) -> Tensor:
    """A feature map as [rows, channels, …]; without a batch dim it is one row.

    >>> in_rows(torch.zeros(4, 7, 8), 2).shape, in_rows(torch.zeros(3, 5, 5), 0).shape
    (torch.Size([4, 8, 7]), torch.Size([1, 3, 5, 5]))
    """
    return x.unsqueeze(0) if dim == 0 else x.movedim(dim, 1)
