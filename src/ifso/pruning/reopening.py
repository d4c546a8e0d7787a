"""A run that has already come to its end, opened again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ifso.common.module_state import named_tensors
from ifso.common.serialization import located, parsed, read_tensor_file, refuse_special
from ifso.common.text import one_line
from ifso.costs.cost import count
from ifso.errors import RunError, VerificationError
from ifso.graph.channel_graph import ChannelGraph
from ifso.pruning.recovery import Measure
from ifso.pruning.result import PruneResult, networks_of
from ifso.pruning.verify import Check, refuse_failed
from ifso.runs.folder import SCORES, SUMMARY, RunFolder, refuse_other_files
from ifso.surgery.compact import compact_
from ifso.surgery.recipe import Round, remember
from ifso.surgery.store import WEIGHTS, read_recipe


def finished_result(folder: RunFolder, model: nn.Module, graph: ChannelGraph) -> PruneResult:
    """The result that was written, with the smaller network in ``model``; a check that failed then fails again."""
    summary, (scores, _) = _summary(folder), read_tensor_file(folder.path / SCORES)
    refuse_other_files(folder.path, folder.config)
    recipe = read_recipe(folder.path)
    if not recipe.rounds:
        raise RunError(f"{folder.path} holds a network that was not pruned; put that of the run back, or start anew")
    keep = _keep(graph, recipe.rounds[-1])
    compact_(model, graph, keep)
    _fill_(model, folder)
    remember(model, recipe)
    measures = tuple(_measure(dict(one)) for one in summary["measures"])
    result = PruneResult(
        model=model, graph=graph, keep=keep, recipe=recipe, before=count(graph, graph.kept(None)),
        after=count(graph, graph.kept(keep)), targets=summary["targets"], shares=summary["shares"],
        removals=summary["removals"], seconds=summary["seconds"], timings=summary["timings"],
        checks=tuple(Check(**check) for check in summary["checks"]),
        measures=measures,
        networks=networks_of(summary.get("stages", ()), folder.path, measures, summary["shares"]),
        notes=(*summary["notes"], "the run had already come to its end"), latency=summary["latency"],
        scores=scores, metrics=tuple(folder.metrics()[0]), config=folder.config, folder=folder.path,
        stages=tuple(summary.get("stages", ())), floors=tuple(summary.get("floors", ())),
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
        refuse_special(folder.path / SUMMARY)
        summary = parsed((folder.path / SUMMARY).read_bytes())
        if summary is None or not _is_right(summary):
            raise RunError("damaged; remove it and resume the run, which then writes it again")
        if not summary["targets"] or not summary["targets"].keys() <= summary["shares"].keys():
            raise RunError("says nothing of its budget; remove it and resume the run, which then writes it again")
    return summary


def _is_right(summary: Mapping[str, Any]) -> bool:
    needed = all(name in summary and is_right(summary[name]) for name, is_right in _PARTS.items())
    return needed and all(is_right(summary[name]) for name, is_right in _LATER_PARTS.items() if name in summary)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _LARGEST


def _are_numbers(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


def _are_values(value: object) -> bool:
    """Measured numbers; one that was not finite is None."""
    return isinstance(value, dict) and all(part is None or _is_number(part) for part in value.values())


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
        and _are_values({key: part for key, part in one.items() if key != "stage"})
        for one in value
    )


def _are_stages(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, dict) and all(name in one and is_right(one[name]) for name, is_right in _STAGE.items())
        for one in value
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and _is_number(value)


def _are_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_latency(value: object) -> bool:
    return value is None or (isinstance(value, dict) and all(_is_number(value.get(key)) for key in _LATENCIES))


_LARGEST = 2**53
_LATENCIES = ("before", "after", "share")
_PARTS: Mapping[str, Callable[[object], bool]] = {
    "targets": _are_numbers, "shares": _are_numbers, "timings": _are_numbers, "removals": _is_number,
    "seconds": _is_number, "checks": _are_checks, "measures": _are_measures, "latency": _is_latency,
    "notes": _are_strings,
}  # fmt: skip
"""What a summary must hold, and how each part of it is known to be right."""

_LATER_PARTS: Mapping[str, Callable[[object], bool]] = {"stages": _are_stages, "floors": _are_strings}
"""What older summaries do not hold."""

_STAGE: Mapping[str, Callable[[object], bool]] = {
    "stage": _is_count, "units": _is_count, "shares": _are_numbers, "values": _are_values, "seconds": _is_number,
}  # fmt: skip
