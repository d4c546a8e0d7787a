"""The feature maps that units are read from, seen while the model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ifso.criteria.base import Task
from ifso.curvature.weights import Reader
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
_ARGUMENTS = {"input": 0, "weight": 1, "bias": 2, "groups": 6}


def is_composite(func: Any) -> bool:
    """Return whether layers run within that torch function."""
    return func in _COMPOSITES


def inside_of(mode: TorchFunctionMode, func: Any, args: Any, kwargs: Any) -> Any:
    """What a composite function returns, with ``mode`` seeing the functions that it calls."""
    with mock.patch.object(F, "has_torch_function", lambda _: False), mode:
        return func(*args, **kwargs)


class ReadingLayers(TorchFunctionMode):
    """Within it ``visit`` is called with the input of every conv, transposed conv or linear layer that reads units.

    Units that no layer reads (queries and keys) are visited at the output of the layer that makes them.
    ``everywhere=True`` refuses a reading parameter that is differentiated in any other use.

    ``regions`` holds, where regions were cut out of images since the last layer before (``roi_align``), the image that
    each comes from, in the order of the images; else it is None. Layers that see as many rows see these regions.
    While ``visit`` runs, ``reader`` and ``groups`` are those of the layer.
    """

    def __init__(self, task: Task, visit: Visit, everywhere: bool) -> None:
        super().__init__()
        self._visit, self._everywhere = visit, everywhere
        self.regions: Tensor | None = None
        self.reader: Reader | None = None
        self.groups = 1
        self._samples = 0
        self._cutting = False
        self._readers: dict[int, list[Reader]] = {}
        for reader in task.readers:
            self._readers.setdefault(id(task.tensors[reader.parameter]), []).append(reader)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One call of a torch function."""
        kwargs = kwargs or {}
        if is_composite(func):
            return self._attention(func, args, kwargs)
        self._follow_regions(func, args)
        weight = argument(args, kwargs, "weight") if func in LAYERS else None
        if id(weight) in self._readers:
            return self._layer(func, args, kwargs, self._readers[id(weight)])
        result = func(*args, **kwargs)
        if self._everywhere:
            self._refuse_other_uses(func, (args, kwargs), result)
        return result

    def _attention(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Attention has [tokens, samples, features] within: what is visited has the samples first."""
        query = args[0] if args else kwargs["query"]
        before, self._samples = self._samples, query.shape[1] if query.dim() == 3 else 1
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
        with torch._C.DisableTorchFunction():
            owner = reader.owner if reader.dim == 0 else reader.channels(groups)
            if not self._samples:
                return self._visit(reader.parameter, x, x.dim() - LAYERS[func] - 1, owner)
            tokens = x.unflatten(0, (-1, self._samples)) if x.dim() == 2 else x
            tokens = self._visit(reader.parameter, tokens.transpose(0, 1), 2, owner).transpose(0, 1)
            return tokens.flatten(0, 1) if x.dim() == 2 else tokens

    def _refuse_other_uses(self, func: Any, arguments: Any, result: Any) -> None:
        used = [self._readers[id(tensor)][0] for tensor in tensors_in(arguments) if id(tensor) in self._readers]
        with torch._C.DisableTorchFunction():
            if used and any(tensor.requires_grad for tensor in tensors_in(result)):
                raise ScoreError(
                    f"{used[0].parameter} reads units but is used by {getattr(func, '__name__', func)}, not as the "
                    "weight of a conv or linear layer; use ifso, taylor or magnitude, which allow for any use"
                )


def argument(args: Any, kwargs: Any, name: str) -> Any:
    place = _ARGUMENTS[name]
    return args[place] if len(args) > place else kwargs.get(name)


def tensors_in(tree: Any) -> Iterator[Tensor]:
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
