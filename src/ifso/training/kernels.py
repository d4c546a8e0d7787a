"""Convolutions of few channels on a GPU: forward, and both gradients. Written in Triton.

What a layer of 16 channels asks for is what libraries made for wide layers do worst: a matrix of 16 × 144 numbers
summed over 131,072 positions, for one. Tensors are channels-last in bfloat16, weights in float32 and rounded on the
way; sums are taken in float32 in a fixed order, so that results repeat bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 64
"""Channels of a layer up to which this is the quicker way."""

TILE = 128
PROGRAMS = 264
"""Positions in a tile, and programs that sum: two for each of the 132 multiprocessors of an H200."""


@triton.jit
def _convolve(
    x, weight, y, positions, height, width, channels, out_height, out_width, out_channels, stride, padding,
    step_in, step_out, step_tap,
    SIDE: tl.constexpr, FLIP: tl.constexpr, TILE: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y[position, k] = Σ x[position moved by the tap, c] · weight[tap, c, k], taps in reverse order if FLIP."""
    c, k = tl.arange(0, BC), tl.arange(0, BK)
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row, column = at // out_width % out_height * stride - padding, at % out_width * stride - padding
    base = at // (out_width * out_height) * height
    total = tl.zeros((TILE, BK), tl.float32)
    for tap in tl.static_range(SIDE * SIDE):
        h, w = row + tap // SIDE, column + tap % SIDE
        inside = (at < positions) & (h >= 0) & (h < height) & (w >= 0) & (w < width)
        source = (base + h) * width + w
        pixels = tl.load(
            x + source[:, None] * channels + c[None, :], mask=inside[:, None] & (c < channels)[None, :], other=0.0
        )
        place = SIDE * SIDE - 1 - tap if FLIP else tap
        factors = tl.load(
            weight + c[:, None] * step_in + k[None, :] * step_out + place * step_tap,
            mask=(c < channels)[:, None] & (k < out_channels)[None, :],
            other=0.0,
        )
        total = tl.dot(pixels, factors.to(pixels.dtype), total)
    tl.store(
        y + at[:, None] * out_channels + k[None, :],
        total.to(y.dtype.element_ty),
        mask=(at < positions)[:, None] & (k < out_channels)[None, :],
    )


@triton.jit
def _partial_gradients(
    x, dy, partial, positions, height, width, channels, out_height, out_width, out_channels, stride, padding, each,
    SIDE: tl.constexpr, TILE: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Σ dy[position, k] · x[position moved, c] over ``each`` positions, for BW neighbouring taps of the kernel."""
    split, group = tl.program_id(0), tl.program_id(1)
    groups: tl.constexpr = (SIDE + BW - 1) // BW
    r = group // groups
    j, k = tl.arange(0, BC * BW), tl.arange(0, BK)
    s, c = group % groups * BW + j // BC, j % BC
    total = tl.zeros((BK, BC * BW), tl.float32)
    for first in range(split * each, tl.minimum((split + 1) * each, positions), TILE):
        at = first + tl.arange(0, TILE)
        h = at // out_width % out_height * stride - padding + r
        w = (at % out_width * stride - padding)[:, None] + s[None, :]
        source = (at // (out_width * out_height) * height + h) * width
        inside = ((at < positions) & (h >= 0) & (h < height))[:, None] & (w >= 0) & (w < width)
        grads = tl.load(
            dy + at[:, None] * out_channels + k[None, :],
            mask=(at < positions)[:, None] & (k < out_channels)[None, :],
            other=0.0,
        )
        pixels = tl.load(
            x + (source[:, None] + w) * channels + c[None, :],
            mask=inside & (c < channels)[None, :] & (s < SIDE)[None, :],
            other=0.0,
        )
        total = tl.dot(tl.trans(grads), pixels, total)
    place = (((split * out_channels + k)[:, None] * SIDE + r) * SIDE + s[None, :]) * channels + c[None, :]
    tl.store(partial + place, total, mask=(k < out_channels)[:, None] & (c < channels)[None, :] & (s < SIDE)[None, :])


def convolution(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """y [N, K, H', W'] from x [N, C, H, W], channels-last, and weight [K, C, side, side] in float32."""
    side = weight.shape[2]
    sizes = [(size + 2 * padding - side) // stride + 1 for size in x.shape[2:]]
    return _convolved(x, weight, (weight.shape[0], *sizes), stride, padding, flip=False)


def input_gradient(dy: Tensor, weight: Tensor, padding: int) -> Tensor:
    """∂L/∂x [N, C, H, W] from ∂L/∂y [N, K, H', W'], channels-last, of a convolution with stride 1."""
    side = weight.shape[2]
    sizes = [size - 2 * padding + side - 1 for size in dy.shape[2:]]
    return _convolved(dy, weight, (weight.shape[1], *sizes), 1, side - 1 - padding, flip=True)


def _convolved(x: Tensor, weight: Tensor, out: tuple[int, ...], stride: int, padding: int, *, flip: bool) -> Tensor:
    samples, channels, height, width = x.shape
    y = torch.empty((samples, *out), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    out_channels, out_height, out_width = out
    positions = samples * out_height * out_width
    steps = weight.stride()
    _convolve[(triton.cdiv(positions, TILE),)](
        x, weight, y, positions, height, width, channels, out_height, out_width, out_channels, stride, padding,
        steps[0] if flip else steps[1], steps[1] if flip else steps[0], steps[3],
        SIDE=weight.shape[2], FLIP=flip, TILE=TILE, BC=_block(channels), BK=_block(out_channels),
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return y


def weight_gradient(x: Tensor, dy: Tensor, side: int, stride: int, padding: int) -> Tensor:
    """∂L/∂W [K, C, side, side] in float32 from x [N, C, H, W] and ∂L/∂y [N, K, H', W'], both channels-last."""
    samples, channels, height, width = x.shape
    _, out_channels, out_height, out_width = dy.shape
    positions, block = samples * out_height * out_width, _block(channels)
    taps, tile = (triton.next_power_of_2(side), TILE) if block < WIDEST else (1, TILE // 2)
    groups = side * triton.cdiv(side, taps)
    each = triton.cdiv(triton.cdiv(positions, triton.cdiv(PROGRAMS, groups)), tile) * tile
    splits = triton.cdiv(positions, each)
    partial = torch.empty(splits, out_channels, side, side, channels, device=x.device)
    _partial_gradients[(splits, groups)](
        x, dy, partial, positions, height, width, channels, out_height, out_width, out_channels, stride, padding, each,
        SIDE=side, TILE=tile, BC=block, BK=_block(out_channels), BW=taps, num_warps=4, num_stages=3,
    )  # fmt: skip
    return partial.sum(0).permute(0, 3, 1, 2)


def _block(channels: int) -> int:
    return max(16, triton.next_power_of_2(channels))
