"""Recipes: what they refuse, how they travel as JSON, how one follows another."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import re
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from ifso.errors import RecipeError
from ifso.surgery.recipe import (
    AttributeChange,
    FrozenAxis,
    KeptUnits,
    Recipe,
    Round,
    ShapeChange,
    extend,
    named_tensors,
    recipe_of,
    remember,
    unchanged,
)
from ifso.surgery.store import save


def make_recipe() -> Recipe:
    shapes = {
        "a.weight": ShapeChange((8, 3, 3, 3), (5, 3, 3, 3)),
        "a.bias": ShapeChange((8,), (5,)),
        "b.weight": ShapeChange((4, 8), (4, 5)),
        "steps": ShapeChange((), ()),
    }
    attributes = (
        AttributeChange("a", "out_channels", None, 8, 5),
        AttributeChange("", "dims", 1, 8, 5),
        AttributeChange("b", "in_features", None, 8, 5),
    )
    group = KeptUnits("a", 8, (0, 2, 3, 5, 7), (("a.weight", 0), ("a.bias", 0), ("b.weight", 1)), ("softmax",))
    frozen = FrozenAxis("b.weight", 0, "output of the model")
    return Recipe("nets.Net", shapes, attributes, (Round((group,), (frozen,), {"macs": 900}, {"macs": 600}),))


def make_later() -> Recipe:
    shapes = {
        "a.weight": ShapeChange((5, 3, 3, 3), (2, 3, 3, 3)),
        "a.bias": ShapeChange((5,), (2,)),
        "b.weight": ShapeChange((4, 5), (4, 2)),
        "steps": ShapeChange((), ()),
    }
    attributes = (AttributeChange("a", "out_channels", None, 5, 2), AttributeChange("c", "groups", None, 4, 2))
    group = KeptUnits("a", 5, (1, 4), (("a.weight", 0),), ())
    return Recipe("nets.Net", shapes, attributes, (Round((group,), (), {"macs": 600}, {"macs": 250}),))


def plain() -> dict:
    return json.loads(json.dumps(make_recipe().to_json()))


def test_json_leads_back_to_an_equal_recipe():
    recipe = make_recipe()
    document = recipe.to_json()
    assert json.loads(json.dumps(document)) == document
    assert Recipe.from_json(document) == recipe


def test_json_says_what_it_is():
    document = plain()
    assert document["format"] == "ifso-recipe"
    assert document["version"] == 1
    assert document["fingerprint"] == make_recipe().fingerprint
    assert document["versions"].keys() == {"ifso", "torch", "python"}
    assert document["versions"]["torch"] == str(torch.__version__)


def test_removed_units_and_costs():
    recipe = make_recipe()
    assert recipe.removed_units == 3
    assert (recipe.cost_before, recipe.cost_after) == ({"macs": 900}, {"macs": 600})


def test_fingerprint_depends_on_the_original_names_and_shapes_only():
    recipe = make_recipe()
    same_start = unchanged_like(recipe, dict(reversed(recipe.shapes.items())))
    assert same_start.fingerprint == recipe.fingerprint
    renamed = {name.replace("a.", "c."): change for name, change in recipe.shapes.items()}
    assert unchanged_like(recipe, renamed).fingerprint != recipe.fingerprint
    other = {**recipe.shapes, "a.bias": ShapeChange((9,), (5,))}
    assert unchanged_like(recipe, other).fingerprint != recipe.fingerprint


def unchanged_like(recipe: Recipe, shapes: dict[str, ShapeChange]) -> Recipe:
    return Recipe(recipe.model, {name: ShapeChange(c.before, c.before) for name, c in shapes.items()})


def test_then_chains_shapes_attributes_rounds_and_costs():
    first, later = make_recipe(), make_later()
    both = first.then(later)
    assert both.shapes["a.weight"] == ShapeChange((8, 3, 3, 3), (2, 3, 3, 3))
    assert both.fingerprint == first.fingerprint
    assert set(both.attributes) == {
        AttributeChange("a", "out_channels", None, 8, 2),
        AttributeChange("", "dims", 1, 8, 5),
        AttributeChange("b", "in_features", None, 8, 5),
        AttributeChange("c", "groups", None, 4, 2),
    }
    assert both.rounds == (*first.rounds, *later.rounds)
    assert both.removed_units == 6
    assert (both.cost_before, both.cost_after) == ({"macs": 900}, {"macs": 250})
    assert Recipe.from_json(both.to_json()) == both


def test_then_refuses_recipes_that_do_not_follow():
    first, later = make_recipe(), make_later()
    with pytest.raises(RecipeError, match=r"'a.weight' has shape \(2, 3, 3, 3\) after the first"):
        later.then(first)
    fewer = Recipe(later.model, {name: c for name, c in later.shapes.items() if name != "steps"})
    with pytest.raises(RecipeError, match="'steps' is in one of them only"):
        first.then(fewer)
    attribute = AttributeChange("a", "out_channels", None, 6, 2)
    with pytest.raises(RecipeError, match=r"'a.out_channels' is 5 after the first and 6"):
        first.then(Recipe(later.model, later.shapes, (attribute,)))


def test_named_tensors_holds_tied_ones_once_and_non_persistent_buffers():
    model = nn.Module()
    model.first = nn.Linear(3, 3)
    model.second = nn.Linear(3, 3)
    model.second.weight = model.first.weight
    model.shared = model.first
    model.register_buffer("mask", torch.ones(2), persistent=False)
    assert list(named_tensors(model)) == ["first.weight", "first.bias", "second.bias", "mask"]


def test_unchanged_has_every_shape_twice():
    recipe = unchanged(nn.BatchNorm1d(3))
    assert recipe.shapes["num_batches_tracked"] == ShapeChange((), ())
    assert recipe.shapes["weight"] == ShapeChange((3,), (3,))
    assert recipe.rounds == ()
    assert recipe.cost_before == recipe.cost_after == {}
    assert recipe.model == "torch.nn.modules.batchnorm.BatchNorm1d"


def test_unchanged_refuses_lazy_models():
    with pytest.raises(RecipeError, match="run the model once"):
        unchanged(nn.LazyLinear(3))


def test_recipes_travel_with_the_model():
    model = nn.Linear(2, 2)
    assert recipe_of(model) is None
    recipe = unchanged(model)
    remember(model, recipe)
    assert recipe_of(model) is recipe
    assert recipe_of(copy.deepcopy(model)) == recipe
    assert model.state_dict().keys() == {"weight", "bias"}


def test_a_pickled_model_needs_no_ifso_to_be_unpickled():
    model = nn.Linear(2, 2)
    remember(model, unchanged(model))
    assert b"ifso." not in pickle.dumps(model)
    assert recipe_of(pickle.loads(pickle.dumps(model))) == unchanged(model)


def test_what_json_makes_of_a_recipe_file_is_read(tmp_path: Path):
    model = nn.Linear(2, 2)
    save(model, tmp_path)
    assert Recipe.from_json(json.loads((tmp_path / "recipe.json").read_text())) == unchanged(model)


def test_remembering_does_not_keep_a_model_alive():
    model = nn.Linear(2, 2)
    remember(model, unchanged(model))
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_extend_counts_from_the_original():
    model = nn.Linear(2, 2)
    first, later = make_recipe(), make_later()
    assert extend(model, first) is first
    remember(model, first)
    assert extend(model, later) == first.then(later)


def change(document: dict, path: str, value: object) -> None:
    *parents, last = (int(key) if key.isdigit() else key for key in path.split("/"))
    for key in parents:
        document = document[key]
    document[last] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format", "other", "no ifso recipe"),
        ("version", 2, "version 2 is unknown"),
        ("version", True, "recipe.version: bool instead of int"),
        ("version", "1", "recipe.version: str instead of int"),
        ("fingerprint", "0" * 64, "fingerprint"),
        ("fingerprint", 3, "recipe.fingerprint: int instead of str"),
        ("versions/ifso", None, r"versions\['ifso'\]: NoneType instead of str"),
        ("surprise", 1, "unknown key 'surprise'"),
        ("rounds/0/surprise", 1, r"rounds\[0\]: unknown key 'surprise'"),
        ("model", 3, "recipe.model: int instead of str"),
        ("model", "x" * 5000, "longer than 4096"),
        ("shapes", [], "recipe.shapes: list instead of dict"),
        ("shapes/a.bias", [[8], [5]], r"shapes\['a.bias'\]: list instead of dict"),
        ("shapes/a.bias/before", [9], "fingerprint"),
        ("shapes/a.bias/before", [-8], r"shapes\['a.bias'\]: a size cannot go from -8 to 5"),
        ("shapes/a.bias/after", [-1], r"shapes\['a.bias'\]: a size cannot go from 8 to -1"),
        ("shapes/a.bias/after", [9], r"shapes\['a.bias'\]: a size cannot go from 8 to 9"),
        ("shapes/a.bias/after", [5, 1], "from 1 to 2 axes"),
        ("shapes/a.bias/after", [5.0], r"after\[0\]: float instead of int"),
        ("shapes/a.bias/after", [True], r"after\[0\]: bool instead of int"),
        ("shapes/a.bias/after", [float("nan")], r"after\[0\]: float instead of int"),
        ("shapes/a.bias/before", [2**41], "a size cannot go from"),
        ("shapes/a.bias/before", [10**5000], "number is too large"),
        ("shapes/a.bias", {"before": [2**30, 2**30], "after": [1, 1]}, "more than .* elements"),
        ("shapes/a.bias", {"before": [1] * 65, "after": [1] * 65}, "65 axes"),
        ("attributes/0/name", "not a name", "'not a name' is not the name of a public attribute"),
        ("attributes/0/name", "_parameters", "public attribute"),
        ("attributes/0/name", "__class__", r"attributes\[0\]: '__class__' is not"),
        ("attributes/0/position", -1, "position -1 is negative"),
        ("attributes/0/position", "0", "str instead of int"),
        ("attributes/0/after", 9, "a size cannot go from 8 to 9"),
        ("attributes/1/name", None, "NoneType instead of str"),
        ("attributes/2", dict(zip("ab", "cd", strict=True)), r"attributes\[2\]: key 'after' is missing"),
        ("rounds/0/groups/0/kept", [0, 2, 2], "strictly ascending"),
        ("rounds/0/groups/0/kept", [2, 0], r"rounds\[0\].groups\[0\]: kept units are not"),
        ("rounds/0/groups/0/kept", [0, 8], "out of range"),
        ("rounds/0/groups/0/kept", [-1, 3], "out of range"),
        ("rounds/0/groups/0/size", -1, "-1 units"),
        ("rounds/0/groups/0/members/0", ["a.weight"], r"members\[0\]: 1 items instead of 2"),
        ("rounds/0/groups/0/members/0", ["a.weight", -1], "negative axis"),
        ("rounds/0/frozen/0/dim", -1, "axis -1 is negative"),
        ("rounds/0/cost_after", {"macs": -1}, "cost is negative"),
        ("rounds/0/cost_after", {"params": 1}, "different names"),
        ("rounds/0/cost_after", {"macs": 1e300 * 1e10}, "float instead of int"),
        ("rounds/0/cost_after", {"macs": 2**70}, "too large"),
    ],
)
def test_from_json_refuses(path: str, value: object, message: str):
    document = plain()
    change(document, path, value)
    with pytest.raises(RecipeError, match=message) as caught:
        Recipe.from_json(document)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["version", "fingerprint", "versions", "model", "shapes", "attributes", "rounds"])
def test_from_json_refuses_missing_keys(path: str):
    document = plain()
    del document[path]
    with pytest.raises(RecipeError, match=path):
        Recipe.from_json(document)


@pytest.mark.parametrize("document", [None, [], "text", 3, {}])
def test_from_json_refuses_what_is_no_recipe(document: object):
    with pytest.raises(RecipeError, match="no ifso recipe"):
        Recipe.from_json(document)


def test_from_json_refuses_deep_nesting():
    nested: list = []
    for _ in range(100_000):
        nested = [nested]
    for path in ("shapes/a.bias/after/0", "version", "model", "rounds/0/groups", "rounds/0/cost_after/macs"):
        document = plain()
        change(document, path, nested)
        with pytest.raises(RecipeError, match="instead of"):
            Recipe.from_json(document)


def test_doubles_are_refused():
    document = plain()
    document["attributes"].append(document["attributes"][0])
    with pytest.raises(RecipeError, match=re.escape("attribute ('a', 'out_channels', None) occurs twice")):
        Recipe.from_json(document)
    document = plain()
    document["rounds"][0]["groups"] *= 2
    with pytest.raises(RecipeError, match="group 'a' occurs twice"):
        Recipe.from_json(document)
