"""Compare whatever networks return: tensors in tuples, lists, dicts and dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors(outputs: Any) -> Iterator[Tensor]:
    """Every tensor in the outputs, in order.

    >>> import torch
    >>> [t.item() for t in tensors({"a": torch.tensor(1), "b": [torch.tensor(2), None, (torch.tensor(3),)]})]
    [1, 2, 3]
    """
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        for value in outputs.values():
            yield from tensors(value)
    elif isinstance(outputs, list | tuple):
        for value in outputs:
            yield from tensors(value)
    elif dataclasses.is_dataclass(outputs):
        for part in dataclasses.fields(outputs):
            yield from tensors(getattr(outputs, part.name))


def finite(outputs: Any) -> bool:
    """Whether there are outputs and all are finite."""
    found = list(tensors(outputs))
    return bool(found) and all(bool(tensor.isfinite().all()) for tensor in found)


def relative_error(reference: Any, other: Any) -> float:
    """max |a - b| / max |a|, the largest over all output tensors; infinite where shapes differ.

    >>> import torch
    >>> relative_error([torch.tensor([1.0, -4.0])], [torch.tensor([1.0, -3.0])])
    0.25
    >>> relative_error(torch.zeros(2), torch.zeros(3))
    inf
    """
    expected, found = list(tensors(reference)), list(tensors(other))
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
