"""The only place in these tests that knows where things live in the package: a move of modules is followed here."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ifso.cli.main import _parser, main
from ifso.criteria import registry as criteria
from ifso.curvature.solvers import SOLVERS
from ifso.data.registry import FORMS as DATA_FORMS
from ifso.models.registry import FORMS as MODEL_FORMS
from ifso.models.registry import PROVIDERS
from ifso.pruning.budget import NORMALIZERS, PRESETS, STAGED
from ifso.training.precision import PRECISIONS, SCORE_PRECISIONS
from ifso.training.settings import RECIPES
from ifso_repro.config import rows, studies

__all__ = ["main", "parser", "registries"]


def parser() -> argparse.ArgumentParser:
    """The parser of ``ifso`` with all its commands."""
    return _parser()


def registries() -> dict[str, Any]:
    """Everything that a user chooses by name, with its options where it has some."""
    return {
        "criteria": {name: criteria.find(name) for name in criteria.names()},
        "solvers": dict(SOLVERS),
        "presets": {name: dict(values) for name, values in PRESETS.items()},
        "staged": dict(STAGED),
        "recipes": {name: asdict(settings) for name, settings in RECIPES.items()},
        "normalizers": _names(NORMALIZERS),
        "precisions": _names(PRECISIONS),
        "score precisions": _names(SCORE_PRECISIONS),
        "providers": sorted(PROVIDERS),
        "networks": sorted(PROVIDERS["ifso"].names()),
        "model forms": MODEL_FORMS,
        "data forms": DATA_FORMS,
        "rows": sorted(rows()),
        "studies": {name: study.title for name, study in studies().items()},
    }


def _names(found: Any) -> list[str]:
    return sorted(found) if isinstance(found, Mapping) else list(found)
