"""Networks over tokens: attention in several dialects, norms over channels, gated MLPs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """One projection for q, k, v; ``num_heads`` and ``head_dim`` in attributes; PyTorch's fused product."""

    def __init__(self, width: int, num_heads: int, head_dim: int):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
        self.qkv = nn.Linear(width, 3 * num_heads * head_dim)
        self.proj = nn.Linear(num_heads * head_dim, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(batch, tokens, self.num_heads * self.head_dim))


class WidthAttention(nn.Module):
    """As timm used to write it: the head size is the input's width over ``num_heads``, and a scale is kept."""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.num_heads, self.scale = num_heads, (width // num_heads) ** -0.5
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, width // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        weights = (q @ k.transpose(-2, -1) * self.scale).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(batch, tokens, width))


class BiasedAttention(nn.Module):
    """Swin: separate products, softmax, and a table of relative position biases with a column per head."""

    def __init__(self, width: int, num_heads: int, head_dim: int, tokens: int):
        super().__init__()
        self.num_heads, self.scale = num_heads, head_dim**-0.5
        self.q, self.k, self.v = (nn.Linear(width, num_heads * head_dim) for _ in range(3))
        self.proj = nn.Linear(num_heads * head_dim, width)
        self.table = nn.Parameter(torch.zeros(2 * tokens - 1, num_heads))
        place = torch.arange(tokens)
        self.register_buffer("index", place[:, None] - place[None, :] + tokens - 1)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.num_heads, -1).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self._heads(self.q(x)), self._heads(self.k(x)), self._heads(self.v(x))
        bias = self.table[self.index].permute(2, 0, 1)
        weights = (q @ k.transpose(-2, -1) * self.scale + bias).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class CachingAttention(BiasedAttention):
    """LeViT: in eval mode the biases looked up once are kept for the next call; train mode forgets them."""

    def __init__(self, width: int, num_heads: int, head_dim: int, tokens: int):
        super().__init__(width, num_heads, head_dim, tokens)
        self.cache: dict[str, Tensor] = {}

    def train(self, mode: bool = True) -> nn.Module:
        self.cache = {} if mode else self.cache
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if self.training or "bias" not in self.cache:
            self.cache["bias"] = self.table[self.index].permute(2, 0, 1)
        q, k, v = self._heads(self.q(x)), self._heads(self.k(x)), self._heads(self.v(x))
        weights = (q @ k.transpose(-2, -1) * self.scale + self.cache["bias"]).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """linear, GELU, linear."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Transformer(nn.Module):
    """Tokens [B, T, 6] → embedding of 8 → x + attention(norm x) → x + mlp(norm x) → norm → 5."""

    def __init__(self, attention: nn.Module, norm: type[nn.Module] = nn.LayerNorm):
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.norm1, self.attn = norm(8), attention
        self.norm2, self.mlp = norm(8), Mlp(8, 10)
        self.norm, self.head = norm(8), nn.Linear(8, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return self.head(self.norm(x))


def attention() -> nn.Module:
    return Transformer(Attention(8, num_heads=4, head_dim=3))


def attention_of_width() -> nn.Module:
    return Transformer(WidthAttention(8, num_heads=4))


def attention_biased() -> nn.Module:
    return Transformer(BiasedAttention(8, num_heads=4, head_dim=3, tokens=7))


def attention_caching() -> nn.Module:
    return Transformer(CachingAttention(8, num_heads=4, head_dim=3, tokens=7))


def rms_norm() -> nn.Module:
    return Transformer(Attention(8, num_heads=4, head_dim=3), nn.RMSNorm)


class OneHead(nn.Module):
    """Attention with a single head: its channels can go one by one, and the default scale follows them."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.q, self.k, self.v = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(8, 10)
        self.head = nn.Linear(10, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.relu(self.embed(tokens))
        x = F.scaled_dot_product_attention(self.q(x)[:, None], self.k(x)[:, None], self.v(x)[:, None])
        return self.head(x[:, 0])


class OneHeadAlike(nn.Module):
    """One head again: keys and values of one width, so that PyTorch takes a fused kernel until they differ."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(6, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(F.scaled_dot_product_attention(self.q(tokens), self.k(tokens), self.v(tokens)))


class ViewedAsKeys(nn.Module):
    """Queries and values are viewed as wide as the keys: values must lose as many channels as keys."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(6, 8), nn.Linear(8, 5)
        self.q, self.k, self.v = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(8, 6)
        self.out, self.heads = nn.Linear(6, 8), 1

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.relu(self.embed(tokens))
        q, k, v = self.q(x), self.k(x), self.v(x)
        size = k.shape[-1] // self.heads
        q, k, v = (item.view(len(x), -1, self.heads, size).transpose(1, 2) for item in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(len(x), -1, self.heads * size)
        return self.head(x + self.out(y))


class GroupedQuery(nn.Module):
    """Each key and value serves two queries: they are repeated, and go together with both."""

    def __init__(self):
        super().__init__()
        self.embed, self.q, self.kv, self.out = nn.Linear(6, 8), nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.relu(self.embed(tokens))
        q = self.q(x).view(*x.shape[:2], -1, 4).transpose(1, 2)
        k, v = (part.view(*x.shape[:2], -1, 4).transpose(1, 2) for part in self.kv(x).chunk(2, -1))
        k, v = (part[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for part in (k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v, scale=0.5).transpose(1, 2).flatten(2))


class IndexedByHead(nn.Module):
    """Scores looked up by relative position, with an index expanded over the heads: as in DeBERTa."""

    def __init__(self):
        super().__init__()
        self.heads, self.size = 4, 3
        self.q, self.k, self.out = nn.Linear(6, 12), nn.Linear(6, 12), nn.Linear(12, 5)
        self.v, self.positions = nn.Linear(6, 12), nn.Linear(6, 12)
        self.register_buffer("table", torch.randn(7, 6))

    def _cut(self, x: Tensor) -> Tensor:
        x = x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)
        return x.reshape(-1, *x.shape[2:])

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = (self._cut(layer(tokens)) for layer in (self.q, self.k, self.v))
        keys = self._cut(self.positions(self.table)[None]).repeat(len(tokens), 1, 1)
        where = torch.arange(7)[:, None] - torch.arange(7)[None] + 6
        by_place = torch.gather(q @ keys.mT, -1, (where // 2).expand(len(q), -1, -1))
        y = ((q @ k.mT + by_place) / self.size**0.5).softmax(-1) @ v
        return self.out(y.view(len(tokens), self.heads, *y.shape[1:]).transpose(1, 2).flatten(2))


class MultiHead(nn.Module):
    """PyTorch's own layer around a residual connection."""

    def __init__(self, batch_first: bool, need_weights: bool = False):
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.attn = nn.MultiheadAttention(8, 4, batch_first=batch_first)
        self.head = nn.Linear(8, 5)
        self.need_weights = need_weights

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + self.attn(x, x, x, need_weights=self.need_weights)[0])


def multihead() -> nn.Module:
    return MultiHead(batch_first=True)


def multihead_sequence_first() -> nn.Module:
    return MultiHead(batch_first=False)


def multihead_weights() -> nn.Module:
    """With the averaged attention weights that nobody uses, which is PyTorch's default."""
    return MultiHead(batch_first=True, need_weights=True)


class CrossAttention(nn.Module):
    """Queries of one input, keys and values of another, and the attention weights as a second output."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(6, 8), nn.Linear(4, 8)
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, queries: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        memory = self.right(memory)
        x, weights = self.attn(self.left(queries), memory, memory)
        return self.head(x), weights


class Encoder(nn.Module):
    """``nn.TransformerEncoderLayer``, norms after the sums."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.layer = nn.TransformerEncoderLayer(8, 4, dim_feedforward=12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(tokens)))


class ConvNeXt(nn.Module):
    """Depthwise convolution, channels last, layer norm, MLP, layer scale, channels first, sum."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 2, 2)
        self.dw = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.gamma = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        inner = self.norm(self.dw(x).permute(0, 2, 3, 1))
        inner = self.gamma * self.fc2(F.gelu(self.fc1(inner)))
        return self.head((x + inner.permute(0, 3, 1, 2)).mean((2, 3)))


class ChannelsFirstNorm(nn.Module):
    """Layer norm over dim 1, written out with means."""

    def __init__(self, channels: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(variance + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


def channels_first_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), ChannelsFirstNorm(8), nn.GELU(), nn.Conv2d(8, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(6, 5),
    )  # fmt: skip


class ViT(nn.Module):
    """Patches, class token, learned positions, one block, the class token read out."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.token, self.place = nn.Parameter(torch.zeros(1, 1, 8)), nn.Parameter(torch.zeros(1, 5, 8))
        self.norm1, self.attn = nn.LayerNorm(8), Attention(8, num_heads=4, head_dim=2)
        self.norm2, self.mlp = nn.LayerNorm(8), Mlp(8, 12)
        self.head = nn.Linear(8, 5)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.place
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return self.head(x[:, 0])


class GluMlp(nn.Module):
    """``F.glu``: the first half of the hidden units gated by the second."""

    def __init__(self):
        super().__init__()
        self.embed, self.fc1, self.fc2, self.head = nn.Linear(6, 8), nn.Linear(8, 12), nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head(x + self.fc2(F.glu(self.fc1(x), -1)))


class SwiGluMlp(nn.Module):
    """The same through ``chunk`` and SiLU."""

    def __init__(self):
        super().__init__()
        self.embed, self.fc1, self.fc2, self.head = nn.Linear(6, 8), nn.Linear(8, 12), nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        gate, value = self.fc1(x).chunk(2, -1)
        return self.head(x + self.fc2(F.silu(gate) * value))


def mlp_batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Linear(8, 7, bias=False),
        nn.BatchNorm1d(7),
        nn.Tanh(),
        nn.Linear(7, 5),
    )


class Mixer(nn.Module):
    """MLP-Mixer: one MLP along tokens, one along channels."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm1, self.norm2 = nn.Linear(6, 8), nn.LayerNorm(8), nn.LayerNorm(8)
        self.tokens, self.channels = Mlp(7, 9), Mlp(8, 10)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return self.head((x + self.channels(self.norm2(x))).mean(1))


class TiedLanguageModel(nn.Module):
    """Embedding and output layer share one matrix [11, 8]."""

    def __init__(self):
        super().__init__()
        self.embed, self.mlp, self.out = nn.Embedding(11, 8), Mlp(8, 10), nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.out(x + self.mlp(x))


class EinsumMix(nn.Module):
    """A linear layer and an outer product written with ``torch.einsum``."""

    def __init__(self):
        super().__init__()
        self.embed, self.weight, self.head = nn.Linear(6, 8), nn.Parameter(torch.randn(8, 7)), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(torch.einsum("btc,cd->btd", F.relu(self.embed(x)), self.weight)))
