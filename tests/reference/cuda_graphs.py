"""Recording without a GPU: a list of operations on tensors that stay where they are, as in a CUDA graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ifso.common.cuda_graphs import Recorded, Work


class Tape(TorchDispatchMode):
    """A CUDA graph on the CPU: the same operations on the same memory, once more. What waits for values fails."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
            raise RuntimeError("operation not permitted when stream is capturing")
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        known = {storage_of(leaf) for leaf in tree_leaves((args, kwargs))} - {None}
        fresh = [leaf for leaf in tree_leaves(out) if storage_of(leaf) not in known | {None}]
        writes = any(argument.alias_info and argument.alias_info.is_write for argument in func._schema.arguments)
        if (fresh or writes) and func.overloadpacket is not torch.ops.aten.set_:
            args, kwargs = tree_map_only(Tensor, bare, (args, kwargs))
            places = [bare(leaf) if any(leaf is one for one in fresh) else None for leaf in tree_leaves(out)]
            self._steps.append((func, args, kwargs, places))
        return out

    def spoil(self) -> None:
        """Nothing that was computed is there; a graph that is captured does not run."""
        for tensor in (place for *_, places in self._steps for place in places if place is not None):
            tensor.fill_(torch.nan if tensor.is_floating_point() else 0)

    @torch.no_grad()
    def replay(self) -> None:
        with _set_fwd_grad_enabled(False):
            for func, args, kwargs, places in self._steps:
                for place, found in zip(places, tree_leaves(func(*args, **kwargs)), strict=True):
                    if place is not None:
                        place.copy_(found)


def bare(tensor: Tensor) -> Tensor:
    """The same memory, of which nobody hears when it is written."""
    return tensor if tensor._is_zerotensor() else tensor.data


def storage_of(leaf: Any) -> int | None:
    return None if not isinstance(leaf, Tensor) or leaf._is_zerotensor() else leaf.untyped_storage()._cdata


def taped(work: Work, _pool: Any = None) -> Recorded:
    """Recording as :class:`Tape` does it."""
    tape = Tape()
    with tape:
        found = work()
    with torch.no_grad(), _set_fwd_grad_enabled(False):
        tape.spoil()
    return found, tape.replay
