"""monai's networks for volumes and images."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.zoo.build import Case

STEPS = {"channels": (8, 16, 32, 64), "strides": (2, 2, 2)}
PLANE, VOLUME = (64, 64), (32, 32, 32)
NETWORKS: dict[str, tuple[str, tuple[int, ...], int, dict[str, Any]]] = {
    "UNet": ("UNet", VOLUME, 1, {"spatial_dims": 3, "in_channels": 1, "out_channels": 3, **STEPS, "num_res_units": 2}),
    "UNet-plain": ("UNet", VOLUME, 1, {"spatial_dims": 3, "in_channels": 1, "out_channels": 3, **STEPS}),
    "AttentionUnet": ("AttentionUnet", VOLUME, 1, {"spatial_dims": 3, "in_channels": 1, "out_channels": 3, **STEPS}),
    "BasicUNet": ("BasicUNet", VOLUME, 1, {"features": (8, 8, 16, 32, 64, 8)}),
    "BasicUNetPlusPlus": ("BasicUNetPlusPlus", VOLUME, 1, {"features": (8, 8, 16, 32, 64, 8)}),
    "SegResNet": ("SegResNet", VOLUME, 1, {"init_filters": 8}),
    "SegResNetDS": ("SegResNetDS", VOLUME, 1, {"init_filters": 8, "dsdepth": 2}),
    "DynUNet": (
        "DynUNet", VOLUME, 1,
        {"spatial_dims": 3, "in_channels": 1, "out_channels": 3, "kernel_size": [3, 3, 3, 3], "strides": [1, 2, 2, 2],
         "upsample_kernel_size": [2, 2, 2], "filters": [8, 16, 32, 64], "deep_supervision": True},
    ),
    "DynUNet-residual": (
        "DynUNet", VOLUME, 1,
        {"spatial_dims": 3, "in_channels": 1, "out_channels": 3, "kernel_size": [3, 3, 3, 3], "strides": [1, 2, 2, 2],
         "upsample_kernel_size": [2, 2, 2], "filters": [8, 16, 32, 64], "res_block": True},
    ),
    "UNETR": (
        "UNETR", VOLUME, 1,
        {"in_channels": 1, "out_channels": 3, "img_size": VOLUME, "feature_size": 8, "hidden_size": 48, "mlp_dim": 96,
         "num_heads": 4},
    ),
    "SwinUNETR": ("SwinUNETR", (64, 64, 64), 1, {"in_channels": 1, "out_channels": 3, "feature_size": 12}),
    "VNet": ("VNet", VOLUME, 1, {"spatial_dims": 3, "in_channels": 1, "out_channels": 3}),
    "FlexibleUNet": ("FlexibleUNet", PLANE, 3, {"in_channels": 3, "out_channels": 3, "backbone": "efficientnet-b0"}),
    "HighResNet": ("HighResNet", (16, 16, 16), 1, {"spatial_dims": 3, "in_channels": 1, "out_channels": 3}),
    "MedNeXt": ("MedNeXt", VOLUME, 1, {"spatial_dims": 3, "in_channels": 1, "out_channels": 3, "init_filters": 8}),
    "DenseNet121": ("DenseNet121", PLANE, 3, {"spatial_dims": 2, "in_channels": 3, "out_channels": 4}),
    "SEResNet50": ("SEResNet50", PLANE, 3, {"spatial_dims": 2, "in_channels": 3, "num_classes": 4}),
    "EfficientNetBN": ("EfficientNetBN", PLANE, 3, {"model_name": "efficientnet-b0", "pretrained": False}),
    "resnet18": ("resnet18", VOLUME, 1, {"n_input_channels": 1, "num_classes": 4}),
    "ViT": (
        "ViT", VOLUME, 1,
        {"in_channels": 1, "img_size": VOLUME, "patch_size": (8, 8, 8), "hidden_size": 48, "mlp_dim": 96,
         "num_layers": 4, "num_heads": 4, "classification": True},
    ),
    "AutoEncoder": ("AutoEncoder", PLANE, 3, {"spatial_dims": 2, "in_channels": 3, "out_channels": 3, **STEPS}),
}  # fmt: skip
NETWORKS["AutoEncoder"][3]["strides"] = (2, 2, 2, 2)


def builders() -> dict[str, Callable[[], Case]]:
    """By name."""
    return {name: partial(_network, *network) for name, network in NETWORKS.items()}


def _network(name: str, size: tuple[int, ...], channels: int, options: dict[str, Any]) -> Case:
    from monai.networks import nets

    images = torch.rand(2, channels, *size)
    return Case(getattr(nets, name)(**options), (images,), (images,))
