"""Convolutions: plain, grouped, depthwise, transposed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ifso.common.tensors import placed
from ifso.graph.channel_ids import CONSUMES, PRODUCES, Labels, Layer
from ifso.graph.rules import rule
from ifso.graph.rules.pointwise import follow
from ifso.graph.tape import Call, Ref

UNREADABLE = "is read by a weight whose input axis must stay"


@rule(
    "aten.convolution", "aten._convolution", "aten.cudnn_convolution", "aten.mkldnn_convolution",
    "aten.convolution_overrideable",
)  # fmt: skip
def convolution(call: Call, labels: Labels) -> None:
    """``convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)``."""
    x, weight, bias = call.args[:3]
    Convolution(call, labels, x, weight, bias, transposed=call.args[6], groups=call.args[8]).follow()


@dataclass(frozen=True)
class Convolution:
    """A convolution of any kind: input [N, I, …], weight [O, I/groups, …] or, transposed, [I, O/groups, …]."""

    call: Call
    labels: Labels
    x: Ref
    weight: Ref
    bias: Ref | None
    transposed: bool
    groups: int

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the weight."""
        return self.labels.shape(self.weight)

    @property
    def has_parameter(self) -> bool:
        """Whether its weight is one, and not made in forward."""
        return self.labels.tape.values[self.weight.index].kind == "parameter"

    def follow(self) -> None:
        """Say what its output has, and what goes together."""
        labels, x, out = self.labels, self.x, self.call.result
        for layer in labels[x]:
            if any(dim >= 2 for dim in layer.dims):
                labels.freeze(layer.ids, "lies along the positions that a convolution mixes")
        if self.groups > 1 and self.shape[:2] == (self.groups, 1):
            self._follow_depthwise()
            return
        out_dim, in_dim = (1, 0) if self.transposed else (0, 1)
        made, read = self._weight_ids(out_dim), self._weight_ids(in_dim)
        if read is not None and (self.groups == 1 or self.transposed):
            labels.role(read, CONSUMES)
        if self.groups == 1 and read is not None and not self.has_parameter:
            self._flag_made_weight(read)
        if self.groups > 1:
            made, read = self._grouped(made, read)
        else:
            self._read(read, self.shape[in_dim])
        if made is not None:
            labels.role(made, PRODUCES)
        layers = [] if made is None else [Layer(placed(made, 1, len(labels.shape(out))))]
        labels.set(out, [*layers, *(layer for layer in labels[x] if layer.dims == (0,))], like=x)
        follow(labels, out, self.bias, 1)
        self._count(made, read)

    def _follow_depthwise(self) -> None:
        """One filter per channel: the weight goes along with the channels in whatever order they come, like a norm."""
        labels, x, out = self.labels, self.x, self.call.result
        own = self._weight_ids(0)
        layers = [layer for layer in labels[x] if layer.varies(1)]
        self._read(own, self.groups)
        if own is not None:
            labels.measure(self.call, ("groups",), own)
        labels.set(out, layers if layers or own is None else [Layer(placed(own, 1, len(labels.shape(x))))], like=x)
        follow(labels, out, self.bias, 1)
        self._count(own, None)

    def _weight_ids(self, dim: int) -> Tensor | None:
        layer = next((layer for layer in self.labels[self.weight] if layer.dims == (dim,)), None)
        return None if layer is None else layer.ids.flatten()

    def _flag_made_weight(self, read: Tensor) -> None:
        """A weight made with statistics over what it reads is not zero for removed channels, and they may not be."""
        for ids, flag, _ in list(self.labels.flags):
            if bool(torch.isin(read, ids).all()):
                self.labels.flag(read, flag, self.call)
                return

    def _read(self, read: Tensor | None, size: int) -> None:
        """The channels of the input are read by weight slices ``read``."""
        layers = [layer for layer in self.labels[self.x] if layer.varies(1)]
        if read is None:
            for layer in layers if size > 1 else ():
                self.labels.freeze(layer.ids, UNREADABLE)
            return
        if not layers:
            self.labels.freeze(read, f"reads {self.labels.why(self.x)}")
        for layer in layers:
            self.labels.unite_layers(layer, Layer(placed(read, 1, layer.ids.dim())))

    def _grouped(self, made: Tensor | None, read: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Ids of all output and all input channels, whatever the weight's own shape is."""
        labels, groups, shape = self.labels, self.groups, self.shape
        layer = labels.along(self.x, 1)
        if layer is not None and not self._deals_evenly(layer):
            layer = labels.unlock(layer)
        incoming = None if layer is None else layer.ids.movedim(1, -1)
        total_in = shape[0] if self.transposed else shape[1] * groups
        per_in, per_out = total_in // groups, (shape[1] if self.transposed else shape[0] // groups)
        outgoing = self._ragged_outputs(per_out, shape[0] // groups) if self.transposed else made
        if outgoing is None:
            outgoing = labels.fresh(groups * per_out)
            labels.freeze(outgoing, "is made by a weight whose output axis must stay")
        if incoming is None:
            self._group_fixed_input(outgoing, read, per_in)
            return outgoing, read if self.transposed else None
        incoming = self._one_line(incoming)
        if per_in == 1 or per_out == 1:
            self._unite_groups(incoming, outgoing)
            if self.transposed and read is not None:
                labels.unite(read, incoming)
            return outgoing, incoming
        period = layer.period if layer is not None else 0
        labels.balance(_cells(incoming, groups, period), self.call.module)
        labels.balance(outgoing.view(groups, -1), self.call.module)
        if not self.transposed:
            self._read_within_groups(incoming, per_out, read)
        elif read is not None:
            labels.unite(read, incoming)
        if period:
            labels.ragged_period[labels.tape.values[self.weight.index].name] = period
        return outgoing, incoming

    def _group_fixed_input(self, outgoing: Tensor, read: Tensor | None, per_in: int) -> None:
        """What a grouped convolution reads must stay: its outputs can go, equally many from each group."""
        reason = f"reads {self.labels.why(self.x)}"
        if read is not None:
            self.labels.freeze(read, reason)
        if per_in == 1:
            self.labels.freeze(outgoing, reason)
        elif outgoing.numel() > self.groups:
            self.labels.balance(outgoing.view(self.groups, -1), self.call.module)

    def _deals_evenly(self, layer: Layer) -> bool:
        """Return whether each group can take equally many channels of each block of a shuffled axis."""
        per_in, per_out = self.shape[1], self.shape[0] // self.groups
        shuffled = layer.dims == (1,) and layer.period > 0 and per_in % layer.period == 0
        return shuffled and per_in > 1 and per_out > 1 and self.has_parameter and not self.transposed

    def _one_line(self, ids: Tensor) -> Tensor:
        """Ids [..., C] of a channel axis that must not vary elsewhere, as [C]."""
        flat = ids.reshape(-1, ids.shape[-1])
        if flat.shape[0] > 1:
            self.labels.unite(flat, flat[:1])
        return flat[0]

    def _unite_groups(self, incoming: Tensor, outgoing: Tensor) -> None:
        """A group has one channel on one side, so input and output channels of a group go together."""
        rows_in, rows_out = incoming.view(self.groups, -1), outgoing.view(self.groups, -1)
        self.labels.unite(rows_out, rows_out[:, :1])
        self.labels.unite(rows_in, rows_out[:, :1])
        self.labels.measure(self.call, ("groups",), rows_out[:, 0])

    def _read_within_groups(self, incoming: Tensor, per_out: int, read: Tensor | None) -> None:
        """A weight [O, I/g, …]: positions along dim 1 mean other channels in each group."""
        rows = incoming.view(self.groups, -1)
        if self.has_parameter:
            table = self._ragged(rows.repeat_interleave(per_out, 0))
            known = self.labels.ragged.setdefault(self.labels.tape.values[self.weight.index].name, table)
            if known is not table:
                self.labels.unite(known, table)
        elif read is not None:
            self.labels.unite(rows, read)
        else:
            self.labels.freeze(rows, UNREADABLE)

    def _ragged_outputs(self, per_out: int, per_in: int) -> Tensor | None:
        """Ids of the outputs of a grouped transposed convolution [I, O/g, …], remembered with the weight."""
        count, name = self.groups * per_out, self.labels.tape.values[self.weight.index].name
        if per_out == 1:
            return self.labels.fresh(count)
        if not self.has_parameter:
            return None
        if name in self.labels.ragged:
            return self.labels.ragged[name].flatten(1)[::per_in].reshape(-1)[:count]
        ids = self.labels.fresh(count)
        self.labels.ragged[name] = self._ragged(ids.view(self.groups, per_out).repeat_interleave(per_in, 0))
        return ids

    def _ragged(self, table: Tensor) -> Tensor:
        """A row of ids for each position along dim 0, with all dims of the weight."""
        return table.reshape(*table.shape, *[1] * (len(self.shape) - 2))

    def _count(self, made: Tensor | None, read: Tensor | None) -> None:
        """Note what it costs."""
        labels, groups, shape, out = self.labels, self.groups, self.shape, self.call.result
        positions = labels.tape.shape(self.x if self.transposed else out)
        times = positions[0] * math.prod(positions[2:]) * math.prod(shape[2:])
        total_out = shape[1] * groups if self.transposed else shape[0]
        per_in = (shape[0] // groups) if self.transposed else shape[1]
        layers = [] if made is None else [made.view(1, -1, 1)]
        if read is not None:
            rows = read.view(groups, -1) if read.numel() == per_in * groups else read.view(1, -1)
            rows = rows.repeat_interleave(total_out // rows.shape[0], 0) if groups > 1 else rows
            layers.append(rows.unsqueeze(0))
        labels.cost("conv", self.call, (times, total_out, per_in), layers)
        labels.cost("activation", self.call, labels.tape.shape(out), [layer.ids for layer in labels[out]])


def _cells(ids: Tensor, groups: int, period: int) -> Tensor:
    """Blocks that must keep equally many: the groups, or their shares of each block of a shuffled axis."""
    if not period:
        return ids.view(groups, -1)
    return ids.view(groups, -1, period).transpose(1, 2).reshape(groups * period, -1)
