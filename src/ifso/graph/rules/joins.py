"""Joining, padding, looking up and writing by position: what happens at the seams of a channel axis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ifso.common.tensors import placed
from ifso.graph.channel_ids import PADDED_BACK, PADDED_FRONT, PRODUCES, Labels, Layer
from ifso.graph.rules import rule
from ifso.graph.rules.layout import carry_period
from ifso.graph.tape import Call, Ref


@rule("aten.cat", "aten.concat")
def cat(call: Call, labels: Labels) -> None:
    """Ids are joined along the dim, without empty pieces; along the other dims all pieces hold the same channels."""
    pieces = [ref for ref in call.args[0] if labels.tape.shape(ref) != (0,)]
    out = call.outputs[0]
    if not pieces:
        labels.set(out, ())
        return
    dim = call.argument(1, "dim", 0) % len(labels.shape(pieces[0]))
    _join([ref for ref in pieces if labels.tape.shape(ref)[dim]] or pieces[:1], out, dim, labels)


@rule("aten.stack")
def stack(call: Call, labels: Labels) -> None:
    """``cat`` along a new dim: all pieces hold the same channels."""
    pieces, out = call.args[0], call.result
    dim = call.argument(1, "dim", 0) % len(labels.shape(out))
    layers = labels.merge(replace(layer, ids=layer.ids.unsqueeze(dim)) for ref in pieces for layer in labels[ref])
    _freeze_unmatched(pieces, layers, labels, lambda ids: ids.squeeze(dim))
    labels.set(out, layers, like=pieces[0])


def _freeze_unmatched(
    pieces: list[Ref], layers: list[Layer], labels: Labels, own_ids: Callable[[Tensor], Tensor] = lambda ids: ids
) -> None:
    """Freeze layers that lie side by side with an axis of fixed size; ``own_ids`` brings ids to a piece's dims."""
    for layer in layers:
        for ref in pieces:
            here = replace(layer, ids=own_ids(layer.ids))
            if labels.rigid_dim(here, ref, here.ids.dim()) is not None:
                labels.freeze(layer.ids, f"is joined side by side with {labels.why(ref)}")


def _join(pieces: list[Ref], out: Ref | None, dim: int, labels: Labels) -> None:
    across = labels.merge(layer for ref in pieces for layer in labels[ref] if not layer.varies(dim))
    _freeze_unmatched(pieces, across, labels)
    joined: list[Layer] = []
    if any(labels.along(ref, dim) is not None for ref in pieces):
        joined = [Layer(_ids_along(pieces, dim, labels))]
    labels.set(out, labels.merge([*joined, *across]), like=pieces[0])


def _ids_along(pieces: list[Ref], dim: int, labels: Labels) -> Tensor:
    parts = []
    for ref in pieces:
        size = labels.shape(ref)[dim]
        layers = [layer for layer in labels[ref] if layer.varies(dim)]
        if layers:
            parts.append(labels.unlock(layers[0]).ids)
            for other in layers[1:]:
                labels.unite(layers[0].ids, other.ids)
            continue
        ids = labels.fresh(size)
        if ref.index not in labels.uniform or size == 1:
            labels.freeze(ids, f"is joined with {labels.why(ref)}")
        parts.append(placed(ids, dim, len(labels.shape(ref))))
    widest = [max(part.shape[d] for part in parts) for d in range(parts[0].dim())]
    return torch.cat(
        [part.expand([part.shape[dim] if d == dim else s for d, s in enumerate(widest)]) for part in parts], dim
    )


@rule("aten.constant_pad_nd")
def pad(call: Call, labels: Labels) -> None:
    """Zeros around: along a channel axis they are new channels."""
    x, amounts = call.args[:2]
    ndim = len(labels.shape(x))
    padded = {ndim - 1 - i // 2: amounts[i : i + 2] for i in range(0, len(amounts), 2)}
    results = []
    for layer in labels[x]:
        ids = layer.ids
        for dim in layer.dims:
            before, after = padded.get(dim, (0, 0))
            if before or after:
                ids = _pad_ids(labels.unlock(replace(layer, ids=ids)).ids, dim, before, after, call, labels)
        results.append(replace(layer, ids=ids, period=0 if ids is not layer.ids else layer.period))
    labels.set(call.outputs[0], results, like=x)


def _pad_ids(ids: Tensor, dim: int, before: int, after: int, call: Call, labels: Labels) -> Tensor:
    if before < 0 or after < 0:
        start, stop = max(-before, 0), ids.shape[dim] - max(-after, 0)
        return _pad_ids(ids.narrow(dim, start, stop - start), dim, max(before, 0), max(after, 0), call, labels)
    parts = []
    for count, names in ((before, PADDED_FRONT), (after, PADDED_BACK)):
        shape = list(ids.shape)
        shape[dim] = count
        new = labels.fresh(count)
        if count:
            labels.measure(call, names, new)
        parts.append(placed(new, dim, ids.dim()).expand(shape))
    return torch.cat([parts[0], ids, parts[1]], dim)


@rule("aten.index", "aten.index_select", "aten.embedding")
def index(call: Call, labels: Labels) -> None:
    """Look-up: an axis that is indexed must stay, the others pass."""
    if call.op == "aten.index":
        x, indices = call.args[:2]
    elif call.op == "aten.embedding":
        x, indices = call.args[0], [call.args[1]]
    else:
        x, dim, where = call.args[:3]
        indices = [None] * (dim % max(len(labels.shape(x)), 1)) + [where]
    dummies, indexed = _dummy_indices(indices, labels)
    passing = []
    for layer in labels.passing(x, indexed, "is looked up by position"):
        ids = layer.ids[tuple(dummies)] if indexed else layer.ids
        passing.append(carry_period(layer, ids, labels))
        if call.op == "aten.embedding":
            labels.role(ids, PRODUCES)
    for ref in indices:
        if isinstance(ref, Ref):
            labels.freeze_all([ref], "is used as an index")
    labels.set(call.outputs[0], passing, like=x)


def _dummy_indices(indices: list[Any], labels: Labels) -> tuple[list[Any], list[int]]:
    """Index every looked-up dim (of size 1 in the ids) at 0, keeping the number of dims right."""
    dummies: list[Any] = []
    indexed: list[int] = []
    for entry in indices:
        if entry is None:
            dummies.append(slice(None))
            continue
        ndim = len(labels.tape.shape(entry))
        is_mask = labels.tape.values[entry.index].dtype in (torch.bool, torch.uint8)
        count = ndim if is_mask else 1
        indexed.extend(range(len(dummies), len(dummies) + count))
        zero = torch.zeros([1] if is_mask else [1] * ndim, dtype=torch.long, device="cpu")
        dummies.extend([zero] * count)
    return dummies, indexed


@rule("aten.gather", "aten.take_along_dim")
def gather(call: Call, labels: Labels) -> None:
    """Look-up along one axis with an index of the same shape."""
    x, dim, where = call.args[:3]
    dim = dim % max(len(labels.shape(x)), 1)
    passing = []
    for layer in labels[x]:
        if layer.varies(dim) or any(labels.shape(where)[d] != labels.shape(x)[d] for d in layer.dims):
            labels.freeze(layer.ids, "is looked up by position")
        else:
            passing.append(layer)
    labels.adopt(where, passing)
    labels.set(call.outputs[0], passing, like=x)


@rule("aten.index_add", "aten.index_copy")
def index_add(call: Call, labels: Labels) -> None:
    """Rows added by index along one axis, as experts give their tokens back: the other axes are the same channels."""
    x, dim, _, source = call.args[:4]
    out, layers = call.outputs[0], [*labels[x], *labels[source]]
    if any(layer.varies(dim % len(labels.shape(x))) for layer in layers):
        labels.freeze_all([x, source], "is written by position")
        labels.set(out, ())
        return
    merged = labels.merge(layers)
    _freeze_unmatched([x, source], merged, labels)
    labels.adopt(x, merged)
    labels.set(out, merged, like=source)
    labels.uniform.discard(x.index)


@rule("aten.index_put", "aten._index_put_impl_")
def index_put(call: Call, labels: Labels) -> None:
    """Rows written by index: along the other axes what is written and what is there are the same channels."""
    x, indices, values = call.args[:3]
    out = call.outputs[0]
    _, indexed = _dummy_indices(indices, labels)
    ndim = len(labels.shape(x))
    layers = [*labels[x], *labels.aligned(values, ndim)] if len(labels.shape(values)) <= ndim else list(labels[x])
    if len(labels.shape(values)) > ndim or any(layer.varies(dim) for layer in layers for dim in indexed):
        labels.freeze_all([x, values], "is written by position")
        labels.set(out, ())
        return
    merged = labels.merge(layers)
    _freeze_unmatched([x, values], merged, labels)
    labels.set(out, merged, like=values)
    if merged:
        labels.uniform.discard(x.index)
