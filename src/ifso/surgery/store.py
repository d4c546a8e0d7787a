"""A compacted model as two files, ``recipe.json`` and ``model.safetensors``; no pickle on either way.

The recipe holds the SHA-256 of the weights and of itself, so damage or an edit of either file is noticed (white space
and the order of keys in the recipe do not count). The hashes guard against accidents, not against a forger.

Saving writes both files under provisional names, then renames the weights, and last the recipe. Stopped before the
first renaming, the earlier save stands; stopped between the two, the provisional recipe is the one that fits the
weights, and both :func:`load` and the next :func:`save` find it.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

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
from ifso.common.module_state import inner_name, named_tensors, unwrapped
from ifso.common.serialization import no_constant, unique_keys
from ifso.common.text import one_line
from ifso.errors import RecipeError, VerificationError
from ifso.graph.execution import trainable
from ifso.graph.slim_attention import slim_attention
from ifso.surgery.loading import assign, check_compacted, check_fresh, difference, new_values, placed_like, shapes_after
from ifso.surgery.recipe import Recipe, check_format, extend, remember
from ifso.surgery.recipe import recipe as recipe_to_save

if TYPE_CHECKING:
    from collections.abc import Iterator
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
