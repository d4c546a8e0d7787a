"""What share of a network the graph can prune, and which units it couples."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from ifso.graph.channel_graph import ChannelGraph

STAYS = -1
OUTPUT_REASON = "output of the model"
"""A convolution frozen for a reason with these words computes the final output and is not counted."""

Slice = tuple[str, int, tuple[int, ...]]


def prunable_parameters(model: nn.Module, graph: ChannelGraph) -> float:
    """Share of the parameter elements that at least one unit owns."""
    prunable = total = 0
    for name, parameter in model.named_parameters():
        total += parameter.numel()
        if name in graph.layouts:
            owned = torch.zeros((), dtype=torch.bool)
            for layer in graph.layouts[name].layers:
                owned = owned | (layer != STAYS)
            prunable += int(owned.sum()) * (parameter.numel() // max(owned.numel(), 1))
    return prunable / max(total, 1)


def prunable_conv_channels(model: nn.Module, graph: ChannelGraph, ran: set[str]) -> float | None:
    """Share of the output channels of the convolutions that ran, the final ones left out; None if there are none."""
    owned: dict[tuple[str, int], set[int]] = defaultdict(set)
    for group in graph.groups:
        for member in group.members:
            owned[member.parameter, member.dim].update(i for index in member.index for i in index)
    final = {(frozen.parameter, frozen.dim) for frozen in graph.frozen if OUTPUT_REASON in frozen.reason.lower()}
    prunable = total = 0
    for name, module in model.named_modules():
        if name not in ran or not isinstance(module, nn.modules.conv._ConvNd):
            continue
        axis = (f"{name}.weight", 1 if module.transposed else 0)
        if axis not in final:
            total += module.out_channels
            prunable += len(owned[axis]) * (module.groups if module.transposed else 1)
    return prunable / total if total else None


def partition(graph: ChannelGraph) -> set[frozenset[Slice]]:
    """The coupling alone: for each unit the parameter slices that go with it, whatever groups and units are called."""
    units = set()
    for group in graph.groups:
        for unit in range(group.size):
            units.add(frozenset((member.parameter, member.dim, member.index[unit]) for member in group.members))
    return units


def frozen_reasons(graph: ChannelGraph, most: int = 3) -> list[list]:
    """The most frequent reasons with the number of parameter axes."""
    return [[reason, count] for reason, count in Counter(frozen.reason for frozen in graph.frozen).most_common(most)]


def flag_counts(graph: ChannelGraph) -> dict[str, int]:
    """How many groups carry each flag."""
    return dict(sorted(Counter(flag for group in graph.groups for flag in group.flags).items()))
