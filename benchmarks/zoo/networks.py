"""Which networks the zoo holds: torchvision's, one small variant of every timm family, and those of other libraries."""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ifso.errors import IfsoError

FAMILIES = Path(__file__).resolve().parent / "timm_families.json"
"""{timm.models module: {model, params, input_size}}, the smallest model of each module."""

SETS = ("torchvision", "timm", "all", "third-party")
"""Those of ``benchmarks/zoo/run.py``."""

LIBRARIES = {
    "ultralytics": "ultralytics",
    "segmentation_models": "segmentation_models_pytorch",
    "transformers": "transformers",
    "monai": "monai",
}
"""Files of ``libraries/``, and the package each needs."""

MEASURED = Path(__file__).resolve().parents[2] / "docs" / "zoo" / "results.json"
"""What the zoo on a CPU found out about these networks: from it, which ones take long."""

WEIGHTS_A_SECOND = 2e7
"""So many weights count as much as a second of tracing."""

KINDS = ("classification", "segmentation", "detection")
"""The torchvision tasks that ``python -m benchmarks zoo`` goes over."""

ALL_KINDS = ("classification", "segmentation", "video", "detection", "optical_flow")
"""Those that ``benchmarks/zoo/run.py`` goes over."""

OWN = "own"
"""The kind of a network that somebody named."""


@dataclass(frozen=True)
class Entry:
    """One network of a zoo. ``kind`` is the torchvision task or the timm family."""

    source: str
    kind: str
    name: str

    @property
    def key(self) -> str:
        """As the command line names it: ``torchvision:resnet18``."""
        return f"{self.source}:{self.name}"


def entries(which: str) -> list[Entry]:
    """The networks of a set in a fixed order; ``"all"`` is torchvision and the timm families."""
    found = torchvision_entries(ALL_KINDS) if which in ("torchvision", "all") else []
    found += timm_entries() if which in ("timm", "all") else []
    return found + (third_party_entries() if which == "third-party" else [])


def torchvision_entries(kinds: Sequence[str] = KINDS) -> list[Entry]:
    """Every builder of these tasks that is not quantized."""
    from torchvision import models

    modules = {kind: getattr(models, kind, models) for kind in kinds}
    return [
        Entry("torchvision", kind, name)
        for kind, module in modules.items()
        for name in sorted(models.list_models(module=module))
    ]


def timm_entries(file: Path = FAMILIES) -> list[Entry]:
    """The committed choice, one per family."""
    families = json.loads(file.read_text())
    return [Entry("timm", family, chosen["model"]) for family, chosen in sorted(families.items())]


def installed(entries: Sequence[Entry]) -> tuple[list[Entry], list[Entry]]:
    """Those that the installed timm has, and those that it lacks."""
    lacking: list[Entry] = []
    if any(entry.source == "timm" for entry in entries):
        import timm

        lacking = [entry for entry in entries if entry.source == "timm" and not timm.is_model(entry.name)]
    return [entry for entry in entries if entry not in lacking], lacking


def named(models: Sequence[str]) -> list[Entry]:
    """Networks by their MODEL names, in place of those of the zoo.

    >>> [entry.key for entry in named(["ifso:resnet20", "nets.py:mine"])]
    ['ifso:resnet20', 'nets.py:mine']
    """
    found = []
    for model in models:
        source, colon, name = model.partition(":")
        if not colon or not source or not name:
            raise IfsoError(f"--models takes names such as torchvision:resnet18, got {model!r}")
        found.append(Entry(source, OWN, name))
    return found


def matching(entries: Sequence[Entry], patterns: Sequence[str]) -> list[Entry]:
    """Those whose name, with or without its source, or whose kind fits a pattern; all without patterns.

    >>> [entry.name for entry in matching(named(["ifso:resnet20", "ifso:vgg16"]), ["res*"])]
    ['resnet20']
    """
    if not patterns:
        return list(entries)
    found = [e for e in entries if any(fnmatch(word, p) for word in (e.key, e.name, e.kind) for p in patterns)]
    if not found:
        raise IfsoError(f"--only {' '.join(patterns)} fits none of the {len(entries)} networks")
    return found


def by_cost(entries: Sequence[Entry], file: Path = MEASURED) -> list[Entry]:
    """The networks, those first that take little time: of Python, as tracing does, and for their weights."""
    rows = json.loads(file.read_text())["results"]

    def cost(entry: Entry) -> float:
        row = rows.get(entry.key, {})
        return float(row.get("trace_seconds", 0.0) + row.get("params", 0) / WEIGHTS_A_SECOND)

    return sorted(entries, key=cost)


def third_party_entries() -> list[Entry]:
    """Every network of ``libraries/``."""
    return [
        Entry(source, package, name)
        for source, package in LIBRARIES.items()
        for name in importlib.import_module(f"benchmarks.zoo.libraries.{source}").builders()
    ]


def write_families(file: Path = FAMILIES) -> str:
    """Choose the model with the fewest weights (then the smallest input) of every timm family; say what was skipped."""
    import timm
    import torch

    families: dict[str, dict[str, Any]] = {}
    skipped: list[str] = []
    for family in timm.list_modules():
        for name in timm.list_models(module=family):
            try:
                with warnings.catch_warnings(), torch.device("meta"):
                    warnings.simplefilter("ignore")
                    model = timm.create_model(name)
            except Exception as error:  # whatever a third-party constructor raises
                skipped.append(f"{name} ({type(error).__name__})")
                continue
            params, size = sum(weight.numel() for weight in model.parameters()), model.pretrained_cfg["input_size"]
            found = {"model": name, "params": params, "input_size": list(size)}
            if not name.startswith("test_"):
                families[family] = min(families.get(family, found), found, key=_size)
    lines = [f"  {json.dumps(family)}: {json.dumps(families[family])}" for family in sorted(families)]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return f"{len(families)} families; skipped {', '.join(skipped) or 'none'}"


def _size(found: dict[str, Any]) -> tuple[int, int, str]:
    return found["params"], found["input_size"][-1], found["model"]
