"""Check a network of another library in the mode it is used in and in the one it trains in, with its own loss."""

from __future__ import annotations

import copy
import importlib
import warnings
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from benchmarks.lively import calibrate_, perturb_
from build import SEED, Absent, Case, finite
from catalog import LIBRARIES, Entry
from check import (
    TOLERANCE,
    VISIBLE,
    Result,
    frozen_reasons,
    one_line,
    prunable_parameters,
    random_keep,
    relative_error,
    rounded,
    training,
)
from torch import nn

from ifso.common.tensors import tensors_in
from ifso.graph.balancing import balance
from ifso.graph.tracing import trace
from ifso.surgery.compact import compact_
from ifso.surgery.mask import masked

MODES = ("eval", "train")


def check_both(entry: Entry, result: Result) -> None:
    """Fill the result with what the table of other libraries shows."""
    case = _build(entry, result)
    result.values["params"] = sum(parameter.numel() for parameter in case.model.parameters())
    result.values["dtype"] = str(next(case.model.parameters()).dtype).removeprefix("torch.")
    for mode in MODES:
        _check_mode(copy.deepcopy(case), mode, result)


def _build(entry: Entry, result: Result) -> Case:
    """In float64 where the network and its loss run in it, with weights on which a wrong removal shows."""
    warnings.simplefilter("ignore")
    if find_spec(LIBRARIES[entry.source]) is None:
        raise Absent(f"{LIBRARIES[entry.source]} is not installed")
    library = importlib.import_module(f"libraries.{entry.source}")
    for dtype in (torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        torch.manual_seed(SEED)
        case = library.builders()[entry.name]()
        case.model.to(dtype).eval()
        try:
            _condition_(case)
            if not (finite(case.run()) and finite(_run(case, "train"))):
                raise RuntimeError("outputs are not finite")
        except Exception as error:
            if dtype is torch.float32:
                raise
            result.values["notes"] = [f"does not run in float64 ({type(error).__name__})"]
            continue
        return case
    raise AssertionError("unreachable")


def _condition_(case: Case) -> None:
    perturb_(case.model, SEED)
    for module in case.model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    case.ran = calibrate_(case.model, case.run)


def _run(case: Case, mode: str) -> Any:
    """The outputs, or the losses, in a mode; the model is in eval mode before and after."""
    with _mode(case.model, mode):
        return case.run()


def _mode(model: nn.Module, mode: str) -> AbstractContextManager[None]:
    """Within it the model, which is in eval mode, is in that mode: to be traced, to run, and to be compacted."""
    return training(model) if mode == "train" else nullcontext()


def _check_mode(case: Case, mode: str, result: Result) -> None:
    """Trace in a mode, remove, and compare in it; a network pruned as it trains must be the same in eval mode, too."""
    modes = (mode,) if mode == "eval" else (mode, "eval")
    whole = [_run(case, each) for each in modes]
    torch.manual_seed(SEED)
    with _mode(case.model, mode), result.timed(f"{mode}_trace"):
        graph = trace(case.model, case.training_inputs if mode == "train" else case.inputs)
    result.values |= {
        f"{mode}_prunable": round(prunable_parameters(case.model, graph), 4),
        f"{mode}_units": graph.num_units,
        f"{mode}_frozen": [[one_line(reason), count] for reason, count in frozen_reasons(graph)],
        f"{mode}_notes": [one_line(note) for note in graph.notes],
    }
    if not graph.num_units:
        result.fail("refused", f"{mode} mode: nothing can be pruned: {frozen_reasons(graph)[0][0]}")
        return
    result.stage = f"{mode} mode"
    keep = balance(graph, random_keep(graph))
    with masked(case.model, graph, keep):
        soft = [_run(case, each) for each in modes]
    with _mode(case.model, mode):
        compact_(case.model, graph, keep)
    hard = [_run(case, each) for each in modes]
    for each, *outputs in zip(modes, whole, soft, hard, strict=True):
        _compare(result, mode, each, *outputs)


def _compare(result: Result, traced: str, mode: str, whole: Any, soft: Any, hard: Any) -> None:
    where = f"{traced} mode" if traced == mode else f"pruned in {traced}, run in {mode} mode"
    if traced != mode:
        whole, soft, hard = _of_same_shape(whole, soft, hard)
    error, change = relative_error(soft, hard), relative_error(whole, soft)
    result.values[f"{traced}_error"] = max(result.values.get(f"{traced}_error", 0.0), rounded(error), key=float)
    if not (finite(soft) and finite(hard)):
        result.fail("inexact", f"{where}: outputs are not finite")
    single = result.values["dtype"] == "float32"
    if not error <= (TOLERANCE if not single else 100 * TOLERANCE):
        result.fail("inexact", f"{where}: masked and compacted differ by {error:.1e}")
    if not change >= VISIBLE:
        result.fail("inexact", f"{where}: removal changed the output by {change:.1e} only: it proves nothing")


def _of_same_shape(whole: Any, soft: Any, hard: Any) -> tuple[list[torch.Tensor], ...]:
    """Only the outputs that lost nothing: features that are returned beside the predictions have fewer channels."""
    kept = [
        three for three in zip(*map(tensors_in, (whole, soft, hard)), strict=True) if three[1].shape == three[2].shape
    ]
    return tuple(map(list, zip(*kept, strict=True))) if kept else ([], [], [])
