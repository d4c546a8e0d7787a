"""A sample of known networks, small inputs, float64: about a third of the units goes, and masked equals compacted."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from cases import difference, enliven_, outputs, random_keep, removed
from torch import Tensor, nn

import ifso

EXACT = 1e-5
VISIBLE = 1e-6


@dataclass(frozen=True)
class Known:
    """A network of torchvision or timm, the size of its images, and options for its builder."""

    name: str
    size: int = 64
    options: dict[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        source, _, name = self.name.partition(":")
        torch.manual_seed(0)
        if source == "timm":
            import timm

            return timm.create_model(name, **self.options)
        from torchvision import models

        return models.get_model(name, weights=None, **self.options)


NETWORKS = (
    Known("torchvision:mobilenet_v3_small", 32),
    Known("torchvision:googlenet", 32, {"init_weights": False}),
    Known("timm:convnextv2_atto", 32),
    Known("timm:vit_tiny_patch16_224", 64, {"img_size": 64, "depth": 2}),
    Known("timm:swin_tiny_patch4_window7_224", 56, {"img_size": 56, "depths": (2, 2), "num_heads": (3, 6)}),
    Known("timm:ghostnet_050", 32),
    Known("timm:skresnet18", 32, {"layers": (1, 1, 1, 1)}),
)
OTHERS = (
    Known("torchvision:shufflenet_v2_x0_5", 32),
    Known("timm:res2net50_14w_8s", 32, {"layers": (1, 1, 1, 1)}),
    Known("timm:levit_128s", 64, {"img_size": 64, "depth": (1, 1, 1)}),
    Known("torchvision:resnet18", 32),
    Known("timm:densenet121", 32, {"block_config": (2, 3, 2, 2)}),
    Known("torchvision:mobilenet_v2", 32),
    Known("torchvision:squeezenet1_1", 64),
    Known("torchvision:efficientnet_b0", 32),
    Known("torchvision:regnet_y_400mf", 32),
    Known("torchvision:mnasnet0_5", 32),
    Known("torchvision:lraspp_mobilenet_v3_large", 64, {"weights_backbone": None}),
    Known("timm:convnext_atto", 32),
    Known("timm:deit_tiny_distilled_patch16_224", 64, {"img_size": 64, "depth": 2}),
    Known("timm:resnext50_32x4d", 32, {"layers": (1, 1, 1, 1)}),
    Known("timm:dpn48b", 32),
    Known("timm:ecaresnet50t", 32, {"layers": (1, 1, 1, 1)}),
    Known("timm:repvgg_a0", 32),
    Known("timm:mixer_s32_224", 64, {"img_size": 64}),
    Known("timm:poolformer_s12", 32),
)
"""Of which tests/cases.py holds small relatives."""


def prepared(known: Known) -> tuple[nn.Module, Tensor]:
    """The network in float64 and eval mode, with parameters on which errors show, and two images."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = enliven_(known.build().double().eval())
    return model, torch.randn(2, 3, known.size, known.size, dtype=torch.float64)


@pytest.mark.parametrize(
    "known",
    [*NETWORKS, *(pytest.param(known, marks=pytest.mark.slow) for known in OTHERS)],
    ids=lambda known: known.name,
)
def test_masked_equals_compacted(known):
    model, images = prepared(known)
    graph = ifso.trace(model, images)
    assert len(graph.groups) >= 1
    assert prunable_share(model, graph) > 0.5
    keep = random_keep(graph, seed=0, share=0.3)
    assert removed(keep) > 0
    twin = copy.deepcopy(model)
    plain = outputs(twin, images)
    with ifso.masked(twin, graph, keep):
        soft = outputs(twin, images)
    assert difference(plain, soft) > VISIBLE
    ifso.compact_(model, graph, keep)
    assert difference(soft, outputs(model, images)) <= EXACT


def prunable_share(model: nn.Module, graph: ifso.ChannelGraph) -> float:
    """Share of the parameters' elements that shrink when units go."""
    named = dict(model.named_parameters())
    touched = {member.parameter for group in graph.groups for member in group.members}
    return sum(named[name].numel() for name in touched & named.keys()) / sum(p.numel() for p in named.values())


# ---- detectors ------------------------------------------------------------------------------------------------------


def _small(name: str, **options: Any) -> Callable[[], nn.Module]:
    from torchvision import models

    few = {"score_thresh": 1e-3, "detections_per_img": 8, "topk_candidates": 20, "num_classes": 7}
    return partial(models.get_model, f"{name}", weights=None, weights_backbone=None, **few, **options)


DETECTORS = {
    "ssdlite320_mobilenet_v3_large": _small("ssdlite320_mobilenet_v3_large"),
    "retinanet_resnet50_fpn": _small("retinanet_resnet50_fpn", min_size=96, max_size=128),
    "fcos_resnet50_fpn": _small("fcos_resnet50_fpn", min_size=96, max_size=128),
}


def scene() -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Two images of different sizes with boxes."""
    random = torch.Generator().manual_seed(0)
    images = [torch.rand(3, 96, 112, generator=random), torch.rand(3, 104, 96, generator=random)]
    boxes = torch.tensor([[10.0, 20.0, 60.0, 80.0], [30.0, 5.0, 90.0, 70.0]])
    return images, [{"boxes": boxes.clone(), "labels": torch.tensor([1, 3])} for _ in images]


def coupling(graph: ifso.ChannelGraph) -> set[frozenset]:
    """Units as sets of slices, whatever groups and units are called."""
    return {
        frozenset((member.parameter, member.dim, member.index[unit]) for member in group.members)
        for group in graph.groups
        for unit in range(group.size)
    }


QUICK, *LARGE = DETECTORS


@pytest.mark.parametrize("name", [QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in LARGE)])
def test_detectors_couple_alike_in_eval_and_train_mode(name):
    torch.manual_seed(0)
    model = enliven_(DETECTORS[name]().eval())
    images, targets = scene()
    evaluation = ifso.trace(model, (images,))
    training = ifso.trace(model.train(), (images, targets))
    assert coupling(evaluation) == coupling(training)
    assert training.num_units > 1000
    model.eval()
    keep = random_keep(training, seed=0, share=0.3)
    plain = outputs(model, (images,))
    with ifso.masked(model, training, keep):
        soft = outputs(model, (images,))
        losses = losses_of(model, images, targets)
    assert difference(plain, soft) > VISIBLE
    ifso.compact_(model, evaluation, keep_like(training, evaluation, keep))
    torch.testing.assert_close(losses_of(model, images, targets), losses, rtol=1e-3, atol=1e-5)


def keep_like(source: ifso.ChannelGraph, target: ifso.ChannelGraph, keep: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same choice for a graph with the same coupling, whatever its groups are called."""
    chosen = {}
    for group in source.groups:
        for unit in range(group.size):
            slices = frozenset((member.parameter, member.dim, member.index[unit]) for member in group.members)
            chosen[slices] = bool(keep[group.name][unit])
    return {
        group.name: torch.tensor(
            [
                chosen[frozenset((m.parameter, m.dim, m.index[unit]) for m in group.members)]
                for unit in range(group.size)
            ]
        )
        for group in target.groups
    }


@torch.no_grad()
def losses_of(model: nn.Module, images: list[Tensor], targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The losses of train mode with the statistics of eval mode."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    try:
        torch.manual_seed(0)
        return model(images, targets)
    finally:
        model.eval()
