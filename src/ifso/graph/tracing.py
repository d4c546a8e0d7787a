"""``ifso.trace``: any network in, coupled channels out. A run is recorded, its calls are followed by their rules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ifso.common.devices import available_memory
from ifso.common.module_state import named_tensors
from ifso.common.tensors import tensors_in
from ifso.common.torch_state import ALONE
from ifso.errors import TraceError
from ifso.graph import rules
from ifso.graph.channel_graph import ChannelGraph
from ifso.graph.channel_ids import Labels, MeasuredBy
from ifso.graph.execution import GuardedRecorder, explain, run_fake, run_real, trainable
from ifso.graph.layouts import terms_of
from ifso.graph.naming import is_under, modes_of, names_in, wiring_of
from ifso.graph.reductions import reductions_of
from ifso.graph.size_attributes import settle
from ifso.graph.tape import Call, FunctionCall, Recorder, Ref, Tape, refs_in


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
        check_model(model)
        if not tensors_in(example_inputs):
            raise TraceError("example_inputs hold no tensor; give what model(...) takes: a tensor, a tuple or a dict")
        names = names_in(model, ignore, "ignore")
        tape, on_real_tensors = record(model, example_inputs, memory_limit)
        labels = follow_channels(tape, names)
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


LEAVING = frozenset(("numpy", "tolist", "__array__", "__dlpack__"))
"""Functions that hand values to code that nobody follows."""


def follow_channels(tape: Tape, ignore: Collection[str] = ()) -> Labels:
    """Propagate channel ids through a recorded run."""
    labels = Labels(tape)
    for call in tape.calls:
        _follow(call, labels)
    for function in tape.functions:
        if function.name in BY_FUNCTION:
            BY_FUNCTION[function.name](function, labels)
        if function.name in LEAVING:
            labels.freeze_all(refs_in(function.args), f"its values leave torch by {function.name}")
        if function.name == "__set__":
            labels.freeze_all(refs_in(function.args), "is replaced while the model runs (.data = …)")
    _count_attention_once(labels)
    labels.freeze_all(tape.outputs, "is an output of the model")
    for place, value in enumerate(tape.values):
        if value.kind in ("parameter", "buffer") and is_under(value.name, ignore):
            labels.freeze_all([Ref(place)], "ignored on request")
    return labels


def _follow(call: Call, labels: Labels) -> None:
    """Apply the rule of a call. A call that its rule does not understand holds its channels fast, with a note."""
    try:
        rules.find(call)(call, labels)
    except Exception as error:
        labels.notes.append(
            f"{call.op} in {call.module or 'the model'} could not be followed ({type(error).__name__}: {error})"
        )
        rules.unknown(call, labels)


def _flag_attention_scale(function: FunctionCall, labels: Labels) -> None:
    """Attention divides by √(head size) unless told a scale: removing single channels of a head changes that."""
    for layer in labels[function.args[0]] if function.args and function.kwargs.get("scale") is None else ():
        if layer.varies(layer.ids.dim() - 1):
            labels.scales.append((layer.ids.reshape(-1, layer.ids.shape[-1]), function.key))


ATTENTION = {"scaled_dot_product_attention": 0, "multi_head_attention_forward": 2}
"""Functions of attention, with the number of costs behind its products: those of the projection of a layer."""


def _count_attention_once(labels: Labels) -> None:
    """Attention writes what it returns, whether PyTorch takes one kernel for it or, for odd sizes, two products."""
    inside = defaultdict[Any, list[Any]](list)
    for op in labels.operations:
        inside[op.function].append(op)
    weights = set()
    for function in labels.tape.functions:
        if function.name not in ATTENTION or (isinstance(function.result, tuple) and function.result[1] is not None):
            continue
        made = inside[function.key]
        products = made[: len(made) - ATTENTION[function.name]]
        if len(products) > 2 and products[-3].kind == "activation":
            weights.add(id(products[-3]))
    labels.operations = [op for op in labels.operations if id(op) not in weights]


def _settle_attention_layer(function: FunctionCall, labels: Labels) -> None:
    """The same inside ``nn.MultiheadAttention``, whose first rows of weights make the queries.

    It also averages its weights over the heads: a flag only where somebody looks at them.
    """
    width, heads, together = function.args[3:6]
    weight = together or function.kwargs.get("q_proj_weight")
    layer = labels.along(weight, 0) if isinstance(weight, Ref) else None
    if layer is not None:
        labels.scales.append((layer.ids.flatten()[:width].view(heads, -1), function.key))
    averaged = [ids for ids, _, key in labels.flags if key == function.key]
    weights = function.result[1] if isinstance(function.result, tuple) else None
    read = {ref for call in labels.tape.calls if call.function != function.key for ref in call.inputs}
    if weights is not None and (weights in read or weights in labels.tape.outputs):
        for ids in averaged:
            labels.freeze(ids, "its attention weights, averaged over the heads, are used")
    labels.flags = [item for item in labels.flags if item[2] != function.key]


def _measure_instance_norm(function: FunctionCall, labels: Labels) -> None:
    layer = labels.along(function.args[0], 1) if isinstance(function.args[0], Ref) else None
    if layer is not None and layer.dims == (1,):
        labels.sizes.append(MeasuredBy(function.key[0], ("num_features",), None, layer.ids.flatten()))


BY_FUNCTION: dict[str, Callable[[FunctionCall, Labels], None]] = {
    "scaled_dot_product_attention": _flag_attention_scale,
    "multi_head_attention_forward": _settle_attention_layer,
    "instance_norm": _measure_instance_norm,
}
"""What is noted of torch functions beside the ATen calls that they make."""
