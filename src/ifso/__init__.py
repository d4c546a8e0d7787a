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

_MODULES = {
    "costs": ("Cost", "UnitCosts", "cost", "unit_costs"),
    "criteria.base": ("Criterion",),
    "criteria.scorer": ("score",),
    "curvature.loss_change": ("LossChange", "true_loss_change"),
    "exporting.export": ("export",),
    "graph.balancing": ("balance",),
    "graph.channel_graph": ("ChannelGraph", "Frozen", "Group", "Member"),
    "graph.tracing": ("trace",),
    "models": ("create_model",),
    "pruning.budget": ("Budget", "Mixed"),
    "pruning.prune": ("prune",),
    "pruning.result": ("PruneResult",),
    "surgery.compact": ("compact_",),
    "surgery.mask": ("masked",),
    "surgery.recipe": ("Recipe", "recipe"),
    "surgery.store": ("load", "save"),
}
_HOME = {name: f"ifso.{module}" for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for."""
    if name not in _HOME:
        raise AttributeError(f"module 'ifso' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
