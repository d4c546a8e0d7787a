"""What a run begins with, as plain values for ``structure.json``: a run that was interrupted can be looked at, too."""

from __future__ import annotations

from typing import Any

from ifso.costs.counting import count
from ifso.graph.channel_graph import ChannelGraph, Group


def structure_of(graph: ChannelGraph) -> dict[str, Any]:
    """Groups with their members, what is frozen and why, shapes and costs of the network before the run.

    ``positions`` of a member are how many slices along its axis belong to the group.
    """
    frozen = [
        {"parameter": axis.parameter, "dim": axis.dim, "reason": axis.reason, "slices": len(axis.index)}
        for axis in graph.frozen
    ]
    return {
        "groups": [_group(group) for group in graph.groups],
        "frozen": frozen,
        "shapes": {name: list(layout.shape) for name, layout in graph.layouts.items()},
        "cost": count(graph, graph.kept(None)).as_dict(),
    }


def _group(group: Group) -> dict[str, Any]:
    members = [
        {
            "parameter": member.parameter,
            "dim": member.dim,
            "role": member.role,
            "positions": int((member.owner >= 0).reshape(-1, member.owner.shape[-1]).any(0).sum()),
        }
        for member in group.members
    ]
    return {"name": group.name, "size": group.size, "flags": sorted(group.flags), "members": members}
