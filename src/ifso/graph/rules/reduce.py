"""Sums, means, maxima, softmax: channels that are reduced over are flagged, since zeros count there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ifso.graph.channel_ids import Labels, Layer
from ifso.graph.rules import rule
from ifso.graph.tape import Call

OVER_CHANNELS = "reduced over channels"


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
        from ifso.graph.rules.pointwise import pointwise

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
