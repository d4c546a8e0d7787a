"""Functions that take statistics over channels (layer norm, softmax …), where a zero is not the same as nothing.

They are remembered by the place where they are called, with the units along the axes of their tensors, so that a masked
model can call them on the kept channels alone: gather, call, scatter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ifso.graph.channel_graph import STAYS
from ifso.graph.channel_ids import Labels
from ifso.graph.tape import FunctionCall, FunctionKey, ModuleFunctions, Ref
from ifso.graph.units import Units

Lines = tuple[tuple[int, Tensor], ...]
"""(dim, unit numbers [rows, n] along it) of a tensor's channel axes."""


def reductions_of(labels: Labels, units: Units) -> dict[FunctionKey, FunctionCall]:
    """The calls in which units that can go are reduced over, with :data:`Lines` in place of tensors."""
    flagged = {function for _, _, function in labels.flags_for(units.of)}

    def lines(tree: Any) -> Any:
        if isinstance(tree, Ref):
            return _lines(tree, labels, units)
        if isinstance(tree, (tuple, list)):
            return [lines(item) for item in tree]
        if isinstance(tree, dict):
            return {key: lines(item) for key, item in tree.items()}
        return None

    found: dict[FunctionKey, FunctionCall] = {}
    for call in labels.tape.functions:
        if call.key in flagged and call.key not in found:
            args, kwargs, result = (lines(tree) for tree in (call.args, call.kwargs, call.result))
            found[call.key] = FunctionCall(call.key, call.name, tuple(args), kwargs, result)
    return found


def _lines(ref: Ref, labels: Labels, units: Units) -> Lines:
    found = {}
    for layer in labels[ref]:
        for dim in layer.dims:
            rows = units.of[layer.ids.movedim(dim, -1).reshape(-1, layer.ids.shape[dim])]
            if bool((rows != STAYS).any()):
                found[dim] = rows
    return tuple(found.items())


class ExactReductions(ModuleFunctions):
    """Within it, functions over channels see only the kept ones."""

    def __init__(self, model: nn.Module, reductions: Mapping[FunctionKey, FunctionCall], kept: Tensor) -> None:
        super().__init__(model)
        self._reductions, self._kept = reductions, kept

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, visit, number = self.next_function(func)
        reduction = self._reductions.get((name, visit, number)) or self._reductions.get((name, 1, number))
        if reduction is None or getattr(func, "__name__", "") != reduction.name:
            return func(*args, **kwargs)
        if reduction.name == "multi_head_attention_forward":
            return func(*self._rescaled(args, kwargs, reduction), **kwargs)
        fewer = [self._gather(item, lines) for item, lines in zip(args, reduction.args, strict=False)]
        fewer_named = {key: self._gather(item, reduction.kwargs.get(key)) for key, item in kwargs.items()}
        if reduction.name in ("layer_norm", "rms_norm"):
            _fit_normalized_shape(fewer, fewer_named)
        return self._scatter(func(*fewer, **fewer_named), reduction.result)

    def _gather(self, item: Any, lines: Any) -> Any:
        if isinstance(item, Tensor) and lines:
            for dim, units in lines:
                index = self._kept[units].any(0).nonzero().flatten()
                if item.shape[dim] == units.shape[1] > index.numel():
                    item = item.index_select(dim, index.to(item.device))
        elif isinstance(item, (tuple, list)) and isinstance(lines, list):
            return type(item)(self._gather(part, line) for part, line in zip(item, lines, strict=True))
        return item

    def _rescaled(self, args: Any, kwargs: dict[str, Any], reduction: FunctionCall) -> list[Any]:
        """Arguments of ``nn.MultiheadAttention`` with queries as long as the smaller head's division by √size wants."""
        width, heads, weight, bias = args[3:7]
        lines = reduction.args[5] if weight is not None else reduction.kwargs.get("q_proj_weight")
        units = dict(lines or ()).get(0)
        if units is None:
            return list(args)
        size = int(self._kept[units].flatten()[:width].view(heads, -1).sum(1).max())
        gain = (width / heads / size) ** 0.5
        longer = list(args)
        if weight is None:
            kwargs["q_proj_weight"] = kwargs["q_proj_weight"] * gain
        else:
            longer[5] = torch.cat([weight[:width] * gain, weight[width:]])
        longer[6] = None if bias is None else torch.cat([bias[:width] * gain, bias[width:]])
        return longer

    def _scatter(self, result: Any, lines: Any) -> Any:
        if isinstance(result, Tensor):
            for dim, units in lines or ():
                index = self._kept[units].any(0).nonzero().flatten()
                if index.numel() < units.shape[1]:
                    shape = list(result.shape)
                    shape[dim] = units.shape[1]
                    result = result.new_zeros(shape).index_copy(dim, index.to(result.device), result)
        elif isinstance(result, (tuple, list)) and isinstance(lines, list):
            return type(result)([self._scatter(part, line) for part, line in zip(result, lines, strict=True)])
        return result


def _fit_normalized_shape(args: list[Any], kwargs: dict[str, Any]) -> None:
    x = args[0] if args else kwargs["input"]
    old = args[1] if len(args) > 1 else kwargs["normalized_shape"]
    new = list(x.shape[x.dim() - len(old) :])
    if len(args) > 1:
        args[1] = new
    else:
        kwargs["normalized_shape"] = new
