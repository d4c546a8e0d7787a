"""Axes that moves have to watch: how many units each can lose, and how many channels it has."""

from __future__ import annotations

import torch
from torch import Tensor

from ifso.graph.channel_graph import STAYS, ChannelGraph
from ifso.pruning.floors import Floors
from ifso.pruning.ledger import Incidence, incidence


class Axes:
    """Axes that must not lose too many units: every axis of every parameter, and the blocks of every balance.

    ``floors`` say how many units each keeps.
    """

    def __init__(self, graph: ChannelGraph, floors_of: Floors) -> None:
        floors: dict[tuple[int, ...], int] = {}
        for layout in graph.layouts.values():
            for layer in layout.layers:
                row = _distinct(layer)
                floors[row] = floors_of.least(len(row))
        for group in graph.groups:
            if (least := floors_of.of_group(group)) is not None:
                floors[tuple(range(group.first, group.first + group.size))] = least
        for balance in graph.balances:
            for block in balance.blocks:
                floors.setdefault(_distinct(block), 1)
        self.rows = [torch.tensor(row, dtype=torch.long, device="cpu") for row in floors]
        self.floors = list(floors.values())
        self.of: Incidence = incidence(self.rows, graph.num_units)

    def room(self, kept: Tensor) -> list[int]:
        """How many units each axis can still lose."""
        return [int(kept[row].sum()) - floor for row, floor in zip(self.rows, self.floors, strict=True)]


def _distinct(layer: Tensor) -> tuple[int, ...]:
    """Its units, once each, and the slices that stay, each."""
    stays = int((layer == STAYS).sum())
    return (*layer[layer != STAYS].unique().tolist(), *[STAYS] * stays)


class ProducedAxes:
    """The channels of every axis that units are produced on."""

    def __init__(self, graph: ChannelGraph) -> None:
        wanted = {
            (member.parameter, member.dim)
            for group in graph.groups
            for member in group.members
            if member.role == "produces"
        }
        labels: dict[tuple[str, int], Tensor] = {}
        for group in graph.groups:
            for member in group.members:
                place = (member.parameter, member.dim)
                if place in wanted:
                    before = labels.get(place, torch.full_like(member.owner, STAYS))
                    labels[place] = torch.where(member.owner >= 0, member.owner + group.first, before)
        rows = {tuple(label.reshape(-1, label.shape[-1]).unique(dim=0).flatten().tolist()) for label in labels.values()}
        self.rows = [torch.tensor(row, dtype=torch.long, device="cpu") for row in sorted(rows)]
        self.of: Incidence = incidence(self.rows, graph.num_units)

    def channels(self, kept: Tensor) -> list[int]:
        """How many channels each axis has."""
        return [int(kept[row].sum()) for row in self.rows]
