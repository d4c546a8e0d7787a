"""``ifso.compact_``: physical removal, proved before on fake tensors, and beside the masked model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ifso.common.module_state import named_tensors, read_attribute, refresh_hooked_weights_, set_attribute, set_tensors
from ifso.common.tensors import map_tensors, tensors_in
from ifso.common.torch_state import forget_caches, in_precision, preserved
from ifso.costs.cost import check_fits, count
from ifso.errors import CompactionError, KeepError
from ifso.graph.balancing import check_keep
from ifso.graph.channel_graph import ChannelGraph, Group, Keep, Layout, by_group
from ifso.graph.dry_run import check_removal
from ifso.graph.execution import call_model, on_real_tensors, trainable
from ifso.graph.layouts import compact, compact_shape
from ifso.graph.naming import class_name
from ifso.graph.removal import UnitRemoval, new_numbers
from ifso.graph.slim_attention import slim_attention
from ifso.surgery.mask import left_of, masked, refuse_masked
from ifso.surgery.recipe import (
    AttributeChange,
    FrozenAxis,
    KeptUnits,
    Recipe,
    Round,
    ShapeChange,
    extend,
    remember,
)


def compact_(
    model: nn.Module,
    graph: ChannelGraph,
    keep: Keep,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    verify: bool = True,
) -> Recipe:
    """Remove the units that ``keep`` does not keep, in place, and return the recipe of what was done.

    Parameters stay the same objects (so ties and optimizers hold), with their requires_grad, dtype, device and memory
    format; gradients shrink along. The smaller model is first run on fake tensors and must give the same output shapes.
    If a check fails, nothing was changed.

    Args:
        model: the one that was traced; changed in place.
        graph: from :func:`ifso.trace`; trace again afterwards.
        keep: for each group a bool tensor, True for units that stay; groups that are not named stay whole.
        optimizer: whose state is to shrink along.
        verify: run the smaller model on the example inputs of the trace, where it must give what the masked model
            gives; False saves two passes.

    Returns:
        What was removed from the model, all compactions together.

    Raises:
        KeepError: ``keep`` does not fit the graph, or is not balanced.
        CompactionError: the smaller model does not run, or does not give what the masked one gives.
        StaleGraphError: the graph is of another model, or from before a compaction.

    >>> from ifso.graph.tracing import trace
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> graph = trace(net, torch.zeros(1, 3, 8, 8))
    >>> recipe = compact_(net, graph, {"0": torch.arange(8) < 6})
    >>> net[0], tuple(net[2].weight.shape)
    (Conv2d(3, 6, kernel_size=(3, 3), stride=(1, 1)), (4, 6, 3, 3))
    """
    check_fits(model, graph)
    refuse_masked(model)
    kept = graph.kept(keep)
    check_keep(graph, kept)
    labels, units = graph.recording
    removal = UnitRemoval(units, graph.attributes, kept, labels, graph.inputs, graph.on_real_tensors)
    problem = check_removal(model, removal, graph.output_shapes, graph.modes)
    if problem is not None:
        raise CompactionError(
            f"the smaller model does not run: {problem}; the model was left as it was "
            "(trace with ignore= to leave layers alone)"
        )
    if verify:
        check_same_function(model, graph, removal)
    recipe = _recipe(model, graph, kept)
    whole = extend(model, recipe)
    with trainable():
        _apply(model, graph, kept, recipe, optimizer)
    remember(model, whole)
    return whole


def _recipe(model: nn.Module, graph: ChannelGraph, kept: Tensor) -> Recipe:
    shapes = {}
    for name, tensor in named_tensors(model).items():
        before = tuple(tensor.shape)
        layout = graph.layouts.get(name)
        shapes[name] = ShapeChange(before, compact_shape(layout, kept, name) if layout else before)
    changes = tuple(_attribute_changes(model, graph, kept, shapes))
    return Recipe(class_name(model), shapes, changes, (round_of(graph, kept),))


def round_of(graph: ChannelGraph, kept: Tensor) -> Round:
    """The story of one removal from the model that was traced."""
    return Round(
        groups=tuple(_kept_units(group, kept) for group in graph.groups),
        frozen=tuple(FrozenAxis(item.parameter, item.dim, item.reason) for item in graph.frozen),
        cost_before=count(graph, graph.kept(None)).as_dict(),
        cost_after=count(graph, kept).as_dict(),
    )


def _kept_units(group: Group, kept: Tensor) -> KeptUnits:
    members = tuple((member.parameter, member.dim) for member in group.members)
    kept_here = tuple(kept[group.units].nonzero().flatten().tolist())
    return KeptUnits(group.name, group.size, kept_here, members, tuple(sorted(group.flags)))


def _attribute_changes(
    model: nn.Module, graph: ChannelGraph, kept: Tensor, shapes: dict[str, ShapeChange]
) -> Iterator[AttributeChange]:
    modules = dict(model.named_modules())
    new = new_numbers(model, graph.attributes, kept, {name: change.after for name, change in shapes.items()})
    for (module, name, position), after in new.items():
        before = read_attribute(modules[module], name, position)
        if before is not None and before != after:
            yield AttributeChange(module, name, position, before, after)


def _apply(
    model: nn.Module, graph: ChannelGraph, kept: Tensor, recipe: Recipe, optimizer: torch.optim.Optimizer | None
) -> None:
    """Make all new tensors first, then swap them in: nothing can fail halfway."""
    smaller, tensors = [], named_tensors(model)
    for name, data in left_of(model, graph, kept).items():
        tensor = tensors[name]
        layout = graph.layouts.get(name, Layout(tuple(tensor.shape), ()))
        shrink = partial(compact, layout=layout, kept=kept, name=name)
        grad = None if tensor.grad is None else shrink(tensor.grad)
        state = {key: shrink(value) for key, value in state_of(optimizer, tensor).items()}
        smaller.append((tensor, data, grad, state))
    for tensor, data, grad, state in smaller:
        tensor.grad = None
        tensor.data = data
        tensor.grad = grad
        if optimizer is not None and state:
            optimizer.state[tensor].update(state)
    modules = dict(model.named_modules())
    for change in recipe.attributes:
        set_attribute(modules[change.module], change.name, change.position, change.after)
    slim_attention(model)
    forget_caches(model)
    refresh_hooked_weights_(model)


def state_of(optimizer: torch.optim.Optimizer | None, parameter: Tensor) -> dict[str, Tensor]:
    """Momenta and the like: state tensors of the parameter's own shape."""
    state = {} if optimizer is None else optimizer.state.get(parameter, {})
    return {key: value for key, value in state.items() if isinstance(value, Tensor) and value.shape == parameter.shape}


UNSEEN = 1e-5
"""Differences up to this, relative to the largest output, are rounding in any precision."""
EXACT = 1e-6
"""What float64 may differ by."""
ROUGH = {torch.float64: EXACT, torch.float32: 1e-3}
HALF = 5e-2
SMALL = 2**20
"""Inputs with more elements are cut to two samples."""
MOST_GROUPS = 32
"""Groups that are tried one by one to find the one to name."""

Answers = list[Tensor]


def check_same_function(model: nn.Module, graph: ChannelGraph, removal: UnitRemoval) -> None:
    """CompactionError if the smaller model gives something else than the masked one on the example inputs."""
    error = _Comparison(model, graph, removal).difference()
    if error is None:
        return
    name = _first_group(model, graph, removal)
    what = f"removing units of {name!r}" if name else "the units taken together"
    hint = f"trace with ignore=({name!r},)" if name else "trace with ignore= to leave layers alone"
    raise CompactionError(
        f"the smaller model computes something else than the masked one: {what} changes the outputs by {error:.1e} of "
        f"the largest; the model was left as it was ({hint})"
    )


def _first_group(model: nn.Module, graph: ChannelGraph, removal: UnitRemoval) -> str | None:
    """The first group whose removal alone changes the outputs."""
    changed = [group for group in graph.groups if not bool(removal.kept[group.units].all())]
    for group in changed[:MOST_GROUPS]:
        kept = torch.ones_like(removal.kept)
        kept[group.units] = removal.kept[group.units]
        with suppress(KeepError):
            check_keep(graph, kept)
            if _Comparison(model, graph, replace(removal, kept=kept)).difference() is not None:
                return group.name
    return None


@dataclass(frozen=True)
class _Comparison:
    """A model with a removal, masked beside really without the units."""

    model: nn.Module
    graph: ChannelGraph
    removal: UnitRemoval

    def difference(self) -> float | None:
        """The largest relative one of the outputs, if it is more than rounding; None also where none can be told."""
        inputs = _samples(self.graph.inputs)
        soft = self._try(inputs, smaller=False)
        if soft is None and inputs is not self.graph.inputs:
            inputs = self.graph.inputs
            soft = self._try(inputs, smaller=False)
        if soft is None:
            return None
        error = _error(soft, self._try(inputs, smaller=True))
        if error <= UNSEEN:
            return None
        with suppress(Exception), in_float64(self.model):
            doubled = map_tensors(inputs, as_float64)
            soft = self._run(doubled, smaller=False)
            error, limit = _error(soft, self._run(doubled, smaller=True)), EXACT
            return None if error <= limit or self._is_random(doubled, soft) else error
        limit = max((ROUGH.get(tensor.dtype, HALF) for tensor in soft), default=HALF)
        if self.graph.on_real_tensors or error <= limit or self._is_random(inputs, soft):
            return None
        return error

    def _is_random(self, inputs: Any, soft: Answers) -> bool:
        """Return whether the masked model itself gives something else with other random numbers."""
        again = self._try(inputs, smaller=False, seed=1)
        return again is None or _error(soft, again) > EXACT

    def _try(self, inputs: Any, smaller: bool, seed: int = 0) -> Answers | None:
        with suppress(Exception):
            return self._run(inputs, smaller, seed)
        return None

    def _run(self, inputs: Any, smaller: bool, seed: int = 0) -> Answers:
        """Numbers that the model gives, masked or really without the units."""
        model, kept = self.model, self.removal.kept

        def run() -> Answers:
            torch.manual_seed(seed)
            if smaller:
                set_tensors(model, left_of(model, self.graph, kept))
                self.removal.set_numbers(model)
            output = call_model(model, map_tensors(inputs, lambda tensor: tensor.detach().clone()))
            return [tensor.detach().clone() for tensor in tensors_in(output)]

        if smaller:
            return on_real_tensors(model, run)
        with masked(model, self.graph, by_group(self.graph, kept)):
            return on_real_tensors(model, run)


def _error(wanted: Answers, found: Answers | None) -> float:
    """The largest difference relative to the largest number of a tensor; infinite where shapes or a run differ."""
    if found is None or [tensor.shape for tensor in wanted] != [tensor.shape for tensor in found]:
        return float("inf")
    largest = 0.0
    for one, other in zip(wanted, found, strict=True):
        one, other = one.to("cpu", torch.complex128), other.to("cpu", torch.complex128)
        finite = one.isfinite() & other.isfinite()
        if bool(finite.any()):
            scale = one[finite].abs().max().clamp(min=1e-12)
            largest = max(largest, float((one - other)[finite].abs().max() / scale))
    return largest


def _samples(inputs: Any) -> Any:
    """The example inputs, at most two samples if they are large; numbers that are all alike become random ones."""
    tensors = tensors_in(inputs)
    first = {tuple(tensor.shape[:1]) for tensor in tensors}
    large = sum(tensor.numel() for tensor in tensors) > SMALL and len(first) == 1 and first != {()}
    random = torch.Generator().manual_seed(0)

    def sample(tensor: Tensor) -> Tensor:
        tensor = tensor[:2] if large else tensor
        if tensor.is_floating_point() and tensor.numel() > 1 and bool((tensor == tensor.flatten()[0]).all()):
            return torch.randn(tensor.shape, generator=random, device="cpu").to(tensor)
        return tensor

    return map_tensors(inputs, sample)


@contextlib.contextmanager
def in_float64(model: nn.Module) -> Iterator[None]:
    """Within it parameters, buffers and new tensors are float64; afterwards all is exactly as before."""
    default = torch.get_default_dtype()
    with preserved(model), in_precision(model, torch.float64):
        try:
            torch.set_default_dtype(torch.float64)
            yield
        finally:
            torch.set_default_dtype(default)


def as_float64(tensor: Tensor) -> Tensor:
    """The tensor in float64, if it holds real numbers."""
    return tensor.double() if tensor.is_floating_point() else tensor
