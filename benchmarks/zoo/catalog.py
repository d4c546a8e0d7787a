"""Which networks the zoo holds: torchvision's, one small variant of every timm family, and those of other libraries."""

from __future__ import annotations

import importlib
import json
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.gpu_zoo.networks import FAMILIES, Entry, timm_entries, torchvision_entries

HERE = Path(__file__).resolve().parent
NAMES = HERE / "timm_names.json"
"""Like ``FAMILIES``, by the first word of the model name: finer than modules, which may hold several architectures."""

SETS = ("torchvision", "timm", "timm-names", "all", "third-party")
LIBRARIES = {
    "ultralytics": "ultralytics",
    "segmentation_models": "segmentation_models_pytorch",
    "transformers": "transformers",
    "monai": "monai",
}
"""Files of ``libraries/``, and the package each needs."""
TORCHVISION_KINDS = ("classification", "segmentation", "video", "detection", "optical_flow")


def entries(which: str) -> list[Entry]:
    """The networks of a set in a fixed order; ``"all"`` is torchvision and the timm families."""
    found: list[Entry] = []
    if which in ("torchvision", "all"):
        found += torchvision_entries(TORCHVISION_KINDS)
    if which in ("timm", "all"):
        found += timm_entries(FAMILIES)
    if which == "timm-names":
        found += timm_entries(NAMES)
    if which == "third-party":
        found += third_party_entries()
    return found


def third_party_entries() -> list[Entry]:
    """Every network of ``libraries/``."""
    return [
        Entry(source, package, name)
        for source, package in LIBRARIES.items()
        for name in importlib.import_module(f"libraries.{source}").builders()
    ]


def write_timm_choices() -> str:
    """Choose the smallest model of every timm family, by module and by name; say what was skipped."""
    import timm

    models = {module: timm.list_models(module=module) for module in timm.list_modules()}
    module_of = {name: module for module, names in models.items() for name in names if not name.startswith("test_")}
    sizes, skipped = _sizes(module_of)
    _write(FAMILIES, sizes, module_of.__getitem__)
    _write(NAMES, sizes, lambda name: re.split(r"[_\d]", name)[0])
    lost = sorted(set(models) - {module_of[name] for name in sizes})
    return (
        f"{len(sizes)} of {len(module_of)} timm models measured, {len(json.loads(FAMILIES.read_text()))} families, "
        f"{len(json.loads(NAMES.read_text()))} names; skipped {skipped}; families without a model: {lost}"
    )


def _sizes(names: Iterable[str]) -> tuple[dict[str, dict], list[str]]:
    """Parameters and native input of each model, built on the meta device."""
    import timm
    import torch

    sizes: dict[str, dict] = {}
    skipped = []
    for name in names:
        try:
            with warnings.catch_warnings(), torch.device("meta"):
                warnings.simplefilter("ignore")
                model = timm.create_model(name)
        except Exception as error:  # whatever a third-party constructor raises
            skipped.append(f"{name} ({type(error).__name__})")
            continue
        params = sum(parameter.numel() for parameter in model.parameters())
        sizes[name] = {"model": name, "params": params, "input_size": list(model.pretrained_cfg["input_size"])}
    return sizes, skipped


def _write(file: Path, sizes: dict[str, dict], family: Callable[[str], str]) -> None:
    """Keep the model with the fewest parameters (then the smallest input) of each family."""
    chosen: dict[str, dict] = {}
    for name in sorted(sizes, key=lambda name: (sizes[name]["params"], sizes[name]["input_size"][-1], name)):
        chosen.setdefault(family(name), sizes[name])
    lines = [f"  {json.dumps(key)}: {json.dumps(chosen[key])}" for key in sorted(chosen)]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")
