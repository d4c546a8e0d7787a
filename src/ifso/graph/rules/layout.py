"""Views, copies, cuts and joins: most of them simply run on the ids themselves."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ifso.graph.channel_ids import Labels, Layer, compress
from ifso.graph.rules import hold, rule
from ifso.graph.tape import Call, Ref

TOO_LARGE = 1 << 22
"""Ids of a reshape that mixes channels with other axes are followed up to this many elements."""


@rule(
    "aten.alias", "aten.detach", "aten.clone", "aten._to_copy", "aten.contiguous", "aten.to",
    "aten.lift", "aten.positive", "aten.real", "aten.imag", "aten._conj", "aten.resolve_conj", "aten.resolve_neg",
)  # fmt: skip
def same(call: Call, labels: Labels) -> None:
    """The same elements in the same places."""
    x = call.args[0]
    _remember_view(call, labels, x)
    labels.set(call.outputs[0], labels[x], like=x)


@rule(
    "aten.permute", "aten.transpose", "aten.t", "aten.unsqueeze", "aten.squeeze", "aten.expand", "aten.slice",
    "aten.select", "aten.unbind", "aten.split_with_sizes", "aten.unsafe_split_with_sizes",
    "aten.narrow", "aten.diagonal", "aten.flip", "aten.roll",
    "aten.repeat", "aten.unfold", "aten.movedim", "aten.rot90", "aten.tril", "aten.triu", "aten.numpy_T", "aten.mT",
    "aten.split_with_sizes_copy", "aten.unbind_copy", "aten.permute_copy",
)  # fmt: skip
def rearrange(call: Call, labels: Labels) -> None:
    """Run the same operator on the ids."""
    x = call.args[0]
    _remember_view(call, labels, x)
    results: list[list[Layer]] = [[] for _ in call.outputs]
    ordered = _ordered_dims(call, len(labels.shape(x)))
    for layer in labels[x]:
        if any(layer.varies(dim) for dim in ordered):
            labels.freeze(layer.ids, f"its order matters in {call.op}")
            continue
        if call.op == "aten.slice" and call.argument(4, "step", 1) > 1:
            _keep_in_step(layer, call.argument(1, "dim", 0), call.argument(4, "step", 1), labels)
        for place, ids in enumerate(_on_ids(call, layer.ids, labels.shape(x))):
            results[place].append(carry_period(layer, ids, labels))
        if call.op in ("aten.slice", "aten.select") and results[0][-1].ids.numel() < layer.ids.numel():
            labels.keep_together(layer.ids)
    for ref, layers in zip(call.outputs, results, strict=True):
        labels.set(ref, layers, like=x)
        if call.op == "aten.expand" and ref is not None:
            labels.flexible[ref.index] = _expanded_dims(labels.shape(x), labels.shape(ref))


def _ordered_dims(call: Call, ndim: int) -> list[int]:
    """Dims along which the operator means positions, not channels: with some gone, the others would be elsewhere."""
    if call.op == "aten.roll":
        return [dim % ndim for dim in call.argument(2, "dims", ())] or list(range(ndim))
    if call.op == "aten.unfold":
        return [call.args[1] % ndim]
    return [ndim - 2, ndim - 1] if call.op in ("aten.tril", "aten.triu") else []


def _keep_in_step(layer: Layer, dim: int, step: int, labels: Labels) -> None:
    """Every ``step``-th channel is picked: those from one to the next go together, or the step would pick others."""
    if layer.varies(dim % layer.ids.dim()):
        for block in labels.unlock(layer).ids.split(step, dim):
            labels.link_rows(block, [dim])


def _expanded_dims(before: tuple[int, ...], after: tuple[int, ...]) -> set[int]:
    offset = len(after) - len(before)
    return {dim for dim, size in enumerate(after) if size > 1 and (dim < offset or before[dim - offset] == 1)}


def _on_ids(call: Call, ids: Tensor, shape: tuple[int, ...]) -> list[Tensor]:
    name = call.op.removeprefix("aten.").rstrip("_") if call.op.endswith("_") else None
    func = getattr(torch.ops.aten, name) if name else call.func
    result = func(ids.expand(shape), *call.args[1:], **call.kwargs)
    copies = call.op in ("aten.flip", "aten.roll", "aten.repeat", "aten.tril", "aten.triu", "aten.rot90")
    results = result if isinstance(result, (tuple, list)) else (result,)
    return [compress(item, exact=copies) for item in results]


def carry_period(layer: Layer, ids: Tensor, labels: Labels) -> Layer:
    """A shuffled axis stays one only while all of it is there, in the same order."""
    if layer.period and not (ids.numel() == layer.ids.numel() and bool((ids.flatten() == layer.ids.flatten()).all())):
        layer = labels.unlock(layer)
    return replace(layer, ids=ids)


def _remember_view(call: Call, labels: Labels, base: Ref) -> None:
    if call.op in ("aten.clone", "aten._to_copy", "aten.flip", "aten.roll", "aten.repeat"):
        return
    for ref in call.outputs:
        if ref is not None and ref != base:
            labels.views[ref.index] = labels.views.get(base.index, base.index)
            if base.index in labels.uniform:
                labels.uniform.add(ref.index)


@rule("aten.view_as_complex", "aten.view_as_real")
def complex_view(call: Call, labels: Labels) -> None:
    """A last axis of two numbers becomes one complex number, or the other way round."""
    x, out = call.args[0], call.outputs[0]
    joins = call.op == "aten.view_as_complex"
    layers = []
    for layer in labels[x]:
        if joins and layer.varies(layer.ids.dim() - 1):
            labels.freeze(layer.ids, "are the two parts of complex numbers")
        else:
            layers.append(replace(layer, ids=layer.ids.squeeze(-1) if joins else layer.ids.unsqueeze(-1)))
    labels.set(out, layers, like=x)


@rule("aten.split", "aten.unsafe_split")
def split(call: Call, labels: Labels) -> None:
    """Equal pieces (``chunk``, ``split``): along a channel axis the pieces must keep equally many."""
    x = call.args[0]
    dim = call.argument(2, "dim", 0) % len(labels.shape(x))
    sizes = {labels.shape(ref)[dim] for ref in call.outputs if ref is not None}
    for layer in labels[x]:
        if layer.dims == (dim,) and len(call.outputs) > 1:
            if len(sizes) == 1:
                labels.split(layer.ids.flatten().view(len(call.outputs), -1), call.module)
            else:
                labels.freeze(layer.ids, "is cut into pieces of different size by a single number")
    rearrange(call, labels)


@rule("aten.view", "aten._unsafe_view", "aten.reshape", "aten._reshape_alias", "aten.unflatten", "aten.view_copy")
def view(call: Call, labels: Labels) -> None:
    """Reshape: splitting a channel axis asks for balance, joining axes in another order makes a shuffle."""
    x, out = call.args[0], call.outputs[0]
    if out is None or not isinstance(call.args[1], (list, tuple)):
        labels.set(out, ())
        return
    _remember_view(call, labels, x)
    results = []
    for layer in labels[x]:
        ids = _reshape_ids(layer.ids, labels.shape(x), labels.shape(out))
        if ids is None:
            labels.freeze(layer.ids, "is mixed with other axes by a reshape too large to follow")
            continue
        reshaped = _after_reshape(layer, ids, call, labels)
        if reshaped is not None:
            results.append(reshaped)
    labels.set(out, results, like=x)


def _reshape_ids(ids: Tensor, before: tuple[int, ...], after: tuple[int, ...]) -> Tensor | None:
    """Ids after a reshape; axes that are reshaped among themselves and carry no ids are left out of the work."""
    source, target = [1] * len(before), [1] * len(after)
    for ins, outs in _blocks(before, after):
        if any(ids.shape[dim] > 1 for dim in ins):
            for dim in ins:
                source[dim] = before[dim]
            for dim in outs:
                target[dim] = after[dim]
    full = ids.expand(source)
    if full.numel() > TOO_LARGE:
        try:
            return compress(full.view(target))
        except RuntimeError:
            return None
    return compress(full.reshape(target), exact=True)


def _blocks(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Runs of axes that are reshaped among themselves.

    >>> _blocks((5, 8, 3, 3), (5, 2, 4, 9))
    [([0], [0]), ([1], [1, 2]), ([2, 3], [3])]
    """
    blocks = []
    i = j = 0
    while i < len(before) or j < len(after):
        ins, outs = [i] if i < len(before) else [], [j] if j < len(after) else []
        left, right = math.prod(before[d] for d in ins), math.prod(after[d] for d in outs)
        while left != right:
            if left < right:
                ins.append(ins[-1] + 1 if ins else i)
                left *= before[ins[-1]]
            else:
                outs.append(outs[-1] + 1 if outs else j)
                right *= after[outs[-1]]
        blocks.append((ins, outs))
        i, j = i + len(ins), j + len(outs)
    return blocks


def _after_reshape(layer: Layer, ids: Tensor, call: Call, labels: Labels) -> Layer | None:
    before, after = len(layer.dims), sum(size > 1 for size in ids.shape)
    if before == after == 1 and ids.numel() == layer.ids.numel():
        return replace(layer, ids=ids)
    layer = labels.unlock(layer)
    if after > before:
        _note_split(ids, call, labels)
    elif after < before and ids.numel() == layer.ids.numel():
        return _joined(layer, ids, labels)
    return replace(layer, ids=ids)


def _note_split(ids: Tensor, call: Call, labels: Labels) -> None:
    cut = ids.squeeze()
    for level in range(cut.dim() - 1, 0, -1):
        labels.split(cut.reshape(cut.shape[:level].numel(), -1), call.module)


def _joined(layer: Layer, ids: Tensor, labels: Labels) -> Layer | None:
    """Axes joined into one. In order: fine. Blocks last: a shuffle. Anything else: frozen."""
    flat = ids.flatten()
    array = layer.ids.squeeze()
    if _ascends(flat) or any(_same(array, blocks) for blocks, _ in labels.splits):
        return replace(layer, ids=ids)
    if array.dim() == 2 and any(_same(array.t(), blocks) for blocks, _ in labels.splits):
        return replace(layer, ids=ids, period=array.shape[1])
    if array.dim() == 2 and bool((array == array[:1]).all() or (array == array[:, :1]).all()):
        return replace(layer, ids=ids)
    if array.dim() == 2 and _ascends(array.unique_consecutive(dim=0).flatten()):
        return replace(layer, ids=ids)  # rows repeated in place: keys and values that several queries share
    labels.freeze(flat, "is reordered in a way that cannot be followed")
    return None


def _ascends(flat: Tensor) -> bool:
    return bool((flat[1:] >= flat[:-1]).all())


def _same(array: Tensor, blocks: Tensor) -> bool:
    return array.numel() == blocks.numel() and array.reshape(blocks.shape).equal(blocks)


@rule("aten.as_strided")
def as_strided(call: Call, labels: Labels) -> None:
    """Followed only where it changes nothing."""
    x, out = call.args[0], call.outputs[0]
    if out is not None and labels.shape(out) == labels.shape(x):
        labels.set(out, labels[x], like=x)
        return
    hold(call, labels, "is read through raw strides")


@rule("aten.repeat_interleave")
def repeat_interleave(call: Call, labels: Labels) -> None:
    """Each slice several times: run on the ids where the counts are a number."""
    if len(call.args) > 1 and isinstance(call.args[1], int):
        rearrange(call, labels)
    else:
        hold(call, labels, "is repeated by counts known only at run time")
