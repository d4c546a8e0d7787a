"""A pruned network in the shape it had before: zeros where units were removed, so that it trains as quickly as then.

GPUs compute with channels in eights and sixteens; layers of 11 or 13 channels can take twice the time of 16. A removed
unit that is zero everywhere, in the filters that make it, its norm and all that reads it, stays zero under SGD: its
output is zero, and so are all its gradients. The padded network is therefore trained exactly as the small one, and the
small one is read out of it at the end.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ifso.errors import RecipeError
from ifso.graph.slots import named_tensors
from ifso.graph.tracing import trace
from ifso.surgery.compact import compact_
from ifso.surgery.recipe import Recipe


class Padding:
    """Where the numbers of a pruned network stand in the network before pruning, from its recipe."""

    def __init__(self, original: nn.Module, recipe: Recipe, example_inputs: Any) -> None:
        places = copy.deepcopy(original).to("cpu", torch.float64)
        graph = trace(places, example_inputs.to("cpu", torch.float64))
        for tensor in named_tensors(places).values():
            tensor.data = torch.arange(tensor.numel(), dtype=torch.float64).reshape(tensor.shape)
        for step in recipe.rounds:
            compact_(places, graph, {group.name: _mask(group.size, group.kept) for group in step.groups})
            graph = trace(places, example_inputs.to("cpu", torch.float64))
        self._places: Mapping[str, Tensor] = {
            name: tensor.detach().long() for name, tensor in named_tensors(places).items()
        }

    @torch.no_grad()
    def pad_(self, original: nn.Module, pruned: nn.Module) -> nn.Module:
        """``original`` with the numbers of ``pruned`` and zeros elsewhere."""
        small = named_tensors(pruned)
        for name, tensor in named_tensors(original).items():
            places = self._at(name, small[name], tensor)
            wide = torch.zeros(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
            wide[places.flatten()] = small[name].detach().to(tensor).flatten()
            tensor.copy_(wide.view(tensor.shape))
        return original

    @torch.no_grad()
    def unpad_(self, pruned: nn.Module, original: nn.Module) -> nn.Module:
        """``pruned`` with the numbers that stand in its places in ``original``."""
        wide = named_tensors(original)
        for name, tensor in named_tensors(pruned).items():
            places = self._at(name, tensor, wide[name])
            tensor.copy_(wide[name].detach().reshape(-1)[places.flatten()].view(tensor.shape))
        return pruned

    def _at(self, name: str, small: Tensor, wide: Tensor) -> Tensor:
        places = self._places[name]
        if places.shape != small.shape or (places.numel() and int(places.max()) >= wide.numel()):
            raise RecipeError(f"{name!r} has shape {list(small.shape)}, by the recipe it is {list(places.shape)}")
        return places.to(wide.device)


def _mask(size: int, kept: tuple[int, ...]) -> Tensor:
    mask = torch.zeros(size, dtype=torch.bool)
    mask[list(kept)] = True
    return mask
