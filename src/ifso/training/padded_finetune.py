"""Train a pruned network in widths that a GPU likes, with zeros where units were removed.

GPUs compute with channels in eights and sixteens; layers of 11 or 13 channels can take twice the time of 16. So widths
are rounded up to multiples or, where that cannot be (:func:`narrow_`), are those before pruning. A removed
unit that is zero everywhere, in the filters that make it, its norm and all that reads it, stays zero under SGD: its
output is zero, and so are all its gradients. So the padded network is trained exactly as the small one, which is read
out of it at the end.

This fails where a module makes something else of a zero, as a sigmoid does, or takes a statistic over channels, as a
layer norm does: :func:`padded_` refuses those. Dropout draws other numbers for the wider layers.
"""

from __future__ import annotations

import copy
import math
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ifso.common.loss_fn import LossFn
from ifso.common.module_state import named_tensors
from ifso.common.text import describe_error
from ifso.common.torch_state import eval_mode, same_modes, undisturbed
from ifso.data.base import Data
from ifso.errors import IfsoError, RecipeError
from ifso.graph.tracing import trace
from ifso.surgery.compact import compact_
from ifso.surgery.recipe import Recipe, recipe_of
from ifso.training.precision import tensor_cores

MULTIPLE = 16
"""What widths are multiples of in training on a GPU."""

TOLERANCE = 1e-3
"""By how much the losses of both networks may differ, as a share, for rounding."""


class Padding:
    """The positions of a pruned network's numbers in the network before pruning, from its recipe."""

    def __init__(self, original: nn.Module, recipe: Recipe, example_inputs: Any) -> None:
        positions = copy.deepcopy(original).to("cpu", torch.float64).eval()
        inputs = tree_map(_on_cpu, example_inputs)
        graph = trace(positions, inputs)
        for tensor in named_tensors(positions).values():
            tensor.data = torch.arange(tensor.numel(), dtype=torch.float64).reshape(tensor.shape)
        for number, step in enumerate(recipe.rounds):
            graph = trace(positions, inputs) if number else graph
            kept = {group.name: torch.tensor(group.kept, dtype=torch.long) for group in step.groups}
            keep = {group.name: torch.isin(torch.arange(group.size), kept[group.name]) for group in step.groups}
            compact_(positions, graph, keep)
        self._positions = {name: tensor.detach().long() for name, tensor in named_tensors(positions).items()}

    def within(self, narrowed: Padding) -> Padding:
        """The positions in a network that was itself narrowed, and that has all of these numbers."""
        found = copy.copy(self)
        found._positions = {
            name: torch.searchsorted(narrowed._positions[name].flatten(), positions)
            for name, positions in self._positions.items()
        }
        return found

    @torch.no_grad()
    def pad_(self, original: nn.Module, pruned: nn.Module) -> nn.Module:
        """``original`` with the numbers of ``pruned`` and zeros elsewhere."""
        small = named_tensors(pruned)
        for name, tensor in named_tensors(original).items():
            positions = self._at(name, small[name], tensor)
            wide = torch.zeros(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
            wide[positions.flatten()] = small[name].detach().to(tensor).flatten()
            tensor.copy_(wide.view(tensor.shape))
        return original

    @torch.no_grad()
    def unpad_(self, pruned: nn.Module, original: nn.Module) -> nn.Module:
        """``pruned`` with its numbers in ``original``."""
        wide = named_tensors(original)
        for name, tensor in named_tensors(pruned).items():
            positions = self._at(name, tensor, wide[name])
            tensor.copy_(wide[name].detach().reshape(-1)[positions.flatten()].view(tensor.shape))
        return pruned

    def elsewhere(self, name: str, wide: Tensor) -> Tensor:
        """The entries of a tensor of the wide network that the pruned one does not have."""
        outside = torch.ones(wide.numel(), dtype=torch.bool, device=wide.device)
        outside[self._positions[name].flatten().to(wide.device)] = False
        return wide.reshape(-1)[outside]

    def _at(self, name: str, small: Tensor, wide: Tensor) -> Tensor:
        positions = self._positions[name]
        if positions.shape != small.shape or (positions.numel() and int(positions.max()) >= wide.numel()):
            raise RecipeError(f"{name!r} has shape {list(small.shape)}, by the recipe it is {list(positions.shape)}")
        return positions.to(wide.device)


def narrow_(original: nn.Module, recipe: Recipe, example_inputs: Any, multiple: int) -> Recipe | None:
    """Remove units from ``original`` that ``recipe`` removes, so many that widths stay multiples; return what went.

    None where that cannot be, and then nothing is removed: after several rounds, or where other units must go along.
    """
    if len(recipe.rounds) != 1:
        return None
    keep = {}
    for group in recipe.rounds[0].groups:
        stays = torch.zeros(group.size, dtype=torch.bool)
        stays[list(group.kept)] = True
        gone = (~stays).nonzero().flatten()
        stays[gone[: -len(group.kept) % multiple]] = True
        keep[group.name] = stays
    try:
        return compact_(original, trace(original, example_inputs), keep, verify=False)
    except IfsoError:
        return None


def padded_(original: nn.Module, pruned: nn.Module, data: Data, *, multiple: int | None = None) -> Padding:
    """Copy the numbers of ``pruned`` into ``original``, with zeros elsewhere, if it then trains as ``pruned`` does.

    With a ``multiple``, ``original`` is first narrowed to widths that are multiples of it, where that can be done.
    Otherwise a RecipeError says why: units that are flagged, such as those of a layer norm, or a trial on a batch of
    ``data`` in which the loss is another one or something that was removed has a gradient.
    """
    recipe = recipe_of(pruned)
    if recipe is None or not recipe.rounds:
        raise RecipeError("nothing was removed from it")
    for group in chain.from_iterable(step.groups for step in recipe.rounds):
        if group.flags and len(group.kept) < group.size:
            raise RecipeError(f"units of {group.name} were removed, which are flagged {', '.join(group.flags)}")
    try:
        inputs = data.example_inputs()
        padding = Padding(original, recipe, inputs)
        if multiple is not None:
            whole = copy.deepcopy(original)
            narrowed = narrow_(original, recipe, inputs, multiple)
            padding = padding if narrowed is None else padding.within(Padding(whole, narrowed, inputs))
        padding.pad_(original, pruned)
        with tensor_cores("float32"):
            _try(padding, original, pruned, data.loss_fn, data.first_batch())
    except RecipeError:
        raise
    except Exception as error:
        raise RecipeError(f"it could not be tried ({type(error).__name__}: {describe_error(error)})") from error
    return padding


def _try(padding: Padding, wide: nn.Module, small: nn.Module, loss_fn: LossFn, batch: Any) -> None:
    """Raise unless both have the same loss and the zeros would stay zero."""
    found, wanted = (_loss(model, loss_fn, batch) for model in (wide, small))
    if not math.isclose(found, wanted, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
        raise RecipeError(f"its loss would be {found:.6g} and not {wanted:.6g}")
    named = {name: parameter for name, parameter in named_tensors(wide).items() if parameter.requires_grad}
    with same_modes(wide), undisturbed(wide), torch.enable_grad():
        gradients = torch.autograd.grad(loss_fn(wide.train(), batch), list(named.values()), allow_unused=True)
    for name, gradient in zip(named, gradients, strict=True):
        if gradient is not None and bool(padding.elsewhere(name, gradient).any()):
            raise RecipeError(f"what was removed from {name} would not stay zero")


def _loss(model: nn.Module, loss_fn: LossFn, batch: Any) -> float:
    with torch.no_grad(), eval_mode(model), undisturbed(model):
        return float(loss_fn(model, batch))


def _on_cpu(leaf: Any) -> Any:
    """An example input for a network in float64."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.to("cpu", torch.float64 if leaf.is_floating_point() else leaf.dtype)
