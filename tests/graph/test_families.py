"""Families of Hugging Face's transformers, tiny and untrained: nothing that ifso does leaves a mark in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_no_mark import assert_same, fakes, weights
from torch import Tensor, nn

import ifso
from ifso.errors import BudgetError, IfsoError

transformers = pytest.importorskip("transformers")

TOKENS = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
PATCHES = {**{name: size for name, size in TOKENS.items() if name != "vocab_size"}, "image_size": 16, "patch_size": 4}
STAGES = {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 2, "image_size": 16, "patch_size": 2}
LEVELS = {"num_channels": 3, "depths": [1, 1], "hidden_sizes": [8, 12]}

IMAGE = {"pixel_values": (1, 3, 16, 16)}
WORDS = {"input_ids": (1, 6)}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "ViT": (PATCHES, IMAGE),
    "DeiT": (PATCHES, IMAGE),
    "Beit": ({**PATCHES, "use_relative_position_bias": True}, IMAGE),
    "Dinov2": ({**PATCHES, "mlp_ratio": 2}, IMAGE),
    "DINOv3ViT": (PATCHES, IMAGE),
    "CLIPVision": (PATCHES, IMAGE),
    "SiglipVision": (PATCHES, IMAGE),
    "Swin": (STAGES, IMAGE),
    "Swinv2": (STAGES, IMAGE),
    "ConvNext": ({**LEVELS, "num_stages": 2, "patch_size": 2}, IMAGE),
    "ResNet": ({**LEVELS, "embedding_size": 8, "layer_type": "basic"}, {"pixel_values": (2, 3, 32, 32)}),
    "Bert": (TOKENS, WORDS),
    "Roberta": (TOKENS, WORDS),
    "Albert": ({**TOKENS, "embedding_size": 8}, WORDS),
    "DistilBert": ({"vocab_size": 40, "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2}, WORDS),
    "Llama": ({**TOKENS, "num_key_value_heads": 1, "use_cache": False}, WORDS),
    "GPT2": ({"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "use_cache": False}, WORDS),
}  # fmt: skip
"""By the name of its classes: settings, and the shapes of what it is called with."""


def built(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    settings, shapes = FAMILIES[name]
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**settings)).eval()
    inputs = {
        key: torch.randint(40, shape) if key == "input_ids" else torch.randn(shape) for key, shape in shapes.items()
    }
    return model, inputs


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).last_hidden_state.square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("ran_before", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_bits_afterwards(name: str, ran_before: bool) -> None:
    model, inputs = built(name)
    other, _ = built(name)
    found: Callable[[nn.Module], Tensor] = lambda net: net(**inputs).last_hidden_state  # noqa: E731
    if ran_before:
        found(model)
    before = weights(model)
    graph = ifso.trace(model, inputs)
    assert_same(before, model)
    assert fakes() == []
    if graph.groups:
        scores = ifso.score(model, graph, loss, [inputs], "taylor")
        assert all(score.isfinite().all() for score in scores.values())
        keep = {group.name: torch.arange(group.size) > 0 for group in graph.groups}
        with ifso.masked(model, graph, ifso.balance(graph, keep)):
            found(model)
    with pytest.raises(BudgetError if graph.groups else IfsoError):
        ifso.prune(
            model, [inputs], loss, budget=ifso.Budget(macs=1e-9), example_inputs=inputs, progress=False
        )  # fmt: skip
    assert_same(before, model)
    assert fakes() == []
    with torch.no_grad():
        mine, wanted = found(model), found(other)
    assert type(mine) is Tensor
    assert torch.equal(mine, wanted)
