"""What was removed from a model: a checked record that leads from the original shapes to the compacted ones.

A recipe names every parameter and buffer, so a fresh model either fits it exactly or is refused.

>>> shapes = {"weight": ShapeChange((4, 3), (2, 3)), "bias": ShapeChange((4,), (2,))}
>>> group = KeptUnits("linear", size=4, kept=(0, 2), members=(("weight", 0), ("bias", 0)), flags=())
>>> recipe = Recipe("Linear", shapes, (AttributeChange("", "out_features", None, 4, 2),), (Round((group,)),))
>>> recipe.removed_units
2
>>> Recipe.from_json(recipe.to_json()) == recipe
True
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import reprlib
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ifso._version import __version__
from ifso.common.module_state import named_tensors, unwrapped
from ifso.common.serialization import from_plain, scalar, to_plain
from ifso.errors import RecipeError
from ifso.graph.naming import class_name

if TYPE_CHECKING:
    from collections.abc import Iterable

FORMAT = "ifso-recipe"
VERSION = 1
HASHES = ("weights_sha256", "recipe_sha256")
"""What a file ``recipe.json`` holds beside the recipe."""
MAX_SIZE = 2**40
"""The longest axis, and the most elements of one tensor, that a recipe may speak of."""
MAX_AXES = 64

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ShapeChange:
    """Shape of a parameter or buffer in the original model and in the compacted one; equal where nothing went."""

    before: Shape
    after: Shape

    def __post_init__(self) -> None:
        if len(self.before) != len(self.after) or len(self.before) > MAX_AXES:
            raise RecipeError(f"a shape cannot go from {len(self.before)} to {len(self.after)} axes")
        for before, after in zip(self.before, self.after, strict=True):
            _check_shrinks(before, after)
        if math.prod(self.before) > MAX_SIZE:
            raise RecipeError(f"shape {self.before} has more than {MAX_SIZE} elements")


@dataclass(frozen=True)
class AttributeChange:
    """A Python int on submodule ``module`` ("" is the model itself) that follows a number of channels.

    ``position`` is the place in a tuple or list attribute, None for a plain int.
    """

    module: str
    name: str
    position: int | None
    before: int
    after: int

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.name.startswith("_"):
            raise RecipeError(f"{reprlib.repr(self.name)} is not the name of a public attribute")
        if self.position is not None and self.position < 0:
            raise RecipeError(f"position {self.position} is negative")
        _check_shrinks(self.before, self.after)

    @property
    def place(self) -> tuple[str, str, int | None]:
        """What tells this attribute from the others."""
        return self.module, self.name, self.position

    def __str__(self) -> str:
        name = ".".join(filter(None, (self.module, self.name)))
        return repr(name if self.position is None else f"{name}[{self.position}]")


@dataclass(frozen=True)
class KeptUnits:
    """Which units of one group stayed. ``members`` are the (parameter, axis) pairs that lost slices."""

    name: str
    size: int
    kept: tuple[int, ...]
    members: tuple[tuple[str, int], ...]
    flags: tuple[str, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.size <= MAX_SIZE:
            raise RecipeError(f"a group cannot have {self.size} units")
        if any(left >= right for left, right in pairwise(self.kept)):
            raise RecipeError("kept units are not in strictly ascending order")
        if self.kept and not 0 <= self.kept[0] <= self.kept[-1] < self.size:
            raise RecipeError(f"kept units are out of range, the group has {self.size}")
        if any(dim < 0 for _, dim in self.members):
            raise RecipeError("a member has a negative axis")


@dataclass(frozen=True)
class FrozenAxis:
    """A parameter axis that could not be pruned, and the reason in words."""

    parameter: str
    dim: int
    reason: str

    def __post_init__(self) -> None:
        if self.dim < 0:
            raise RecipeError(f"axis {self.dim} is negative")


@dataclass(frozen=True)
class Round:
    """One compaction: what each group kept, what was frozen, and the cost by name before and after."""

    groups: tuple[KeptUnits, ...] = ()
    frozen: tuple[FrozenAxis, ...] = ()
    cost_before: dict[str, int] = field(default_factory=dict)
    cost_after: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_unique("group", (group.name for group in self.groups))
        if self.cost_before.keys() != self.cost_after.keys():
            raise RecipeError("the costs before and after have different names")
        if min((*self.cost_before.values(), *self.cost_after.values()), default=0) < 0:
            raise RecipeError("a cost is negative")


@dataclass(frozen=True)
class Recipe:
    """All that a fresh model needs to take in compacted weights, and the story of how it got there.

    A model that is compacted again gains a further round (:meth:`then`); one that never was has none.

    Attributes:
        model: the class of the network.
        shapes: those of every parameter and buffer, before and after, also unchanged ones; tied ones under their first
            name.
        attributes: Python numbers of modules, before and after.
        rounds: what each compaction removed.
    """

    model: str
    shapes: dict[str, ShapeChange]
    attributes: tuple[AttributeChange, ...] = ()
    rounds: tuple[Round, ...] = ()

    def __post_init__(self) -> None:
        _check_unique("attribute", (change.place for change in self.attributes))

    def __repr__(self) -> str:
        """One line, for a terminal or a notebook.

        >>> Recipe("Linear", {"weight": ShapeChange((4, 3), (4, 3))})
        <Recipe of Linear: nothing was removed>
        """
        if not self.removed_units:
            return f"<Recipe of {self.model.rpartition('.')[2]}: nothing was removed>"
        pairs = ((name, self.cost_before.get(name), self.cost_after.get(name)) for name in ("macs", "params"))
        costs = [f"{name} {first:,} → {last:,} ({last / first:.1%})" for name, first, last in pairs if first and last]
        rounds = f"{len(self.rounds)} round{'' if len(self.rounds) == 1 else 's'}"
        what = "; ".join([f"{self.removed_units} units removed in {rounds}", *costs])
        return f"<Recipe of {self.model.rpartition('.')[2]}: {what}>"

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the original names and shapes: what a fresh model must have."""
        original = sorted((name, change.before) for name, change in self.shapes.items())
        return hashlib.sha256(json.dumps(original, separators=(",", ":")).encode()).hexdigest()

    @property
    def removed_units(self) -> int:
        """Units removed in all rounds together."""
        groups = chain.from_iterable(round_.groups for round_ in self.rounds)
        return sum(group.size - len(group.kept) for group in groups)

    @property
    def cost_before(self) -> dict[str, int]:
        """Cost of the original model, as counted in the first round."""
        return self.rounds[0].cost_before if self.rounds else {}

    @property
    def cost_after(self) -> dict[str, int]:
        """Cost of the compacted model, as counted in the last round."""
        return self.rounds[-1].cost_after if self.rounds else {}

    def then(self, later: Recipe) -> Recipe:
        """This recipe followed by ``later``, which must start from the shapes and attributes that this one leads to."""
        shapes = _chain_shapes(self.shapes, later.shapes)
        attributes = _chain_attributes(self.attributes, later.attributes)
        return Recipe(self.model, shapes, attributes, self.rounds + later.rounds)

    def to_json(self) -> dict[str, Any]:
        """A dict of plain JSON values that :meth:`from_json` turns into an equal recipe."""
        header = _Header(FORMAT, VERSION, self.fingerprint, versions())
        return {**to_plain(header), **to_plain(self)}

    @classmethod
    def from_json(cls, document: object) -> Recipe:
        """The recipe that :meth:`to_json` wrote; a RecipeError that says what is wrong and where, if anything is.

        ``document`` may be what ``json.load`` makes of a ``recipe.json``: the hashes in it are passed over, as the
        weights are not at hand. :func:`ifso.load` checks them.
        """
        known = {key: value for key, value in check_format(document).items() if key not in HASHES}
        names = set(_Header.__annotations__)
        header = from_plain(_Header, {name: known[name] for name in known if name in names}, "recipe")
        recipe = from_plain(cls, {name: known[name] for name in known if name not in names}, "recipe")
        if header.fingerprint != recipe.fingerprint:
            raise RecipeError("recipe.fingerprint does not belong to the shapes before compaction")
        return recipe


@dataclass(frozen=True)
class _Header:
    format: str
    version: int
    fingerprint: str
    versions: dict[str, str]


def check_format(document: object) -> dict[str, Any]:
    """``document`` itself if it claims to be a recipe of the version that this library reads."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise RecipeError(f"this is no ifso recipe: there is no 'format': {FORMAT!r}")
    version = scalar(int, document.get("version"), "recipe.version")
    if version != VERSION:
        raise RecipeError(f"recipe version {version} is unknown, this ifso reads {VERSION}; use the ifso that wrote it")
    return document


def shapes_of(model: nn.Module) -> dict[str, Shape]:
    """Shape of every tensor of :func:`named_tensors`."""
    tensors = named_tensors(model)
    for name, tensor in tensors.items():
        if is_lazy(tensor):
            raise RecipeError(f"parameter {name!r} of the lazy model has no shape yet; run the model once first")
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def digest_of(model: nn.Module) -> str:
    """The beginning of a SHA-256 over the names and values of all tensors: tells one set of weights from another."""
    digest = hashlib.sha256()
    for name, tensor in named_tensors(model).items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def unchanged(model: nn.Module) -> Recipe:
    """The recipe of a model from which nothing was removed."""
    return Recipe(class_name(model), {name: ShapeChange(shape, shape) for name, shape in shapes_of(model).items()})


_REMEMBERED: WeakKeyDictionary[nn.Module, Recipe] = WeakKeyDictionary()
_CARRIED = "_ifso_recipe"
"""The attribute in which a compacted model carries its recipe as JSON, so that copies and pickles have it, too."""


def remember(model: nn.Module, recipe: Recipe) -> None:
    """Give a model that was compacted its ``recipe``, counted from the original model; copies of it carry it along."""
    _REMEMBERED[model] = recipe
    vars(model)[_CARRIED] = json.dumps(recipe.to_json())


def recipe_of(model: nn.Module) -> Recipe | None:
    """The recipe that the model, or the model that it is a copy of, was given; None if there is none."""
    carried = vars(model).get(_CARRIED)
    if carried is not None and model not in _REMEMBERED:
        _REMEMBERED[model] = Recipe.from_json(json.loads(carried))
    return _REMEMBERED.get(model)


def recipe(model: nn.Module) -> Recipe:
    """What was removed from ``model``, which may be a copy (moving average, unpickled …) or wrapped (DDP, compiled …).

    Args:
        model: compacted or whole.

    Returns:
        The recipe; that of a model from which nothing was removed has no rounds.

    Raises:
        RecipeError: something was removed, as shapes or parts say, and the recipe is not known.

    >>> recipe(nn.Linear(2, 2)).rounds
    ()
    """
    plain = unwrapped(model)
    found = recipe_of(plain)
    if found is None:
        _refuse_pruned(plain)
    return found or unchanged(plain)


def _refuse_pruned(model: nn.Module) -> None:
    """RecipeError if a part of the model was compacted, or it has the shapes of a compacted one without its recipe."""
    hint = "give the run it comes from: ifso.save(model, folder, like=RUN)"
    for name, module in model.named_modules():
        if name and _CARRIED in vars(module):
            raise RecipeError(
                f"{name!r} of this {type(model).__name__} was compacted, not the whole; save that part, or {hint}"
            )
    found = shapes_of(model)
    for known in _REMEMBERED.values():
        after = {name: change.after for name, change in known.shapes.items()}
        if found == after and any(change.before != change.after for change in known.shapes.values()):
            raise RecipeError(
                f"this {type(model).__name__} has the shapes of a compacted {known.model.rpartition('.')[2]} but no "
                f"recipe of its own, so it could not be loaded; {hint}"
            )


def extend(model: nn.Module, recipe: Recipe) -> Recipe:
    """``recipe`` counted from the original model: after what is remembered of ``model``, if anything is."""
    earlier = recipe_of(model)
    return earlier.then(recipe) if earlier else recipe


def _chain_shapes(first: dict[str, ShapeChange], later: dict[str, ShapeChange]) -> dict[str, ShapeChange]:
    for name in first.keys() ^ later.keys():
        raise RecipeError(f"the recipes do not follow each other: {name!r} is in one of them only")
    for name, change in first.items():
        if change.after != later[name].before:
            raise RecipeError(
                f"the recipes do not follow each other: {name!r} has shape {change.after} after the first "
                f"and {later[name].before} before the second"
            )
    return {name: ShapeChange(change.before, later[name].after) for name, change in first.items()}


def _chain_attributes(
    first: tuple[AttributeChange, ...], later: tuple[AttributeChange, ...]
) -> tuple[AttributeChange, ...]:
    chained = {change.place: change for change in first}
    for change in later:
        earlier = chained.get(change.place, change)
        if change.place in chained and earlier.after != change.before:
            raise RecipeError(
                f"the recipes do not follow each other: attribute {change} is {earlier.after} after the first "
                f"and {change.before} before the second"
            )
        chained[change.place] = AttributeChange(*change.place, earlier.before, change.after)
    return tuple(chained.values())


def _check_shrinks(before: int, after: int) -> None:
    if not 0 <= after <= before <= MAX_SIZE:
        raise RecipeError(f"a size cannot go from {before} to {after}")


def _check_unique(what: str, names: Iterable[object]) -> None:
    seen = set()
    for name in names:
        if name in seen:
            raise RecipeError(f"{what} {reprlib.repr(name)} occurs twice")
        seen.add(name)


def versions() -> dict[str, str]:
    """What files are written with."""
    return {"ifso": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
