"""Convolutions: plain, grouped, depthwise, transposed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ifso.graph.channel_ids import CONSUMES, PRODUCES, Labels, Layer, placed
from ifso.graph.rules import rule
from ifso.graph.rules.pointwise import follow
from ifso.graph.tape import Call, Ref


@rule(
    "aten.convolution", "aten._convolution", "aten.cudnn_convolution", "aten.mkldnn_convolution",
    "aten.convolution_overrideable",
)  # fmt: skip
def convolution(call: Call, labels: Labels) -> None:
    """``convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)``."""
    x, weight, bias = call.args[:3]
    convolve(call, labels, x, weight, bias, transposed=call.args[6], groups=call.args[8])


def convolve(
    call: Call, labels: Labels, x: Ref, weight: Ref, bias: Ref | None, *, transposed: bool, groups: int
) -> None:
    """Follow a convolution of any kind."""
    out = call.result
    shape = labels.shape(weight)
    if groups > 1 and shape[1] == 1 and shape[0] == groups:
        _depthwise(call, labels, x, weight, bias, transposed)
        return
    _freeze_positions(labels, x)
    out_dim, in_dim = (1, 0) if transposed else (0, 1)
    made, read = _weight_ids(labels, weight, out_dim), _weight_ids(labels, weight, in_dim)
    if read is not None and (groups == 1 or transposed):
        labels.role(read, CONSUMES)
    if groups == 1 and read is not None and not _is_parameter(labels, weight):
        _flag_made_weight(call, labels, read)
    if groups > 1:
        made, read = _grouped(call, labels, x, weight, made, read, transposed, groups)
    else:
        _read(labels, x, 1, read, shape[in_dim])
    if made is not None:
        labels.role(made, PRODUCES)
    layers = [] if made is None else [Layer(placed(made, 1, len(labels.shape(out))))]
    along_batch = [layer for layer in labels[x] if layer.dims == (0,)]
    labels.set(out, [*layers, *along_batch], like=x)
    follow(labels, out, bias, 1)
    _conv_cost(call, labels, x, weight, made, read, transposed, groups)


def _flag_made_weight(call: Call, labels: Labels, read: Tensor) -> None:
    """A weight made with statistics over what it reads is not zero there for removed channels, and they may not be."""
    for ids, flag, _ in list(labels.flags):
        if bool(torch.isin(read, ids).all()):
            labels.flag(read, flag, call)
            return


def _depthwise(call: Call, labels: Labels, x: Ref, weight: Ref, bias: Ref | None, transposed: bool) -> None:
    """One filter per channel: the weight goes along with the channels like a norm's, in whatever order they come."""
    out = call.result
    own = _weight_ids(labels, weight, 0)
    _freeze_positions(labels, x)
    layers = [layer for layer in labels[x] if layer.varies(1)]
    _read(labels, x, 1, own, labels.shape(weight)[0])
    if own is not None:
        labels.measure(call, ("groups",), own)
    labels.set(out, layers if layers or own is None else [Layer(placed(own, 1, len(labels.shape(x))))], like=x)
    follow(labels, out, bias, 1)
    _conv_cost(call, labels, x, weight, own, None, transposed, labels.shape(weight)[0])


def _freeze_positions(labels: Labels, x: Ref) -> None:
    """Channels that lie where the kernel moves cannot go: their neighbours would change."""
    for layer in labels[x]:
        if any(dim >= 2 for dim in layer.dims):
            labels.freeze(layer.ids, "lies along the positions that a convolution mixes")


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
        labels.unite_layers(layer, Layer(placed(read, dim, layer.ids.dim())))


def _grouped(
    call: Call,
    labels: Labels,
    x: Ref,
    weight: Ref,
    made: Tensor | None,
    read: Tensor | None,
    transposed: bool,
    groups: int,
) -> tuple[Tensor | None, Tensor | None]:
    """Grouped convolution: ids of all output and all input channels, whatever the weight's own shape is."""
    shape = labels.shape(weight)
    layer = labels.along(x, 1)
    if layer is not None and not (
        _deals_evenly(layer, groups, shape) and _is_parameter(labels, weight) and not transposed
    ):
        layer = labels.unlock(layer)
    incoming = None if layer is None else layer.ids.movedim(1, -1)
    total_in = shape[0] if transposed else shape[1] * groups
    per_in, per_out = total_in // groups, (shape[1] if transposed else shape[0] // groups)
    outgoing = _ragged(labels, weight, groups * per_out, (groups, per_out), shape[0] // groups) if transposed else made
    if outgoing is None:
        outgoing = labels.fresh(groups * per_out)
        labels.freeze(outgoing, "is made by a weight whose output axis must stay")
    if incoming is None:
        _grouped_from_input(call, labels, outgoing, read, groups, per_in, f"reads {labels.why(x)}")
        return outgoing, read if transposed else None
    incoming = _one_line(labels, incoming)
    if per_in == 1 or per_out == 1:
        _whole_groups(call, labels, incoming, outgoing, groups)
        if transposed and read is not None:
            labels.unite(read, incoming)
        return outgoing, incoming
    period = layer.period if layer is not None else 0
    labels.balance(_cells(incoming, groups, period), call.module)
    labels.balance(outgoing.view(groups, -1), call.module)
    if not transposed:
        _read_within_groups(labels, weight, incoming, groups, per_out, read)
    elif read is not None:
        labels.unite(read, incoming)
    if period:
        labels.ragged_period[labels.tape.values[weight.index].name] = period
    return outgoing, incoming


def _grouped_from_input(
    call: Call, labels: Labels, outgoing: Tensor, read: Tensor | None, groups: int, per_in: int, reason: str
) -> None:
    """What a grouped convolution reads must stay: its outputs can go, equally many from each group."""
    if read is not None:
        labels.freeze(read, reason)
    if per_in == 1:
        labels.freeze(outgoing, reason)
    elif outgoing.numel() > groups:
        labels.balance(outgoing.view(groups, -1), call.module)


def _is_parameter(labels: Labels, ref: Ref) -> bool:
    return labels.tape.values[ref.index].kind == "parameter"


def _deals_evenly(layer: Layer, groups: int, weight_shape: tuple[int, ...]) -> bool:
    """Return whether each group of a convolution can take equally many channels of each block of a shuffled axis."""
    per_in, per_out = weight_shape[1], weight_shape[0] // groups
    return layer.dims == (1,) and layer.period > 0 and per_in % layer.period == 0 and per_in > 1 and per_out > 1


def _cells(ids: Tensor, groups: int, period: int) -> Tensor:
    """Blocks that must keep equally many: the groups, or their shares of each block of a shuffled axis."""
    if not period:
        return ids.view(groups, -1)
    return ids.view(groups, -1, period).transpose(1, 2).reshape(groups * period, -1)


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
    if not _is_parameter(labels, weight):
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
    call: Call,
    labels: Labels,
    x: Ref,
    weight: Ref,
    made: Tensor | None,
    read: Tensor | None,
    transposed: bool,
    groups: int,
) -> None:
    out = call.result
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
        layers.append(
            rows.repeat_interleave(total_out // rows.shape[0], 0).unsqueeze(0) if groups > 1 else rows.unsqueeze(0)
        )
    labels.cost("conv", call, (times, total_out, per_in), layers)
    labels.cost("activation", call, labels.tape.shape(out), [layer.ids for layer in labels[out]])
