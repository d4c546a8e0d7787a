"""Matrix products and attention: where features are made and read.

A contraction unites the ids of both sides along the contracted axis and ends them there. Where they also vary along a
batch axis (attention: the head), each row becomes one unit and its id goes on.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ifso.graph.channel_ids import CONSUMES, PRODUCES, Labels, Layer
from ifso.graph.rules import hold, rule
from ifso.graph.tape import Call, Ref


@rule("aten.mm", "aten.bmm")
def matmul(call: Call, labels: Labels) -> None:
    """[…, m, k] · […, k, n]."""
    a, b = call.args[:2]
    _product(call, labels, a, b, None)


@rule("aten.addmm", "aten.baddbmm", "aten.addbmm")
def add_matmul(call: Call, labels: Labels) -> None:
    """bias + a·b."""
    bias, a, b = call.args[:3]
    _product(call, labels, a, b, bias)


@rule("aten._grouped_mm", "aten._scaled_grouped_mm")
def grouped_matmul(call: Call, labels: Labels) -> None:
    """x [rows, k] with weights [experts, k, n], each expert for its own rows: the kernel takes few sizes."""
    x, weight = call.args[:2]
    hold(
        call, labels,
        "runs through grouped_mm, which takes only sizes of a multiple of 16 bytes; let experts run without it "
        '(transformers: experts_implementation="batched_mm" or "eager")',
    )  # fmt: skip
    labels.cost("linear", call, (*labels.tape.shape(x), labels.tape.shape(weight)[-1]), ())
    labels.cost("activation", call, labels.tape.shape(call.result), ())


@rule("aten.linear")
def linear(call: Call, labels: Labels) -> None:
    """x [… , k] with weight [n, k]."""
    x, weight = call.args[:2]
    ndim = len(labels.shape(x))
    b = [replace(layer, ids=layer.ids.t().reshape(*[1] * (ndim - 2), *layer.ids.t().shape)) for layer in labels[weight]]
    _multiply(call, labels, (x, weight), b, labels.shape(weight)[0], call.argument(2, "bias"), heads=False)


def _product(call: Call, labels: Labels, a: Ref, b: Ref, bias: Ref | None) -> None:
    rows = len(labels.shape(b)) - 2
    labels.adopt(a, [replace(x, ids=x.ids.transpose(-1, -2)) for x in labels[b] if x.varies(rows)])
    _multiply(call, labels, (a, b), list(labels[b]), labels.shape(b)[-1], bias, heads=True)


def _multiply(
    call: Call, labels: Labels, factors: tuple[Ref, Ref], b: list[Layer], width: int, bias: Any, *, heads: bool
) -> None:
    """The product of x […, m, k] with layers ``b`` […, k, n], n being ``width``; batch axes may be ``heads``."""
    x, other = factors
    a, result, shape = list(labels[x]), call.result, (*labels.shape(x), width)
    out = contract(labels, a, b, shape, (labels.why(x), labels.why(other)), call if heads else None)
    if isinstance(bias, Ref):
        out = labels.merge([*out, *labels.aligned(bias, len(labels.shape(result)))])
    labels.set(result, out, like=x)
    kind = "linear" if any(labels.axis_of(layer.ids) is not None for layer in b if layer.dims) else "matmul"
    expanded = [layer.ids.unsqueeze(-1) for layer in a] + [layer.ids.unsqueeze(-3) for layer in b]
    labels.cost(kind, call, (*labels.tape.shape(x), width), expanded)
    labels.cost("activation", call, labels.tape.shape(result), [layer.ids for layer in labels[result]])


def contract(
    labels: Labels,
    a: list[Layer],
    b: list[Layer],
    shape: tuple[int, ...],
    why: tuple[str, str],
    call: Call | None = None,
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
    hold(call, labels, "is inside a fused attention kernel")


@rule("aten.mkldnn_rnn_layer", "aten._cudnn_rnn", "aten.miopen_rnn")
def recurrent_layer(call: Call, labels: Labels) -> None:
    """x [steps, batch, features] meets every weight matrix once a step; on other machines these are plain products."""
    hold(call, labels, "runs through a recurrent layer, which is one kernel")
    values = labels.tape.values
    rows = math.prod(labels.tape.shape(call.args[0])[:-1])
    for ref in call.inputs:
        if values[ref.index].kind == "parameter" and len(values[ref.index].shape) == 2:
            outputs, inputs = values[ref.index].shape
            labels.cost("linear", call, (rows, inputs, outputs), ())
            labels.cost("activation", call, (rows, outputs), ())
