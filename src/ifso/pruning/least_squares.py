"""The weights that fit best when inputs go: W_K = W A[:, K] A[K, K]⁻¹, layer by layer, from what the layers see.

Proposition 1 gives, beside the change of the loss, the weights that the others adapt to. With the curvature of a layer
taken as a Kronecker product, that update is the least-squares answer: the layer's outputs z = W a + b stay as near as
they can to what they were when only the columns K of its input a are left,

    W_K = W Ã[:, K] Ã[K, K]⁻¹,   Ã = A + λI,   λ = damping · mean diag A,   b_K = b + (W − W_K) E[a],

for the whole removed set at once: of all V that are zero outside K, W_K has the least E|(W − V)a|² + λ|W − V|², so that
what the data do not tell stays as it was. A is the covariance of a over samples and positions where something behind
the layer takes a shift away (its bias, or a batch norm), else its second moment. Convolutions are linear in patches; a
transposed one is a convolution of the input with zeros between.

With few samples inputs fit together by chance. Two halves of the samples, with A₁ and A₂, say how far that goes:
‖A₁ − A₂‖²/4 is what A errs by, and λ at least what shrinks A towards its mean diagonal as Ledoit and Wolf (2004) do for
such an error. Of the step from "no update" to W_K that share, from 0 to 1, is taken at which the weights fitted to
either half do best on the other one: never worse there than no update at all.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn

from ifso.common.module_state import named_tensors
from ifso.criteria.moments import Halves, mean_size
from ifso.criteria.reader_hooks import TRANSPOSED
from ifso.curvature.weight_space import Reader
from ifso.errors import ScoreError
from ifso.pruning.layer_calls import LayerCall, LayerCalls, as_kernel, as_matrix

DAMPING = 0.01
"""The least λ, as a share of the mean of A's diagonal."""

MOST_DAMPING = 1e3
"""The largest, for halves that have nothing in common."""

POSITIONS = 64
"""Positions of a feature map, drawn at random, that an image adds to A."""

PIECE = 2 * 2**30
"""Bytes of moments that are held at a time; layers beyond that wait for another pass over the data."""


def fitted(weight: Tensor, moments: Tensor, kept: Tensor, damping: float = DAMPING) -> Tensor:
    """W_K in place of W: zero in the columns that go. One group.

    Args:
        weight: W [outputs, k], in float64.
        moments: A [k, k], covariance or second moment, in float64.
        kept: bool [k], the columns that stay.
        damping: λ as a share of the mean of A's diagonal over the columns that are not constant, nor gone before
            (nothing reads those any more); more, if A is so far from regular that this will not do.

    Returns:
        [outputs, k]. Columns that are always zero (dead channels) keep their weights, as nothing is known of them.

    >>> a = torch.tensor([[2.0, 2.0], [2.0, 2.0]], dtype=torch.float64)  # the second input equals the first
    >>> fitted(torch.tensor([[1.0, 3.0]], dtype=torch.float64), a, torch.tensor([True, False]), damping=1e-9)
    tensor([[4.0000, 0.0000]], dtype=torch.float64)
    """
    if not bool(moments.isfinite().all()):
        raise ScoreError("the inputs of a layer are not finite, so that its weights cannot be updated; check the data")
    result, lost = weight * kept, ~kept & weight.any(0)
    if not bool(kept.any()) or not bool(lost.any()):
        return result
    left, lost = kept.nonzero().flatten(), lost.nonzero().flatten()
    size = mean_size(moments.diagonal(), kept | weight.any(0))
    # W Ã[:, K] = W[:, K] Ã[K, K] + W[:, L] A[L, K]: only what goes has to be taken over
    taken, inner = weight[:, lost] @ moments[lost][:, left], moments[left]
    while True:
        damped = inner.index_select(1, left)
        damped.diagonal().add_(damping * size)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not bool(failed):
            break
        damping = max(10 * damping, 1e-12)
    del damped, inner
    result[:, left] += torch.cholesky_solve(taken.t(), factor).t()
    return result


def damping_for(whole: Tensor, halves: Sequence[Tensor], counted: Tensor) -> float:
    """λ for what A errs by, as two halves of the samples tell: ρ / (1 − ρ), (1 − ρ) A + ρ · mean diag A being nearest.

    Args:
        whole: A [k, k].
        halves: A₁ and A₂, of either half.
        counted: bool [k], the columns that matter.

    >>> whole, apart = torch.tensor([[2.0, 1.0], [1.0, 2.0]]), torch.tensor([[1.0, 0.5], [0.5, 0.0]])
    >>> all_of_it = torch.tensor([True, True])
    >>> damping_for(whole, [whole, whole], all_of_it), damping_for(whole, [whole + apart, whole - apart], all_of_it)
    (0.01, 3.0)
    """
    error = (halves[0] - halves[1])[counted][:, counted].square().sum() / 4
    away = whole[counted][:, counted]
    away.diagonal().sub_(mean_size(whole.diagonal(), counted))
    left = float(away.square().sum() - error)
    return min(max(DAMPING, float(error) / left), MOST_DAMPING) if left > 0 else MOST_DAMPING


def protected(weight: Tensor, whole: Tensor, halves: Sequence[Tensor], kept: Tensor) -> Tensor:
    """W_K as :func:`fitted` has it, damped and shortened as far as the two halves of the samples call for.

    >>> a = torch.tensor([[2.0, 2.0], [2.0, 2.0]], dtype=torch.float64)
    >>> weight, kept = torch.tensor([[1.0, 3.0]], dtype=torch.float64), torch.tensor([True, False])
    >>> protected(weight, a, [a, a], kept)
    tensor([[3.9703, 0.0000]], dtype=torch.float64)
    >>> protected(weight, a, [a, torch.diag(a.diagonal())], kept)  # the second half knows nothing of the first one
    tensor([[1., 0.]], dtype=torch.float64)
    """
    plain = weight * kept
    lost, along, size = weight - plain, 0.0, 0.0
    if not bool(lost.any()):
        return plain
    damping = damping_for(whole, halves, kept | weight.any(0))
    for half, other in (halves, halves[::-1]):
        step = fitted(weight, half, kept, damping) - plain
        seen = step @ other
        along += float((seen * lost).sum())
        size += float((seen * step).sum())
    share = min(max(along / size, 0.0), 1.0) if size > 0 else 0.0
    return plain + share * (fitted(weight, whole, kept, damping) - plain)


@dataclass
class Update:
    """New weights and biases by name, and the layers that were left alone, each with the reason."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    left_alone: dict[str, str] = field(default_factory=dict)

    @torch.no_grad()
    def apply_(self, model: nn.Module) -> None:
        """Put the new numbers into the model."""
        live = named_tensors(model)
        for name, new in self.tensors.items():
            live[name].copy_(new)


@dataclass
class _Seen:
    """What is known of a layer after a pass."""

    reader: Reader
    moments: Halves
    transposed: bool
    groups: int
    bias: str


def least_squares(
    model: nn.Module,
    readers: Iterable[Reader],
    kept: Tensor,
    run: Callable[[], Iterator[None]],
    *,
    damping: float | None = None,
    positions: int = POSITIONS,
    reduce: Callable[[Tensor], Tensor] = lambda total: total,
) -> Update:
    """The weights (and biases) of all layers that lose inputs when units go. The model is not changed.

    Of a layer without a bias in front of a batch norm, the running mean takes the bias's place.

    Args:
        model: as it is before the units go.
        readers: where layers read units that go.
        kept: bool [units + 1], with a last entry True: the units that stay.
        run: runs the model on one batch after the other, yielding after each; called once for each piece of layers.
        damping: λ as a share of the mean of A's diagonal; None for what two halves of the samples call for.
        positions: of a feature map that each sample adds to A.
        reduce: a sum over all processes.

    Returns:
        Update, with a reason for each layer that has no closed form here.
    """
    tensors = named_tensors(model)
    update = Update()
    by_name: dict[str, list[Reader]] = {}
    for reader in readers:
        if tensors[reader.parameter].dim() > 1:
            by_name.setdefault(reader.parameter, []).append(reader)
    for piece in _pieces(by_name, tensors, update):
        seen, calls = _pass(piece, tensors, run, positions)
        for name in piece:
            if name in calls.other_uses:
                update.left_alone[name] = f"its weight is also used by {calls.other_uses[name]}"
            elif name not in calls.ran:
                update.left_alone[name] = "its weight is not that of a conv or linear layer that ran"
            elif name in seen:
                norms = calls.norms.get(name, []) if name in calls.normed else []
                found = _fit(tensors[name].detach(), seen[name], name in calls.normed, tensors, kept, damping, reduce)
                _add_to(update, name, *found, seen[name].bias, norms, tensors)
    return update


def _fit(
    weight: Tensor, seen: _Seen, normed: bool, tensors: Mapping[str, Tensor], kept: Tensor,
    damping: float | None, reduce: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The new weight of a layer, and what has to be added to its outputs."""
    halves = seen.moments.over(reduce)
    moments = halves.whole()
    matrix = as_matrix(weight, seen.transposed, seen.groups).double()
    stays = _columns_kept(seen.reader, seen, kept, matrix.shape[2]).to(matrix.device)
    mean, parts = moments.mean(), (moments, *halves.apart())
    whole, *apart = (part.matrix(centred=normed or seen.bias in tensors) for part in parts)
    del halves, moments, parts  # of wide layers they take much memory
    groups = zip(matrix, whole, zip(*apart, strict=True), stays, strict=True)
    new = torch.stack(
        [
            protected(one, both, each, left) if damping is None else fitted(one, both, left, damping)
            for one, both, each, left in groups
        ]
    )
    shift = ((matrix - new) @ mean.unsqueeze(2)).flatten()
    return as_kernel(new, weight.shape, seen.transposed).to(weight.dtype), shift


def _add_to(
    update: Update, name: str, weight: Tensor, shift: Tensor, bias: str, norms: Sequence[Tensor],
    tensors: Mapping[str, Tensor],
) -> None:  # fmt: skip
    """The shift goes into the bias or, without one, out of the running means of the batch norms behind."""
    update.tensors[name] = weight
    if bias in tensors:
        old = tensors[bias].detach()
        update.tensors[bias] = (old.double() + shift).to(old.dtype)
        return
    known = {id(tensor) for tensor in norms}
    for module in {other.rpartition(".")[0] for other, tensor in tensors.items() if id(tensor) in known}:
        mean = tensors.get(f"{module}.running_mean")
        if mean is not None:
            update.tensors[f"{module}.running_mean"] = (mean.double() - shift).to(mean.dtype)


def _columns_kept(reader: Reader, seen: _Seen, kept: Tensor, columns: int) -> Tensor:
    """Which columns stay, bool [groups, k]."""
    owner = (reader.owner if seen.transposed else reader.channels(seen.groups)).cpu()
    channels = kept[owner].reshape(seen.groups, -1)
    return channels.repeat_interleave(columns // channels.shape[1], 1)


def _pieces(
    by_name: Mapping[str, list[Reader]], tensors: Mapping[str, Tensor], update: Update
) -> Iterator[dict[str, list[Reader]]]:
    """Layers whose moments fit into memory together; one that is too large by itself is left alone."""
    piece: dict[str, list[Reader]] = {}
    total = 0
    for name, found in by_name.items():
        columns, size = _size(tensors[name], found[0])
        if size > PIECE:
            update.left_alone[name] = f"{columns} columns are too many for their moments to be held"
            continue
        if piece and total + size > PIECE:
            yield piece
            piece, total = {}, 0
        piece[name] = found
        total += size
    if piece:
        yield piece


def _size(weight: Tensor, reader: Reader) -> tuple[int, int]:
    """How many columns a layer has, and the bytes of both halves' moments."""
    columns = weight.numel() // weight.shape[1 - reader.dim]
    groups = _groups(reader.owner) if reader.owner.dim() > 1 else 1
    return columns, 2 * max(weight.element_size(), 4) * groups * columns**2


def _groups(owner: Tensor) -> int:
    """The groups of a convolution, whose outputs [O, I / groups] read the same channels.

    >>> _groups(torch.tensor([[0, 1], [0, 1], [2, 3], [2, 3], [-1, -1], [-1, -1], [-1, -1], [-1, -1]]))
    4
    """
    begins = (owner[1:] != owner[:-1]).any(1).nonzero().flatten() + 1
    places = [0, *begins.tolist(), len(owner)]
    return len(owner) // math.gcd(*(end - begin for begin, end in pairwise(places)))


def _pass(
    piece: Mapping[str, list[Reader]], tensors: Mapping[str, Tensor], run: Callable[[], Iterator[None]], positions: int
) -> tuple[dict[str, _Seen], LayerCalls]:
    """One pass over the data: the moments of each layer of a piece."""
    seen: dict[str, _Seen] = {}
    biases = {id(tensor): name for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)}

    def see(name: str, call: LayerCall) -> None:
        transposed = call.function in TRANSPOSED
        reader = next((reader for reader in piece[name] if (reader.dim == 0) == transposed), None)
        if reader is None:
            return
        rows = seen[name].moments.rows if name in seen else 0
        generator = torch.Generator(device="cpu").manual_seed(zlib.crc32(name.encode()) + rows)
        columns = call.columns(positions, generator)
        if name in seen:
            seen[name].moments.add(columns, call.samples, number)
        else:
            bias = biases.get(id(call.bias), "")
            seen[name] = _Seen(reader, Halves.of(columns, call.samples, number), transposed, call.groups, bias)

    calls = LayerCalls({name: tensors[name] for name in piece}, see)
    number = 0
    with torch.no_grad(), calls:
        for _ in run():
            number += 1
    return seen, calls
