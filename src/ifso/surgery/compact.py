"""``ifso.compact_``: physical removal, proved on fake tensors before anything is touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from ifso.common.module_state import named_tensors, read_attribute, refresh_hooked_weights_, set_attribute
from ifso.common.torch_state import forget_caches
from ifso.costs.cost import check_fits, count
from ifso.errors import CompactionError
from ifso.graph.balancing import check_keep
from ifso.graph.channel_graph import ChannelGraph, Group, Keep, Layout
from ifso.graph.dry_run import check_removal
from ifso.graph.execution import trainable
from ifso.graph.layouts import compact, compact_shape
from ifso.graph.removal import UnitRemoval, new_numbers
from ifso.graph.slim_attention import slim_attention
from ifso.surgery.mask import left_of, refuse_masked
from ifso.surgery.recipe import (
    AttributeChange,
    FrozenAxis,
    KeptUnits,
    Recipe,
    Round,
    ShapeChange,
    extend,
    name_of,
    remember,
)
from ifso.surgery.verify import check_same_function


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
    return Recipe(name_of(model), shapes, changes, (round_of(graph, kept),))


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
        smaller.append((tensor, data, grad, _shrunk_state(optimizer, tensor, shrink)))
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


def _shrunk_state(
    optimizer: torch.optim.Optimizer | None, parameter: Tensor, shrink: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Momenta and the like: state tensors of the parameter's own shape."""
    state = {} if optimizer is None else optimizer.state.get(parameter, {})
    own = {key: value for key, value in state.items() if isinstance(value, Tensor) and value.shape == parameter.shape}
    return {key: shrink(value) for key, value in own.items()}
