"""Does a file compute what the network computes?"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ifso.errors import VerificationError

TOLERANCE = 1e-4

Outputs = Sequence[Sequence[Tensor]]
"""For each of several inputs the tensors that come out, in their order."""


def relative_difference(found: Tensor, wanted: Tensor) -> float:
    """The largest difference as a share of the largest value wanted: max |a − b| / max |b|; infinite for other shapes.

    Infinite and undefined values have to stand in the same places; they and equal tensors differ by nothing.

    >>> import torch
    >>> relative_difference(torch.tensor([1.0, 3.999]), torch.tensor([1.0, 4.0])) < 0.00026
    True
    >>> relative_difference(torch.zeros(2), torch.zeros(3))
    inf
    """
    if found.shape != wanted.shape:
        return float("inf")
    a, b = found.detach().double(), wanted.detach().double()
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return 0.0
    if not bool((a.isfinite() & b.isfinite() | same).all()):
        return float("inf")
    finite = b[b.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    difference = float((a - b)[~same].abs().max())
    return difference / largest if largest else float("inf")


def in_order_of(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[Tensor]:
    """Detections of one image in the order of those wanted: rounding swaps boxes with nearly the same score.

    All tensors have a row for each box. Each row wanted takes the nearest one found that no other took.

    >>> import torch
    >>> boxes, scores = torch.tensor([[0.0, 1.0], [5.0, 6.0]]), torch.tensor([0.9, 0.9])
    >>> in_order_of([boxes.flip(0), scores], [boxes, scores])[0].tolist()
    [[0.0, 1.0], [5.0, 6.0]]
    """
    rows = {len(tensor) for tensor in (*found, *wanted)}
    if len(found) != len(wanted) or len(rows) != 1:
        return list(found)
    distance = sum(_row_distance(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))
    assert isinstance(distance, Tensor)
    order = []
    for row in distance:
        order.append(int(row.argmin()))
        distance[:, order[-1]] = float("inf")
    return [tensor[order] for tensor in found]


def _row_distance(found: Tensor, wanted: Tensor) -> Tensor:
    """Of every row wanted to every row found, each column as a share of the largest value."""
    a, b = (tensor.double().flatten(1) if tensor.dim() > 1 else tensor.double()[:, None] for tensor in (found, wanted))
    largest = float(b.abs().max()) if b.numel() else 0.0
    return (b[:, None] - a[None]).abs().amax(2) / (largest or 1.0)


def worst_difference(found: Outputs, wanted: Outputs) -> float:
    """Over all inputs and outputs."""
    worst = 0.0
    for ours, theirs in zip(found, wanted, strict=True):
        if len(ours) != len(theirs):
            return float("inf")
        worst = max([worst, *map(relative_difference, ours, theirs)])
    return worst


def check_same(found: Outputs, wanted: Outputs, tolerance: float, runner: str) -> float:
    """The worst relative difference, if it is within the tolerance; VerificationError otherwise."""
    worst = worst_difference(found, wanted)
    if not worst <= tolerance:
        raise VerificationError(
            f"{runner} does not compute what PyTorch does: results differ by {worst:.2g} of the largest value, "
            f"and {tolerance:g} is allowed; nothing was written"
        )
    return worst
