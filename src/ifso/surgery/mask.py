"""``ifso.masked``: soft removal. The network keeps its shape and computes what the smaller one would."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ifso.common.module_state import named_tensors
from ifso.common.torch_state import forget_caches
from ifso.costs.cost import check_fits
from ifso.errors import CompactionError
from ifso.graph.balancing import check_keep
from ifso.graph.channel_graph import ChannelGraph, Keep
from ifso.graph.execution import trainable
from ifso.graph.layouts import compact, kept_length, surviving
from ifso.graph.reductions import ExactReductions


@contextlib.contextmanager
def masked(model: nn.Module, graph: ChannelGraph, keep: Keep) -> Iterator[nn.Module]:
    """Within the context the units that ``keep`` does not keep are gone in effect: their slices are zero.

    Functions that take statistics over channels (layer norm …) see only the kept ones. The model can be trained inside:
    removed slices have no gradient and stay zero whatever the optimizer remembers; afterwards the kept slices have
    their trained values and the removed ones, running statistics too, their old.

    Args:
        model: the one that was traced.
        graph: from :func:`ifso.trace`.
        keep: for each group a bool tensor, True for units that stay; groups that are not named stay whole.

    Yields:
        The model.

    Raises:
        KeepError: ``keep`` does not fit the graph, or is not balanced.
        StaleGraphError: the graph is of another model.

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
    forget_caches(model)
    with trainable():
        pieces = list(_pieces(model, graph, kept))
        parameters = [piece for piece in pieces if isinstance(piece.tensor, nn.Parameter)]
        for piece in parameters:
            piece.tensor.data = piece.put.clone()
    try:
        with contextlib.ExitStack() as stack:
            for piece in parameters:
                if piece.tensor.requires_grad:
                    handle = piece.tensor.register_hook(lambda grad, alive=piece.alive: grad * alive)
                    stack.callback(handle.remove)
            stack.callback(register_optimizer_step_post_hook(lambda *_: _zero(parameters)).remove)
            if model not in _masked:
                _masked.add(model)
                stack.callback(_masked.discard, model)
            if graph.reductions:
                stack.enter_context(ExactReductions(model, graph.reductions, kept))
            yield model
    finally:
        with trainable():
            for piece in pieces:
                piece.restore()
        forget_caches(model)


_masked: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def refuse_masked(model: nn.Module) -> None:
    """CompactionError within :func:`masked`, which could not put back what was changed there."""
    if model in _masked:
        raise CompactionError(f"{type(model).__name__} is masked; leave the block of ifso.masked first")


@dataclass(frozen=True, eq=False)
class _Piece:
    """A parameter or buffer that loses slices; ``alive`` is broadcastable to it.

    A ``gain`` of a weight norm is what a removal multiplies the parameter by.
    """

    tensor: Tensor
    original: Tensor
    alive: Tensor
    gain: Tensor | None = None

    @cached_property
    def put(self) -> Tensor:
        """What takes the place of the original."""
        scaled = self.original if self.gain is None else self.original * self.gain
        return scaled.masked_fill(~self.alive, 0)

    @torch.no_grad()
    def restore(self) -> None:
        """What was removed as it was before, what was kept as it is now."""
        now, alive = self.tensor.data, self.alive
        if self.gain is not None:
            now, alive = now / self.gain, alive & (now != self.put)
        self.original.copy_(torch.where(alive, now, self.original))
        self.tensor.data = self.original


def _pieces(model: nn.Module, graph: ChannelGraph, kept: Tensor) -> Iterator[_Piece]:
    for name, tensor in named_tensors(model).items():
        layout, gain = graph.masking(name), gain_of(model, graph, kept, name)
        if layout is None and gain is None:
            continue
        alive = torch.ones_like(tensor, dtype=torch.bool) if layout is None else surviving(layout, kept)
        if gain is not None or not bool(alive.all()):
            original = tensor.data if isinstance(tensor, nn.Parameter) else tensor.detach().clone()
            yield _Piece(tensor, original, alive.to(tensor.device), gain)


def gain_of(model: nn.Module, graph: ChannelGraph, kept: Tensor, name: str) -> Tensor | None:
    """What the gain of a weight norm is multiplied by, so that what is left of the weight stays as it is."""
    normed, dim = graph.gains.get(name, ("", 0))
    layout = graph.masking(normed)
    if layout is None:
        return None
    v = model.get_parameter(normed).detach()
    return kept_length(v, surviving(layout, kept).to(v.device), dim)


def left_of(model: nn.Module, graph: ChannelGraph, kept: Tensor) -> dict[str, Tensor]:
    """What is left of every parameter and buffer that loses slices or is a gain that makes up for them, by name."""
    found = {}
    for name, tensor in named_tensors(model).items():
        gain, layout = gain_of(model, graph, kept, name), graph.layouts.get(name)
        data = tensor.detach() if gain is None else tensor.detach() * gain
        if layout is not None:
            data = compact(data, layout, kept, name)
        if gain is not None or data.shape != tensor.shape:
            found[name] = data
    return found


@torch.no_grad()
def _zero(pieces: list[_Piece]) -> None:
    """After a step of an optimizer, whose momentum may reach removed slices."""
    for piece in pieces:
        piece.tensor.data.masked_fill_(~piece.alive, 0)
