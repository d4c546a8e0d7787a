"""Scores in float64 to compare with, of some units of every group, computed once and kept in small files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from benchmarks.zoo.networks import Entry
from ifso.bench.correlation import spearman, spearman_at_equal_size
from ifso.common.files import replacing, write_tensors
from ifso.graph.channel_graph import ChannelGraph

CRITERIA = ("ifso", "group-fisher")
PER_GROUP = 16
"""So many units of every group are compared, evenly spread."""

CLOSE = 1e-3
"""Sums of weights that differ by less, relatively, are of the same weights."""

Scores = Mapping[str, Tensor]
"""Values of some units, by criterion."""


@dataclass(frozen=True)
class Sample:
    """Some units of a graph: ``units`` are their numbers, ``groups`` those of the groups they belong to."""

    units: Tensor
    groups: tuple[int, ...]

    @classmethod
    def of(cls, graph: ChannelGraph) -> Sample:
        """:data:`PER_GROUP` units of every group, or all that it has."""
        places, groups = [torch.empty(0, dtype=torch.long)], list[int]()
        for number, group in enumerate(graph.groups):
            count = min(group.size, PER_GROUP)
            places.append(group.first + torch.linspace(0, group.size - 1, count).round().long())
            groups += [number] * count
        return cls(torch.cat(places), tuple(groups))

    def taken(self, graph: ChannelGraph, scores: Mapping[str, Tensor]) -> Tensor:
        """The scores of these units from those of all, by group."""
        everything = torch.zeros(graph.num_units, dtype=torch.float64)
        for group in graph.groups:
            everything[group.units] = scores[group.name]
        return everything[self.units]

    def rank(self, found: Tensor, exact: Tensor) -> tuple[float | None, float | None]:
        """Spearman's correlation over all units, and within groups (the mean, weighted by units)."""
        one, other = found.double().tolist(), exact.double().tolist()
        return spearman(one, other), spearman_at_equal_size(one, other, self.groups)


def sums_of(model: nn.Module, images: Tensor) -> Tensor:
    """What tells whether a network and its images are those of an earlier time, but for rounding."""
    parts = [parameter.detach().double().sum() for parameter in model.parameters()]
    return torch.stack([*parts, images.double().sum()]).float()


def path_of(folder: Path, entry: Entry) -> Path:
    """The file of a network."""
    return folder / f"{entry.source.replace('/', '_')}.{entry.name.replace('/', '_')}.safetensors"


def write(path: Path, scores: Scores, sums: Tensor, about: Mapping[str, str]) -> None:
    """Keep scores as float32, which has digits enough for ranks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: values.float().contiguous() for name, values in scores.items()}
    with replacing(path) as new:
        write_tensors(new, {**tensors, "sums": sums}, {"about": json.dumps(dict(about))})


def read(path: Path, sums: Tensor, count: int) -> dict[str, Tensor] | None:
    """The scores of ``count`` units by criterion; None if there are none, or of another network."""
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError):
        return None
    before = found.pop("sums", torch.empty(0))
    if before.shape != sums.shape or any(values.shape != (count,) for values in found.values()):
        return None
    same = torch.allclose(before, sums, rtol=CLOSE, atol=CLOSE * float(sums.abs().max()))
    return found if same else None
