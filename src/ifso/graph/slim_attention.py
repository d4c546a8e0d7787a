"""``nn.MultiheadAttention`` with fewer heads than its width would hold.

PyTorch's layer insists that ``num_heads × head_dim`` equals the width of its input. Once heads or input channels are
removed they differ, so the layer's class is exchanged, in place, for one that reads its sizes from its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional


class SlimMultiheadAttention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` whose inner width ``num_heads × head_dim`` is free. Same parameters, same call."""

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """False, so that PyTorch's fused encoder kernels, which assume the full width, stay away."""
        return False

    def forward(  # noqa: D102 - as in nn.MultiheadAttention
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,  # noqa: ARG002 - a hint only; attn_mask says the same
    ) -> tuple[Tensor, Tensor | None]:
        batched = query.dim() == 3
        tensors = [tensor if batched else tensor.unsqueeze(0) for tensor in (query, key, value)]
        if batched and not self.batch_first:
            tensors = [tensor.transpose(0, 1) for tensor in tensors]
        q, k, v = self._project(tensors)
        bias = self._bias(
            q, key_padding_mask if batched or key_padding_mask is None else key_padding_mask[None], attn_mask
        )
        if need_weights:
            scores = (q / self.head_dim**0.5) @ k.transpose(-2, -1)
            weights = (scores if bias is None else scores + bias).softmax(-1)
            inner = functional.dropout(weights, self.dropout, self.training) @ v
        else:
            weights = None
            dropout = self.dropout if self.training else 0.0
            inner = functional.scaled_dot_product_attention(q, k, v, bias, dropout)
        out = functional.linear(inner.transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return out[0], None if weights is None else weights[0]
        return (out if self.batch_first else out.transpose(0, 1)), weights

    def _project(self, tensors: list[Tensor]) -> list[Tensor]:
        """[B, T, C] each → [B, heads, T, head_dim]."""
        weights = self.in_proj_weight.chunk(3)
        biases = self.in_proj_bias.chunk(3) if self.in_proj_bias is not None else (None, None, None)
        return [
            functional.linear(tensor, weight, bias).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for tensor, weight, bias in zip(tensors, weights, biases, strict=True)
        ]

    def _bias(self, q: Tensor, padding: Tensor | None, mask: Tensor | None) -> Tensor | None:
        """Both masks as one term to add to the scores [B, heads, T, S]."""
        terms = []
        if mask is not None:
            mask = _as_bias(mask, q.dtype)
            terms.append(mask.unflatten(0, (q.shape[0], -1)) if mask.dim() == 3 else mask)
        if padding is not None:
            terms.append(_as_bias(padding, q.dtype)[:, None, None, :])
        return None if not terms else sum(terms[1:], terms[0])


def _as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))


def slim_attention(model: nn.Module, shapes: Mapping[str, tuple[int, ...]] | None = None) -> list[str]:
    """Exchange the class of every attention layer whose sizes do not fit PyTorch's; returns their names.

    ``shapes`` are shapes that parameters are going to have, by name.
    """
    names = []
    for name, module in model.named_modules():
        if type(module) is nn.MultiheadAttention and _is_slim(module, (shapes or {}).get(f"{name}.in_proj_weight")):
            module.__class__ = SlimMultiheadAttention
            names.append(name)
    return names


def _is_slim(module: nn.MultiheadAttention, shape: tuple[int, ...] | None) -> bool:
    if module.in_proj_weight is None or module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        return False
    rows, width = shape or module.in_proj_weight.shape
    return rows != 3 * width
