"""Criteria that see no data: magnitude, distances between filters (FPGM), gains of norm layers, and random numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ifso.criteria.base import Criterion, Task
from ifso.curvature.weight_space import Reader, slices_of, sum_by_unit
from ifso.errors import ScoreError
from ifso.graph.channel_graph import Group, Member
from ifso.graph.layouts import surviving

NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


@dataclass(frozen=True)
class Magnitude(Criterion):
    """s_i = Σ |W(:, i)|^p over the slices that read unit i, of all layers that read it.

    The paper's magnitude baseline, p = 1. A unit that no weight reads is measured where it is made.

    Args:
        p: the power, 1 or 2.

    >>> import torch
    >>> from ifso import trace
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2))
    >>> net[2].weight.data = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
    >>> graph = trace(net, torch.zeros(1, 2))
    >>> Magnitude().units(Task(net, graph, None, graph.kept(None)), None)
    tensor([4., 6.], dtype=torch.float64)
    """

    name = "magnitude"
    needs = "weights"

    p: Literal[1, 2] = 1

    def units(self, task: Task, batch: Any) -> Tensor:  # noqa: ARG002 (one protocol)
        """Scores [units]."""
        return task.add_slices((reader, task.weight(reader.parameter).abs() ** self.p) for reader in task.readers)


@dataclass(frozen=True)
class MagnitudeAverage(Criterion):
    """s_i = Σ over the layers that make unit i of the mean |weight| of their filters for it.

    The mean runs over the weights that are still there: inputs already pruned do not count.
    Of a layer whose unit owns several filters (heads, gates) it is the mean over all of them.
    """

    name = "magnitude-average"
    needs = "weights"

    def units(self, task: Task, batch: Any) -> Tensor:  # noqa: ARG002 (one protocol)
        """Scores [units]."""
        total = torch.zeros(task.graph.num_units, dtype=torch.float64, device=task.device)
        for maker in task.makers:
            weights, alive = _left_of(task, maker)
            total += task.add_slices([(maker, weights)]) / task.add_slices([(maker, alive)]).clamp(min=1)
        return total


def _left_of(task: Task, maker: Reader) -> tuple[Tensor, Tensor]:
    """|weight| of a parameter, and 1 for what is left of it; of a weight norm's gain the filters' means."""
    name, _ = task.graph.gains.get(maker.parameter, (maker.parameter, 0))
    layout = task.graph.layouts[name]
    alive = surviving(layout, task.kept).expand(layout.shape).to(task.device, torch.float64)
    weights = task.weight(name).abs() * alive
    if name == maker.parameter:
        return weights, alive
    shape = task.tensors[maker.parameter].shape
    alive, weights = alive.sum_to_size(shape), weights.sum_to_size(shape)
    return weights / alive.clamp(min=1), torch.ones_like(alive)


@dataclass(frozen=True)
class Fpgm(Criterion):
    """s_i = Σ_j ‖F_i − F_j‖ over the filters of the layer that are still there, summed over the layers that make i.

    "Filter Pruning via Geometric Median" (He et al., CVPR 2019): the filters nearest to the geometric median of their
    layer can be replaced by the others. F_j runs over all filters of the layer, also those that cannot be pruned.
    """

    name = "fpgm"
    needs = "weights"

    def units(self, task: Task, batch: Any) -> Tensor:  # noqa: ARG002 (one protocol)
        """Scores [units]."""
        total = torch.zeros(task.graph.num_units, dtype=torch.float64, device=task.device)
        kept = task.kept.to(task.device)
        for maker in task.makers:
            filters, owner = _filters(task.weight(maker.parameter), maker)
            alive = filters[kept[owner]]
            distances = torch.cdist(filters, alive, compute_mode="donot_use_mm_for_euclid_dist")
            total += sum_by_unit(distances.sum(1, dtype=torch.float64), owner, task.graph.num_units)
        return total


def _filters(weight: Tensor, maker: Reader) -> tuple[Tensor, Tensor]:
    """The filters of a layer as rows, and the unit that each makes.

    A grouped transposed convolution has its outputs along dim 1, others for each group of its input rows.
    """
    if maker.owner.dim() == 1:
        return weight.movedim(maker.dim, 0).flatten(1), maker.owner
    some = maker.owner[(maker.owner >= 0).any(1)][0]
    rows = int((maker.owner == some).all(1).sum())
    by_group = weight.unflatten(0, (-1, rows)).transpose(1, 2)
    return by_group.flatten(0, 1).flatten(1), maker.owner[::rows].flatten()


@dataclass(frozen=True)
class BnScale(Criterion):
    """s_i = Σ |γ_i| over the norm layers that unit i passes through ("Network Slimming", Liu et al., ICCV 2017).

    A norm layer is one of PyTorch's, or a module whose class has ``Norm`` in its name; its gain is its ``weight``.
    """

    name = "bn-scale"
    needs = "weights"

    def units(self, task: Task, batch: Any) -> Tensor:  # noqa: ARG002 (one protocol)
        """Scores [units]."""
        gains = slices_of(((group, gain) for group in task.graph.groups for gain in _gains(task, group)), task.device)
        return task.add_slices((part, task.weight(part.parameter).abs()) for part in gains)


def _gains(task: Task, group: Group) -> list[Member]:
    def is_gain(member: Member) -> bool:
        owner, _, key = member.parameter.rpartition(".")
        module = task.model.get_submodule(owner)
        is_norm = isinstance(module, NORMS) or "norm" in type(module).__name__.lower()
        return member.role == "follows" and key == "weight" and is_norm

    gains = list(filter(is_gain, group.members))
    if not gains:
        raise ScoreError(
            f"criterion 'bn-scale': group {group.name!r} passes through no norm layer with a gain; "
            "use a criterion that works without, such as ifso, group-fisher, taylor, magnitude or fpgm"
        )
    return gains


@dataclass(frozen=True)
class Random(Criterion):
    """Uniform numbers in [0, 1), the same for the same ``seed``: in every call, on every device and rank.

    Args:
        seed: of the numbers.
    """

    name = "random"
    needs = "nothing"

    seed: int = 0

    def units(self, task: Task, batch: Any) -> Tensor:  # noqa: ARG002 (one protocol)
        """Scores [units]."""
        generator = torch.Generator("cpu").manual_seed(self.seed)
        return torch.rand(task.graph.num_units, generator=generator, dtype=torch.float64, device="cpu")
