"""Batches that go through a network together, as one: fewer passes, as far as there is memory for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ifso.common.batches import is_listed, joined, num_samples, rough_count
from ifso.common.distributed import is_distributed
from ifso.common.loss_fn import LossFn
from ifso.common.module_state import named_tensors
from ifso.errors import ScoreError
from ifso.pruning.fitted_layers import Layer
from ifso.pruning.layer_calls import LayerCall, LayerCalls
from ifso.pruning.partial_passes import run, tensors_of

Batches = Callable[[], Iterable[Any]]
"""Gives the batches, each time in the same order."""


def chunks_of(layers: Mapping[str, Layer], batches: Batches, live: int) -> list[list[int]]:
    """How many samples each batch holds, in lists of those that go as one batch.

    They take up to ``live`` bytes, by four times the widest input. Batches of other kinds go apart, and each does by
    itself with several processes, or layers that are called more than once.
    """
    found, kinds = list[list[int]](), list[Any]()
    try:
        for batch in batches():
            found.append([num_samples(batch)])
            kinds.append(_kind(batch))
    except ScoreError:  # of tensors some hold no samples
        return [[rough_count(batch)] for batch in batches()]
    if is_distributed() or not layers or any(layer.calls > 1 for layer in layers.values()):
        return found
    most = live * max(found[0][0], 1) / (4 * max(layer.reads for layer in layers.values()))
    chunks = found[:1]
    for (count,), kind, before in zip(found[1:], kinds[1:], kinds[:-1], strict=True):
        if kind is None or kind != before or sum(chunks[-1]) + count > most:
            chunks.append([])
        chunks[-1].append(count)
    return chunks


def _kind(batch: Any) -> Any:
    """What two batches must have in common to be joined; None for one that cannot be."""
    leaves, spec = tree_flatten(batch)
    if is_listed(batch) or not all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
        return None
    return spec, [(leaf.shape[1:], leaf.dtype, leaf.device) for leaf in leaves]


def as_chunks(batches: Batches, chunks: Sequence[Sequence[int]], room: int = 0) -> Batches:
    """The batches, those of a chunk as one.

    Once made they are held where they are if they take up to ``room`` bytes, until somebody writes into one.
    """
    held: list[tuple[Any, list[int]]] = []

    def give() -> Iterator[Any]:
        if held and all(_versions(one) == before for one, before in held):
            yield from (one for one, _ in held)
            return
        held.clear()
        found, made, left = iter(batches()), list[tuple[Any, list[int]]](), room
        for chunk in chunks:
            some = list(islice(found, len(chunk)))
            one = joined(some) if len(some) > 1 else some[0]
            left -= sum(tensor.nbytes for tensor in tensors_of(one))
            made = [*made, (one, _versions(one))] if left >= 0 else []
            yield one
        held.extend(made if left >= 0 and all(_versions(one) == before for one, before in made) else [])

    return give


def _versions(batch: Any) -> list[int]:
    """How often its tensors have been written into; those of inference mode do not say."""
    return [tensor._version for tensor in tensors_of(batch) if not tensor.is_inference()]


def go_together(network: nn.Module, loss_fn: LossFn, batches: Batches, chunk: Sequence[int]) -> bool:
    """Return whether layers see of the batches of a chunk, as one, so many times the rows as there are more samples."""
    if len(chunk) == 1:
        return True
    lengths = list[list[tuple[str, int]]]()
    for counts in (chunk[:1], chunk):
        batch, seen = next(iter(as_chunks(batches, [counts])())), list[tuple[str, int]]()
        calls = LayerCalls(named_tensors(network), lambda name, call: seen.append((name, len(call.x))))  # noqa: B023
        try:
            run(network, loss_fn, batch, calls)
        except Exception:  # a network that takes no such batch, or no memory for it
            return False
        lengths.append([(name, length * sum(chunk) // sum(counts)) for name, length in seen])
    return lengths[0] == lengths[1]


def by_batch(call: LayerCall, counts: Sequence[int]) -> list[LayerCall]:
    """A call that saw the samples of several batches, apart; nothing if its rows are not theirs."""
    if len(counts) == 1:
        return [call]
    share, rest = divmod(len(call.x), sum(counts))
    return [] if rest else [replace(call, x=part) for part in call.x.split([share * count for count in counts])]
