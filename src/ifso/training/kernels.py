"""Convolutions of few channels and batch norms on a GPU, forward and backward. Written in Triton.

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
"""Positions in a tile, and programs that sum: two for each of the 132 multiprocessors of an H200.

These numbers, and where :func:`_row_gradients` is taken, were chosen by measuring there.
"""

NORM_TILE = 4096
NORM_SUMS, NORM_PROGRAMS = 128, 264
"""Numbers in a tile of a batch norm, and programs that sum and that apply."""


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


@triton.jit
def _row_gradients(
    x, dy, partial, positions, height, width, channels, out_height, out_width, out_channels, stride, padding, each,
    SIDE: tl.constexpr, TILE: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """As :func:`_partial_gradients`, for the three taps in a row of a 3×3 kernel, which share what is loaded of dy."""
    split, r = tl.program_id(0), tl.program_id(1)
    c, k = tl.arange(0, BC), tl.arange(0, BK)
    left = tl.zeros((BK, BC), tl.float32)
    middle = tl.zeros((BK, BC), tl.float32)
    right = tl.zeros((BK, BC), tl.float32)
    for first in range(split * each, tl.minimum((split + 1) * each, positions), TILE):
        at = first + tl.arange(0, TILE)
        h = at // out_width % out_height * stride - padding + r
        w = at % out_width * stride - padding
        source = (at // (out_width * out_height) * height + h) * width + w
        inside, there = (at < positions) & (h >= 0) & (h < height), (c < channels)[None, :]
        pixels = x + source[:, None] * channels + c[None, :]
        grads = tl.load(
            dy + at[:, None] * out_channels + k[None, :],
            mask=(at < positions)[:, None] & (k < out_channels)[None, :],
            other=0.0,
        )
        grads = tl.trans(grads)
        near = tl.load(pixels, mask=(inside & (w >= 0) & (w < width))[:, None] & there, other=0.0)
        left = tl.dot(grads, near, left)
        near = tl.load(pixels + channels, mask=(inside & (w >= -1) & (w < width - 1))[:, None] & there, other=0.0)
        middle = tl.dot(grads, near, middle)
        near = tl.load(pixels + 2 * channels, mask=(inside & (w >= -2) & (w < width - 2))[:, None] & there, other=0.0)
        right = tl.dot(grads, near, right)
    place = partial + ((split * out_channels + k)[:, None] * SIDE + r) * SIDE * channels + c[None, :]
    kept = (k < out_channels)[:, None] & (c < channels)[None, :]
    tl.store(place, left, mask=kept)
    tl.store(place + channels, middle, mask=kept)
    tl.store(place + 2 * channels, right, mask=kept)


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
    positions, block, widest = samples * out_height * out_width, _block(channels), _block(max(channels, out_channels))
    if side == 3 and widest < WIDEST:
        taps, tile, programs = 3, 2048 // widest, 2 * PROGRAMS
        kernel, more = _row_gradients, {"num_warps": 2}
    else:
        taps, tile = (triton.next_power_of_2(side), TILE) if block < WIDEST else (1, TILE // 2)
        programs, kernel, more = PROGRAMS, _partial_gradients, {"BW": taps, "num_warps": 4}
    groups = side * triton.cdiv(side, taps)
    programs = triton.cdiv(programs, groups)
    each = triton.cdiv(triton.cdiv(positions, programs), tile) * tile
    splits = triton.cdiv(positions, each)
    partial = torch.empty(splits, out_channels, side, side, channels, device=x.device)
    kernel[(splits, groups)](
        x, dy, partial, positions, height, width, channels, out_height, out_width, out_channels, stride, padding, each,
        SIDE=side, TILE=tile, BC=block, BK=_block(out_channels), num_stages=3, **more,
    )  # fmt: skip
    return partial.sum(0).permute(0, 3, 1, 2)


def _block(channels: int) -> int:
    return max(16, triton.next_power_of_2(channels))


@triton.jit
def _norm_tile(program, cols, rows, channels, BR: tl.constexpr):
    """Addresses of ``BR`` positions of a channels-last tensor, and which of them there are."""
    r = program * BR + tl.arange(0, BR)
    return r[:, None] * channels + cols[None, :], (r < rows)[:, None] & (cols < channels)[None, :]


@triton.jit
def _total(partial, which: tl.constexpr, cols, channels, SPLITS: tl.constexpr):
    """The sum over splits of partial sums [SPLITS, 2, channels]."""
    at = (tl.arange(0, SPLITS) * 2 + which)[:, None] * channels + cols[None, :]
    return tl.sum(tl.load(partial + at, mask=(cols < channels)[None, :], other=0.0), 0)


@triton.jit
def _norm_forward_sums(x, partial, rows, channels, BR: tl.constexpr, BC: tl.constexpr, SPLITS: tl.constexpr):
    """Σ(x−k) and Σ(x−k)², where k is the channel's first value: no cancellation in the variance."""
    cols, split = tl.program_id(0) * BC + tl.arange(0, BC), tl.program_id(1)
    first = tl.load(x + cols, mask=cols < channels, other=0.0).to(tl.float32)
    a = tl.zeros([BR, BC], tl.float32)
    b = tl.zeros([BR, BC], tl.float32)
    for tile in range(split, tl.cdiv(rows, BR), SPLITS):
        at, there = _norm_tile(tile, cols, rows, channels, BR)
        value = tl.load(x + at, mask=there, other=0.0).to(tl.float32) - first[None, :]
        value = tl.where(there, value, 0.0)
        a += value
        b += value * value
    base = partial + split * 2 * channels + cols
    tl.store(base, tl.sum(a, 0), mask=cols < channels)
    tl.store(base + channels, tl.sum(b, 0), mask=cols < channels)


@triton.jit
def _norm_forward(
    x, y, gain, bias, running_mean, running_var, partial, stats, rows, channels, momentum, eps,
    BR: tl.constexpr, BC: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """``y`` and the statistics [mean, 1/σ]; the running ones move towards them."""
    cols = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = cols < channels
    shift = _total(partial, 0, cols, channels, SPLITS) / rows
    variance = tl.maximum(_total(partial, 1, cols, channels, SPLITS) / rows - shift * shift, 0.0)
    mean = tl.load(x + cols, mask=inside, other=0.0).to(tl.float32) + shift
    rstd = 1.0 / tl.sqrt(variance + eps)
    if tl.program_id(1) == 0:
        tl.store(stats + cols, mean, mask=inside)
        tl.store(stats + channels + cols, rstd, mask=inside)
        old = tl.load(running_mean + cols, mask=inside, other=0.0)
        tl.store(running_mean + cols, old + momentum * (mean - old), mask=inside)
        old = tl.load(running_var + cols, mask=inside, other=0.0)
        tl.store(running_var + cols, old + momentum * (variance * (rows / (rows - 1.0)) - old), mask=inside)
    scale = tl.load(gain + cols, mask=inside, other=0.0) * rstd
    add = tl.load(bias + cols, mask=inside, other=0.0)
    for tile in range(tl.program_id(1), tl.cdiv(rows, BR), tl.num_programs(1)):
        at, there = _norm_tile(tile, cols, rows, channels, BR)
        value = tl.load(x + at, mask=there, other=0.0).to(tl.float32) - mean[None, :]
        tl.store(y + at, (value * scale[None, :] + add[None, :]).to(y.dtype.element_ty), mask=there)


@triton.jit
def _norm_backward_sums(
    x, dy, stats, partial, rows, channels, BR: tl.constexpr, BC: tl.constexpr, SPLITS: tl.constexpr
):
    """Σdy and Σx̂dy."""
    cols, split = tl.program_id(0) * BC + tl.arange(0, BC), tl.program_id(1)
    mean = tl.load(stats + cols, mask=cols < channels, other=0.0)
    rstd = tl.load(stats + channels + cols, mask=cols < channels, other=0.0)
    a = tl.zeros([BR, BC], tl.float32)
    b = tl.zeros([BR, BC], tl.float32)
    for tile in range(split, tl.cdiv(rows, BR), SPLITS):
        at, there = _norm_tile(tile, cols, rows, channels, BR)
        grad = tl.load(dy + at, mask=there, other=0.0).to(tl.float32)
        a += grad
        b += grad * (tl.load(x + at, mask=there, other=0.0).to(tl.float32) - mean[None, :])
    base = partial + split * 2 * channels + cols
    tl.store(base, tl.sum(a, 0), mask=cols < channels)
    tl.store(base + channels, tl.sum(b, 0) * rstd, mask=cols < channels)


@triton.jit
def _norm_backward(
    x, dy, dx, gain, stats, partial, of_gain, of_bias, rows, channels,
    BR: tl.constexpr, BC: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The gradients of x, gain and bias."""
    cols = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = cols < channels
    mean = tl.load(stats + cols, mask=inside, other=0.0)
    rstd = tl.load(stats + channels + cols, mask=inside, other=0.0)
    plain = _total(partial, 0, cols, channels, SPLITS)
    along = _total(partial, 1, cols, channels, SPLITS)
    if tl.program_id(1) == 0:
        tl.store(of_gain + cols, along, mask=inside)
        tl.store(of_bias + cols, plain, mask=inside)
    scale = tl.load(gain + cols, mask=inside, other=0.0) * rstd
    for tile in range(tl.program_id(1), tl.cdiv(rows, BR), tl.num_programs(1)):
        at, there = _norm_tile(tile, cols, rows, channels, BR)
        hat = (tl.load(x + at, mask=there, other=0.0).to(tl.float32) - mean[None, :]) * rstd[None, :]
        grad = tl.load(dy + at, mask=there, other=0.0).to(tl.float32)
        out = scale[None, :] * (grad - (plain[None, :] + hat * along[None, :]) / rows)
        tl.store(dx + at, out.to(dx.dtype.element_ty), mask=there)


def batch_norm(
    x: Tensor, gain: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor, momentum: float, eps: float
) -> tuple[Tensor, Tensor]:
    """``y`` and statistics [2, C] for :func:`batch_norm_gradients`; running statistics are changed in place."""
    sizes, sums, programs, tiles = _norm_plan(x)
    partial = torch.empty(tiles["SPLITS"], 2, x.shape[1], device=x.device)
    stats, y = torch.empty(2, x.shape[1], device=x.device), torch.empty_like(x)
    _norm_forward_sums[sums](x, partial, *sizes, **tiles)
    _norm_forward[programs](
        x, y, gain, bias, running_mean, running_var, partial, stats, *sizes, momentum, eps, **tiles
    )  # fmt: skip
    return y, stats


def batch_norm_gradients(x: Tensor, dy: Tensor, gain: Tensor, stats: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """∂L/∂x, ∂L/∂gain and ∂L/∂bias; ``dy`` lies in memory as ``x`` does."""
    sizes, sums, programs, tiles = _norm_plan(x)
    partial = torch.empty(tiles["SPLITS"], 2, x.shape[1], device=x.device)
    dx, of_gain, of_bias = torch.empty_like(x), torch.empty_like(gain), torch.empty_like(gain)
    _norm_backward_sums[sums](x, dy, stats, partial, *sizes, **tiles)
    _norm_backward[programs](x, dy, dx, gain, stats, partial, of_gain, of_bias, *sizes, **tiles)
    return dx, of_gain, of_bias


def _norm_plan(x: Tensor) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int], dict[str, int]]:
    """Positions and channels, the programs that sum, those that apply, and their tiles."""
    channels, rows = x.shape[1], x.numel() // x.shape[1]
    width = min(_block(channels), WIDEST)
    columns, height = triton.cdiv(channels, width), NORM_TILE // width
    splits = max(triton.next_power_of_2(triton.cdiv(NORM_SUMS, columns)), 16)
    programs = max(1, min(triton.cdiv(rows, height), NORM_PROGRAMS // columns))
    tiles = {"BR": height, "BC": width, "SPLITS": splits, "num_warps": 8}
    return (rows, channels), (columns, splits), (columns, programs), tiles
