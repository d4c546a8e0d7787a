"""Structured pruning for any PyTorch network.

>>> import ifso
>>> ifso.__version__
'0.1.0'

Names are imported when first used, so that ``import ifso`` stays quick and does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ifso._version import __version__
from ifso.errors import IfsoError

if TYPE_CHECKING:
    from ifso.costs import Cost, UnitCosts, cost, unit_costs
    from ifso.criteria.base import Criterion
    from ifso.criteria.scorer import score
    from ifso.curvature.loss_change import LossChange, true_loss_change
    from ifso.exporting.export import export
    from ifso.graph.balancing import balance
    from ifso.graph.channel_graph import ChannelGraph, Frozen, Group, Member
    from ifso.graph.tracing import trace
    from ifso.models import create_model
    from ifso.pruning.budget import Budget, Mixed
    from ifso.pruning.prune import prune
    from ifso.pruning.result import PruneResult
    from ifso.surgery.compact import compact_
    from ifso.surgery.mask import masked
    from ifso.surgery.recipe import Recipe, recipe
    from ifso.surgery.store import load, save

__all__ = [
    "Budget",
    "ChannelGraph",
    "Cost",
    "Criterion",
    "Frozen",
    "Group",
    "IfsoError",
    "LossChange",
    "Member",
    "Mixed",
    "PruneResult",
    "Recipe",
    "UnitCosts",
    "__version__",
    "balance",
    "compact_",
    "cost",
    "create_model",
    "export",
    "load",
    "masked",
    "prune",
    "recipe",
    "save",
    "score",
    "trace",
    "true_loss_change",
    "unit_costs",
]

_HOME = {
    "Budget": "ifso.pruning.budget",
    "ChannelGraph": "ifso.graph.channel_graph",
    "Cost": "ifso.costs",
    "Criterion": "ifso.criteria.base",
    "Frozen": "ifso.graph.channel_graph",
    "Group": "ifso.graph.channel_graph",
    "LossChange": "ifso.curvature.loss_change",
    "Member": "ifso.graph.channel_graph",
    "Mixed": "ifso.pruning.budget",
    "PruneResult": "ifso.pruning.result",
    "Recipe": "ifso.surgery.recipe",
    "UnitCosts": "ifso.costs",
    "balance": "ifso.graph.balancing",
    "compact_": "ifso.surgery.compact",
    "cost": "ifso.costs",
    "create_model": "ifso.models",
    "export": "ifso.exporting.export",
    "load": "ifso.surgery.store",
    "masked": "ifso.surgery.mask",
    "prune": "ifso.pruning.prune",
    "recipe": "ifso.surgery.recipe",
    "save": "ifso.surgery.store",
    "score": "ifso.criteria.scorer",
    "trace": "ifso.graph.tracing",
    "true_loss_change": "ifso.curvature.loss_change",
    "unit_costs": "ifso.costs",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for."""
    if name not in _HOME:
        raise AttributeError(f"module 'ifso' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
