"""Inputs that a network is exported with, and others of several batch sizes that the file is checked on."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ifso.common.batches import is_listed, size_of
from ifso.common.tensors import map_tensors
from ifso.errors import ExportError

BATCH = "batch"
BATCHES = (1, 2, 5)
"""Sizes that a file with a dynamic batch is checked on."""

NOISE = 1 / 3
WHILE_TRACING = 2
"""PyTorch takes sizes of 0 and 1 for constants, so a batch that is to vary has to be traced with more."""


@dataclass(frozen=True)
class Sample:
    """What a network takes: ``args`` by position, ``kwargs`` by name. ``static``: the batch is that of the example.

    Lists of images, as detectors take them, are always static: every image in the list is an input of its own.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    static: bool

    @classmethod
    def of(cls, example_inputs: Any, *, static: bool = False) -> Sample:
        """Of example inputs as :func:`ifso.trace` takes them, brought to the CPU.

        >>> Sample.of({"x": torch.zeros(1, 3, 8, 8)}).kwargs["x"].shape
        torch.Size([1, 3, 8, 8])
        """
        static = static or is_listed(example_inputs)
        inputs = map_tensors(example_inputs, lambda tensor: tensor.detach().cpu())
        strange = [type(leaf).__name__ for leaf in tree_leaves(inputs) if not isinstance(leaf, Tensor)]
        if strange or not tree_leaves(inputs):
            raise ExportError(
                f"the example inputs hold {strange[0] if strange else 'nothing'}; give tensors, in a tuple of "
                "positional or a dict of keyword arguments"
            )
        if isinstance(inputs, dict):
            return cls((), inputs, static)
        return cls(inputs if isinstance(inputs, tuple) else (inputs,), {}, static)

    @property
    def tensors(self) -> list[Tensor]:
        """All of them, in the order of a file's inputs."""
        return tree_leaves((self.args, self.kwargs))

    @property
    def batch(self) -> int:
        """How many there are at once."""
        return size_of((*self.args, *self.kwargs.values()))

    def checks(self) -> list[Sample]:
        """What a file made from it is checked on: batches of several sizes, or the example and one more like it."""
        return [self, self.drawn(self.batch)] if self.static else [self.drawn(batch) for batch in BATCHES]

    def for_tracing(self) -> Sample:
        """The same with a batch that PyTorch does not take for a constant, unless it is to be one."""
        return self if self.static else self._changed(lambda tensor: _rows(tensor, WHILE_TRACING))

    def dynamic_shapes(self) -> tuple[Any, ...] | dict[str, Any] | None:
        """Which sizes vary, in the form of ``torch.export``: the first of every tensor that is no scalar."""
        if self.static:
            return None
        batch = torch.export.Dim(BATCH, min=1)
        shapes = tree_map(lambda tensor: {0: batch} if tensor.dim() else None, (self.args, self.kwargs))
        return shapes[1] if self.kwargs else shapes[0]

    def drawn(self, batch: int) -> Sample:
        """Other inputs of the same kind, ``batch`` of them unless that is fixed; always the same ones.

        Numbers are those of the example with noise of a third of their standard deviation (of 1 if they are all the
        same), and stay within 0 to 1 if the example does; integers are drawn from those in the example.

        >>> tokens = Sample.of(torch.tensor([[3, 7, 3]])).drawn(2).tensors[0]
        >>> tokens.shape, set(tokens.flatten().tolist()) <= {3, 7}
        (torch.Size([2, 3]), True)
        """
        random = torch.Generator().manual_seed(batch)
        if self.static:
            return self._changed(lambda tensor: _noisy(tensor, random))
        return self._changed(lambda tensor: _noisy(_rows(tensor, batch), random))

    def described(self, model: nn.Module) -> list[tuple[str, list[int | str]]]:
        """Name and shape of every input of a file; the names are those of the arguments of ``forward``.

        >>> Sample.of(torch.zeros(1, 3, 8, 8)).described(nn.Conv2d(3, 4, 1))
        [('input', ['batch', 3, 8, 8])]
        """
        described = []
        for name, value in {**_named(model, self.args), **self.kwargs}.items():
            tensors = tree_leaves(value)
            for number, tensor in enumerate(tensors):
                shape: list[int | str] = list(tensor.shape)
                if shape and not self.static:
                    shape[0] = BATCH
                described.append((name if len(tensors) == 1 else f"{name}_{number}", shape))
        return described

    def _changed(self, change: Any) -> Sample:
        return Sample(map_tensors(self.args, change), map_tensors(self.kwargs, change), self.static)


def _rows(tensor: Tensor, count: int) -> Tensor:
    return tensor if not tensor.dim() else torch.cat([tensor[:1]] * count)


def _noisy(tensor: Tensor, random: torch.Generator) -> Tensor:
    if not tensor.is_floating_point():
        places = torch.randint(max(tensor.numel(), 1), tensor.shape, generator=random)
        return tensor.flatten()[places] if tensor.numel() else tensor
    scale = float(tensor.float().std(correction=0)) if tensor.numel() else 0.0
    noise = torch.randn(tensor.shape, generator=random) * (scale * NOISE or 1.0)
    changed = (tensor.float() + noise).to(tensor.dtype)
    pixels = scale > 0 and float(tensor.min()) >= 0 and float(tensor.max()) <= 1
    return changed.clamp(0, 1) if pixels else changed


def _named(model: nn.Module, args: tuple[Any, ...]) -> dict[str, Any]:
    parameters = inspect.signature(model.forward).parameters.values()
    plain = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    names = [*plain[: len(args)], *(f"input_{number}" for number in range(len(plain), len(args)))]
    return dict(zip(names, args, strict=True))
