"""A run that has already come to its end, opened again."""

from __future__ import annotations

from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ifso.costs.counting import count
from ifso.errors import RunError
from ifso.graph.channel_graph import ChannelGraph
from ifso.graph.slots import named_tensors
from ifso.pruning.afterwards import Measure
from ifso.pruning.checking import Check, refuse_failed
from ifso.pruning.checkpoint import located, parsed, read_tensor_file
from ifso.pruning.folder import SCORES, SUMMARY, RunFolder
from ifso.pruning.result import PruneResult
from ifso.surgery.compact import compact_
from ifso.surgery.recipe import Round, remember
from ifso.surgery.store import WEIGHTS, read_recipe


def finished_result(folder: RunFolder, model: nn.Module, graph: ChannelGraph) -> PruneResult:
    """The result that was written, with the smaller network in ``model``; a check that failed then fails again."""
    summary, (scores, _) = _summary(folder), read_tensor_file(folder.path / SCORES)
    recipe = read_recipe(folder.path)
    keep = _keep(graph, recipe.rounds[-1])
    compact_(model, graph, keep)
    _fill_(model, folder)
    remember(model, recipe)
    result = PruneResult(
        model=model, graph=graph, keep=keep, recipe=recipe, before=count(graph, graph.kept(None)),
        after=count(graph, graph.kept(keep)), targets=summary["targets"], shares=summary["shares"],
        removals=summary["removals"], seconds=summary["seconds"], timings=summary["timings"],
        checks=tuple(Check(**check) for check in summary["checks"]),
        measures=tuple(_measure(dict(one)) for one in summary["measures"]),
        notes=(*summary["notes"], "the run had already come to its end"), latency=summary["latency"],
        scores=scores, metrics=tuple(folder.metrics()[0]), config=folder.config, folder=folder.path,
    )  # fmt: skip
    refuse_failed(result.checks)
    return result


def _keep(graph: ChannelGraph, last: Round) -> dict[str, Tensor]:
    """What the last round has left; those before it were made before the run."""
    keep = {name: torch.zeros_like(choice) for name, choice in graph.keep_all().items()}
    for group in last.groups:
        keep[group.name][list(group.kept)] = True
    return keep


@torch.no_grad()
def _fill_(model: nn.Module, folder: RunFolder) -> None:
    stored = load_file(folder.path / WEIGHTS)
    for name, tensor in named_tensors(model).items():
        tensor.copy_(stored[name])


def _measure(values: dict[str, Any]) -> Measure:
    return Measure(values.pop("stage"), values)


def _summary(folder: RunFolder) -> dict[str, Any]:
    with located(folder.path / SUMMARY):
        summary = parsed((folder.path / SUMMARY).read_bytes())
        missing = {"targets", "shares", "removals", "seconds", "timings", "checks", "measures", "notes", "latency"}
        if summary is None or not missing <= summary.keys():
            raise RunError("damaged; remove it and resume the run, which then writes it again")
    return summary
