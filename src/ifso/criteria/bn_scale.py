"""BN scale: units that a norm layer multiplies by a large gain matter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ifso.criteria.base import Criterion, Task
from ifso.errors import ScoreError
from ifso.graph.channel_graph import Group, Member

NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


@dataclass(frozen=True)
class BnScale(Criterion):
    """s_i = Σ |γ_i| over the norm layers that unit i passes through ("Network Slimming", Liu et al., ICCV 2017).

    A norm layer is one of PyTorch's, or a module whose class has ``Norm`` in its name; its gain is its ``weight``.
    """

    name = "bn-scale"
    needs = "weights"

    def units(self, task: Task, batch: Any) -> Tensor:  # noqa: ARG002 (one protocol)
        """Scores [units]."""
        slices = [task.slices(group, member) for group in task.graph.groups for member in _gains(task, group)]
        return task.add_slices((part, task.weight(part.parameter).abs()) for part in slices)


def _gains(task: Task, group: Group) -> list[Member]:
    gains = [member for member in group.members if member.role == "follows" and _is_gain(task.model, member.parameter)]
    if not gains:
        raise ScoreError(
            f"criterion 'bn-scale': group {group.name!r} passes through no norm layer with a gain; "
            "use a criterion that works without, such as ifso, group-fisher, taylor, magnitude or fpgm"
        )
    return gains


def _is_gain(model: nn.Module, parameter: str) -> bool:
    owner, _, key = parameter.rpartition(".")
    module = model.get_submodule(owner)
    return key == "weight" and (isinstance(module, NORMS) or "norm" in type(module).__name__.lower())
