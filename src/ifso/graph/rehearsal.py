"""Rehearsing a removal: the model runs with smaller parameters on fake tensors, beside its own recording.

Sizes kept as Python numbers (``num_heads``, ``C // heads``, widths in slices) are invisible to the tape. Here they show:
every torch function must give the shapes that the ids predict. Where one does not, the expected shape is put in its
place and the run goes on, so that one run finds every such place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ifso.graph.labels import Labels
from ifso.graph.tape import FunctionCall, ModuleStack, Ref, Tape, refs_in, tensors_in


def expected_shape(shape: tuple[int, ...], layers: list[Tensor], kept: Tensor) -> tuple[int, ...]:
    """Shape after removal of a tensor whose elements belong to the units in ``layers``."""
    result = list(shape)
    for layer in layers:
        alive = kept[layer]
        dims = [dim for dim, size in enumerate(layer.shape) if size > 1]
        for dim, size in zip(dims, _block(alive.squeeze()), strict=True):
            result[dim] = size
    return tuple(result)


def _block(alive: Tensor) -> list[int]:
    """Sizes of the block that the survivors form: a sub-block, or rows of equal length."""
    total = int(alive.sum())
    filled = [int(_any_other(alive, dim).sum()) for dim in range(alive.dim())]
    product = 1
    for size in filled:
        product *= size
    if product == total:
        return filled
    for dim in range(alive.dim() - 1, -1, -1):
        rest = product // max(filled[dim], 1)
        counts = alive.sum(dim)
        if rest and total % rest == 0 and len(set(counts[counts > 0].tolist())) == 1:
            return [total // rest if d == dim else size for d, size in enumerate(filled)]
    return filled


def _any_other(alive: Tensor, dim: int) -> Tensor:
    return alive.movedim(dim, 0).flatten(1).any(1) if alive.dim() > 1 else alive


@dataclass(frozen=True)
class Problem:
    """A function that did not give the expected shapes."""

    module: str
    call: FunctionCall
    why: str


class Diverged(Exception):
    """The model took another way than in its recording."""

    def __init__(self, module: str) -> None:
        super().__init__(module)
        self.module = module


class Rehearsal(TorchFunctionMode):
    """Compares each torch function with the recording and notes the problems."""

    def __init__(self, model: nn.Module, labels: Labels, units: Tensor, kept: Tensor, replaced: set[str]) -> None:
        super().__init__()
        self.problems: list[Problem] = []
        self._tape: Tape = labels.tape
        results = {ref for call in self._tape.functions for ref in refs_in(call.result)}
        self._expected = {
            ref: expected_shape(self._tape.shape(ref), [units[layer.ids] for layer in labels[ref]], kept) for ref in results
        }
        self._stack = ModuleStack(model, self._resume)
        self._last = ""
        self._place = 0
        self._inside = False
        self._replaced = replaced

    @property
    def module(self) -> str:
        """The innermost module that ran last."""
        return self._last

    def _resume(self, name: str, entry: int) -> None:
        if name in self._replaced:
            self._place = self._tape.module_ends.get(entry, self._place)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside or any(name in self._replaced for name in self._stack.running):
            return func(*args, **kwargs)
        self._last = self._stack.module
        name = getattr(func, "__name__", str(func))
        if self._place >= len(self._tape.functions) or self._tape.functions[self._place].name != name:
            raise Diverged(self._stack.module)
        call = self._tape.functions[self._place]
        self._place += 1
        self._inside = True
        try:
            return self._compare(call, func, args, kwargs)
        finally:
            self._inside = False

    def _compare(self, call: FunctionCall, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            result = func(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - any failure of the user's model is a finding
            self._note(call, f"{type(error).__name__}: {error}")
            return self._stand_in(call.result)
        refs = list(refs_in(call.result))
        tensors = tensors_in(result)
        if not refs:
            return result
        wanted = [self._expected[ref] for ref in refs]
        if [tuple(tensor.shape) for tensor in tensors] != wanted:
            self._note(call, f"gave {[tuple(t.shape) for t in tensors]}, expected {wanted}")
            return self._stand_in(call.result)
        return result

    def _note(self, call: FunctionCall, why: str) -> None:
        self.problems.append(Problem(self._stack.module, call, " ".join(why.split())[:200]))

    def _stand_in(self, tree: Any) -> Any:
        if isinstance(tree, Ref):
            return torch.empty(self._expected[tree], dtype=self._tape.values[tree.index].dtype)
        if isinstance(tree, (tuple, list)):
            return type(tree)(self._stand_in(item) for item in tree) if type(tree) in (tuple, list) else tree
        return tree

    def __enter__(self) -> Rehearsal:
        self._stack.__enter__()
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._stack.__exit__(*exc)
