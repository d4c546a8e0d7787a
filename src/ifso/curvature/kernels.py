"""Batch norm on dual numbers in two GPU kernels a pass, one adds up, one applies; activations in one. In Triton.

The formulas are those of :mod:`ifso.curvature.dual_functions`, of which this is the quick version.
Tensors are [N, C, …] in channels-first or channels-last order. Sums are taken in float32 in a fixed order, so that
results repeat bit for bit.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 8
SUM_PROGRAMS = 128
APPLY_PROGRAMS = 264
"""Tile sizes and numbers of programs were chosen by measuring on an H200 (132 multiprocessors)."""

BLOCK = 1024
"""Numbers that a program of an activation takes; not yet chosen by measuring."""


@triton.jit
def _offsets(rows, cols, channels, inner, LAST: tl.constexpr):
    """Addresses of [rows, cols], a row being one position of one sample and a column one channel."""
    if LAST:
        return rows[:, None] * channels + cols[None, :]
    return (rows // inner)[:, None] * (channels * inner) + cols[None, :] * inner + (rows % inner)[:, None]


@triton.jit
def _total(partial, which: tl.constexpr, cols, channels, KINDS: tl.constexpr, SPLITS: tl.constexpr):
    """The sum over splits of partial sums [SPLITS, KINDS, channels]."""
    split = tl.arange(0, SPLITS)
    at = (split * KINDS + which)[:, None] * channels + cols[None, :]
    return tl.sum(tl.load(partial + at, mask=(cols < channels)[None, :], other=0.0), 0)


@triton.jit
def _forward_sums(
    x, x_dot, partial, rows, channels, inner,
    LAST: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Σ(x−k), Σ(x−k)², Σẋ and Σ(x−k)ẋ, where k is the channel's first value: no cancellation in the variance."""
    cols = tl.program_id(0) * BC + tl.arange(0, BC)
    split = tl.program_id(1)
    inside = cols < channels
    first = tl.load(x + (cols if LAST else cols * inner), mask=inside, other=0.0).to(tl.float32)
    a = tl.zeros([BR, BC], tl.float32)
    b = tl.zeros([BR, BC], tl.float32)
    c = tl.zeros([BR, BC], tl.float32)
    d = tl.zeros([BR, BC], tl.float32)
    for start in range(split * BR, rows, SPLITS * BR):
        r = start + tl.arange(0, BR)
        ok = (r < rows)[:, None] & inside[None, :]
        at = _offsets(r, cols, channels, inner, LAST)
        value = tl.where(ok, tl.load(x + at, mask=ok, other=0.0).to(tl.float32) - first[None, :], 0.0)
        dot = tl.load(x_dot + at, mask=ok, other=0.0).to(tl.float32)
        a += value
        b += value * value
        c += dot
        d += value * dot
    base = partial + split * 4 * channels + cols
    tl.store(base, tl.sum(a, 0), mask=inside)
    tl.store(base + channels, tl.sum(b, 0), mask=inside)
    tl.store(base + 2 * channels, tl.sum(c, 0), mask=inside)
    tl.store(base + 3 * channels, tl.sum(d, 0), mask=inside)


@triton.jit
def _forward_apply(
    x, x_dot, y, y_dot, gain, bias, partial, stats, rows, channels, inner, eps,
    HAS_BIAS: tl.constexpr, LAST: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """``y``, ``ẏ`` and the statistics [mean, r, mean(x̂ẋ), mean(ẋ)]."""
    cols = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = cols < channels
    first = tl.load(x + (cols if LAST else cols * inner), mask=inside, other=0.0).to(tl.float32)
    shift = _total(partial, 0, cols, channels, 4, SPLITS) / rows
    variance = tl.maximum(_total(partial, 1, cols, channels, 4, SPLITS) / rows - shift * shift, 0.0)
    dot_mean = _total(partial, 2, cols, channels, 4, SPLITS) / rows
    mean = first + shift
    rstd = 1.0 / tl.sqrt(variance + eps)
    along = (_total(partial, 3, cols, channels, 4, SPLITS) / rows - shift * dot_mean) * rstd
    if tl.program_id(1) == 0:
        tl.store(stats + cols, mean, mask=inside)
        tl.store(stats + channels + cols, rstd, mask=inside)
        tl.store(stats + 2 * channels + cols, along, mask=inside)
        tl.store(stats + 3 * channels + cols, dot_mean, mask=inside)
    weight = tl.load(gain + cols, mask=inside, other=0.0).to(tl.float32)
    add = tl.load(bias + cols, mask=inside, other=0.0).to(tl.float32) if HAS_BIAS else tl.zeros([BC], tl.float32)
    for start in range(tl.program_id(1) * BR, rows, tl.num_programs(1) * BR):
        r = start + tl.arange(0, BR)
        ok = (r < rows)[:, None] & inside[None, :]
        at = _offsets(r, cols, channels, inner, LAST)
        hat = (tl.load(x + at, mask=ok, other=0.0).to(tl.float32) - mean[None, :]) * rstd[None, :]
        dot = tl.load(x_dot + at, mask=ok, other=0.0).to(tl.float32)
        dot = weight[None, :] * rstd[None, :] * (dot - dot_mean[None, :] - hat * along[None, :])
        tl.store(y + at, (hat * weight[None, :] + add[None, :]).to(y.dtype.element_ty), mask=ok)
        tl.store(y_dot + at, dot.to(y_dot.dtype.element_ty), mask=ok)


@triton.jit
def _backward_sums(
    lam, lam_dot, x, x_dot, stats, partial, rows, channels, inner,
    LAST: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Σλ, Σx̂λ, Σλẋ, Σλ̇ and Σx̂λ̇."""
    cols = tl.program_id(0) * BC + tl.arange(0, BC)
    split = tl.program_id(1)
    inside = cols < channels
    mean = tl.load(stats + cols, mask=inside, other=0.0)
    rstd = tl.load(stats + channels + cols, mask=inside, other=0.0)
    a = tl.zeros([BR, BC], tl.float32)
    b = tl.zeros([BR, BC], tl.float32)
    c = tl.zeros([BR, BC], tl.float32)
    d = tl.zeros([BR, BC], tl.float32)
    e = tl.zeros([BR, BC], tl.float32)
    for start in range(split * BR, rows, SPLITS * BR):
        r = start + tl.arange(0, BR)
        ok = (r < rows)[:, None] & inside[None, :]
        at = _offsets(r, cols, channels, inner, LAST)
        hat = (tl.load(x + at, mask=ok, other=0.0).to(tl.float32) - mean[None, :]) * rstd[None, :]
        grad = tl.load(lam + at, mask=ok, other=0.0).to(tl.float32)
        grad_dot = tl.load(lam_dot + at, mask=ok, other=0.0).to(tl.float32)
        dot = tl.load(x_dot + at, mask=ok, other=0.0).to(tl.float32)
        a += grad
        b += hat * grad
        c += grad * dot
        d += grad_dot
        e += hat * grad_dot
    base = partial + split * 5 * channels + cols
    tl.store(base, tl.sum(a, 0), mask=inside)
    tl.store(base + channels, tl.sum(b, 0), mask=inside)
    tl.store(base + 2 * channels, tl.sum(c, 0), mask=inside)
    tl.store(base + 3 * channels, tl.sum(d, 0), mask=inside)
    tl.store(base + 4 * channels, tl.sum(e, 0), mask=inside)


@triton.jit
def _backward_apply(
    lam, lam_dot, x, x_dot, back, back_dot, gain, stats, partial, rows, channels, inner,
    LAST: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """``x̄ = B(λ)`` and its tangent ``B(λ̇) − r (mean(x̂ẋ) x̄ + mean(x̂λ) ẏ + mean(λẏ) x̂)``."""
    cols = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = cols < channels
    mean = tl.load(stats + cols, mask=inside, other=0.0)
    rstd = tl.load(stats + channels + cols, mask=inside, other=0.0)
    along = tl.load(stats + 2 * channels + cols, mask=inside, other=0.0)
    scale = tl.load(gain + cols, mask=inside, other=0.0).to(tl.float32) * rstd
    lam_mean = _total(partial, 0, cols, channels, 5, SPLITS) / rows
    lam_hat = _total(partial, 1, cols, channels, 5, SPLITS) / rows
    x_dot_mean = tl.load(stats + 3 * channels + cols, mask=inside, other=0.0)
    lam_x_dot = _total(partial, 2, cols, channels, 5, SPLITS) / rows
    lam_y_dot = scale * (lam_x_dot - x_dot_mean * lam_mean - along * lam_hat)
    dot_mean = _total(partial, 3, cols, channels, 5, SPLITS) / rows
    dot_hat = _total(partial, 4, cols, channels, 5, SPLITS) / rows
    for start in range(tl.program_id(1) * BR, rows, tl.num_programs(1) * BR):
        r = start + tl.arange(0, BR)
        ok = (r < rows)[:, None] & inside[None, :]
        at = _offsets(r, cols, channels, inner, LAST)
        hat = (tl.load(x + at, mask=ok, other=0.0).to(tl.float32) - mean[None, :]) * rstd[None, :]
        grad = tl.load(lam + at, mask=ok, other=0.0).to(tl.float32)
        grad_dot = tl.load(lam_dot + at, mask=ok, other=0.0).to(tl.float32)
        dot = tl.load(x_dot + at, mask=ok, other=0.0).to(tl.float32)
        dot = scale[None, :] * (dot - x_dot_mean[None, :] - hat * along[None, :])
        out = scale[None, :] * (grad - lam_mean[None, :] - hat * lam_hat[None, :])
        straight = scale[None, :] * (grad_dot - dot_mean[None, :] - hat * dot_hat[None, :])
        turned = along[None, :] * out + lam_hat[None, :] * dot + lam_y_dot[None, :] * hat
        tl.store(back + at, out.to(back.dtype.element_ty), mask=ok)
        tl.store(back_dot + at, (straight - rstd[None, :] * turned).to(back_dot.dtype.element_ty), mask=ok)


@triton.jit
def _dot_sums(
    a, b, c, d, partial, rows, channels, inner,
    TWO: tl.constexpr, LAST: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Partial sums of a·b + c·d."""
    cols = tl.program_id(0) * BC + tl.arange(0, BC)
    split = tl.program_id(1)
    inside = cols < channels
    total = tl.zeros([BR, BC], tl.float32)
    for start in range(split * BR, rows, SPLITS * BR):
        r = start + tl.arange(0, BR)
        ok = (r < rows)[:, None] & inside[None, :]
        at = _offsets(r, cols, channels, inner, LAST)
        value = tl.load(a + at, mask=ok, other=0.0).to(tl.float32) * tl.load(b + at, mask=ok, other=0.0).to(tl.float32)
        if TWO:
            third = tl.load(c + at, mask=ok, other=0.0).to(tl.float32)
            value += third * tl.load(d + at, mask=ok, other=0.0).to(tl.float32)
        total += value
    tl.store(partial + split * channels + cols, tl.sum(total, 0), mask=inside)


@triton.jit
def _slopes(v, KIND: tl.constexpr):
    """An activation at ``v`` with its first and its second derivative."""
    if KIND == "silu":
        s = 1.0 / (1.0 + tl.exp(-v))
        value = v * s
        slope = s * (1.0 + v * (1.0 - s))
        bend = s * (1.0 - s) * (2.0 + v * (1.0 - 2.0 * s))
    elif KIND == "gelu":
        below = 0.5 * (1.0 + tl.erf(v * 0.7071067811865476))
        density = 0.3989422804014327 * tl.exp(-0.5 * v * v)
        value = v * below
        slope = below + v * density
        bend = density * (2.0 - v * v)
    else:  # gelu_tanh
        inner = 0.7978845608028654 * (v + 0.044715 * v * v * v)
        first = 0.7978845608028654 * (1.0 + 0.134145 * v * v)
        second = 0.7978845608028654 * 0.26829 * v
        half = 1.0 / (1.0 + tl.exp(-2.0 * inner))
        t = 2.0 * half - 1.0
        flat = 4.0 * half * (1.0 - half)
        value = v * half
        slope = half + 0.5 * v * flat * first
        bend = flat * (first + 0.5 * v * (second - 2.0 * t * first * first))
    return value, slope, bend


@triton.jit
def _activation_forward(x, x_dot, y, y_dot, size, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """``y = f(x)`` and ``f'(x) ẋ``."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < size
    value, slope, _ = _slopes(tl.load(x + at, mask=ok, other=0.0).to(tl.float32), KIND)
    dot = slope * tl.load(x_dot + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=ok)
    tl.store(y_dot + at, dot.to(y_dot.dtype.element_ty), mask=ok)


@triton.jit
def _activation_backward(
    lam, lam_dot, x, x_dot, back, back_dot, size, MOVES: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    """``f'(x) λ`` and its tangent ``f'(x) λ̇ + f''(x) ẋ λ``, where λ has one."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < size
    _, slope, bend = _slopes(tl.load(x + at, mask=ok, other=0.0).to(tl.float32), KIND)
    grad = tl.load(lam + at, mask=ok, other=0.0).to(tl.float32)
    dot = bend * tl.load(x_dot + at, mask=ok, other=0.0).to(tl.float32) * grad
    if MOVES:
        dot += slope * tl.load(lam_dot + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(back + at, (slope * grad).to(back.dtype.element_ty), mask=ok)
    tl.store(back_dot + at, dot.to(back_dot.dtype.element_ty), mask=ok)


def activation_forward(name: str, x: Tensor, x_dot: Tensor, y: Tensor, y_dot: Tensor) -> None:
    """Write ``y`` and ``ẏ``; all tensors lie in memory as ``x`` does."""
    grid = (triton.cdiv(x.numel(), BLOCK),)
    _activation_forward[grid](x, x_dot, y, y_dot, x.numel(), KIND=name, BLOCK=BLOCK)


def activation_backward(
    name: str, lam: Tensor, lam_dot: Tensor | None, x: Tensor, x_dot: Tensor
) -> tuple[Tensor, Tensor]:
    """``x̄`` and its tangent."""
    back, back_dot = torch.empty_like(x), torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), BLOCK),)
    _activation_backward[grid](
        lam, lam if lam_dot is None else lam_dot, x, x_dot, back, back_dot, x.numel(),
        MOVES=lam_dot is not None, KIND=name, BLOCK=BLOCK,
    )  # fmt: skip
    return back, back_dot


def batch_norm_forward(
    x: Tensor, x_dot: Tensor, gain: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``y``, ``ẏ`` and statistics [mean, r, mean(x̂ẋ), mean(ẋ)]."""
    shape = _Shape(x)
    partial = x.new_empty(shape.splits, 4, shape.channels, dtype=torch.float32)
    stats = x.new_empty(4, shape.channels, dtype=torch.float32)
    y, y_dot = torch.empty_like(x), torch.empty_like(x)
    _forward_sums[shape.sum_grid](x, x_dot, partial, *shape.sizes, **shape.tiles)
    _forward_apply[shape.apply_grid](
        x, x_dot, y, y_dot, gain, gain if bias is None else bias, partial, stats, *shape.sizes, eps,
        HAS_BIAS=bias is not None, **shape.tiles,
    )  # fmt: skip
    return y, y_dot, stats


def batch_norm_backward(
    lam: Tensor, lam_dot: Tensor, x: Tensor, x_dot: Tensor, gain: Tensor, stats: Tensor
) -> tuple[Tensor, Tensor]:
    """``x̄`` and its tangent."""
    shape = _Shape(x)
    partial = x.new_empty(shape.splits, 5, shape.channels, dtype=torch.float32)
    back, back_dot = torch.empty_like(lam), torch.empty_like(lam)
    _backward_sums[shape.sum_grid](lam, lam_dot, x, x_dot, stats, partial, *shape.sizes, **shape.tiles)
    _backward_apply[shape.apply_grid](
        lam, lam_dot, x, x_dot, back, back_dot, gain, stats, partial, *shape.sizes, **shape.tiles
    )
    return back, back_dot


def channel_dots(a: Tensor, b: Tensor, c: Tensor | None = None, d: Tensor | None = None) -> Tensor:
    """Σ a·b + c·d over everything but the channels."""
    shape = _Shape(a)
    partial = a.new_empty(shape.splits, shape.channels, dtype=torch.float32)
    third, fourth = (a, b) if c is None or d is None else (c, d)
    _dot_sums[shape.sum_grid](a, b, third, fourth, partial, *shape.sizes, TWO=c is not None, **shape.tiles)
    return partial.sum(0)


class _Shape:
    """How the programs share a tensor [N, C, …] among them."""

    def __init__(self, x: Tensor) -> None:
        self.channels = x.shape[1]
        inner = math.prod(x.shape[2:])
        rows = x.shape[0] * inner
        last = not x.is_contiguous()
        width, tile = (16, 4096) if last else (1 if inner >= 256 else 4, 1024)
        height = tile // width
        columns = triton.cdiv(self.channels, width)
        self.splits = max(triton.next_power_of_2(triton.cdiv(SUM_PROGRAMS, columns)), 32)
        self.sizes = (rows, self.channels, inner)
        self.tiles = {"LAST": last, "BR": height, "BC": width, "SPLITS": self.splits, "num_warps": WARPS}
        self.sum_grid = (columns, self.splits)
        self.apply_grid = (columns, max(1, min(triton.cdiv(rows, height), APPLY_PROGRAMS // columns)))
