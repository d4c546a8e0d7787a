"""Parts of random networks that work on tokens [N, T, C]: attention in several dialects, MLPs, mixing of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from nets.attention import WidthAttention
from random_parts import WIDTHS, Lambda, Numbers
from torch import Tensor, nn


@dataclass(frozen=True)
class Row:
    """What passes between these parts: ``count`` tokens of ``width`` features."""

    count: int
    width: int


Made = tuple[nn.Module, Row] | None
Builder = Callable[[Row, Numbers], Made]
TOKEN_PARTS: dict[str, Builder] = {}


def part(function: Builder) -> Builder:
    """Register a builder under its name."""
    TOKEN_PARTS[function.__name__] = function
    return function


@part
def linear(shape: Row, numbers: Numbers) -> Made:
    width = numbers.pick(*WIDTHS)
    return nn.Linear(shape.width, width, bias=numbers.pick(True, False)), replace(shape, width=width)


@part
def token_norm(shape: Row, numbers: Numbers) -> Made:
    norm = numbers.pick(nn.LayerNorm, nn.RMSNorm)
    return norm(shape.width, eps=1e-5, elementwise_affine=numbers.pick(True, False)), shape


@part
def token_activation(shape: Row, numbers: Numbers) -> Made:
    return numbers.pick(nn.ReLU(), nn.GELU(), nn.Tanh()), shape


class Mlp(nn.Module):
    """Two layers around a nonlinearity or a gate, with a shortcut."""

    def __init__(self, width: int, hidden: int, kind: str):
        super().__init__()
        self.kind = kind
        self.fc1 = nn.Linear(width, 2 * hidden if kind == "glu" else hidden)
        self.gate = nn.Linear(width, hidden) if kind == "swiglu" else None
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc1(x)
        if self.kind == "glu":
            hidden = F.glu(hidden, -1)
        elif self.gate is not None:
            hidden = F.silu(hidden) * self.gate(x)
        else:
            hidden = F.gelu(hidden)
        return x + self.fc2(hidden)


@part
def mlp(shape: Row, numbers: Numbers) -> Made:
    return Mlp(shape.width, numbers.pick(6, 8, 3), numbers.pick("plain", "glu", "swiglu")), shape


class Multihead(nn.Module):
    """PyTorch's own layer, with a shortcut."""

    def __init__(self, width: int, heads: int, batch_first: bool, weights: bool):
        super().__init__()
        self.batch_first, self.weights = batch_first, weights
        self.attn = nn.MultiheadAttention(width, heads, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.batch_first else x.transpose(0, 1)
        y = self.attn(y, y, y, need_weights=self.weights)[0]
        return x + (y if self.batch_first else y.transpose(0, 1))


@part
def multihead(shape: Row, numbers: Numbers) -> Made:
    heads = numbers.divisor(shape.width, smallest=1)
    if heads is None:
        return None
    return Multihead(shape.width, heads, numbers.pick(True, False), numbers.pick(False, True)), shape


class Attention(nn.Module):
    """One projection for q, k and v; ``num_heads`` and ``head_dim`` in attributes; fused or written out."""

    def __init__(self, width: int, num_heads: int, head_dim: int, fused: bool):
        super().__init__()
        self.num_heads, self.head_dim, self.scale, self.fused = num_heads, head_dim, head_dim**-0.5, fused
        self.qkv = nn.Linear(width, 3 * num_heads * head_dim)
        self.proj = nn.Linear(num_heads * head_dim, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = (q @ k.transpose(-2, -1) * self.scale).softmax(-1) @ v
        return x + self.proj(y.transpose(1, 2).reshape(batch, tokens, self.num_heads * self.head_dim))


@part
def attention(shape: Row, numbers: Numbers) -> Made:
    return Attention(shape.width, numbers.pick(2, 3, 1, 4), numbers.pick(2, 3), numbers.pick(True, False)), shape


class SeparateAttention(nn.Module):
    """Three projections; the head size is what a view leaves over; keys and values may come from fewer tokens."""

    def __init__(self, width: int, num_heads: int, head_dim: int, pooled: bool):
        super().__init__()
        self.num_heads, self.pooled = num_heads, pooled
        self.q, self.k, self.v = (nn.Linear(width, num_heads * head_dim) for _ in range(3))
        self.proj = nn.Linear(num_heads * head_dim, width)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.num_heads, -1).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        memory = x[:, ::2] if self.pooled else x
        q, k, v = self._heads(self.q(x)), self._heads(self.k(memory)), self._heads(self.v(memory))
        return x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@part
def separate_attention(shape: Row, numbers: Numbers) -> Made:
    heads, size = numbers.pick(2, 3, 1), numbers.pick(2, 4, 3)
    return SeparateAttention(shape.width, heads, size, numbers.pick(False, True)), shape


class ResidualWidthAttention(WidthAttention):
    """The head size is the input's width over ``num_heads``, and a scale is kept; added to the input."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


@part
def width_attention(shape: Row, numbers: Numbers) -> Made:
    heads = numbers.divisor(shape.width, smallest=1)
    return None if heads is None else (ResidualWidthAttention(shape.width, heads), shape)


@part
def encoder_layer(shape: Row, numbers: Numbers) -> Made:
    heads = numbers.divisor(shape.width, smallest=1)
    if heads is None:
        return None
    first = numbers.pick(False, True)
    layer = nn.TransformerEncoderLayer(shape.width, heads, 6, dropout=0.0, batch_first=True, norm_first=first)
    return layer, shape


class Mixer(nn.Module):
    """Layers along the tokens."""

    def __init__(self, count: int, hidden: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(count, hidden), nn.Linear(hidden, count)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.gelu(self.fc1(x.transpose(1, 2)))).transpose(1, 2)


@part
def mixer(shape: Row, numbers: Numbers) -> Made:
    return Mixer(shape.count, numbers.pick(5, 3)), shape


class ClassToken(nn.Module):
    """A learned token before the others, and a learned place for each."""

    def __init__(self, count: int, width: int):
        super().__init__()
        self.cls, self.places = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.randn(1, count + 1, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.places


@part
def class_token(shape: Row, numbers: Numbers) -> Made:
    return ClassToken(shape.count, shape.width), replace(shape, count=shape.count + 1)


@part
def fewer_tokens(shape: Row, numbers: Numbers) -> Made:
    return (Lambda(lambda x: x[:, 1:]), replace(shape, count=shape.count - 1)) if shape.count > 2 else None


class TokenBatchNorm(nn.Module):
    """A batch norm over the features."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.BatchNorm1d(width, momentum=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


@part
def token_batch_norm(shape: Row, numbers: Numbers) -> Made:
    return TokenBatchNorm(shape.width), shape
