"""transformers: classifiers and detectors from small configurations, trained by their own losses."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.zoo.build import Case

SIZE, LABELS = 64, 5
TOKENS = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": SIZE,
    "patch_size": 16,
}  # fmt: skip
WINDOWS = {"image_size": SIZE, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4}
STAGES = {"hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 2, 1]}
CLASSIFIERS: dict[str, dict[str, Any]] = {
    "ViT": TOKENS, "DeiT": TOKENS, "Beit": TOKENS, "Data2VecVision": TOKENS, "Dinov2": TOKENS, "ViTMSN": TOKENS,
    "Dinov2WithRegisters": TOKENS, "IJepa": TOKENS,
    "Swin": WINDOWS, "Swinv2": WINDOWS,
    "ConvNext": STAGES, "ConvNextV2": STAGES,
    "ResNet": {**STAGES, "embedding_size": 16}, "RegNet": {**STAGES, "embedding_size": 16, "groups_width": 8},
    "Bit": {"hidden_sizes": [128, 128, 256, 256], "depths": [1, 1, 2, 1], "embedding_size": 32}, "HGNetV2": {},
    "MobileNetV1": {"image_size": SIZE, "depth_multiplier": 0.25}, "MobileNetV2": {"image_size": SIZE},
    "MobileViT": {"image_size": SIZE}, "MobileViTV2": {"image_size": SIZE}, "EfficientNet": {"image_size": SIZE},
    "Levit": {"image_size": SIZE}, "PoolFormer": {**STAGES}, "Pvt": {"image_size": SIZE, "depths": [1, 1, 1, 1]},
    "PvtV2": {"image_size": SIZE, "depths": [1, 1, 1, 1]}, "Segformer": {"depths": [1, 1, 1, 1]},
    "Cvt": {"depth": [1, 2, 3], "embed_dim": [16, 32, 64], "num_heads": [1, 2, 4]},
    "FocalNet": {"image_size": SIZE, "embed_dim": 16, "depths": [1, 1]},
    "SwiftFormer": {}, "Hiera": {"image_size": [SIZE, SIZE], "depths": [1, 1, 2, 1], "embed_dim": 16,
                                 "num_heads": [1, 2, 4, 8]},
    "TextNet": {},
}  # fmt: skip
DECODING = {"encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_queries": 6}
DETR = {
    **DECODING, "d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "auxiliary_loss": True,
    "backbone": None, "use_timm_backbone": False, "use_pretrained_backbone": False,
}  # fmt: skip
REAL_TIME = {
    "encoder_hidden_dim": 32, "d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_queries": 12,
    "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_denoising": 0,
    "encoder_in_channels": [24, 32, 48], "decoder_in_channels": [32, 32, 32], "feat_strides": [8, 16, 32],
}  # fmt: skip
DETECTORS: dict[str, dict[str, Any]] = {
    "Detr": DETR, "ConditionalDetr": DETR, "TableTransformer": DETR, "DabDetr": {**DETR, "hidden_size": 32},
    "DeformableDetr": {**DETR, "num_feature_levels": 3, "two_stage": False},
    "RTDetr": REAL_TIME, "RTDetrV2": REAL_TIME, "DFine": REAL_TIME,
    "Yolos": {**TOKENS, "image_size": [SIZE, SIZE], "num_detection_tokens": 6},
}  # fmt: skip
MASKS = {
    "feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "num_attention_heads": 4, "dim_feedforward": 48,
    "encoder_feedforward_dim": 48, "encoder_layers": 1, "decoder_layers": 2, "num_queries": 6, "train_num_points": 64,
}  # fmt: skip
SEGMENTERS: dict[str, dict[str, Any]] = {
    "SegformerForSemanticSegmentation": {"depths": [1, 1, 1, 1], "decoder_hidden_size": 32},
    "BeitForSemanticSegmentation": {**TOKENS, "num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "UperNetForSemanticSegmentation": {"hidden_size": 32},
    "MobileViTForSemanticSegmentation": {"image_size": SIZE, "aspp_out_channels": 32},
    "MobileNetV2ForSemanticSegmentation": {"image_size": SIZE},
    "DPTForSemanticSegmentation": {**TOKENS, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3],
                                   "neck_hidden_sizes": [8, 16, 24, 32], "fusion_hidden_size": 16},
    "Mask2FormerForUniversalSegmentation": MASKS,
    "MaskFormerForInstanceSegmentation": {},
    "OneFormerForUniversalSegmentation": {
        "hidden_dim": 64, "mask_dim": 64, "conv_dim": 64, "num_queries": 6, "num_attention_heads": 4,
        "encoder_layers": 1, "decoder_layers": 2, "dim_feedforward": 48, "encoder_feedforward_dim": 48,
        "train_num_points": 64, "strides": [4, 8, 16, 32], "query_dec_layers": 1, "text_encoder_width": 64,
        "text_encoder_num_layers": 1, "text_encoder_n_ctx": 2, "is_training": True,
    },
}  # fmt: skip


def builders() -> dict[str, Callable[[], Case]]:
    """By class."""
    classifiers = {f"{name}ForImageClassification": partial(_classifier, name) for name in CLASSIFIERS}
    detectors = {f"{name}ForObjectDetection": partial(_detector, name) for name in DETECTORS}
    return classifiers | detectors | {name: partial(_segmenter, name) for name in SEGMENTERS}


def _configuration(name: str, options: dict[str, Any]) -> Any:
    """A configuration with few labels and nothing left to chance."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**options)
    config.num_labels = LABELS
    for key in vars(config):
        if "drop" in key and isinstance(getattr(config, key), float):
            setattr(config, key, 0.0)
    return config


def _backbone() -> Any:
    import transformers

    names = ["stage2", "stage3", "stage4"]
    return transformers.ResNetConfig(**STAGES, embedding_size=16, out_features=names)


def _named(name: str, config: Any) -> nn.Module:
    import transformers

    return getattr(transformers, name)(config)


def _classifier(name: str) -> Case:
    model = _named(f"{name}ForImageClassification", _configuration(name, CLASSIFIERS[name]))
    images = torch.rand(2, 3, SIZE, SIZE)
    return Case(model, {"pixel_values": images}, {"pixel_values": images, "labels": torch.tensor([1, 3])})


def _detector(name: str) -> Case:
    options = dict(DETECTORS[name])
    if name != "Yolos":
        options["backbone_config"] = _backbone()
    model = _named(f"{name}ForObjectDetection", _configuration(name, options))
    boxes = torch.tensor([[0.5, 0.5, 0.4, 0.4], [0.3, 0.3, 0.3, 0.5]])
    labels = [
        {"class_labels": torch.tensor([1, 2]), "boxes": boxes},
        {"class_labels": torch.tensor([0]), "boxes": boxes[:1]},
    ]
    images = torch.rand(2, 3, SIZE, SIZE)
    return Case(model, {"pixel_values": images}, {"pixel_values": images, "labels": labels})


def _segmenter(name: str) -> Case:
    family = re.split("For[A-Z]", name)[0]
    options = dict(SEGMENTERS[name])
    if family in ("UperNet", "Mask2Former", "OneFormer"):
        options["backbone_config"] = _swin()
    model = _maskformer() if family == "MaskFormer" else _named(name, _configuration(family, options))
    images = torch.rand(2, 3, SIZE, SIZE)
    inputs = {"pixel_values": images}
    if family in ("Mask2Former", "MaskFormer", "OneFormer"):
        masks = [(torch.rand(2, SIZE, SIZE) > 0.5).to(images.dtype) for _ in range(2)]
        targets = {"mask_labels": masks, "class_labels": [torch.tensor([1, 2]), torch.tensor([0, 3])]}
        if family == "OneFormer":
            inputs["task_inputs"] = torch.randint(1, 1000, (2, 77))
            inputs["text_inputs"] = torch.randint(1, 1000, (2, 4, 77))
    else:
        targets: dict[str, Any] = {"labels": torch.randint(0, LABELS, (2, SIZE, SIZE))}
    return Case(model, inputs, {**inputs, **targets})


def _swin() -> Any:
    stages = ["stage1", "stage2", "stage3", "stage4"]
    options = {**WINDOWS, "depths": [1, 1, 1, 1], "num_heads": [2, 2, 4, 4], "out_features": stages}
    return _configuration("Swin", options)


def _maskformer() -> nn.Module:
    import transformers

    decoder = _configuration("Detr", {**DETR, "backbone_config": _backbone(), "num_queries": 6})
    options = {"backbone_config": _swin(), "decoder_config": decoder, "fpn_feature_size": 32, "mask_feature_size": 32}
    return transformers.MaskFormerForInstanceSegmentation(_configuration("MaskFormer", options))
