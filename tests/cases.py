"""Named networks with inputs, shared by the tests: deterministic, in float64, with parameters on which errors show."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from nets import attention, calling, convolution, layout
from torch import Tensor, nn

import ifso

SEED = 0

torch.set_num_threads(1)  # the tensors are tiny: a second thread only waits


@dataclass(frozen=True)
class Case:
    """A network and what it is called with. ``prunable``: some of its units must be free to go."""

    name: str
    build: Callable[[], nn.Module]
    make_inputs: Callable[[], Any]
    prunable: bool = True

    def model(self) -> nn.Module:
        """A new network in eval mode, always with the same parameters."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(SEED)
            model = self.build().double().eval()
        enliven_(model)
        return model

    def inputs(self) -> Any:
        """New inputs, always the same."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(SEED + 1)
            return self.make_inputs()

    def graph(self) -> ifso.ChannelGraph:
        """The graph of :meth:`model`, traced once for all tests; it holds for every model this case builds."""
        return _graph(self)


@cache
def _graph(case: Case) -> ifso.ChannelGraph:
    return ifso.trace(case.model(), case.inputs())


@torch.no_grad()
def enliven_(model: nn.Module, seed: int = SEED) -> nn.Module:
    """Move norms, biases, gains and running statistics away from zero and one, so that no error can hide there."""
    random = torch.Generator().manual_seed(seed)

    def uniform(like: Tensor, low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(like.shape, generator=random, dtype=like.dtype)

    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False):
            if sum(size > 1 for size in parameter.shape) > 1 and bool((parameter != parameter.flatten()[0]).any()):
                continue
            constant = key == "weight" or key in ("gain", "gamma", "original0")
            parameter.copy_(uniform(parameter, 0.5, 1.5) if constant else uniform(parameter, -0.5, 0.5))
        for key, buffer in module.named_buffers(recurse=False):
            if key == "running_mean":
                buffer.copy_(uniform(buffer, -0.5, 0.5))
            elif key == "running_var":
                buffer.copy_(uniform(buffer, 0.5, 1.5))
    return model


def image(*shape: int) -> Callable[[], Tensor]:
    """Random float64 inputs of that shape."""
    return lambda: torch.randn(shape, dtype=torch.float64)


def tokens() -> Tensor:
    """[batch, tokens, features]."""
    return torch.randn(2, 7, 6, dtype=torch.float64)


def _two_images() -> tuple[Tensor, Tensor]:
    return image(2, 3, 8, 8)(), image(2, 3, 8, 8)()


def _queries_and_memory() -> tuple[Tensor, Tensor]:
    return image(2, 7, 6)(), image(2, 5, 4)()


def _keywords() -> dict[str, Tensor]:
    return {"image": image(2, 3, 8, 8)(), "extra": image(2, 4)()}


def _image_list() -> tuple[list[Tensor]]:
    return ([image(3, 8, 8)(), image(3, 6, 10)()],)


def _words() -> Tensor:
    return torch.randint(0, 11, (2, 6))


_IMAGES = image(2, 3, 8, 8)

ALL = (
    Case("plain", convolution.plain, _IMAGES),
    Case("residual", convolution.residual, _IMAGES),
    Case("preactivation", convolution.PreActivation, _IMAGES),
    Case("concat", convolution.Dense, _IMAGES),
    Case("concat-with-input", convolution.WithInput, _IMAGES),
    Case("depthwise", convolution.depthwise, _IMAGES),
    Case("grouped", convolution.grouped, _IMAGES),
    Case("grouped-chain", convolution.grouped_chain, _IMAGES),
    Case("grouped-residual", convolution.GroupedResidual, _IMAGES),
    Case("grouped-input", convolution.GroupedInput, image(2, 4, 8, 8)),
    Case("grouped-with-input", convolution.GroupedWithInput, image(2, 2, 8, 8)),
    Case("transposed", convolution.transposed, _IMAGES),
    Case("transposed-grouped", convolution.transposed_grouped, _IMAGES),
    Case("transposed-depthwise", convolution.transposed_depthwise, _IMAGES),
    Case("unet", convolution.UNet, _IMAGES),
    Case("squeeze-excite", convolution.squeeze_excite, _IMAGES),
    Case("squeeze-excite-linear", convolution.squeeze_excite_linear, _IMAGES),
    Case("cbam", convolution.cbam, _IMAGES),
    Case("eca", convolution.eca, _IMAGES),
    Case("along-channels", convolution.AlongChannels, _IMAGES),
    Case("channels-as-batch", convolution.ChannelsAsBatch, _IMAGES, prunable=False),
    Case("fpn", convolution.FPN, image(1, 3, 16, 16)),
    Case("shared-module", convolution.SharedTwice, _IMAGES),
    Case("tuple-inputs", convolution.Siamese, _two_images),
    Case("prelu", convolution.prelu, _IMAGES),
    Case("group-norm", convolution.group_norm, _IMAGES),
    Case("instance-norm", convolution.instance_norm, _IMAGES),
    Case("norms-without-gains", convolution.NormsWithoutGains, _IMAGES),
    Case("conv1d", convolution.conv1d, image(2, 3, 12)),
    Case("conv3d", convolution.conv3d, image(2, 3, 4, 4, 4)),
    Case("weight-norm", convolution.weight_norm, _IMAGES),
    Case("weight-norm-hooked", convolution.weight_norm_hooked, _IMAGES),
    Case("wavenet", convolution.GatedDilated, image(2, 3, 12)),
    Case("weight-standardised", convolution.weight_standardised, _IMAGES),
    Case("weight-standardised-batch-norm", convolution.weight_standardised_batch_norm, _IMAGES),
    Case("im2col", convolution.Im2Col, _IMAGES),
    Case("response-norm", convolution.response_norm, _IMAGES),
    Case("channel-softmax", convolution.ChannelSoftmax, _IMAGES),
    Case("shuffle", layout.shuffled, _IMAGES),
    Case("shuffle-depthwise", layout.shuffle_depthwise, _IMAGES),
    Case("channel-shuffle", layout.channel_shuffle, _IMAGES),
    Case("shufflenet-v1", layout.ShuffleNetV1, _IMAGES),
    Case("shufflenet-v2", layout.shufflenet_v2, _IMAGES),
    Case("shufflenet-v2-deep", layout.shufflenet_v2_deep, _IMAGES),
    Case("pixel-shuffle", layout.pixel_shuffle, _IMAGES),
    Case("pixel-unshuffle", layout.pixel_unshuffle, _IMAGES),
    Case("flatten", layout.flattened, _IMAGES),
    Case("padded", layout.padded, _IMAGES),
    Case("padded-one-number", layout.padded_one_number, _IMAGES),
    Case("padded-lambda", layout.padded_lambda, _IMAGES),
    Case("zero-joined", layout.ZeroJoined, _IMAGES),
    Case("res2net", layout.Res2Net, _IMAGES),
    Case("halves", layout.Halves, _IMAGES),
    Case("unequal-split", layout.UnequalSplit, _IMAGES),
    Case("sliced-by-number", layout.SlicedByNumber, _IMAGES),
    Case("reversible", layout.Reversible, _IMAGES),
    Case("maxout", layout.Maxout, _IMAGES),
    Case("stacked", layout.Stacked, _IMAGES),
    Case("attention", attention.attention, tokens),
    Case("attention-of-width", attention.attention_of_width, tokens),
    Case("attention-biased", attention.attention_biased, tokens),
    Case("rms-norm", attention.rms_norm, tokens),
    Case("one-head", attention.OneHead, tokens),
    Case("one-head-alike", attention.OneHeadAlike, tokens),
    Case("one-head-viewed", attention.ViewedAsKeys, tokens),
    Case("grouped-query", attention.GroupedQuery, tokens),
    Case("indexed-by-head", attention.IndexedByHead, tokens),
    Case("multihead", attention.multihead, tokens),
    Case("multihead-sequence-first", attention.multihead_sequence_first, tokens),
    Case("multihead-weights", attention.multihead_weights, tokens),
    Case("cross-attention", attention.CrossAttention, _queries_and_memory),
    Case("encoder-layer", attention.Encoder, tokens),
    Case("convnext", attention.ConvNeXt, _IMAGES),
    Case("channels-first-norm", attention.channels_first_norm, _IMAGES),
    Case("vit", attention.ViT, _IMAGES),
    Case("glu", attention.GluMlp, tokens),
    Case("swiglu", attention.SwiGluMlp, tokens),
    Case("mlp-batch-norm", attention.mlp_batch_norm, image(4, 6)),
    Case("mixer", attention.Mixer, tokens),
    Case("tied-weights", attention.TiedLanguageModel, _words),
    Case("einsum", attention.EinsumMix, tokens),
    Case("dict-inputs", calling.KeywordInputs, _keywords),
    Case("dict-outputs", calling.DictOutputs, _IMAGES),
    Case("many-outputs", calling.ManyOutputs, _IMAGES),
    Case("nested-inputs", calling.NestedInputs, _image_list),
    Case("data-dependent", calling.DataDependent, _IMAGES),
    Case("chosen-positions", calling.ChosenPositions, _IMAGES),
    Case("real-residual", calling.real_residual, _IMAGES),
    Case("real-along-channels", calling.real_along_channels, _IMAGES),
    Case("real-channels-as-batch", calling.real_channels_as_batch, _IMAGES, prunable=False),
    Case("real-shuffle", calling.real_shuffle, _IMAGES),
    Case("real-attention", calling.real_attention, tokens),
    Case("real-padded", calling.real_padded, _IMAGES),
    Case("real-res2net", calling.real_res2net, _IMAGES),
    Case("recurrent", calling.Recurrent, tokens, prunable=False),
    Case("constant-per-channel", calling.Constants, _IMAGES),
    Case("buffer-per-channel", calling.BufferPerChannel, _IMAGES),
    Case("in-place", calling.InPlace, _IMAGES),
    Case("in-place-shape", calling.InPlaceShape, tokens),
    Case("insistent-code", calling.Insistent, _IMAGES, prunable=False),
    Case("gru-by-hand", calling.GatedByHand, tokens),
    Case("experts", calling.Experts, tokens),
    Case("scripted", calling.Scripted, _IMAGES),
    Case("configured", calling.Configured, _IMAGES),
    Case("unused-parts", calling.unused_parts, _IMAGES),
)

CASES = {case.name: case for case in ALL}


FEW = frozenset({
    "residual", "concat", "depthwise", "grouped", "grouped-with-input", "transposed", "unet", "squeeze-excite",
    "shared-module", "conv1d", "weight-norm", "shuffle-depthwise", "shufflenet-v2", "flatten", "padded", "res2net",
    "halves", "maxout", "multihead", "grouped-query", "cross-attention", "vit", "convnext", "swiglu", "tied-weights",
    "dict-inputs", "many-outputs", "real-residual", "in-place", "experts", "unused-parts",
})  # fmt: skip
"""A case of every kind, for what hangs on the kind and not on the network; the others are slow there."""


def every_case(few: Collection[str] = ()) -> pytest.MarkDecorator:
    """Parametrise a test over all cases, named by their names; those that are not among ``few``, if given, are slow."""
    return _parametrised(ALL, few)


def prunable_cases(few: Collection[str] = ()) -> pytest.MarkDecorator:
    """The same over the cases of which something can be removed."""
    return _parametrised([case for case in ALL if case.prunable], few)


def _parametrised(cases: Iterable[Case], few: Collection[str]) -> pytest.MarkDecorator:
    assert CASES.keys() >= set(few)
    slow = {case.name: [pytest.mark.slow] if few and case.name not in few else [] for case in cases}
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.name, marks=slow[case.name]) for case in cases])


def run(model: nn.Module, inputs: Any) -> Any:
    """``model(x)``, ``model(*tuple)`` or ``model(**dict)``."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


@torch.no_grad()
def outputs(model: nn.Module, inputs: Any) -> list[Tensor]:
    """All floating-point tensors that a model returns."""
    return list(tensors(run(model, inputs)))


def tensors(tree: Any) -> Iterator[Tensor]:
    """Every floating-point tensor in nested containers."""
    if isinstance(tree, Tensor):
        if tree.is_floating_point():
            yield tree
        return
    for item in tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, (tuple, list)) else ():
        yield from tensors(item)


def difference(wanted: list[Tensor], found: list[Tensor]) -> float:
    """The largest |a - b| / max |a| over the tensors; infinite where shapes differ or something is not finite."""
    if [tensor.shape for tensor in wanted] != [tensor.shape for tensor in found]:
        return float("inf")
    worst = 0.0
    for a, b in zip(wanted, found, strict=True):
        if not (a.isfinite().all() and b.isfinite().all()):
            return float("inf")
        if a.numel():
            worst = max(worst, float((a - b).abs().max() / a.abs().max().clamp(min=1e-30)))
    return worst


def random_keep(graph: ifso.ChannelGraph, seed: int, share: float = 0.5) -> dict[str, Tensor]:
    """About ``share`` of every group goes, at random but never all of it, then made legal."""
    random = torch.Generator().manual_seed(seed)
    keep = {}
    for group in graph.groups:
        keep[group.name] = torch.rand(group.size, generator=random) > share
        keep[group.name][torch.randint(group.size, (), generator=random)] = True
    return ifso.balance(graph, keep)


def removed(keep: Mapping[str, Tensor]) -> int:
    """How many units go."""
    return sum(int((~choice).sum()) for choice in keep.values())
