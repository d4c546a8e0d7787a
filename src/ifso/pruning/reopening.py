"""A run that has already come to its end, opened again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ifso.costs.counting import count
from ifso.errors import RunError, VerificationError
from ifso.graph.channel_graph import ChannelGraph
from ifso.graph.slots import named_tensors
from ifso.pruning.afterwards import Measure
from ifso.pruning.checking import Check, refuse_failed
from ifso.pruning.checkpoint import located, parsed, read_tensor_file
from ifso.pruning.folder import SCORES, SUMMARY, RunFolder
from ifso.pruning.result import PruneResult
from ifso.surgery.compact import compact_
from ifso.surgery.files import one_line
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
    try:
        refuse_failed(result.checks)
    except VerificationError as error:
        raise VerificationError(f"{folder.path / SUMMARY}: {one_line(error)}") from None
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
        if summary is None or not all(name in summary and is_right(summary[name]) for name, is_right in _PARTS.items()):
            raise RunError("damaged; remove it and resume the run, which then writes it again")
        if not summary["targets"] or not summary["targets"].keys() <= summary["shares"].keys():
            raise RunError("says nothing of its budget; remove it and resume the run, which then writes it again")
    return summary


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _LARGEST


def _are_numbers(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


def _are_checks(value: object) -> bool:
    kinds: dict[str, Any] = {"name": str, "passed": bool, "detail": str, "error": (int, float, type(None))}
    return isinstance(value, list) and all(
        isinstance(one, dict) and one.keys() == kinds.keys() and all(isinstance(one[key], kinds[key]) for key in kinds)
        for one in value
    )


def _are_measures(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, dict)
        and isinstance(one.get("stage"), str)
        and all(key == "stage" or part is None or _is_number(part) for key, part in one.items())
        for one in value
    )


def _is_latency(value: object) -> bool:
    return value is None or (isinstance(value, dict) and all(_is_number(value.get(key)) for key in _LATENCIES))


_LARGEST = 2**53
_LATENCIES = ("before", "after", "share")
_PARTS: Mapping[str, Callable[[object], bool]] = {
    "targets": _are_numbers, "shares": _are_numbers, "timings": _are_numbers, "removals": _is_number,
    "seconds": _is_number, "checks": _are_checks, "measures": _are_measures, "latency": _is_latency,
    "notes": lambda value: isinstance(value, list) and all(isinstance(note, str) for note in value),
}  # fmt: skip
"""What a summary must hold, and how each part of it is known to be right."""
