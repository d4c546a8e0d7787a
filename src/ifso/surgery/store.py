"""A compacted model as two files, ``recipe.json`` and ``model.safetensors``; no pickle on either way.

The recipe holds the SHA-256 of the weights and of itself, so damage or an edit of either file is noticed (white space
and the order of keys in the recipe do not count). The hashes guard against accidents, not against a forger.

Saving writes both files under provisional names, then renames the weights, and last the recipe. Stopped before the
first renaming, the earlier save stands; stopped between the two, the provisional recipe is the one that fits the
weights, and both :func:`load` and the next :func:`save` find it.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ifso.common.files import (
    clear_scratch,
    error_number,
    explained,
    is_file,
    refuse_not_plain,
    storable,
    sync_file,
    sync_folder,
    write_bytes,
    write_tensors,
)
from ifso.common.locks import turn_in
from ifso.common.module_state import inner_name, named_tensors, replaced, set_tensors, unwrapped
from ifso.common.serialization import no_constant, unique_keys
from ifso.common.text import one_line
from ifso.errors import RecipeError, VerificationError
from ifso.graph.execution import trainable
from ifso.graph.slim_attention import slim_attention
from ifso.surgery.recipe import AttributeChange, Recipe, Shape, check_format, extend, remember, shapes_of
from ifso.surgery.recipe import recipe as recipe_to_save

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from io import BufferedReader

RECIPE = "recipe.json"
WEIGHTS = "model.safetensors"
RUN_SUMMARY = "summary.json"
NEW_RECIPE = ".recipe.json.new"
NEW_WEIGHTS = ".model.safetensors.new"
MAX_RECIPE_BYTES = 64 * 2**20

M = TypeVar("M", bound=nn.Module)


def save(
    model: nn.Module,
    folder: str | os.PathLike[str],
    recipe: Recipe | None = None,
    *,
    like: str | os.PathLike[str] | nn.Module | None = None,
) -> Path:
    """Write ``model`` into ``folder``, which is made if need be, so that :func:`load` can put it into a fresh model.

    All parameters and buffers are stored, also non-persistent ones; tied ones once. A compacted model and its copies
    (moving averages, ``copy.deepcopy``, unpickled ones) carry their recipe; of a wrapper (DDP, ``torch.compile`` …) the
    network inside is saved. An interrupted save never spoils an earlier one.

    Args:
        model: compacted or whole.
        folder: for ``recipe.json`` and ``model.safetensors``.
        recipe: what was removed; by default what the model carries.
        like: where the recipe is, if the model lost it: the folder of a run or of an earlier save, or a model.

    Returns:
        The folder.

    Raises:
        RecipeError: the recipe is not known or does not fit, or the files cannot be written.
    """
    if recipe is not None and like is not None:
        raise RecipeError("both recipe= and like= were given; give one of them")
    folder, model = Path(folder), unwrapped(model)
    if like is not None:
        recipe = recipe_to_save(like) if isinstance(like, nn.Module) else read_recipe(Path(like))
    recipe = recipe or recipe_to_save(model)
    check_compacted(model, recipe)
    document = recipe.to_json()
    Recipe.from_json(document)
    try:
        tensors = storable(named_tensors(model))
    except ValueError as error:
        raise RecipeError(str(error)) from None
    if folder.exists() and not folder.is_dir():
        raise RecipeError(f"{folder} is a file; give a folder to save into")
    with _located(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with turn_in(folder):
            _finish_interrupted(folder)
            _write(folder, tensors, document)
    return folder


def load(folder: str | os.PathLike[str], model: M, *, unverified: bool = False) -> M:
    """Put what :func:`save` wrote into ``model``, a fresh one of the original class and sizes, and return it.

    Tensors come to the device of the fresh model (the CPU for the meta device) and keep its memory format; the dtype is
    that of the file. Parameters stay the same objects with their ties and ``requires_grad``; gradients are dropped.

    Args:
        folder: of a run or of :func:`save`.
        model: fresh; changed in place.
        unverified: take the network of a run even if a check of it failed.

    Returns:
        The model.

    Raises:
        RecipeError: files that are missing, damaged or of another model; the model is as it was.
        VerificationError: the network of a run that failed its check.
    """
    if inner_name(model) is not None:
        kind = type(model).__name__
        raise RecipeError(f"{kind} holds the network that is to be loaded; load it first, then wrap it in {kind}")
    folder = Path(folder)
    if not unverified:
        refuse_failed_run(folder)
    with trainable(), turn_in(folder, reading=True):
        recipe = read_recipe(folder)
        with _located(folder / RECIPE):
            check_fresh(model, recipe)
            values = new_values(model, recipe)
            since_original = extend(model, recipe)
        with _located(folder / WEIGHTS):
            tensors = _read_weights(folder / WEIGHTS, model, recipe)
    with trainable():
        assign(model, values, tensors)
        slim_attention(model)
    remember(model, since_original)
    return model


def _write(folder: Path, tensors: dict[str, Tensor], document: dict[str, Any]) -> None:
    new_weights, new_recipe = folder / NEW_WEIGHTS, folder / NEW_RECIPE
    refuse_not_plain(folder / WEIGHTS)
    refuse_not_plain(folder / RECIPE)
    try:
        digest = _write_weights(new_weights, tensors)
        _write_recipe(new_recipe, {**document, "weights_sha256": digest})
        new_weights.replace(folder / WEIGHTS)
    except BaseException:
        if new_weights.exists():
            new_weights.unlink()
            new_recipe.unlink(missing_ok=True)
        raise
    sync_folder(folder)
    new_recipe.replace(folder / RECIPE)
    sync_folder(folder)


def _write_weights(path: Path, tensors: dict[str, Tensor]) -> str:
    try:
        write_tensors(path, tensors, {"format": "pt"})
    except ValueError as error:
        raise RecipeError(str(error)) from error
    sync_file(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_recipe(path: Path, document: dict[str, Any]) -> None:
    sealed = {**document, "recipe_sha256": _seal(document)}
    lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sealed.items())
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    if len(text) > MAX_RECIPE_BYTES:
        raise RecipeError(f"the recipe takes {len(text)} bytes, more than the {MAX_RECIPE_BYTES} that load accepts")
    write_bytes(path, text.encode("ascii"))
    sync_file(path)


def _finish_interrupted(folder: Path) -> None:
    """Put a recipe in its place that fits the weights, and clear away what a killed save was writing."""
    clear_scratch(folder / NEW_WEIGHTS)
    if (folder / NEW_RECIPE).exists():
        with suppress(RecipeError):
            _matching_recipe(folder, NEW_RECIPE)
            (folder / NEW_RECIPE).replace(folder / RECIPE)


def seal_of(folder: Path) -> str | None:
    """What tells a saved network, recipe and weights, from any other; None if there is no whole one."""
    with suppress(RecipeError), _located(folder / RECIPE):
        document = _read_document(folder / RECIPE)
        return _seal(document)
    return None


def refuse_failed_run(folder: Path) -> None:
    """VerificationError if a summary beside the network says that a check of it failed."""
    failed = failed_checks(folder / RUN_SUMMARY)
    if failed:
        raise VerificationError(
            f"{folder}: this network failed the check of its run ({one_line('; '.join(failed))}); prune again, or ask "
            "for it all the same (unverified=True, --unverified)"
        )


def failed_checks(summary: Path) -> list[str]:
    """Names of the checks that failed, as a run's ``summary.json`` tells; none if there is no such file."""
    if not is_file(summary) or summary.stat().st_size > MAX_RECIPE_BYTES:
        return []
    try:
        document = json.loads(summary.read_bytes())
        return [str(check["name"]) for check in document["checks"] if check["passed"] is False]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return []


def read_recipe(folder: Path) -> Recipe:
    """The recipe that fits the weights in ``folder``; both are whole."""
    try:
        return _matching_recipe(folder, RECIPE)
    except RecipeError:
        with suppress(RecipeError):
            return _matching_recipe(folder, NEW_RECIPE)
        raise


def _matching_recipe(folder: Path, name: str) -> Recipe:
    """The recipe in file ``name``, if it is whole and the weights beside it are those it was saved with."""
    with _located(folder / name):
        document = _read_document(folder / name)
        digest = document.pop("weights_sha256")
        recipe = Recipe.from_json(document)
    with _located(folder / WEIGHTS), _open(folder / WEIGHTS) as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != digest:
            raise RecipeError("the weights are damaged, edited or of another save; restore both files or save again")
    return recipe


def _read_document(path: Path) -> dict[str, Any]:
    with _open(path) as file:
        data = file.read(MAX_RECIPE_BYTES + 1)
    if len(data) > MAX_RECIPE_BYTES:
        raise RecipeError(f"larger than {MAX_RECIPE_BYTES} bytes, which no recipe is")
    try:
        parsed = json.loads(data.decode(), object_pairs_hook=unique_keys, parse_constant=no_constant)
        document = check_format(parsed)
        seal = document.pop("recipe_sha256", None)
        whole = seal == _seal(document)
    except RecursionError:
        raise RecipeError("nested too deeply for a recipe") from None
    except ValueError as error:
        raise RecipeError(f"not valid JSON ({one_line(error)}); restore the file or save again") from None
    if not whole or "weights_sha256" not in document:
        raise RecipeError("damaged or edited, its hash does not fit; restore the file or save again")
    return document


def _read_weights(path: Path, model: nn.Module, recipe: Recipe) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        names = file.keys()
        found = {name: tuple(file.get_slice(name).get_shape()) for name in names}
        if found != shapes_after(recipe):
            raise RecipeError(f"the weights are not those of the recipe: {difference(shapes_after(recipe), found)}")
        return {name: placed_like(name, old, file.get_tensor(name)) for name, old in named_tensors(model).items()}


def _seal(document: dict[str, Any]) -> str:
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _open(path: Path) -> BufferedReader:
    if not path.is_file():
        raise RecipeError("no such file; give a folder that ifso saved a model into")
    return path.open("rb")


@contextmanager
def _located(path: Path) -> Iterator[None]:
    """Say in every error where it was met, and in one line."""
    try:
        yield
    except RecipeError as error:
        raise RecipeError(f"{path}: {one_line(error)}") from error.__cause__
    except OSError as error:
        raise RecipeError(f"{path}: {explained(error)}") from error
    except SafetensorError as error:
        words = explained(error) if error_number(error) else one_line(error)
        raise RecipeError(f"{path}: {words}") from error


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
    modules = dict(model.named_modules(remove_duplicate=False))
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
    modules = dict(model.named_modules(remove_duplicate=False))
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
    if len({(dtype.is_floating_point, dtype.is_complex) for dtype in (old.dtype, stored.dtype)}) > 1:
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
