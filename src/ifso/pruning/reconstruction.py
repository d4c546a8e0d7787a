"""The last step of the fit: layer after layer, the smaller network's outputs are brought to those of the unpruned one.

When units go, the layers that read them are fitted to what they gave before. What earlier layers then do wrong goes on
into later ones. Here each layer, in the order in which they run, sees the inputs x that the smaller network really has,
and its weights W move towards the outputs z of the unpruned network:

    V = W + (C − W A) (A + λI)⁻¹,   the least E|V x − z|² + λ|V − W|²,   A = Cov(x), C = Cov(z, x).

λ is chosen for each layer, λ = ∞ (as it is) among the choices, by the error on every other batch. No weight is ever
fitted to those, so that a layer which would learn its batches by heart stays as it is and passes nothing on. If the
outputs of the whole network are not nearer there in the end, or the loss is higher though it should fall, everything is
undone.

Where all samples go through the network as one batch, a single pass does it: each layer is fitted when it is about to
run. Else every layer takes a pass of its own, from the layer before (:mod:`~ifso.pruning.partial_passes`), in which as
many batches as there is room for go as one.

Both networks are in eval mode. The batch norms of the unpruned one have new statistics where its loss is lower with
them: those of a training that was broken off lag behind its weights. A batch norm behind a layer gets the mean and the
variance with which it does to V x what that of the unpruned network does to z.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ifso.common.batches import joined
from ifso.common.loss_fn import LossFn, steady_
from ifso.common.module_state import named_tensors
from ifso.common.torch_state import same_modes
from ifso.criteria.moments import Halves, mean_size
from ifso.graph.channel_graph import ChannelGraph
from ifso.pruning.chunks import Batches, as_chunks, by_batch, chunks_of, go_together
from ifso.pruning.fitted_layers import Layer, layers_of, outputs_left
from ifso.pruning.judging import Aim
from ifso.pruning.layer_calls import LayerCall, LayerCalls, as_kernel, as_matrix
from ifso.pruning.least_squares import PIECE, POSITIONS
from ifso.pruning.partial_passes import Asked, Enough, PartialPasses, See, run
from ifso.pruning.recovery import Undo, norms_of

GRID = (0.01, 0.1, 1.0, 10.0)
"""λ, in shares of the mean of A's diagonal."""

LEAST_GAIN = 1e-3
"""A layer is changed if that takes away so much of the variance of its outputs."""

LEAST_ROOM = 2**28
"""Bytes that may be held in any case."""


class Room(NamedTuple):
    """Bytes that may be held at a time: ``targets``, outputs of the unpruned network; layers beyond that wait.

    ``live`` is what samples may take on their way through the network as one batch. ``places`` is for what passes go on
    from, of either network, where not all go as one; and as much is for the batches themselves.
    """

    targets: int
    live: int
    places: int

    @classmethod
    def of(cls, layers: Mapping[str, Layer]) -> Room:
        """As much in all as a training step of the unpruned network keeps of a batch: inputs and outputs of its layers.

        The sizes of the network and of its batches alone decide, no clock and no machine.
        """
        room = max(LEAST_ROOM, 2 * sum(layer.reads for layer in layers.values()))
        return cls(targets=room // 4, live=room // 2, places=room // 4)


class _Apart(Exception):
    """What a layer reads of all samples cannot be told apart by batch."""


def reconstruct_(
    model: nn.Module,
    teacher: nn.Module,
    graph: ChannelGraph,
    kept: Tensor,
    loss_fn: LossFn,
    batches: Batches,
    *,
    reduce: Callable[[Tensor], Tensor] = lambda total: total,
) -> bool:
    """Move the weights of a compacted model, layer after layer, towards the outputs of the unpruned one.

    Args:
        model: without the units that are gone; changed in place.
        teacher: the unpruned network, of which ``graph`` is.
        graph: that knows which outputs are left.
        kept: bool [units + 1] from :meth:`ChannelGraph.kept`.
        loss_fn: ``loss_fn(model, batch)`` runs a network.
        batches: gives the batches, each time in the same order.
        reduce: a sum over all processes.

    Returns:
        Whether it did good on the batches that nothing was fitted to. If not, the model is as it was.
    """
    with same_modes(model), same_modes(teacher):
        first = next(iter(batches()))
        for network in (model, teacher):
            steady_(network, loss_fn, first)
            for norm in norms_of(network):
                norm.eval()
        aim = Aim(teacher, loss_fn, batches, reduce).better_calibrated()
        teacher, before = aim.network, aim.judged(model)
        if before is None:
            return False
        undo = Undo(model)
        layers, whole = (layers_of(network, loss_fn, first) for network in (model, teacher))
        room = Room.of(whole)
        chunks = chunks_of(layers, batches, room.live)
        counts = [count for chunk in chunks for count in chunk]
        samples = joined(list(batches())) if [counts] == chunks and len(counts) > 1 else None
        if samples is not None or not all(go_together(one, loss_fn, batches, chunks[0]) for one in (model, teacher)):
            chunks = [[count] for count in counts]
        together = list(_together(layers.keys() & whole.keys(), whole, len(counts), room.targets))
        passes = PartialPasses(model, loss_fn, as_chunks(batches, chunks, room.places), room.places)
        aims = PartialPasses(teacher, loss_fn, passes.batches, room.places if len(together) > 1 else 0)
        for names in together:
            targets = _targets(aims, chunks, named_tensors(teacher), {name: whole[name] for name in names})
            rows = {name: outputs_left(graph, kept, name, named_tensors(teacher)[name], whole[name]) for name in names}
            fit = _Fit(model, teacher, layers, targets, rows, loss_fn, reduce)
            if samples is None or not fit.in_one_pass_(names, samples, counts):
                samples = None
                for name in names:
                    fit.by_itself_(name, passes, chunks)
        after = aim.judged(model)
        if after is not None and after.distance < before.distance and not after.loss > before.loss > before.unpruned:
            return True
        undo()
        return False


def towards(weight: Tensor, fit: Tensor, judge: Tensor) -> Tensor | None:
    """V in place of W, group by group; None if W says nothing of z, so that x and z may not belong together.

    Args:
        weight: W [groups, outputs, k], in float64.
        fit: the covariance of x and z [groups, k + outputs, k + outputs] to fit to.
        judge: that of other samples, by which λ is chosen.

    >>> joint = torch.tensor([[[1.0, 2.0], [2.0, 4.0]]], dtype=torch.float64)  # z = 2 x
    >>> towards(torch.tensor([[[1.0]]], dtype=torch.float64), joint, joint).round(decimals=2)
    tensor([[[1.9900]]], dtype=torch.float64)
    >>> towards(torch.tensor([[[-1.0]]], dtype=torch.float64), joint, joint) is None
    True
    """
    columns = weight.shape[2]

    def error(tried: Tensor) -> Tensor:
        """E|V x − z|² − E|z|² of each group."""
        inner, cross = judge[:, :columns, :columns], judge[:, columns:, :columns]
        return ((tried @ inner) * tried).sum((1, 2)) - 2 * (tried * cross).sum((1, 2))

    inner, cross = fit[:, :columns, :columns], fit[:, columns:, :columns]
    all_columns = torch.ones(columns, dtype=torch.bool, device=fit.device)
    sizes = torch.stack([mean_size(one.diagonal(), all_columns) for one in inner])
    best, least = weight, error(weight)
    if float(least.sum()) >= 0:
        return None
    least = least - LEAST_GAIN * judge.diagonal(dim1=1, dim2=2)[:, columns:].sum(1)
    gap, before = (cross - weight @ inner).mT, None
    for share in GRID:
        damped = inner.clone()
        damped.diagonal(dim1=1, dim2=2).add_(share * sizes[:, None])
        factor, failed = torch.linalg.cholesky_ex(damped)
        tried = weight + torch.cholesky_solve(gap, factor).mT
        found = error(tried)
        better = (failed == 0) & (found < least)
        best, least = torch.where(better[:, None, None], tried, best), torch.where(better, found, least)
        if before is not None and bool((found > before).all()):
            break  # from here on V only comes back to W
        before = found
    return best


def _together(chosen: Set[str], layers: Mapping[str, Layer], batches: int, held: int) -> Iterator[list[str]]:
    """Layers, in order, whose targets can be held at the same time."""
    names: list[str] = []
    total = 0
    for name in (name for name in layers if name in chosen):
        size = layers[name].size * batches
        if names and total + size > held:
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    if names:
        yield names


def _targets(
    passes: PartialPasses, chunks: Sequence[Sequence[int]], tensors: Mapping[str, Tensor], layers: Mapping[str, Layer]
) -> dict[str, list[list[Tensor]]]:
    """The outputs [rows, outputs] of layers in the unpruned network by batch, at the positions that are looked at."""
    found: dict[str, list[list[Tensor]]] = {name: [] for name in layers}

    def begin(chunk: int) -> See:
        first = sum(map(len, chunks[:chunk]))
        for some in found.values():
            some[first:] = [[] for _ in chunks[chunk]]

        def see(name: str, call: LayerCall) -> None:
            for number, part in enumerate(by_batch(call, chunks[chunk]), first):
                add(name, number, part)

        def add(name: str, number: int, call: LayerCall) -> None:
            here = found[name][number]
            columns = call.columns(POSITIONS, _generator(name, number, len(here)))
            outputs = columns @ as_matrix(call.weight, layers[name].transposed, call.groups).mT
            outputs = outputs.transpose(0, 1).flatten(1)
            here.append(outputs if call.bias is None else outputs + call.bias.detach())

        return see

    calls = sum(layer.calls for layer in layers.values())
    for _ in passes.over(Asked({name: tensors[name] for name in layers}, calls, list(layers)[-1]), begin):
        pass
    return found


@dataclass(frozen=True)
class _Fit:
    """Layers of a model that are moved towards their targets; ``rows`` are those that are left of a layer's outputs."""

    model: nn.Module
    teacher: nn.Module
    layers: Mapping[str, Layer]
    targets: Mapping[str, Sequence[Sequence[Tensor]]]
    rows: Mapping[str, Tensor | None]
    loss_fn: LossFn
    reduce: Callable[[Tensor], Tensor]

    def in_one_pass_(self, names: Sequence[str], samples: Any, counts: Sequence[int]) -> bool:
        """Fit each layer when it is about to run; if that cannot be done, return False and leave them as they were."""
        undo, tensors = Undo(self.model), named_tensors(self.model)
        fitted: dict[str, list[tuple[str, Tensor]]] = {}

        def see(name: str, call: LayerCall) -> None:
            if name in fitted:
                return
            parts = by_batch(call, counts)
            if not parts:
                raise _Apart
            self._move_(name, self._halves(name, ([part] for part in parts)))
            means = self.layers[name].means
            places = [*means, *(f"{mean.removesuffix('mean')}var" for mean in means)]
            fitted[name] = [(place, tensors[place].clone()) for place in places]
            if len(fitted) == len(names):
                raise Enough

        try:
            run(self.model, self.loss_fn, samples, LayerCalls({name: tensors[name] for name in names}, see))
        except Exception:  # a network that takes no such batch, or no memory for it
            undo()
            return False
        with torch.no_grad():
            for place, tensor in (one for some in fitted.values() for one in some):
                tensors[place].copy_(tensor)
        return True

    def by_itself_(self, name: str, passes: PartialPasses, chunks: Sequence[Sequence[int]]) -> None:
        """Fit a layer in a pass of its own, which begins where the one before ended."""
        seen: list[LayerCall] = []

        def begin(_: int) -> See:
            seen.clear()
            return lambda _, call: seen.append(call)

        asked = Asked({name: named_tensors(self.model)[name]}, self.layers[name].calls, name)
        calls = (
            [parts[place] for parts in (by_batch(call, chunks[chunk]) for call in seen) if parts]
            for chunk in passes.over(asked, begin)
            for place in range(len(chunks[chunk]))
        )
        self._move_(name, self._halves(name, calls))

    def _halves(self, name: str, calls: Iterable[Sequence[LayerCall]]) -> Halves | None:
        """Moments of what a layer reads and should give; None if these do not go together, or are too many."""
        rows, layer, halves = self.rows[name], self.layers[name], None
        if rows is None or len(rows) != layer.outputs:
            return None
        for number, (here, wanted) in enumerate(zip(calls, self.targets[name], strict=True)):
            seen = [call.columns(POSITIONS, _generator(name, number, at)) for at, call in enumerate(here)]
            left = [one[:, rows.to(one.device)].unflatten(1, (layer.groups, -1)).transpose(0, 1) for one in wanted]
            if [len(one[0]) for one in seen] != [len(one[0]) for one in left] or not seen:
                return None
            joint = torch.cat([torch.cat(seen, 1), torch.cat(left, 1).to(seen[0])], 2)
            if 2 * 4 * len(joint) * joint.shape[2] ** 2 > PIECE:
                return None
            if halves is None:
                halves = Halves.of(joint, 1, number)
            else:
                halves.add(joint, 1, number)
        return halves

    def _move_(self, name: str, halves: Halves | None) -> None:
        """Give a layer its new weights, if all processes have seen what it reads."""
        apart = torch.tensor(float(halves is None), device=named_tensors(self.model)[name].device)
        if not float(self.reduce(apart)) and halves is not None:
            halves = halves.over(self.reduce)
            _move_(self.model, self.teacher, name, self.layers[name], halves, self.rows[name])


@torch.no_grad()
def _move_(model: nn.Module, teacher: nn.Module, name: str, layer: Layer, halves: Halves, rows: Tensor | None) -> None:
    """The new weights of a layer; its bias, or the batch norm behind it, makes the means right."""
    tensors, given = named_tensors(model), named_tensors(teacher)
    weight, bias = tensors[name], tensors.get(layer.bias)
    matrix = as_matrix(weight.detach(), layer.transposed, layer.groups).double()
    columns = matrix.shape[2]
    new = towards(matrix, *(half.matrix(centred=layer.normed or bias is not None) for half in halves.parts))
    if new is None:
        return
    weight.copy_(as_kernel(new, weight.shape, layer.transposed))
    moments = halves.whole()
    mean, joint = moments.mean(), moments.matrix(centred=True)
    shift = (mean[:, columns:] - (new @ mean[:, :columns, None]).squeeze(2)).flatten()
    if bias is not None and not layer.normed:
        bias.copy_(shift)
    spread = ((new @ joint[:, :columns, :columns]) * new).sum(2).flatten()
    wanted = joint.diagonal(dim1=1, dim2=2)[:, columns:].flatten()
    ratio = torch.where(wanted > 0, spread / wanted, 1.0)
    assert rows is not None
    here = rows.to(weight.device)
    for place in layer.means:
        var = f"{place.removesuffix('mean')}var"
        tensors[place].copy_(given[place][here] - shift + (0.0 if bias is None else bias))
        tensors[var].copy_(given[var][here] * ratio)


def _generator(name: str, number: int, call: int) -> torch.Generator:
    """The same positions in both networks."""
    return torch.Generator(device="cpu").manual_seed(zlib.crc32(f"{name} {number} {call}".encode()))
