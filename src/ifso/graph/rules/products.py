"""Convolution and matrix products: where channels are made and read.

A contraction unites the ids of both sides along the contracted axis and ends them there. Where they also vary along a
batch axis (attention: the head), each row becomes one unit and its id goes on.
"""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from ifso.graph.labels import CONSUMES, PRODUCES, Labels, Layer
from ifso.graph.rules import rule
from ifso.graph.rules.pointwise import follow
from ifso.graph.tape import Call, Ref

# ---- convolution --------------------------------------------------------------------------------------------------


@rule("aten.convolution", "aten._convolution", "aten.cudnn_convolution", "aten.mkldnn_convolution", "aten.convolution_overrideable")
def convolution(call: Call, labels: Labels) -> None:
    """``convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)``."""
    x, weight, bias = call.args[:3]
    convolve(call, labels, x, weight, bias, transposed=call.args[6], groups=call.args[8])


def convolve(call: Call, labels: Labels, x: Ref, weight: Ref, bias: Ref | None, *, transposed: bool, groups: int) -> None:
    """Follow a convolution of any kind."""
    out = call.outputs[0]
    assert out is not None
    out_dim, in_dim = (1, 0) if transposed else (0, 1)
    made, read = _weight_ids(labels, weight, out_dim), _weight_ids(labels, weight, in_dim)
    if read is not None and (groups == 1 or transposed):
        labels.role(read, CONSUMES)
    if groups > 1:
        made, read = _grouped(call, labels, x, weight, made, read, transposed, groups)
    else:
        _read(labels, x, 1, read, labels.shape(weight)[in_dim])
    if made is not None:
        labels.role(made, PRODUCES)
    ndim = len(labels.shape(out))
    layers = [] if made is None else [Layer(made.reshape(_at(1, ndim)))]
    labels.set(out, layers, like=x)
    follow(labels, out, bias, 1)
    _conv_cost(call, labels, x, weight, made, read, transposed, groups)


def _at(dim: int, ndim: int) -> list[int]:
    return [-1 if d == dim else 1 for d in range(ndim)]


def _weight_ids(labels: Labels, weight: Ref, dim: int) -> Tensor | None:
    layer = next((layer for layer in labels[weight] if layer.dims == (dim,)), None)
    return None if layer is None else layer.ids.flatten()


def _read(labels: Labels, x: Ref, dim: int, read: Tensor | None, size: int) -> None:
    """The channels along ``dim`` of ``x`` are read by weight slices ``read``."""
    layers = [layer for layer in labels[x] if layer.varies(dim)]
    if read is None:
        if size > 1:
            for layer in layers:
                labels.freeze(layer.ids, "is read by a weight whose input axis must stay")
        return
    if not layers:
        labels.freeze(read, f"reads {labels.why(x)}")
    for layer in layers:
        labels.unite_layers(layer, Layer(read.reshape(_at(dim, layer.ids.dim()))))


def _grouped(
    call: Call, labels: Labels, x: Ref, weight: Ref, made: Tensor | None, read: Tensor | None, transposed: bool, groups: int
) -> tuple[Tensor | None, Tensor | None]:
    """Grouped convolution: ids of all output and all input channels, whatever the weight's own shape is."""
    shape = labels.shape(weight)
    layer = labels.along(x, 1)
    incoming = None if layer is None else labels.unlock(layer).ids.movedim(1, -1)
    total_in = shape[0] if transposed else shape[1] * groups
    per_in, per_out = total_in // groups, (shape[1] if transposed else shape[0] // groups)
    outgoing = _ragged(labels, weight, groups * per_out, (groups, per_out), shape[0] // groups) if transposed else made
    if outgoing is None:
        outgoing = labels.fresh(groups * per_out)
        labels.freeze(outgoing, "is made by a weight whose output axis must stay")
    if incoming is None:
        reason = f"reads {labels.why(x)}"
        labels.freeze(outgoing if per_in == 1 else read if read is not None else outgoing, reason)
        return outgoing, read if transposed else None
    incoming = _one_line(labels, incoming)
    if per_in == 1 or per_out == 1:
        _whole_groups(call, labels, incoming, outgoing, groups)
        if transposed and read is not None:
            labels.unite(read, incoming)
        return outgoing, incoming
    labels.balance(incoming.view(groups, -1), call.module)
    labels.balance(outgoing.view(groups, -1), call.module)
    if transposed:
        if read is not None:
            labels.unite(read, incoming)
    else:
        _read_within_groups(labels, weight, incoming, groups, per_out, read)
    return outgoing, incoming


def _one_line(labels: Labels, ids: Tensor) -> Tensor:
    """Ids [..., C] of a channel axis that must not vary elsewhere, as [C]."""
    flat = ids.reshape(-1, ids.shape[-1])
    if flat.shape[0] > 1:
        labels.unite(flat, flat[:1])
    return flat[0]


def _whole_groups(call: Call, labels: Labels, incoming: Tensor, outgoing: Tensor, groups: int) -> None:
    """Depthwise: a group has one channel on one side, so input and output channels of a group go together."""
    rows_in, rows_out = incoming.view(groups, -1), outgoing.view(groups, -1)
    labels.unite(rows_out, rows_out[:, :1])
    labels.unite(rows_in, rows_out[:, :1])
    labels.measure(call, ("groups",), rows_out[:, 0])


def _read_within_groups(
    labels: Labels, weight: Ref, incoming: Tensor, groups: int, per_out: int, read: Tensor | None
) -> None:
    """A weight [O, I/g, …]: positions along dim 1 mean other channels in each group."""
    rows = incoming.view(groups, -1)
    value = labels.tape.values[weight.index]
    if value.kind != "parameter":
        if read is not None:
            labels.unite(rows, read)
        else:
            labels.freeze(rows, "is read by a weight whose input axis must stay")
        return
    table = rows.repeat_interleave(per_out, 0)
    table = table.reshape(*table.shape, *[1] * (len(value.shape) - 2))
    known = labels.ragged.setdefault(value.name, table)
    if known is not table:
        labels.unite(known, table)


def _ragged(labels: Labels, weight: Ref, count: int, rows: tuple[int, int], per_in: int) -> Tensor | None:
    """Ids of the outputs of a grouped transposed convolution [I, O/g, …], remembered with the weight."""
    value = labels.tape.values[weight.index]
    if value.kind != "parameter" or rows[1] == 1:
        return None if rows[1] > 1 else labels.fresh(count)
    if value.name in labels.ragged:
        table = labels.ragged[value.name]
        return table.flatten(1)[::per_in].reshape(-1)[:count]
    ids = labels.fresh(count)
    table = ids.view(rows).repeat_interleave(per_in, 0)
    labels.ragged[value.name] = table.reshape(*table.shape, *[1] * (len(value.shape) - 2))
    return ids


def _conv_cost(
    call: Call, labels: Labels, x: Ref, weight: Ref, made: Tensor | None, read: Tensor | None, transposed: bool, groups: int
) -> None:
    out = call.outputs[0]
    assert out is not None
    shape = labels.shape(weight)
    positions = labels.tape.shape(x if transposed else out)
    times = positions[0] * math.prod(positions[2:]) * math.prod(shape[2:])
    total_out = shape[1] * groups if transposed else shape[0]
    per_in = (shape[0] // groups) if transposed else shape[1]
    layers = []
    if made is not None:
        layers.append(made.view(1, -1, 1))
    if read is not None:
        rows = read.view(groups, -1) if read.numel() == per_in * groups else read.view(1, -1)
        layers.append(rows.repeat_interleave(total_out // rows.shape[0], 0).unsqueeze(0) if groups > 1 else rows.unsqueeze(0))
    labels.cost("conv", call, (times, total_out, per_in), layers)
    labels.cost("activation", call, labels.tape.shape(out), [layer.ids for layer in labels[out]])


# ---- matrix products ----------------------------------------------------------------------------------------------


@rule("aten.mm", "aten.bmm", "aten.mv", "aten.dot")
def matmul(call: Call, labels: Labels) -> None:
    """[…, m, k] · […, k, n]."""
    a, b = call.args[:2]
    if call.op in ("aten.mv", "aten.dot"):
        labels.freeze_all(call.inputs, f"passes through {call.op}, for which there is no rule")
        labels.set(call.outputs[0], ())
        return
    _product(call, labels, a, b, None)


@rule("aten.addmm", "aten.baddbmm", "aten.addbmm", "aten.addmm_", "aten.baddbmm_")
def add_matmul(call: Call, labels: Labels) -> None:
    """bias + a·b."""
    bias, a, b = call.args[:3]
    _product(call, labels, a, b, bias)


@rule("aten.linear")
def linear(call: Call, labels: Labels) -> None:
    """x [… , k] with weight [n, k]."""
    x, weight = call.args[:2]
    bias = call.argument(2, "bias")
    ndim = len(labels.shape(x))
    a = list(labels[x])
    b = [replace(layer, ids=layer.ids.t().reshape(*[1] * (ndim - 2), *layer.ids.t().shape)) for layer in labels[weight]]
    shape = (*labels.shape(x)[:-1], labels.shape(x)[-1], labels.shape(weight)[0])
    _finish(call, labels, contract(labels, a, b, shape, (labels.why(x), labels.why(weight))), bias, a, b, shape, x)


def _product(call: Call, labels: Labels, a: Ref, b: Ref, bias: Ref | None) -> None:
    a_shape, b_shape = labels.shape(a), labels.shape(b)
    shape = (*a_shape, b_shape[-1])
    layers_a, layers_b = list(labels[a]), list(labels[b])
    out = contract(labels, layers_a, layers_b, shape, (labels.why(a), labels.why(b)), call)
    _finish(call, labels, out, bias, layers_a, layers_b, shape, a)


def _finish(
    call: Call, labels: Labels, out: list[Layer], bias: Ref | None, a: list[Layer], b: list[Layer], shape: tuple[int, ...], x: Ref
) -> None:
    result = call.outputs[0]
    assert result is not None
    if bias is not None and isinstance(bias, Ref):
        out = labels.merge([*out, *labels.aligned(bias, len(labels.shape(result)))])
    labels.set(result, out, like=x)
    kind = "linear" if any(labels.axis_of(layer.ids) is not None for layer in b if layer.dims) else "matmul"
    expanded = [layer.ids.unsqueeze(-1) for layer in a] + [layer.ids.unsqueeze(-3) for layer in b]
    true_shape = (*labels.tape.shape(x), shape[-1])
    labels.cost(kind, call, true_shape, expanded)
    labels.cost("activation", call, labels.tape.shape(result), [layer.ids for layer in labels[result]])


def contract(
    labels: Labels, a: list[Layer], b: list[Layer], shape: tuple[int, ...], why: tuple[str, str], call: Call | None = None
) -> list[Layer]:
    """Layers of a·b, for a […, m, k] and b […, k, n]; ``shape`` is […, m, k, n]."""
    k = len(shape) - 2
    inner_a = [layer for layer in a if layer.varies(k)]
    inner_b = [layer for layer in b if layer.varies(k - 1)]
    for layer in inner_b:
        labels.role(layer.ids, CONSUMES)
    for layer in b:
        if layer.varies(k) and not layer.varies(k - 1):
            labels.role(layer.ids, PRODUCES)
    rows = _meet(labels, inner_a, inner_b, k, shape[k], why)
    if call is not None:
        for layer in rows:
            _measure_heads(call, labels, layer, 0)
    outer_a = [layer for layer in a if not layer.varies(k)]
    outer_b = [layer for layer in b if not layer.varies(k - 1)]
    return labels.merge([*outer_a, *outer_b, *rows])


def _meet(
    labels: Labels, inner_a: list[Layer], inner_b: list[Layer], k: int, size: int, why: tuple[str, str]
) -> list[Layer]:
    """Unite the ids along the contracted axis; returns what goes on along batch axes."""
    if size <= 1:
        return []
    if not inner_a or not inner_b:
        for layer in inner_a:
            labels.freeze(layer.ids, f"is contracted with {why[1]}")
        for layer in inner_b:
            labels.freeze(layer.ids, f"reads {why[0]}" if "input" in why[0] else f"is contracted with {why[0]}")
        return []
    rows = []
    for one in inner_a:
        for other in inner_b:
            left, right = one.ids.unsqueeze(-1), other.ids.unsqueeze(-3)
            labels.unite_layers(replace(one, ids=left), replace(other, ids=right))
            shared = [dim for dim in one.dims if dim < k - 1 and other.varies(dim)]
            if shared:
                ids = labels.link_rows(labels.unlock(one).ids, [d for d in one.dims if d not in shared])
                rows.append(Layer(ids))
    return rows


# ---- attention ----------------------------------------------------------------------------------------------------


@rule(
    "aten._scaled_dot_product_flash_attention_for_cpu", "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention", "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_attention_math", "aten._scaled_dot_product_attention_math_for_mps",
    "aten.scaled_dot_product_attention", "aten._scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip
def attention(call: Call, labels: Labels) -> None:
    """softmax(q·kᵀ)·v over [B, heads, T, d]: with several heads the head is the unit."""
    q, k, v = call.args[:3]
    out = call.outputs[0]
    q_shape, k_shape, v_shape = labels.shape(q), labels.shape(k), labels.shape(v)
    keys = [replace(layer, ids=layer.ids.transpose(-1, -2)) for layer in labels[k]]
    inner = [layer for layer in labels[q] if layer.varies(3)]
    scores = contract(labels, list(labels[q]), keys, (*q_shape, k_shape[-2]), (labels.why(q), labels.why(k)))
    for layer in inner:
        _measure_heads(call, labels, layer, 1)
    mask = call.kwargs.get("attn_mask") or next((ref for ref in call.args[3:] if isinstance(ref, Ref)), None)
    if mask is not None:
        scores = labels.merge([*scores, *labels.aligned(mask, 4)])
    result = contract(labels, scores, list(labels[v]), (*q_shape[:3], k_shape[-2], v_shape[-1]), ("", ""))
    labels.set(out, result, like=v)
    for ref in call.outputs[1:]:
        labels.set(ref, ())
    for first, second, inner_size, outer in (
        (labels[q], keys, q_shape[-1], k_shape[-2]),
        (scores, labels[v], k_shape[-2], v_shape[-1]),
    ):
        layers = [layer.ids.unsqueeze(-1) for layer in first] + [layer.ids.unsqueeze(-3) for layer in second]
        labels.cost("matmul", call, (*q_shape[:3], inner_size, outer), layers)
    if out is not None:
        labels.cost("activation", call, labels.tape.shape(out), [layer.ids for layer in labels[out]])


HEAD_NUMBERS = ("num_heads", "n_heads", "heads", "n_head", "nhead", "num_attention_heads")


def _measure_heads(call: Call, labels: Labels, layer: Layer, dim: int) -> None:
    if layer.varies(dim):
        line = layer.ids.movedim(dim, 0).flatten(1)[:, 0]
        labels.measure(call, HEAD_NUMBERS, line.unique())


@rule("aten._native_multi_head_attention", "aten._transformer_encoder_layer_fwd")
def fused_attention(call: Call, labels: Labels) -> None:
    """Fused kernels are switched off while tracing; if one appears all the same, everything in it stays."""
    labels.freeze_all(call.inputs, "is inside a fused attention kernel")
    for ref in call.outputs:
        labels.set(ref, (), like=call.args[0])
