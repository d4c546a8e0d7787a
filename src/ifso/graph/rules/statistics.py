"""Norms, sums, means, maxima, softmax: statistics over channels are flagged, since zeros count there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ifso.graph.channel_ids import Labels, Layer
from ifso.graph.rules import rule
from ifso.graph.rules.pointwise import follow, pointwise
from ifso.graph.tape import Call, Ref

OVER_CHANNELS = "reduced over channels"


@rule(
    "aten.native_batch_norm", "aten._native_batch_norm_legit", "aten._native_batch_norm_legit_no_training",
    "aten.cudnn_batch_norm", "aten.batch_norm", "aten.miopen_batch_norm", "aten._batch_norm_with_update",
    "aten._batch_norm_no_update", "aten._native_batch_norm_legit_functional",
)  # fmt: skip
def batch_norm(call: Call, labels: Labels) -> None:
    """Weight, bias and running statistics follow dim 1; ids along other dims are normalised over."""
    x = call.args[0]
    for parameter in call.args[1:5]:
        follow(labels, x, parameter, 1)
    for layer in labels[x]:
        if layer.dims == (1,) and call.args[1] is None:
            labels.measure(call, ("num_features",), layer.ids)
        if set(layer.dims) - {0, 1}:
            labels.flag(layer.ids, "weight standardisation", call)
    labels.set(call.outputs[0], labels[x], like=x)


@rule("aten.native_layer_norm", "aten._fused_rms_norm", "aten.rms_norm", "aten.layer_norm")
def layer_norm(call: Call, labels: Labels) -> None:
    """Weight and bias follow the last dims; channels among them share statistics."""
    x, shape = call.args[:2]
    ndim = len(labels.shape(x))
    first = ndim - len(shape)
    for parameter in call.args[2:4]:
        if isinstance(parameter, Ref):
            _follow_last(labels, x, parameter, ndim)
    for layer in labels[x]:
        over = [dim for dim in layer.dims if dim >= first]
        if over:
            labels.flag(layer.ids, "rms norm" if "rms" in call.op else "layer norm", call)
            for dim in over:
                labels.measure(call, ("normalized_shape",), _line(layer, dim), dim - first)
    labels.set(call.outputs[0], labels[x], like=x)


def _line(layer: Layer, dim: int) -> Tensor:
    ids = layer.ids
    for other in range(ids.dim()):
        if other != dim:
            ids = ids.narrow(other, 0, 1)
    return ids


def _follow_last(labels: Labels, x: Ref, parameter: Ref, ndim: int) -> None:
    for own in labels.aligned(parameter, ndim):
        layer = next((item for item in labels[x] if set(item.dims) & set(own.dims)), None)
        if layer is None:
            labels.freeze(own.ids, f"goes along with {labels.why(x)}")
        else:
            labels.unite_layers(layer, own)


@rule("aten.native_group_norm")
def group_norm(call: Call, labels: Labels) -> None:
    """Weight and bias follow dim 1; the blocks of channels that share statistics must keep equally many."""
    x, weight, bias, _, channels, _, groups = call.args[:7]
    for parameter in (weight, bias):
        follow(labels, x, parameter, 1)
    passing: list[Layer] = []
    for layer in labels[x]:
        if layer.dims != (1,):
            if set(layer.dims) - {0}:
                labels.freeze(layer.ids, "is normalised over by a group norm")
            passing.append(layer)
            continue
        layer = labels.unlock(layer)
        ids = layer.ids.flatten()
        labels.measure(call, ("num_channels",), ids)
        if groups == channels:
            labels.measure(call, ("num_groups",), ids)
        else:
            labels.flag(ids, "group norm", call)
            if groups > 1:
                labels.balance(ids.view(groups, -1), call.module)
        passing.append(layer)
    labels.set(call.outputs[0], passing, like=x)


@rule("aten.instance_norm", "aten.cudnn_instance_norm")
def instance_norm(call: Call, labels: Labels) -> None:
    """Statistics per channel: everything follows dim 1."""
    x = call.args[0]
    for parameter in call.args[1:5]:
        follow(labels, x, parameter, 1)
    labels.set(call.outputs[0], labels[x], like=x)


@rule("aten._weight_norm_interface", "aten._weight_norm")
def weight_norm(call: Call, labels: Labels) -> None:
    """w = g · v/‖v‖ over all dims but one, along which g goes: g makes the channels, and v only says in what direction.

    What is left of w stays as it is when other dims of v lose something: g takes over the change of ‖v‖. Along the one
    dim a zero row of v would be divided by zero: there g alone is set to zero.
    """
    v, g = call.args[:2]
    dim: Any = call.argument(2, "dim", 0) % len(labels.shape(v))
    names = labels.tape.values[v.index].name, labels.tape.values[g.index].name
    if all(names):
        labels.unmasked.add((names[0], dim))
        labels.gains[names[1]] = (names[0], dim)
    labels.set(call.outputs[0], labels.merge([*labels[g], *labels[v]]), like=v)


@rule(
    "aten.mean", "aten.sum", "aten.amax", "aten.amin", "aten.max", "aten.min", "aten.var", "aten.var_mean", "aten.std",
    "aten.std_mean", "aten.linalg_vector_norm", "aten.norm", "aten.prod", "aten.argmax", "aten.argmin",
    "aten.logsumexp", "aten.any", "aten.all", "aten.nansum", "aten.count_nonzero",
)  # fmt: skip
def reduce(call: Call, labels: Labels) -> None:
    """Reduced dims lose their ids; ids that vary elsewhere too are linked into rows (attention heads).

    Where the place of the largest is asked for, as of a class, channels must keep their places.
    """
    x, out = call.args[0], call.outputs[0]
    others = [ref for ref in call.inputs if ref != x]
    if others:
        pointwise(call, labels)
        return
    ndim = len(labels.shape(x))
    dims = _reduced_dims(call, ndim)
    keepdim = out is not None and len(labels.tape.shape(out)) == ndim
    placed = _asks_for_places(call, labels)
    results = []
    for layer in labels[x]:
        if placed and any(layer.varies(dim) for dim in dims):
            labels.freeze(layer.ids, f"its order matters in {call.op}")
            continue
        reduced = _over(layer, dims, call, labels)
        if reduced is not None:
            results.append(reduced if keepdim else _drop(reduced, dims))
    for ref in call.outputs:
        labels.set(ref, results, like=x)


def _asks_for_places(call: Call, labels: Labels) -> bool:
    """Return whether something uses the place of an extreme: what argmax gives, or the second output of max."""
    if call.op in ("aten.argmax", "aten.argmin"):
        return True
    if call.op not in ("aten.max", "aten.min") or len(call.outputs) < 2:
        return False
    places, tape = call.outputs[1], labels.tape
    return places in tape.outputs or any(places == ref for other in tape.calls for ref in other.inputs)


def _reduced_dims(call: Call, ndim: int) -> list[int]:
    position = 2 if call.op in ("aten.linalg_vector_norm", "aten.norm") else 1
    dims: Any = call.argument(position, "dim")
    if isinstance(dims, bool) or dims is None or dims == []:
        return list(range(ndim))
    return [dim % ndim for dim in ([dims] if isinstance(dims, int) else dims)]


def _over(layer: Layer, dims: list[int], call: Call, labels: Labels) -> Layer | None:
    met = [dim for dim in dims if layer.varies(dim)]
    if not met:
        return layer
    labels.flag(layer.ids, OVER_CHANNELS, call)
    if set(met) == set(layer.dims):
        return None
    return Layer(labels.link_rows(labels.unlock(layer).ids, met))


def _drop(layer: Layer, dims: list[int]) -> Layer:
    ids = layer.ids
    for dim in sorted(dims, reverse=True):
        ids = ids.squeeze(dim)
    return replace(layer, ids=ids)


@rule("aten._softmax", "aten._log_softmax", "aten._safe_softmax", "aten.softmax", "aten.log_softmax")
def softmax(call: Call, labels: Labels) -> None:
    """Shape stays; channels along the dim are flagged."""
    x, dim = call.args[:2]
    for layer in labels[x]:
        if layer.varies(dim % len(labels.shape(x))):
            labels.flag(layer.ids, OVER_CHANNELS, call)
            labels.keep_together(layer.ids)
    labels.set(call.outputs[0], labels[x], like=x)


@rule("aten.glu")
def glu(call: Call, labels: Labels) -> None:
    """First half times sigmoid of the second: the halves go together."""
    x = call.args[0]
    dim = call.argument(1, "dim", -1) % len(labels.shape(x))
    results = []
    for layer in labels[x]:
        if layer.varies(dim):
            first, second = labels.unlock(layer).ids.chunk(2, dim)
            labels.unite(first, second)
            layer = Layer(first)
        results.append(layer)
    labels.set(call.outputs[0], results, like=x)
