"""Normalisation: parameters go along with their channels; statistics over channels are flagged."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ifso.graph.channel_ids import Labels, Layer
from ifso.graph.rules import rule
from ifso.graph.rules.pointwise import follow
from ifso.graph.tape import Call, Ref


@rule(
    "aten.native_batch_norm", "aten._native_batch_norm_legit", "aten._native_batch_norm_legit_no_training",
    "aten.cudnn_batch_norm", "aten.batch_norm", "aten.miopen_batch_norm", "aten._batch_norm_with_update",
    "aten._batch_norm_no_update", "aten._native_batch_norm_legit_functional",
)  # fmt: skip
def batch_norm(call: Call, labels: Labels) -> None:
    """Weight, bias and running statistics follow dim 1; ids along other dims are normalised over."""
    x = call.args[0]
    for parameter in call.args[1:5]:
        if isinstance(parameter, Ref):
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
        if isinstance(parameter, Ref):
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
