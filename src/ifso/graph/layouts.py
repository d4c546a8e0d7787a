"""What is left of a tensor when units go: shapes, slices and masks from a :class:`Layout`."""

from __future__ import annotations

import torch
from torch import Tensor

from ifso.errors import KeepError
from ifso.graph.channel_graph import Layout


def varying_dims(layer: Tensor) -> list[int]:
    """Dims along which a layer's unit number changes."""
    return [dim for dim, size in enumerate(layer.shape) if size > 1]


def surviving(layout: Layout, kept: Tensor) -> Tensor:
    """Bool tensor broadcastable to the shape: which elements stay."""
    alive = torch.ones([1] * len(layout.shape), dtype=torch.bool, device="cpu")
    for layer in layout.layers:
        alive = alive & kept[layer]
    return alive


def kept_length(v: Tensor, alive: Tensor, dim: int) -> Tensor:
    """‖v'‖/‖v‖ over all dims but one, for what is alive of ``v``, with 1 for the sizes of the others.

    >>> kept_length(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[True, False]]), 0)
    tensor([[0.6000],
            [1.0000]])
    """
    rest = [other for other in range(v.dim()) if other != dim]
    before, after = (x.square().sum(rest, keepdim=True).sqrt() for x in (v, v * alive))
    return torch.where(before > 0, after / before, 1)


def kept_indices(layout: Layout, kept: Tensor) -> dict[int, Tensor] | None:
    """Positions to keep along each dim, in their new order; None if they differ from row to row."""
    if any(len(varying_dims(layer)) != 1 for layer in layout.layers):
        return None
    result = {}
    for layer in layout.layers:
        (dim,) = varying_dims(layer)
        alive = kept[layer.flatten()]
        result[dim] = _dealt(alive, layout.interleave[dim]) if dim in layout.interleave else alive.nonzero().flatten()
    return result


def _dealt(alive: Tensor, period: int) -> Tensor:
    """Positions of the survivors of ``period`` interleaved blocks, one of each block in turn.

    >>> _dealt(torch.tensor([1, 0, 0, 1, 1, 1]).bool(), 2)   # blocks (0 2 4) and (1 3 5) keep 0 4 and 3 5
    tensor([0, 3, 4, 5])

    Blocks of one slice each are in order already. Blocks that lost all are left out.
    """
    if alive.numel() == period:
        return alive.nonzero().flatten()
    blocks = alive.view(-1, period).t()
    if len(set(blocks.sum(1).tolist()) - {0}) > 1:
        raise KeepError(
            "the blocks of a channel shuffle keep different numbers; pass keep through ifso.balance(graph, keep)"
        )
    places = torch.arange(alive.numel(), device="cpu").view(-1, period).t()
    return places[blocks].view(int(blocks.any(1).sum()), -1).t().flatten()


def compact_shape(layout: Layout, kept: Tensor, name: str) -> tuple[int, ...]:
    """Shape of what is left; a :class:`KeepError` if that is no full block."""
    indices = kept_indices(layout, kept)
    if indices is not None:
        return tuple(len(indices[dim]) if dim in indices else size for dim, size in enumerate(layout.shape))
    alive = surviving(layout, kept)
    shape = list(layout.shape)
    rows = alive.any(1, keepdim=True)
    shape[0] = int(rows.sum()) if rows.shape[0] > 1 else shape[0]
    counts = alive.sum(1, keepdim=True)[rows].unique().tolist()
    if alive.shape[1] > 1:
        if len(counts) != 1:
            raise KeepError(
                f"{name}: its groups keep different numbers of channels; pass keep through ifso.balance(graph, keep)"
            )
        shape[1] = counts[0]
    return tuple(shape)


def compact(tensor: Tensor, layout: Layout, kept: Tensor, name: str) -> Tensor:
    """The slices of ``tensor`` that stay, as a new tensor in the same memory format."""
    indices = kept_indices(layout, kept)
    if indices is not None:
        result = tensor
        for dim, index in indices.items():
            if len(index) < result.shape[dim] or dim in layout.interleave:
                result = result.index_select(dim, index.to(tensor.device))
    else:
        shape = compact_shape(layout, kept, name)
        alive = surviving(layout, kept)
        if 1 in layout.interleave:
            result = _rows_dealt(tensor, alive.flatten(1), layout.interleave[1])
        else:
            result = tensor[alive.expand(layout.shape).to(tensor.device)].reshape(shape)
    return in_format_of(result, tensor)


def _rows_dealt(tensor: Tensor, alive: Tensor, period: int) -> Tensor:
    """Each row [O, I/g, …] reads a shuffled axis: its survivors are dealt out in turn."""
    rows = alive.any(1).nonzero().flatten()
    columns = torch.stack([_dealt(alive[row], period) for row in rows]).to(tensor.device)
    kept_rows = tensor.index_select(0, rows.to(tensor.device))
    index = columns.view(*columns.shape, *[1] * (tensor.dim() - 2)).expand(*columns.shape, *tensor.shape[2:])
    return kept_rows.gather(1, index)


def in_format_of(result: Tensor, like: Tensor) -> Tensor:
    """``result`` in the memory format (channels_last …) of ``like``."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    wanted = formats.get(like.dim())
    if wanted is not None and like.is_contiguous(memory_format=wanted) and not like.is_contiguous():
        return result.contiguous(memory_format=wanted)
    return result.contiguous()
