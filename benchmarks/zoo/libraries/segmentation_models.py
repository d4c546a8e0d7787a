"""segmentation_models_pytorch: every decoder on two encoders."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.zoo.build import Case

DECODERS = (
    "Unet", "UnetPlusPlus", "MAnet", "Linknet", "FPN", "PSPNet", "PAN", "DeepLabV3", "DeepLabV3Plus", "UPerNet",
    "Segformer",
)  # fmt: skip
ENCODERS = ("resnet18", "mobilenet_v2")
OTHERS = (("Unet", "efficientnet-b0"), ("Unet", "mit_b0"), ("Segformer", "mit_b0"), ("DPT", "tu-vit_tiny_patch16_224"))


def builders() -> dict[str, Callable[[], Case]]:
    """By decoder and encoder: ``Unet-resnet18``."""
    pairs = [*((decoder, encoder) for encoder in ENCODERS for decoder in DECODERS), *OTHERS]
    return {f"{decoder}-{encoder}": partial(_segmenter, decoder, encoder) for decoder, encoder in pairs}


def _segmenter(decoder: str, encoder: str) -> Case:
    import segmentation_models_pytorch as library

    size = 224 if decoder == "DPT" else 128
    model = getattr(library, decoder)(encoder_name=encoder, encoder_weights=None, classes=4)
    images = torch.rand(2, 3, size, size)
    return Case(model, (images,), (images,))
