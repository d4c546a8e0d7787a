"""Layers that can be fitted, as a first pass of a network finds them, and the outputs that they have left."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ifso.common.loss_fn import LossFn
from ifso.common.module_state import named_tensors
from ifso.criteria.reader_hooks import TRANSPOSED
from ifso.errors import KeepError
from ifso.graph.channel_graph import ChannelGraph
from ifso.graph.layouts import compact
from ifso.pruning.layer_calls import LayerCall, LayerCalls, as_kernel
from ifso.pruning.least_squares import POSITIONS
from ifso.pruning.partial_passes import run


@dataclass(frozen=True)
class Layer:
    """A layer as a first pass finds it: ``calls`` in a forward pass, ``size`` of what it gives in one, in bytes.

    ``reads`` is the size of its input. ``means`` are the running means of the batch norms behind it, if nothing else is
    there.
    """

    calls: int
    size: int
    reads: int
    groups: int
    outputs: int
    transposed: bool
    bias: str
    normed: bool
    means: tuple[str, ...]


def layers_of(network: nn.Module, loss_fn: LossFn, batch: Any) -> dict[str, Layer]:
    """Conv and linear layers whose weights may change, in the order in which they first run."""
    tensors = named_tensors(network)
    names = {id(tensor): name for name, tensor in tensors.items()}
    seen: dict[str, list[LayerCall]] = {}
    sizes: dict[str, int] = {}
    reads: dict[str, int] = {}

    def see(name: str, call: LayerCall) -> None:
        seen.setdefault(name, []).append(replace(call, x=call.x.new_empty(0)))
        sizes[name] = sizes.get(name, 0) + 4 * call.rows(POSITIONS) * _outputs(call)
        reads[name] = reads.get(name, 0) + call.x.nbytes

    weights = {
        name: tensor for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter) and tensor.dim() > 1
    }
    calls = LayerCalls({name: tensor for name, tensor in weights.items() if tensor.requires_grad}, see)
    run(network, loss_fn, batch, calls)
    found = {}
    for name, (call, *others) in seen.items():
        if name in calls.other_uses or any(other.function is not call.function for other in others):
            continue
        normed = name in calls.normed
        behind = {names.get(id(one), "") for one in calls.norms.get(name, [])} if normed else set()
        found[name] = Layer(
            1 + len(others), sizes[name], reads[name], call.groups, _outputs(call), call.function in TRANSPOSED,
            names.get(id(call.bias), ""), normed, tuple(sorted(one for one in behind if one.endswith("running_mean"))),
        )  # fmt: skip
    return found


def outputs_left(graph: ChannelGraph, kept: Tensor, name: str, weight: Tensor, layer: Layer) -> Tensor | None:
    """The numbers, in the unpruned network, of the outputs that a layer still has; None if they cannot be told."""
    numbers = torch.arange(layer.outputs, device="cpu").view(layer.groups, -1, 1)
    columns = weight.numel() // layer.outputs
    places = as_kernel(numbers.expand(-1, -1, columns), weight.shape, layer.transposed)
    try:
        left = compact(places, graph.layouts[name], kept, name) if name in graph.layouts else places
    except KeepError:
        return None
    return left.flatten(1)[:, 0] if not layer.transposed else _in_order(left)


def _in_order(numbers: Tensor) -> Tensor:
    """Each number once, as they come."""
    first = numbers.reshape(*numbers.shape[:2], -1)[:, :, 0]
    return torch.tensor(list(dict.fromkeys(first.flatten().tolist())), device="cpu")


def _outputs(call: LayerCall) -> int:
    return call.weight.shape[1] * call.groups if call.function in TRANSPOSED else len(call.weight)
