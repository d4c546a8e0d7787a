"""Convolutions of all kinds, pooling, resampling and shuffles: channels along dim 1, positions behind."""

from __future__ import annotations

import math
from collections.abc import Callable
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


@rule(
    "aten.max_pool2d_with_indices", "aten.max_pool3d_with_indices", "aten.max_pool1d_with_indices", "aten.max_pool2d",
    "aten.max_pool1d", "aten.max_pool3d", "aten.mkldnn_max_pool2d", "aten.avg_pool1d", "aten.avg_pool2d",
    "aten.avg_pool3d", "aten._adaptive_avg_pool2d", "aten._adaptive_avg_pool3d", "aten.adaptive_avg_pool1d",
    "aten.adaptive_avg_pool2d", "aten.adaptive_max_pool1d", "aten.adaptive_max_pool2d", "aten.adaptive_max_pool3d",
    "aten.upsample_nearest1d", "aten.upsample_nearest2d", "aten.upsample_nearest3d", "aten._upsample_nearest_exact2d",
    "aten.upsample_linear1d", "aten.upsample_bilinear2d", "aten.upsample_bicubic2d", "aten.upsample_trilinear3d",
    "aten._upsample_bilinear2d_aa", "aten._upsample_bicubic2d_aa", "aten.grid_sampler_2d", "aten.grid_sampler_3d",
    "aten.reflection_pad1d", "aten.reflection_pad2d", "aten.reflection_pad3d", "aten.replication_pad1d",
    "aten.replication_pad2d", "aten.replication_pad3d", "aten.fractional_max_pool2d", "aten._fft_r2c", "aten._fft_c2r",
    "aten._fft_c2c", "torchvision.roi_align", "torchvision.roi_pool",
)  # fmt: skip
def positions(call: Call, labels: Labels) -> None:
    """Channels pass; ids that vary along a position axis are frozen."""
    x = call.args[0]
    passing = labels.passing(x, _position_dims(call, labels), f"lies along the positions that {call.op} mixes")
    others = [ref for ref in call.inputs if ref != x]
    labels.freeze_all(others, f"gives the positions to {call.op}")
    for ref in call.outputs:
        labels.set(ref, passing if ref and len(labels.shape(ref)) == len(labels.shape(x)) else (), like=x)


def _position_dims(call: Call, labels: Labels) -> list[int]:
    ndim = len(labels.shape(call.args[0]))
    if "_fft" in call.op:
        return [dim % ndim for dim in call.args[1]]
    spatial = {"1d": 1, "2d": 2, "3d": 3}
    count = next((n for word, n in spatial.items() if word in call.op), 2)
    roi = "roi" in call.op
    return [*range(ndim - count, ndim), *([0] if roi else [])]


@rule("torchvision.deform_conv2d")
def deform_conv(call: Call, labels: Labels) -> None:
    """A convolution with learned positions: input and output channels as in a convolution of one group."""
    x, weight, offset, mask, bias = call.args[:5]
    groups, offset_groups = call.args[11], call.args[12]
    labels.freeze_all(
        [ref for ref in (offset, mask) if ref is not None], "gives the positions to a deformable convolution"
    )
    if offset_groups > 1 or groups > 1:
        labels.freeze_all([x], "is read by a grouped deformable convolution")
    Convolution(call, labels, x, weight, bias, transposed=False, groups=groups).follow()


@rule("aten.pixel_shuffle")
def pixel_shuffle(call: Call, labels: Labels) -> None:
    """[N, C·r², H, W] → [N, C, H·r, W·r]: the r² channels of an output channel go together."""
    _join_channels(call, labels, -3, call.args[1] ** 2, "is mixed with positions by a pixel shuffle")


@rule("aten.pixel_unshuffle")
def pixel_unshuffle(call: Call, labels: Labels) -> None:
    """[N, C, H·r, W·r] → [N, C·r², H, W]: each channel becomes r² consecutive ones."""
    _repeat_channels(call, labels, call.args[1] ** 2)


@rule("aten.im2col")
def im2col(call: Call, labels: Labels) -> None:
    """[N, C, H, W] → [N, C·k·k, L]: each channel becomes k·k consecutive ones."""
    kernel = call.args[1]
    _repeat_channels(call, labels, kernel[0] * kernel[1])


@rule("aten.col2im")
def col2im(call: Call, labels: Labels) -> None:
    """[N, C·k·k, L] → [N, C, H, W]: the k·k entries of an output channel go together."""
    kernel = call.args[2]
    _join_channels(call, labels, -2, kernel[0] * kernel[1], "lies along the positions that col2im mixes")


def _join_channels(call: Call, labels: Labels, channel: int, count: int, reason: str) -> None:
    """``count`` consecutive channels, which lie along dim ``channel``, go together and become one."""
    _change_channels(call, labels, channel, lambda ids: labels.link_rows(ids.view(-1, count), [1]).flatten(), reason)


def _repeat_channels(call: Call, labels: Labels, times: int) -> None:
    reason = f"lies along the positions that {call.op} mixes"
    _change_channels(call, labels, -3, lambda ids: ids.repeat_interleave(times), reason)


def _change_channels(call: Call, labels: Labels, channel: int, change: Callable[[Tensor], Tensor], reason: str) -> None:
    """Ids along dim ``channel`` become others at the same place; all others must stay."""
    x = call.args[0]
    channel += len(labels.shape(x))
    passing = []
    for layer in labels[x]:
        if layer.dims == (channel,):
            ids = change(labels.unlock(layer).ids.flatten())
            passing.append(Layer(placed(ids, channel, len(labels.shape(call.result)))))
        else:
            labels.freeze(layer.ids, reason)
    labels.set(call.result, passing, like=x)


@rule("aten.channel_shuffle", "aten.native_channel_shuffle")
def channel_shuffle(call: Call, labels: Labels) -> None:
    """[N, g·n, …]: blocks are dealt out in turn; they must keep equally many, even if each is one unit.

    The number of blocks shows in no shape, so that a rehearsal could not tell whether it followed.
    """
    x, groups = call.args[:2]
    passing = []
    for layer in labels[x]:
        if layer.dims == (1,):
            blocks = labels.unlock(layer).ids.flatten().view(groups, -1)
            labels.split(blocks, call.module)
            labels.balance(blocks, call.module)
            layer = Layer(placed(blocks.t().flatten(), 1, layer.ids.dim()), period=groups)
        passing.append(layer)
    labels.set(call.outputs[0], passing, like=x)
