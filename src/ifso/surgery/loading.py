"""Does a model fit a recipe, before or after compaction; and how a fresh one takes in the new sizes and tensors."""

from __future__ import annotations

import inspect
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ifso.common.module_state import named_tensors, replaced, set_tensors
from ifso.errors import RecipeError
from ifso.surgery.recipe import AttributeChange, Recipe, Shape, shapes_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

NewValue = tuple[nn.Module, str, Any]
"""A module, the name of its attribute, and the value that the attribute will have."""


def check_fresh(model: nn.Module, recipe: Recipe) -> None:
    """Refuse a model that does not have the shapes that the recipe starts from."""
    found = shapes_of(model)
    before = {name: change.before for name, change in recipe.shapes.items()}
    if found == before:
        return
    if found == shapes_after(recipe):
        raise RecipeError(f"this {type(model).__name__} is already compacted; load into a freshly built one")
    hint = "build it as it was before pruning"
    if not recipe.rounds:
        hint += " (if a compacted model was saved without its recipe: ifso.save(model, folder, like=RUN))"
    raise RecipeError(f"this is the recipe of another model, {recipe.model}: {difference(before, found)}; {hint}")


def check_compacted(model: nn.Module, recipe: Recipe) -> None:
    """Refuse a model that does not have the shapes and attributes that the recipe leads to."""
    found = shapes_of(model)
    if found != shapes_after(recipe):
        raise RecipeError(
            f"the recipe does not lead to this {type(model).__name__}: {difference(shapes_after(recipe), found)}; "
            "save the model that was compacted, with its own recipe"
        )
    modules = _modules(model)
    for change in recipe.attributes:
        _check_entry(_value(modules, change), change, change.after)


def shapes_after(recipe: Recipe) -> dict[str, Shape]:
    """Shapes of the compacted model."""
    return {name: change.after for name, change in recipe.shapes.items()}


def difference(wanted: Mapping[str, Shape], found: Mapping[str, Shape]) -> str:
    """The first tensor in which two models differ, in words.

    >>> difference({"a": (2,), "b": (3,)}, {"a": (2,), "b": (4,)})
    "'b' should have shape (3,) and has shape (4,)"
    """
    name = next(name for name in chain(wanted, found) if wanted.get(name) != found.get(name))
    if name not in found:
        return f"{name!r} of shape {wanted[name]} is missing"
    if name not in wanted:
        return f"{name!r} of shape {found[name]} should not be there"
    return f"{name!r} should have shape {wanted[name]} and has shape {found[name]}"


def new_values(model: nn.Module, recipe: Recipe) -> list[NewValue]:
    """The attributes of a fresh model after compaction, each checked to have its old value now."""
    modules = _modules(model)
    values: dict[tuple[int, str], NewValue] = {}
    for change in recipe.attributes:
        value = _value(modules, change)
        _check_entry(value, change, change.before)
        module = modules[change.module]
        _, _, value = values.get((id(module), change.name), (module, change.name, value))
        values[id(module), change.name] = module, change.name, replaced(value, change.position, change.after)
    return list(values.values())


def placed_like(name: str, old: Tensor, stored: Tensor) -> Tensor:
    """A copy of ``stored`` on the device of ``old`` (the CPU for meta) with the axes of ``old`` in memory order."""
    if _kind(old.dtype) != _kind(stored.dtype):
        raise RecipeError(f"{name!r} is {stored.dtype} in the file and {old.dtype} in the model")
    if old.layout != torch.strided:
        raise RecipeError(f"{name!r} of the model has layout {old.layout}; only dense tensors can be loaded")
    order = sorted(range(old.dim()), key=old.stride, reverse=True)
    device = "cpu" if old.is_meta else old.device
    placed = torch.empty_permuted(stored.shape, order, dtype=stored.dtype, device=device).copy_(stored)
    if not old.is_meta and not torch._has_compatible_shallow_copy_type(old, placed):
        raise RecipeError(
            f"{name!r} of the model is a {type(old).__name__}; load into a plain model and convert it then"
        )
    return placed


def assign(model: nn.Module, values: Iterable[NewValue], tensors: Mapping[str, Tensor]) -> None:
    """Give a model its compacted attributes and tensors. Parameters stay the same objects, except meta ones."""
    for module, name, value in values:
        setattr(module, name, value)
    named = named_tensors(model)
    set_tensors(model, {name: tensors[name] for name, old in named.items() if old.is_meta})
    for name, old in named.items():
        if not old.is_meta:
            old.data = tensors[name]
        if isinstance(old, nn.Parameter):
            old.grad = None


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    return dict(model.named_modules(remove_duplicate=False))


def _value(modules: Mapping[str, nn.Module], change: AttributeChange) -> Any:
    """The attribute as it stands in the object or its class; properties are not run, and are refused later."""
    if change.module not in modules:
        raise RecipeError(f"attribute {change} cannot be set: the model has no module {change.module!r}")
    return inspect.getattr_static(modules[change.module], change.name, None)


def _check_entry(value: Any, change: AttributeChange, wanted: int) -> None:
    entry = value
    if change.position is not None:
        within = isinstance(value, (tuple, list)) and change.position < len(value)
        entry = value[change.position] if within else None
    if type(entry) is not int:
        raise RecipeError(f"attribute {change} is no int in this model but should be {wanted}")
    if entry != wanted:
        raise RecipeError(f"attribute {change} is {entry} in this model but should be {wanted}")


def _kind(dtype: torch.dtype) -> str:
    return "float" if dtype.is_floating_point else "complex" if dtype.is_complex else "integer"
