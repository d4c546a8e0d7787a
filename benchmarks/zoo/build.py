"""Build one network of the zoo with the smallest inputs it accepts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo.cases import SEED, SMALL_SIZES, scenes
from benchmarks.zoo.lively import calibrate_, perturb_
from benchmarks.zoo.networks import Entry
from ifso.common.tensors import map_tensors, tensors_in

CLIPS = ((8, 64), (16, 64), (16, 112), (16, 224))
"""Frames and size of the videos to try."""


class Absent(Exception):
    """The installed library has no such network."""


@dataclass
class Case:
    """A network in eval mode with positional or keyword inputs, and those of train mode where they are others."""

    model: nn.Module
    inputs: tuple[Any, ...] | dict[str, Any]
    training_inputs: tuple[Any, ...] | dict[str, Any] | None = None
    ran: set[str] = field(default_factory=set)
    """Names of the convolutions and linear layers that the inputs reach."""
    notes: list[str] = field(default_factory=list)

    def run(self) -> Any:
        """The outputs in the present mode, always from the same random state."""
        torch.manual_seed(SEED)
        inputs = self.training_inputs if self.model.training and self.training_inputs else self.inputs
        with torch.no_grad():
            return self.model(**inputs) if isinstance(inputs, dict) else self.model(*inputs)

    @property
    def input_shape(self) -> str:
        """The shape of the (first) input in words: ``2x3x64x64``."""
        first = next(iter(self.inputs.values() if isinstance(self.inputs, dict) else self.inputs))
        shapes = [first.shape] if isinstance(first, Tensor) else [image.shape for image in first]
        return " + ".join("x".join(map(str, shape)) for shape in shapes)


@dataclass(frozen=True)
class Candidate:
    """A way to build and to feed a network, to be tried."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    training_inputs: Callable[[], tuple[Any, ...]] | None = None
    abstract: bool = True
    """Whether it can be tried on the meta device first."""


def build(entry: Entry, double_below: float, device: str = "cpu") -> Case:
    """The network in float64 if it has fewer than ``double_below`` parameters, conditioned, with inputs it accepts."""
    warnings.simplefilter("ignore")
    problems: list[str] = []
    for candidate in candidates(entry):
        try:
            if candidate.abstract:
                _try_on_meta(candidate)
            return _realise(candidate, double_below, device)
        except Exception as error:  # whatever a third-party model raises on a size it does not accept
            problems.append(f"{type(error).__name__}: {error}")
    raise RuntimeError(
        f"the network itself runs on none of the inputs tried; last: {problems[-1] if problems else '-'}"
    )


def candidates(entry: Entry) -> Iterator[Candidate]:
    """Ways to build and feed the network, the smallest inputs first."""
    makers = {"detection": _detection, "video": _video, "optical_flow": _optical_flow}
    if entry.source == "timm":
        return _timm(entry)
    return makers.get(entry.kind, _image)(entry)


def _try_on_meta(candidate: Candidate) -> None:
    """Raise if the network refuses the inputs; networks that look at values pass and are only tried for real."""
    try:
        with torch.device("meta"), torch.no_grad():
            candidate.build().eval()(*candidate.inputs())
    except (RuntimeError, NotImplementedError) as error:
        if "meta" not in str(error).lower():
            raise


def _realise(candidate: Candidate, double_below: float, device: str) -> Case:
    """Build for real, in float64 if small enough and possible, and check that the outputs are finite."""

    def make() -> Case:
        model = candidate.build().to(torch.get_default_dtype()).eval()
        perturb_(model, SEED)
        torch.manual_seed(SEED)
        moved = partial(map_tensors, change=lambda tensor: tensor.to(device))
        training = moved(candidate.training_inputs()) if candidate.training_inputs else None
        case = Case(model.to(device), moved(candidate.inputs()), training)
        case.ran = calibrate_(model, case.run)
        if not finite(case.run()):
            raise RuntimeError("outputs are not finite")
        return case

    return in_float64_if_possible(make, _count(candidate.build) < double_below)


def in_float64_if_possible(make: Callable[[], Case], small: bool = True) -> Case:
    """What ``make`` gives with float64 as the usual dtype or, with a note, with float32."""
    notes: list[str] = []
    if small:
        try:
            return _made(make, torch.float64)
        except Exception as error:  # whatever a network raises in a precision that it does not know
            notes.append(f"does not run in float64 ({type(error).__name__})")
    case = _made(make, torch.float32)
    case.notes += notes
    return case


def _made(make: Callable[[], Case], dtype: torch.dtype) -> Case:
    torch.set_default_dtype(dtype)
    torch.manual_seed(SEED)
    return make()


def finite(outputs: Any) -> bool:
    """Whether there are outputs and all are finite."""
    found = tensors_in(outputs)
    return bool(found) and all(bool(tensor.isfinite().all()) for tensor in found)


def _count(build: Callable[[], nn.Module]) -> int:
    """Number of parameters, without memory for them where the builder allows that."""
    try:
        with torch.device("meta"):
            model = build()
    except (RuntimeError, NotImplementedError):
        torch.set_default_dtype(torch.float32)
        model = build()
    return sum(parameter.numel() for parameter in model.parameters())


def _image(entry: Entry) -> Iterator[Candidate]:
    """Torchvision classification and segmentation; ``image_size`` where the builder takes it."""
    for size in SMALL_SIZES:
        options = {"image_size": size} if entry.name.startswith("vit_") else {}
        yield Candidate(_torchvision(entry, **options), _images(2, size))


def _video(entry: Entry) -> Iterator[Candidate]:
    for frames, size in CLIPS:
        batch = 2 if size < 224 else 1
        yield Candidate(_torchvision(entry), _images(batch, frames, size))


def _optical_flow(entry: Entry) -> Iterator[Candidate]:
    yield Candidate(
        _torchvision(entry), lambda: (torch.rand(1, 3, 128, 128), torch.rand(1, 3, 128, 128)), abstract=False
    )


def _torchvision(entry: Entry, **options: Any) -> Callable[[], nn.Module]:
    from torchvision import models

    if entry.kind in ("segmentation", "detection"):
        options["weights_backbone"] = None
    if entry.name in ("googlenet", "inception_v3"):
        options["init_weights"] = False
    return lambda: models.get_model(entry.name, weights=None, **options)


def _timm(entry: Entry) -> Iterator[Candidate]:
    """Small sizes with ``img_size`` where the model takes it, then its native size."""
    import timm

    if not timm.is_model(entry.name):
        raise Absent(f"timm {timm.__version__} has no such network")
    native = timm.get_pretrained_cfg(entry.name).input_size[-1]
    for size in dict.fromkeys([*SMALL_SIZES, native]):
        for options in ({"img_size": size}, {}):
            yield Candidate(partial(timm.create_model, entry.name, **options), _images(2, size))


def _images(count: int, *sizes: int) -> Callable[[], tuple[Tensor]]:
    """Square images, or clips of them."""
    return lambda: (torch.randn(count, 3, *sizes, sizes[-1]),)


SCORE_THRESHOLD = 1e-3
"""Low, so that a network with random weights has detections."""
SCENES = ((160, 192), (224, 176))
FEW = 8
"""Detections kept per image."""
PROPOSALS = {
    "rpn_post_nms_top_n_test": 50,
    "rpn_post_nms_top_n_train": 50,
    "box_batch_size_per_image": 32,
    "box_detections_per_img": FEW,
    "box_score_thresh": SCORE_THRESHOLD,
}


def _detection(entry: Entry) -> Iterator[Candidate]:
    """Two images of different sizes, shrunk to at least 160 where the builder takes it, with targets for train mode."""
    options: dict[str, Any] = {"score_thresh": SCORE_THRESHOLD, "detections_per_img": FEW, "topk_candidates": 50}
    if "rcnn" in entry.name:
        options = dict(PROPOSALS)
    if not entry.name.startswith("ssd"):
        options |= {"min_size": 160, "max_size": 256}

    def seen() -> tuple[Any, Any]:
        return scenes(entry.name, SCENES, torch.Generator().manual_seed(SEED))

    yield Candidate(_torchvision(entry, **options), lambda: seen()[:1], seen, abstract=False)
