"""``ifso.trace``: any network in, coupled channels out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ifso.common.devices import available_memory
from ifso.common.module_state import named_tensors
from ifso.common.tensors import tensors_in
from ifso.common.torch_state import ALONE
from ifso.errors import TraceError
from ifso.graph.channel_graph import ChannelGraph
from ifso.graph.execution import GuardedRecorder, explain, run_fake, run_real, trainable
from ifso.graph.naming import names_in
from ifso.graph.propagate import follow_channels
from ifso.graph.reductions import reductions_of
from ifso.graph.size_attributes import settle
from ifso.graph.tape import Recorder, Tape
from ifso.graph.terms import terms_of
from ifso.graph.wiring import modes_of, wiring_of


def trace(
    model: nn.Module, example_inputs: Any, *, ignore: Iterable[str | nn.Module] = (), memory_limit: int | None = None
) -> ChannelGraph:
    """Find which channels of a network must be removed together, and which must stay.

    The model runs once on fake tensors (no memory, no values), or, where its course depends on values as in detectors,
    on the real ones. It is left exactly as it was: mode, buffers, attributes, random state.

    Args:
        model: any network, in train or eval mode.
        example_inputs: a tensor, a tuple of positional or a dict of keyword arguments. Detectors in train mode take
            ``(images, targets)``.
        ignore: modules whose channels are left alone: their names (or those of parameters), patterns such as
            ``"layer1.*"``, or the modules themselves.
        memory_limit: bytes that a run on real tensors may take; by default 70 % of what is free.

    Returns:
        Groups of units that go together, what is frozen and why, and all that costs, masks and surgery need.

    Raises:
        TraceError: the model does not run on these inputs, is wrapped, compiled or scripted, or ``ignore`` names what
            is not there.
        TraceMemoryError: a run on real tensors would take more than ``memory_limit``.

    >>> import torch
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> graph = trace(net, torch.zeros(1, 3, 8, 8))
    >>> [(group.name, group.size, [member.parameter for member in group.members]) for group in graph.groups]
    [('0', 8, ['0.weight', '0.bias', '1.weight', '1.bias', '1.running_mean', '1.running_var', '3.weight'])]
    """
    with ALONE, trainable():
        return _trace(model, example_inputs, ignore, memory_limit)


def _trace(model: nn.Module, example_inputs: Any, ignored: Any, memory_limit: int | None) -> ChannelGraph:
    _check_arguments(model, example_inputs)
    ignore = names_in(model, ignored, "ignore")
    tape, on_real_tensors = record(model, example_inputs, memory_limit)
    labels = follow_channels(tape, ignore)
    units, attributes = settle(model, example_inputs, labels, on_real_tensors)
    return ChannelGraph(
        groups=units.groups,
        frozen=units.frozen,
        balances=units.balances,
        layouts=units.layouts,
        attributes=attributes,
        terms=terms_of(labels, units, named_tensors(model)),
        inputs=example_inputs,
        output_shapes=tuple(tape.shape(ref) for ref in tape.outputs),
        reductions=reductions_of(labels, units),
        unmasked=frozenset(labels.unmasked),
        gains=labels.gains,
        written=frozenset(tape.written),
        wiring=wiring_of(model),
        modes=modes_of(model),
        on_real_tensors=on_real_tensors,
        recording=(labels, units),
        notes=tuple(dict.fromkeys(labels.notes)),
    )


def _check_arguments(model: nn.Module, example_inputs: Any) -> None:
    check_model(model)
    if not tensors_in(example_inputs):
        raise TraceError("example_inputs hold no tensor; give what model(...) takes: a tensor, a tuple or a dict")


WRAPPERS = {
    "DistributedDataParallel": "its .module",
    "DataParallel": "its .module",
    "FullyShardedDataParallel": "it before it is sharded",
}
"""Modules around a network that hold its weights for several devices, and what to give in place of them."""


def check_model(model: nn.Module) -> None:
    """Refuse modules whose parameters are not plain tensors under their own forward."""
    if not isinstance(model, nn.Module):
        raise TraceError(f"model is a {type(model).__name__}; give a torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise TraceError("model is a scripted or traced module; give the torch.nn.Module it was made from")
    for name, module in model.named_modules():
        _check_wrapping(f"{name} of the model" if name else "model", module)
    for name, tensor in named_tensors(model).items():
        if hasattr(tensor, "placements"):
            raise TraceError(f"{name} is sharded over ranks (DTensor); trace the whole model before sharding it")
        if is_lazy(tensor):
            raise TraceError(f"{name} of a lazy module has no shape yet; run the model once before tracing")


def _check_wrapping(where: str, module: nn.Module) -> None:
    if hasattr(module, "_orig_mod"):
        raise TraceError(f"{where} is compiled; give the module it was made from (its _orig_mod), compile afterwards")
    if getattr(module, "_compiled_call_impl", None) is not None:
        raise TraceError(f"{where} is compiled in place; trace and prune it first, and call compile() afterwards")
    kind = next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in WRAPPERS), None)
    if kind is not None:
        raise TraceError(f"{where} is wrapped in {kind}; give {WRAPPERS[kind]}, and wrap what comes out")


def record(model: nn.Module, inputs: Any, memory_limit: int | None = None) -> tuple[Tape, bool]:
    """A tape of one run, and whether it took real tensors."""
    named: dict[str, Tensor] = named_tensors(model)
    try:
        return run_fake(model, inputs, Recorder(model, named)), False
    except TraceError:
        raise
    except Exception:
        free = available_memory()
        limit = memory_limit if memory_limit is not None else (int(free * 0.7) if free else None)
    try:
        return run_real(model, inputs, GuardedRecorder(model, named, limit)), True
    except Exception as error:
        raise explain(error, model, inputs) from error
