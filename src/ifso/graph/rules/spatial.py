"""Pooling, resampling and sampling: channels (dim 1 of a batched tensor) pass, positions change."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ifso.common.tensors import placed
from ifso.graph.channel_ids import Labels, Layer
from ifso.graph.rules import rule
from ifso.graph.tape import Call


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
    from ifso.graph.rules.convolution import Convolution

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
