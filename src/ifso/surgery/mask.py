"""``ifso.masked``: soft removal. The network keeps its shape and computes what the smaller one would."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ifso.costs.counting import check_fits
from ifso.graph.balancing import check_keep
from ifso.graph.channel_graph import ChannelGraph, Keep
from ifso.graph.layouts import surviving
from ifso.graph.reductions import ExactReductions
from ifso.graph.slots import named_tensors


@contextlib.contextmanager
def masked(model: nn.Module, graph: ChannelGraph, keep: Keep) -> Iterator[nn.Module]:
    """Within the context the units that ``keep`` does not keep are gone in effect: their slices are zero.

    Gradients of removed slices are zero too, so the model can be trained inside; afterwards the kept slices have their
    trained values and the removed ones their old.

    >>> from ifso.graph.tracing import trace
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> graph = trace(net, torch.zeros(1, 3, 8, 8))
    >>> with masked(net, graph, {"0": torch.arange(8) < 6}):
    ...     int((net[0].weight.abs().sum((1, 2, 3)) > 0).sum())
    6
    """
    check_fits(model, graph)
    kept = graph.kept(keep)
    check_keep(graph, kept)
    saved: list[tuple[nn.Parameter, Tensor, Tensor]] = []
    handles = []
    for name, parameter in named_tensors(model).items():
        layout = graph.layouts.get(name)
        if layout is None or not isinstance(parameter, nn.Parameter):
            continue
        alive = surviving(layout, kept)
        if bool(alive.all()):
            continue
        alive = alive.to(parameter.device)
        saved.append((parameter, parameter.data, alive))
        parameter.data = parameter.data.masked_fill(~alive, 0)
        if parameter.requires_grad:
            handles.append(parameter.register_hook(lambda grad, alive=alive: grad * alive))
    try:
        with ExactReductions(model, graph.reductions, kept) if graph.reductions else contextlib.nullcontext():
            yield model
    finally:
        for handle in handles:
            handle.remove()
        for parameter, original, alive in saved:
            with torch.no_grad():
                original.copy_(torch.where(alive, parameter.data, original))
            parameter.data = original
