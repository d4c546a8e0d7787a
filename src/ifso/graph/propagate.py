"""The walk along the tape: every call's rule in turn, then what the user and the model's outputs hold fast."""

from __future__ import annotations

from collections.abc import Collection

from ifso.graph import rules
from ifso.graph.channel_ids import Labels, MeasuredBy
from ifso.graph.naming import is_under
from ifso.graph.tape import Call, FunctionCall, Ref, Tape, refs_in

LEAVING = frozenset(("numpy", "tolist", "__array__", "__dlpack__"))
"""Functions that hand values to code that nobody follows."""


def follow_channels(tape: Tape, ignore: Collection[str] = ()) -> Labels:
    """Propagate channel ids through a recorded run."""
    labels = Labels(tape)
    for call in tape.calls:
        _follow(call, labels)
    for function in tape.functions:
        _flag_attention_scale(function, labels)
        _settle_averaged_heads(function, labels)
        if function.name == "instance_norm":
            _measure_instance_norm(function, labels)
        if function.name in LEAVING:
            labels.freeze_all(refs_in(function.args), f"its values leave torch by {function.name}")
        if function.name == "__set__":
            labels.freeze_all(refs_in(function.args), "is replaced while the model runs (.data = …)")
    _count_attention_once(labels)
    labels.freeze_all(tape.outputs, "is an output of the model")
    for place, value in enumerate(tape.values):
        if value.kind in ("parameter", "buffer") and is_under(value.name, ignore):
            labels.freeze_all([Ref(place)], "ignored on request")
    return labels


def _follow(call: Call, labels: Labels) -> None:
    """Apply the rule of a call. A call that its rule does not understand holds its channels fast, with a note."""
    try:
        rules.find(call)(call, labels)
    except Exception as error:
        labels.notes.append(
            f"{call.op} in {call.module or 'the model'} could not be followed ({type(error).__name__}: {error})"
        )
        rules.unknown(call, labels)


def _flag_attention_scale(function: FunctionCall, labels: Labels) -> None:
    """Attention divides by √(head size) unless told a scale: removing single channels of a head changes that."""
    if function.name == "multi_head_attention_forward":
        _flag_scale_of_layer(function, labels)
    if function.name != "scaled_dot_product_attention" or function.kwargs.get("scale") is not None:
        return
    for layer in labels[function.args[0]] if function.args else ():
        if layer.varies(layer.ids.dim() - 1):
            labels.scales.append((layer.ids.reshape(-1, layer.ids.shape[-1]), function.key))


def _count_attention_once(labels: Labels) -> None:
    """Attention writes what it returns, whether PyTorch takes one kernel for it or, for odd sizes, two products."""
    attentions = {item.key for item in labels.tape.functions if item.name == "scaled_dot_product_attention"}
    inside = [op for op in labels.operations if op.kind == "activation" and op.function in attentions]
    last = {op.function: op for op in inside}
    needless = {id(op) for op in inside if op is not last[op.function]}
    labels.operations = [op for op in labels.operations if id(op) not in needless]


def _flag_scale_of_layer(function: FunctionCall, labels: Labels) -> None:
    """The same inside ``nn.MultiheadAttention``, whose first rows of weights make the queries."""
    width, heads, together = function.args[3:6]
    weight = together or function.kwargs.get("q_proj_weight")
    layer = labels.along(weight, 0) if isinstance(weight, Ref) else None
    if layer is not None:
        labels.scales.append((layer.ids.flatten()[:width].view(heads, -1), function.key))


def _settle_averaged_heads(function: FunctionCall, labels: Labels) -> None:
    """``nn.MultiheadAttention`` also averages its weights over the heads: a flag only where somebody looks at them."""
    if function.name != "multi_head_attention_forward":
        return
    averaged = [ids for ids, _, key in labels.flags if key == function.key]
    weights = function.result[1] if isinstance(function.result, tuple) else None
    read = {ref for call in labels.tape.calls if call.function != function.key for ref in call.inputs}
    if weights is not None and (weights in read or weights in labels.tape.outputs):
        for ids in averaged:
            labels.freeze(ids, "its attention weights, averaged over the heads, are used")
    labels.flags = [item for item in labels.flags if item[2] != function.key]


def _measure_instance_norm(function: FunctionCall, labels: Labels) -> None:
    layer = labels.along(function.args[0], 1) if isinstance(function.args[0], Ref) else None
    if layer is not None and layer.dims == (1,):
        labels.sizes.append(MeasuredBy(function.key[0], ("num_features",), None, layer.ids.flatten()))
