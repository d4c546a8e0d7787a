"""Check one network: trace, remove 30 % of the units at random, compare the compacted network with the masked one."""

from __future__ import annotations

import copy
import importlib
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo.build import Absent, Case, build, finite, in_float64_if_possible
from benchmarks.zoo.cases import SEED
from benchmarks.zoo.lively import calibrate_, perturb_
from benchmarks.zoo.networks import LIBRARIES, Entry
from ifso.common.tensors import tensors_in
from ifso.errors import IfsoError
from ifso.graph.balancing import balance
from ifso.graph.channel_graph import STAYS, ChannelGraph
from ifso.graph.tracing import trace
from ifso.surgery.compact import compact_
from ifso.surgery.mask import masked

REMOVED = 0.3
TOLERANCE = 1e-5
VISIBLE = 1e-4
"""Removal must change the output at least this much, relatively, or the comparison proves nothing."""
SECOND = "second_"
"""What results of the second round are marked with."""
ROUND = {"": "", SECOND: "second round: "}

OUTPUT_REASON = "output of the model"
"""A convolution frozen for a reason with these words computes the final output and is not counted."""

Slice = tuple[str, int, tuple[int, ...]]


@dataclass
class Result:
    """What is known about one network so far; ``stage`` says where it stands."""

    values: dict[str, Any] = field(default_factory=dict)
    stage: str = "build"

    def fail(self, status: str, reason: str) -> None:
        """The first failure stands."""
        if "status" not in self.values:
            self.values |= {"status": status, "reason": one_line(reason)}

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Enter a stage and record its CPU seconds."""
        self.stage = stage
        begun = time.process_time()
        yield
        self.values[f"{stage}_seconds"] = round(time.process_time() - begun, 2)


def check(entry: Entry, double_below: float, device: str = "cpu") -> dict[str, Any]:
    """Everything the table shows about one network. Never raises, except when interrupted."""
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    result = Result()
    try:
        if entry.source in LIBRARIES:
            _check_both_modes(entry, result)
        else:
            _check(build(entry, double_below, device), result)
    except Absent as error:
        result.fail("absent", str(error))
    except IfsoError as error:
        result.fail("refused", f"{result.stage}: {type(error).__name__}: {error}")
    except Exception as error:
        result.fail("crashed", f"{result.stage}: {type(error).__name__}: {error} [{_last_frame(error)}]")
    result.values.setdefault("status", "exact")
    return result.values


def _check(case: Case, result: Result) -> None:
    """All stages in order."""
    model = case.model
    result.values |= {
        "params": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "input": case.input_shape,
    }
    plain = case.run()
    with result.timed("trace"):
        graph = trace(model, case.inputs)
    result.values |= _describe(model, graph, case)
    if not graph.num_units:
        reasons = ", ".join(reason for reason, _ in frozen_reasons(graph))
        result.fail("refused", f"nothing can be pruned: {reasons}")
        return
    _check_same(result, "tracing changed the model", plain, case.run())
    if case.training_inputs:
        _check_training_partition(case, graph, result)
    _check_removal(case, graph, "", result)
    if "status" not in result.values:
        _check_second_round(case, result)


def _describe(model: nn.Module, graph: ChannelGraph, case: Case) -> dict[str, Any]:
    """Numbers of the graph."""
    share = prunable_conv_channels(model, graph, case.ran)
    return {
        "groups": len(graph.groups),
        "units": graph.num_units,
        "flags": flag_counts(graph),
        "prunable_params": round(prunable_parameters(model, graph), 4),
        "prunable_conv_channels": None if share is None else round(share, 4),
        "real_tensors": graph.on_real_tensors,
        "frozen": [[one_line(reason), count] for reason, count in frozen_reasons(graph)],
        "notes": [one_line(note) for note in (*case.notes, *graph.notes)],
    }


def _check_removal(case: Case, graph: ChannelGraph, prefix: str, result: Result) -> None:
    """Masked against compacted, in eval mode and for detectors in train mode too."""
    result.stage = f"{prefix}balance"
    keep = balance(graph, random_keep(graph))
    removed = sum(int((~choice).sum()) for choice in keep.values())
    result.values[f"{prefix}removed_units"] = round(removed / graph.num_units, 4)
    whole = case.run()
    result.stage = f"{prefix}mask"
    with masked(case.model, graph, keep):
        soft, soft_training = case.run(), _losses(case)
    _check_same(result, f"{ROUND[prefix]}masking was not undone", whole, case.run())
    with result.timed(f"{prefix}compact"):
        compact_(case.model, graph, keep)
    result.stage = f"{prefix}run compacted"
    hard, hard_training = case.run(), _losses(case)
    _compare(result, prefix, whole, soft, hard)
    if soft_training is not None:
        error = relative_error(soft_training, hard_training)
        result.values[f"{prefix}training_error"] = rounded(error)
        if not error <= TOLERANCE:
            result.fail("inexact", f"{ROUND[prefix]}losses in train mode differ by {error:.1e}")


def _check_second_round(case: Case, result: Result) -> None:
    """The smaller network must be traced and pruned again as exactly."""
    with result.timed(f"{SECOND}trace"):
        graph = trace(case.model, case.inputs)
    if graph.num_units:
        _check_removal(case, graph, SECOND, result)


def _compare(result: Result, prefix: str, whole: Any, soft: Any, hard: Any) -> None:
    """Record the error and the change."""
    error, change = relative_error(soft, hard), relative_error(whole, soft)
    result.values |= {f"{prefix}error": rounded(error), f"{prefix}change": rounded(change)}
    _judge(result, ROUND[prefix], error, change, finite(soft) and finite(hard))


def _judge(result: Result, where: str, error: float, change: float, finite: bool, most: float = TOLERANCE) -> None:
    """Fail if the error is large, or the change too small to prove anything."""
    if not finite:
        result.fail("inexact", f"{where}outputs are not finite")
    if not error <= most:
        result.fail("inexact", f"{where}masked and compacted differ by {error:.1e}")
    if not change >= VISIBLE:
        result.fail("inexact", f"{where}removal changed the output by {change:.1e} only: the comparison proves nothing")


def random_keep(graph: ChannelGraph) -> dict[str, Tensor]:
    """Remove 30 % of the units of every group, never all of one."""
    generator = torch.Generator().manual_seed(SEED)
    keep = graph.keep_all()
    for group in graph.groups:
        removed = min(round(REMOVED * group.size), group.size - 1)
        keep[group.name][torch.randperm(group.size, generator=generator)[:removed]] = False
    return keep


def _check_training_partition(case: Case, graph: ChannelGraph, result: Result) -> None:
    """A detector traced in train mode with its losses must couple the same slices as in eval mode."""
    with training(case.model), result.timed("training_trace"):
        torch.manual_seed(SEED)
        training_graph = trace(case.model, case.training_inputs)
    here, there = partition(graph), partition(training_graph)
    result.values["same_partition"] = here == there
    if here != there:
        only = f"{len(here - there)} units only in eval, {len(there - here)} only in train mode"
        result.fail("inexact", f"eval and train mode couple differently: {only}")


def _losses(case: Case) -> Any:
    """The losses of a detector in train mode, None for other networks."""
    if case.training_inputs is None:
        return None
    with training(case.model):
        return case.run()


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Train mode without moving the running statistics."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    model.train()
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        model.eval()
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


def _check_same(result: Result, what: str, before: Any, after: Any) -> None:
    error = relative_error(before, after)
    if error != 0:
        result.fail("inexact", f"{what}: outputs moved by {error:.1e}")


def rounded(number: float) -> float | str:
    """Two digits; text where JSON has no number."""
    return float(f"{number:.2g}") if number < float("inf") else str(number)


def _last_frame(error: Exception) -> str:
    """Where it happened: file (two levels), line and function."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno} in {frame.name}"


def one_line(text: str, most: int = 300) -> str:
    r"""The text on one line, without the place of the checkout, cut to ``most`` characters.

    >>> one_line("a\n  b", most=80)
    'a b'
    """
    text = " ".join(text.replace(str(Path(__file__).resolve().parents[1]), "").split())
    return text if len(text) <= most else text[: most - 1] + "…"


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


def frozen_reasons(graph: ChannelGraph, most: int = 3) -> list[list[Any]]:
    """The most frequent reasons with the number of parameter axes."""
    return [[reason, count] for reason, count in Counter(frozen.reason for frozen in graph.frozen).most_common(most)]


def flag_counts(graph: ChannelGraph) -> dict[str, int]:
    """How many groups carry each flag."""
    return dict(sorted(Counter(flag for group in graph.groups for flag in group.flags).items()))


def relative_error(reference: Any, other: Any) -> float:
    """max |a - b| / max |a|, the largest over all output tensors; infinite where shapes differ.

    >>> import torch
    >>> relative_error([torch.tensor([1.0, -4.0])], [torch.tensor([1.0, -3.0])])
    0.25
    >>> relative_error(torch.zeros(2), torch.zeros(3))
    inf
    """
    expected, found = tensors_in(reference), tensors_in(other)
    if [tensor.shape for tensor in expected] != [tensor.shape for tensor in found]:
        return float("inf")
    return max((_relative(a, b) for a, b in zip(expected, found, strict=True)), default=float("inf"))


def _relative(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    difference = float((a - b).abs().max()) if a.numel() else 0.0
    if difference == 0:
        return 0.0
    scale = float(a.abs().max())
    return difference / scale if scale else float("inf")


# -------------------------------------------------------------------------- networks of other libraries, in both modes


def _check_both_modes(entry: Entry, result: Result) -> None:
    """In the mode a network is used in and in the one it trains in, with its own loss."""
    case = _build(entry)
    result.values["params"] = sum(parameter.numel() for parameter in case.model.parameters())
    result.values["dtype"] = str(next(case.model.parameters()).dtype).removeprefix("torch.")
    if case.notes:
        result.values["notes"] = case.notes
    for mode in ("eval", "train"):
        _check_mode(copy.deepcopy(case), mode, result)


def _build(entry: Entry) -> Case:
    """In float64 where the network and its loss run in it, with weights on which a wrong removal shows."""
    warnings.simplefilter("ignore")
    if find_spec(LIBRARIES[entry.source]) is None:
        raise Absent(f"{LIBRARIES[entry.source]} is not installed")
    library = importlib.import_module(f"benchmarks.zoo.libraries.{entry.source}")

    def make() -> Case:
        case = library.builders()[entry.name]()
        case.model.to(torch.get_default_dtype()).eval()
        perturb_(case.model, SEED)
        for module in case.model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0
        case.ran = calibrate_(case.model, case.run)
        if not (finite(case.run()) and finite(_run(case, "train"))):
            raise RuntimeError("outputs are not finite")
        return case

    return in_float64_if_possible(make)


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
        _compare_mode(result, mode, each, *outputs)


def _compare_mode(result: Result, traced: str, mode: str, whole: Any, soft: Any, hard: Any) -> None:
    where = f"{traced} mode: " if traced == mode else f"pruned in {traced}, run in {mode} mode: "
    if traced != mode:
        whole, soft, hard = _of_same_shape(whole, soft, hard)
    error, change = relative_error(soft, hard), relative_error(whole, soft)
    result.values[f"{traced}_error"] = max(result.values.get(f"{traced}_error", 0.0), rounded(error), key=float)
    most = 100 * TOLERANCE if result.values["dtype"] == "float32" else TOLERANCE
    _judge(result, where, error, change, finite(soft) and finite(hard), most)


def _of_same_shape(whole: Any, soft: Any, hard: Any) -> tuple[list[torch.Tensor], ...]:
    """Only the outputs that lost nothing: features that are returned beside the predictions have fewer channels."""
    kept = [
        three for three in zip(*map(tensors_in, (whole, soft, hard)), strict=True) if three[1].shape == three[2].shape
    ]
    return tuple(map(list, zip(*kept, strict=True))) if kept else ([], [], [])
