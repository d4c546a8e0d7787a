"""Saving and loading compacted models: bit for bit in a fresh process, and nothing changed by bad files."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ifso.errors import RecipeError
from ifso.surgery import store
from ifso.surgery.recipe import (
    AttributeChange,
    FrozenAxis,
    KeptUnits,
    Recipe,
    Round,
    ShapeChange,
    named_tensors,
    recipe_of,
    remember,
    shapes_of,
    unchanged,
)
from ifso.surgery.store import load, save

Cuts = dict[tuple[str, int], list[int]]
Sizes = dict[tuple[str, str, int | None], int]


class Pair(NamedTuple):
    width: int
    depth: int


class ConvNet(nn.Module):
    """Convolution, batch norm, flatten, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).relu().flatten(1))


class TiedNet(nn.Module):
    """An embedding that is also the output layer, and one block used under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.block = nn.Linear(8, 8)
        self.again = self.block
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.again(self.block(self.embedding(x)).tanh()))


class HeadsNet(nn.Module):
    """Sizes kept as Python ints, in a tuple, a list, a torch.Size and a named tuple; a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.dims = (3, 8)
        self.listed = [8, 2]
        self.shape = torch.Size([4, 2])
        self.pair = Pair(8, 7)
        self.project = nn.Linear(3, 8)
        self.register_buffer("gain", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(x).view(len(x), self.num_heads, -1) * self.gain[:, None]
        return heads.reshape(-1, self.dims[1]) + self.listed[0] + self.shape[0] + self.pair.width


def cut_(model: nn.Module, cuts: Cuts, sizes: Sizes) -> Recipe:
    """Remove slices and set sizes by hand, remember and return the recipe."""
    before = shapes_of(model)
    for (name, dim), kept in cuts.items():
        tensor = named_tensors(model)[name]
        tensor.data = tensor.data.index_select(dim, torch.tensor(kept))
    attributes = tuple(set_size_(model, place, after) for place, after in sizes.items())
    shapes = {name: ShapeChange(before[name], after) for name, after in shapes_of(model).items()}
    groups = tuple(
        KeptUnits(f"{name}:{dim}", before[name][dim], tuple(kept), ((name, dim),), ())
        for (name, dim), kept in cuts.items()
    )
    round_ = Round(groups, (FrozenAxis("out", 0, "output"),), {"macs": 10}, {"macs": 7})
    recipe = Recipe(type(model).__qualname__, shapes, attributes, (round_,))
    remember(model, recipe)
    return recipe


def set_size_(model: nn.Module, place: tuple[str, str, int | None], after: int) -> AttributeChange:
    module, name, position = place
    owner = model.get_submodule(module)
    value = getattr(owner, name)
    if position is None:
        setattr(owner, name, after)
        return AttributeChange(module, name, None, value, after)
    items = [*value[:position], after, *value[position + 1 :]]
    setattr(owner, name, value._make(items) if isinstance(value, Pair) else type(value)(items))
    return AttributeChange(module, name, position, value[position], after)


KEPT = [0, 2, 3, 6, 7]
CHANNELS: Cuts = {
    ("conv.weight", 0): KEPT,
    ("conv.bias", 0): KEPT,
    ("norm.weight", 0): KEPT,
    ("norm.bias", 0): KEPT,
    ("norm.running_mean", 0): KEPT,
    ("norm.running_var", 0): KEPT,
    ("head.weight", 1): [16 * unit + pixel for unit in KEPT for pixel in range(16)],
}
CHANNEL_SIZES: Sizes = {
    ("conv", "out_channels", None): 5,
    ("norm", "num_features", None): 5,
    ("head", "in_features", None): 80,
}


def pruned_convnet() -> ConvNet:
    model = ConvNet()
    model(torch.randn(8, 3, 4, 4))
    cut_(model, CHANNELS, CHANNEL_SIZES)
    return model


def pruned_tiednet() -> TiedNet:
    model = TiedNet()
    cuts: Cuts = {
        ("embedding.weight", 1): KEPT,
        ("block.weight", 0): KEPT,
        ("block.weight", 1): KEPT,
        ("block.bias", 0): KEPT,
    }
    sizes: Sizes = {
        ("embedding", "embedding_dim", None): 5,
        ("block", "in_features", None): 5,
        ("block", "out_features", None): 5,
        ("out", "in_features", None): 5,
    }
    cut_(model, cuts, sizes)
    return model


def pruned_headsnet() -> HeadsNet:
    model = HeadsNet()
    units = [2, 3, 4, 5, 6, 7]
    cuts: Cuts = {("project.weight", 0): units, ("project.bias", 0): units, ("gain", 0): [1, 2, 3]}
    sizes: Sizes = {
        ("", "num_heads", None): 3,
        ("", "dims", 1): 6,
        ("", "listed", 0): 6,
        ("", "shape", 0): 3,
        ("", "shape", 1): 2,
        ("", "pair", 0): 6,
        ("project", "out_features", None): 6,
    }
    cut_(model, cuts, sizes)
    return model


CASES: dict[str, tuple[type[nn.Module], Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "conv": (ConvNet, pruned_convnet, lambda: torch.randn(2, 3, 4, 4)),
    "tied": (TiedNet, pruned_tiednet, lambda: torch.randint(0, 11, (2, 6))),
    "heads": (HeadsNet, pruned_headsnet, lambda: torch.randn(2, 3)),
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(pruned_convnet().eval(), tmp_path / "run")


def state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, dict[str, object]]]:
    """All tensors and all plain attributes of a model, copied."""
    tensors = {name: tensor.detach().clone() for name, tensor in named_tensors(model).items()}
    attributes = {
        name: {key: copy.copy(value) for key, value in vars(module).items() if not key.startswith("_")}
        for name, module in model.named_modules()
    }
    return tensors, attributes


def same(left: nn.Module, right: nn.Module) -> bool:
    (tensors, attributes), (others, other_attributes) = state(left), state(right)
    equal = all(torch.equal(tensors[name], others[name]) for name in tensors)
    return tensors.keys() == others.keys() and equal and attributes == other_attributes


def refuses(folder: Path, message: str, model: nn.Module | None = None) -> str:
    """``load`` raises one line that matches ``message`` and leaves the model alone; returns the line."""
    model = model or ConvNet()
    untouched = copy.deepcopy(model)
    remembered = recipe_of(model)
    with pytest.raises(RecipeError, match=message) as caught:
        load(folder, model)
    assert same(model, untouched)
    assert recipe_of(model) is remembered
    assert "\n" not in str(caught.value)
    return str(caught.value)


def reseal(folder: Path, edit: Callable[[dict], object] = lambda document: None) -> None:
    """Edit the recipe as a forger would: with hashes that fit again."""
    path = folder / "recipe.json"
    document = json.loads(path.read_text())
    document["weights_sha256"] = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    edit(document)
    del document["recipe_sha256"]
    document["recipe_sha256"] = store._seal(document)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize("case", CASES)
def test_load_restores_outputs_attributes_and_recipe(case: str, tmp_path: Path):
    fresh, pruned, inputs = CASES[case]
    model, x = pruned().eval(), inputs()
    assert save(model, tmp_path / "run") == tmp_path / "run"
    loaded = fresh().eval()
    assert load(str(tmp_path / "run"), loaded) is loaded
    assert torch.equal(loaded(x), model(x))
    assert same(loaded, model)
    assert recipe_of(loaded) == recipe_of(model)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"recipe.json", "model.safetensors"}


def test_a_fresh_process_gives_identical_outputs(tmp_path: Path):
    wanted = {}
    for case, (_, pruned, inputs) in CASES.items():
        model, x = pruned().eval(), inputs()
        save(model, tmp_path / case)
        save_file({"x": x}, tmp_path / case / "x.safetensors")
        wanted[case] = model(x)
    program = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from safetensors.torch import load_file, save_file
from test_store import CASES, load
sys.modules["pickle"] = None
for case, (fresh, _, _) in CASES.items():
    folder = Path({str(tmp_path)!r}) / case
    model = load(folder, fresh().eval())
    save_file({{"y": model(load_file(folder / "x.safetensors")["x"])}}, folder / "y.safetensors")
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    for case, outputs in wanted.items():
        assert torch.equal(load_file(tmp_path / case / "y.safetensors")["y"], outputs)


def test_ties_identity_modes_and_gradients_of_the_fresh_model_stay(tmp_path: Path):
    save(pruned_tiednet(), tmp_path)
    model = TiedNet().train()
    model.block.eval()
    model.block.bias.requires_grad_(False)
    model(torch.tensor([[1, 2]])).sum().backward()
    parameters = dict(model.named_parameters())
    load(tmp_path, model)
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert model.out.weight is model.embedding.weight
    assert not model.block.bias.requires_grad
    assert model.block.weight.requires_grad
    assert (model.training, model.block.training) == (True, False)
    assert model.out.weight.grad is None
    model(torch.tensor([[1, 2]])).sum().backward()
    assert model.out.weight.grad.shape == (11, 5)


def test_every_tensor_is_stored_once(tmp_path: Path):
    save(pruned_tiednet(), tmp_path / "tied")
    assert load_file(tmp_path / "tied" / "model.safetensors").keys() == {
        "embedding.weight",
        "block.weight",
        "block.bias",
    }
    save(pruned_headsnet(), tmp_path / "heads")
    assert "gain" in load_file(tmp_path / "heads" / "model.safetensors")


def test_memory_format_of_the_fresh_model_is_kept(folder: Path):
    model = load(folder, ConvNet().to(memory_format=torch.channels_last))
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert not model.conv.weight.is_contiguous()
    assert load(folder, ConvNet()).conv.weight.is_contiguous()


def test_memory_format_of_the_saved_model_does_not_matter(tmp_path: Path, folder: Path):
    torch.manual_seed(0)
    save(pruned_convnet().to(memory_format=torch.channels_last), tmp_path / "other")
    assert same(load(tmp_path / "other", ConvNet()), load(folder, ConvNet()))


def test_the_dtype_of_the_file_wins(tmp_path: Path):
    model = pruned_convnet().to(torch.bfloat16)
    save(model, tmp_path)
    loaded = load(tmp_path, ConvNet())
    assert loaded.conv.weight.dtype == torch.bfloat16
    assert loaded.norm.num_batches_tracked.dtype == torch.int64
    assert same(loaded, model)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.complex64, torch.bool, torch.uint8, torch.int32, torch.float8_e4m3fn]
)
def test_dtypes(dtype: torch.dtype, tmp_path: Path):
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("held", torch.randint(0, 2, (3, 2)).to(dtype))

    model = Holder()
    save(model, tmp_path)
    loaded = load(tmp_path, Holder())
    assert loaded.held.dtype == dtype
    assert torch.equal(loaded.held.view(torch.uint8), model.held.view(torch.uint8))


def test_a_conjugated_view_is_stored_as_its_values(tmp_path: Path):
    model = nn.ParameterDict({"a": torch.randn(3, dtype=torch.complex64).conj()})
    save(model, tmp_path)
    loaded = load(tmp_path, nn.ParameterDict({"a": torch.zeros(3, dtype=torch.complex64)}))
    assert torch.equal(loaded["a"], model["a"])


def test_parameters_in_one_storage_are_stored_apart(tmp_path: Path):
    model, memory = nn.Linear(2, 2), torch.randn(6)
    model.weight.data, model.bias.data = memory[:4].view(2, 2), memory[4:]
    assert len({tensor.untyped_storage().data_ptr() for tensor in store.storable(named_tensors(model)).values()}) == 2
    save(model, tmp_path)
    loaded = load(tmp_path, nn.Linear(2, 2))
    assert same(loaded, model)
    assert loaded.weight.untyped_storage().data_ptr() != loaded.bias.untyped_storage().data_ptr()


def test_a_model_without_tensors(tmp_path: Path):
    save(nn.ReLU(), tmp_path)
    fresh = nn.ReLU()
    assert load(tmp_path, fresh) is fresh


def test_a_meta_model_is_filled_on_the_cpu(tmp_path: Path):
    saved, x = pruned_tiednet().eval(), torch.randint(0, 11, (2, 6))
    save(saved, tmp_path)
    with torch.device("meta"):
        model = TiedNet().eval()
    model.block.bias.requires_grad_(False)
    load(tmp_path, model)
    assert torch.equal(model(x), saved(x))
    assert model.out.weight is model.embedding.weight
    assert isinstance(model.out.weight, nn.Parameter)
    assert not model.block.bias.requires_grad


def test_loaded_tensors_do_not_depend_on_the_file(folder: Path):
    model = load(folder, ConvNet())
    before = model.conv.weight.clone()
    with (folder / "model.safetensors").open("rb+") as file:
        file.truncate(0)
    assert torch.equal(model.conv.weight, before)


def test_the_files_do_not_change_with_loading(folder: Path):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    load(folder, ConvNet())
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_an_unpruned_model_can_be_saved(tmp_path: Path):
    model = ConvNet()
    save(model, tmp_path)
    loaded = load(tmp_path, ConvNet())
    assert same(loaded, model)
    assert recipe_of(loaded).rounds == ()


def test_a_second_compaction_composes(folder: Path, tmp_path: Path):
    model = load(folder, ConvNet().eval())
    first = recipe_of(model)
    cuts: Cuts = {("conv.weight", 0): [0, 4], ("conv.bias", 0): [0, 4]}
    cuts |= {(f"norm.{name}", 0): [0, 4] for name in ("weight", "bias", "running_mean", "running_var")}
    cuts["head.weight", 1] = [*range(16), *range(64, 80)]
    sizes = {("conv", "out_channels", None): 2, ("norm", "num_features", None): 2, ("head", "in_features", None): 32}
    remember(model, first.then(cut_(model, cuts, sizes)))
    save(model, tmp_path / "twice")
    loaded, x = load(tmp_path / "twice", ConvNet().eval()), torch.randn(2, 3, 4, 4)
    assert torch.equal(loaded(x), model(x))
    assert len(recipe_of(loaded).rounds) == 2
    assert loaded.conv.out_channels == 2


def test_a_recipe_on_a_compacted_model_counts_from_the_original(folder: Path, tmp_path: Path):
    tuned = load(folder, ConvNet())
    first = recipe_of(tuned)
    save(tuned, tmp_path / "copy", recipe=unchanged(tuned))
    model = load(folder, ConvNet())
    load(tmp_path / "copy", model)
    assert recipe_of(model) == first


def test_weights_are_as_readable_as_the_recipe(folder: Path):
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1


# ---------------------------------------------------------------------------------------------- refusals of save


def test_save_refuses_a_recipe_that_does_not_lead_to_the_model(tmp_path: Path):
    with pytest.raises(
        RecipeError, match=r"'conv.weight' should have shape \(5, 3, 3, 3\) and has shape \(8, 3, 3, 3\)"
    ):
        save(ConvNet(), tmp_path / "run", recipe=recipe_of(pruned_convnet()))
    model = pruned_convnet()
    model.norm.num_features = 8
    with pytest.raises(RecipeError, match=r"'norm.num_features' is 8 in this model but should be 5"):
        save(model, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_save_refuses_a_file_as_folder(tmp_path: Path):
    (tmp_path / "run").write_text("precious")
    with pytest.raises(RecipeError, match="run is a file; give a folder"):
        save(pruned_convnet(), tmp_path / "run")
    with pytest.raises(RecipeError, match="Not a directory"):
        save(pruned_convnet(), tmp_path / "run" / "inner")
    assert (tmp_path / "run").read_text() == "precious"


def test_save_refuses_meta_and_unstorable_tensors(tmp_path: Path):
    with pytest.raises(RecipeError, match="'weight': only dense tensors with values"):
        save(nn.Linear(2, 2, device="meta"), tmp_path)
    with pytest.raises(RecipeError, match="complex128"):
        save(nn.ParameterList([torch.zeros(2, dtype=torch.complex128)]), tmp_path)
    sparse = nn.Module()
    sparse.register_buffer("held", torch.eye(2).to_sparse())
    with pytest.raises(RecipeError, match="'held'"):
        save(sparse, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_save_refuses_what_load_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store, "MAX_RECIPE_BYTES", 100)
    with pytest.raises(RecipeError, match="more than the 100"):
        save(pruned_convnet(), tmp_path)
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------------------------------- interrupted saving


class Stop(BaseException):
    """What an interruption looks like: no Exception."""


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), Stop()])
@pytest.mark.parametrize("function", ["replace", "fsync"])
@pytest.mark.parametrize("call", range(5))
def test_an_interrupted_save_leaves_a_loadable_state(
    error: BaseException, function: str, call: int, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    old, new = load(folder, ConvNet()), pruned_convnet()
    interrupt(monkeypatch, function, call, error)
    stopped = call < {"replace": 3, "fsync": 4}[function]
    with pytest.raises((Stop, RecipeError), match=r"No space left|^$") if stopped else nullcontext():
        save(new, folder)
    monkeypatch.undo()
    found = load(folder, ConvNet())
    assert same(found, old) or same(found, new)
    if not stopped:
        assert same(found, new)
    newest = pruned_convnet()
    save(newest, folder)
    assert same(load(folder, ConvNet()), newest)
    assert {path.name for path in folder.iterdir()} == {"recipe.json", "model.safetensors"}


def interrupt(monkeypatch: pytest.MonkeyPatch, function: str, call: int, error: BaseException) -> None:
    calls = iter(range(1000))
    real = getattr(os, function)

    def failing(*arguments: object, **options: object) -> object:
        if next(calls) == call:
            raise error
        return real(*arguments, **options)

    monkeypatch.setattr(os, function, failing)


def test_two_interrupted_saves_in_a_row(folder: Path, monkeypatch: pytest.MonkeyPatch):
    second, third = pruned_convnet(), pruned_convnet()
    interrupt(monkeypatch, "replace", 2, Stop())
    with pytest.raises(Stop):
        save(second, folder)
    monkeypatch.undo()
    interrupt(monkeypatch, "fsync", 1, Stop())
    with pytest.raises(Stop):
        save(third, folder)
    monkeypatch.undo()
    assert same(load(folder, ConvNet()), second)


def test_an_interrupted_first_save_is_loadable_or_clearly_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = pruned_convnet()
    interrupt(monkeypatch, "replace", 1, Stop())
    with pytest.raises(Stop):
        save(model, tmp_path)
    monkeypatch.undo()
    refuses(tmp_path, "recipe.json: no such file")
    interrupt(monkeypatch, "replace", 2, Stop())
    with pytest.raises(Stop):
        save(model, tmp_path)
    monkeypatch.undo()
    assert same(load(tmp_path, ConvNet()), model)


# ---------------------------------------------------------------------------------------------- refusals of load


def test_missing_files(folder: Path, tmp_path: Path):
    refuses(tmp_path / "nowhere", "nowhere/recipe.json: no such file; give a folder")
    (folder / "model.safetensors").rename(tmp_path / "kept")
    refuses(folder, "model.safetensors: no such file")
    (tmp_path / "kept").rename(folder / "model.safetensors")
    (folder / "recipe.json").unlink()
    refuses(folder, "recipe.json: no such file")
    (folder / "recipe.json").mkdir()
    refuses(folder, "recipe.json: no such file")


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 100, -1])
def test_truncated_weights(length: int, folder: Path):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    refuses(folder, "model.safetensors: the weights are damaged, edited or of another save")
    reseal(folder)
    refuses(folder, "model.safetensors: Error while deserializing header")


def test_weights_of_another_save(folder: Path, tmp_path: Path):
    save(pruned_convnet(), tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").replace(folder / "model.safetensors")
    refuses(folder, "of another save")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not valid JSON"),
        (b"not json", "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[]", "no ifso recipe"),
        (b"null", "no ifso recipe"),
        (b'{"format": "other"}', "no ifso recipe"),
        (b'{"format": "ifso-recipe", "version": 99}', "version 99 is unknown"),
        (b'{"format": "ifso-recipe", "version": 1}', "damaged or edited"),
        (b'{"format": "ifso-recipe", "format": "ifso-recipe"}', "a key occurs twice"),
        (b'{"format": "ifso-recipe", "version": NaN}', "NaN is no number"),
        (b'{"format": "ifso-recipe", "version": -Infinity}', "-Infinity is no number"),
        (b'{"format": "ifso-recipe", "version": 1e999}', "float instead of int"),
        (b'{"format": "ifso-recipe", "version": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"[" * 200_000 + b"]" * 200_000, "nested too deeply"),
        (
            b'{"format": "ifso-recipe", "version": 1, "a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
            "nested too deeply",
        ),
        (b" " * (64 * 2**20 + 1), "larger than 67108864 bytes"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_no_recipe(text: bytes, message: str, folder: Path):
    (folder / "recipe.json").write_bytes(text)
    assert len(refuses(folder, f"recipe.json: .*{message}")) < 400


def test_an_edited_recipe(folder: Path):
    path = folder / "recipe.json"
    text = path.read_text()
    path.write_text(text.replace('"macs": 7', '"macs": 8'))
    refuses(folder, "recipe.json: damaged or edited, its hash does not fit")
    path.write_text(text)
    load(folder, ConvNet())


def test_a_recipe_that_was_only_laid_out_anew_is_accepted(folder: Path):
    path = folder / "recipe.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=4, sort_keys=True))
    load(folder, ConvNet())


def test_unknown_version_and_schema_are_named_with_the_file(folder: Path):
    reseal(folder, lambda document: document.update(version=2))
    refuses(folder, "recipe.json: recipe version 2 is unknown, this ifso reads 1")
    reseal(folder, lambda document: document.update(version=1, surprise=0))
    refuses(folder, "recipe.json: recipe: unknown key 'surprise'")


def test_another_model(folder: Path):
    other = ConvNet()
    other.conv = nn.Conv2d(3, 9, 3)
    refuses(folder, r"'conv.weight' should have shape \(8, 3, 3, 3\) and has shape \(9, 3, 3, 3\)", other)
    refuses(folder, r"another model, ConvNet: 'conv.weight' of shape \(8, 3, 3, 3\) is missing", TiedNet())
    larger = ConvNet()
    larger.extra = nn.Linear(1, 1)
    refuses(folder, r"'extra.weight' of shape \(1, 1\) should not be there", larger)


def test_a_compacted_model_is_not_a_fresh_one(folder: Path):
    refuses(folder, "this ConvNet is already compacted; load into a freshly built one", pruned_convnet())


def test_lazy_models(folder: Path):
    with pytest.raises(RecipeError, match="run the model once"):
        load(folder, nn.LazyLinear(3))


def test_attributes_that_are_not_as_recorded(folder: Path):
    model = ConvNet()
    model.norm.num_features = 7
    refuses(folder, "attribute 'norm.num_features' is 7 in this model but should be 8", model)
    model.norm.num_features = 8.0
    refuses(folder, "attribute 'norm.num_features' is no int", model)
    del model.norm.num_features
    refuses(folder, "attribute 'norm.num_features' is no int", model)


@pytest.mark.parametrize("dims", [(3,), [3, 8.0], 8, None, "38", {0: 3, 1: 8}])
def test_tuple_attributes_that_are_not_as_recorded(dims: object, tmp_path: Path):
    save(pruned_headsnet(), tmp_path)
    model = HeadsNet()
    model.dims = dims
    refuses(tmp_path, r"attribute 'dims\[1\]' is no int", model)


def test_attributes_are_not_set_through_properties(folder: Path):
    class Guarded(nn.BatchNorm2d):
        @property
        def sneaky(self) -> int:
            raise AssertionError("a property was run")

    model = ConvNet()
    model.norm = Guarded(8)

    def edit(document: dict) -> None:
        document["attributes"][1]["name"] = "sneaky"

    reseal(folder, edit)
    refuses(folder, "attribute 'norm.sneaky' is no int", model)


def test_forged_module_names(folder: Path):
    def edit(document: dict) -> None:
        document["attributes"][1]["module"] = "norm.nothing"

    reseal(folder, edit)
    refuses(folder, "no module 'norm.nothing'")


@pytest.mark.parametrize(
    ("forge", "message"),
    [
        (lambda tensors: tensors.pop("norm.bias"), r"'norm.bias' of shape \(5,\) is missing"),
        (lambda tensors: tensors.update(more=torch.ones(1)), "'more' of shape .* should not be there"),
        (lambda tensors: tensors.update({"norm.bias": torch.ones(6)}), r"'norm.bias' should have shape \(5,\)"),
        (
            lambda tensors: tensors.update({"norm.bias": torch.ones(5, dtype=torch.int32)}),
            "'norm.bias' is torch.int32 in the file and torch.float32 in the model",
        ),
        (
            lambda tensors: tensors.update({"norm.num_batches_tracked": torch.tensor(1.0)}),
            "'norm.num_batches_tracked' is torch.float32",
        ),
    ],
)
def test_forged_weights(forge: Callable[[dict], object], message: str, folder: Path):
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    forge(tensors)
    save_file(tensors, path)
    reseal(folder)
    refuses(folder, f"model.safetensors: .*{message}")


def test_a_header_that_claims_too_much(folder: Path):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    for claim in (2**63 - 1, 2**40, len(data)):
        path.write_bytes(struct.pack("<Q", claim) + data[8:])
        reseal(folder)
        refuses(folder, "model.safetensors: Error while deserializing header")


# ------------------------------------------------------------------------------------------------------- fuzzing


def damaged(data: bytes, chance: random.Random) -> bytes:
    """``data`` cut short, or with up to three of its bytes replaced by others."""
    if chance.random() < 0.3:
        return data[: chance.randrange(len(data))]
    changed = bytearray(data)
    for position in chance.sample(range(len(data)), chance.randint(1, 3)):
        changed[position] ^= chance.randint(1, 255)
    return bytes(changed)


def means_the_same(left: bytes, right: bytes) -> bool:
    try:
        return json.loads(left) == json.loads(right)
    except ValueError:
        return False


@pytest.mark.parametrize("name", ["recipe.json", "model.safetensors"])
def test_damage_is_always_noticed(name: str, folder: Path):
    chance, path, model = random.Random(0), folder / name, ConvNet()
    data = path.read_bytes()
    for _ in range(200):
        changed = damaged(data, chance)
        if not (name == "recipe.json" and means_the_same(data, changed)):
            path.write_bytes(changed)
            refuses(folder, str(folder), model)


def loads_or_says_why(folder: Path) -> bool:
    """Either a model that runs, or a RecipeError of one line; any other exception passes through."""
    model = ConvNet()
    try:
        load(folder, model)
    except RecipeError as error:
        return len(str(error).splitlines()) == 1
    return model(torch.randn(1, 3, 4, 4)).shape == (1, 5)


def test_a_forged_header_is_refused_or_harmless(folder: Path):
    chance, path = random.Random(1), folder / "model.safetensors"
    data = path.read_bytes()
    length = 8 + struct.unpack("<Q", data[:8])[0]
    for _ in range(200):
        path.write_bytes(damaged(data[:length], chance) + data[length:])
        reseal(folder)
        assert loads_or_says_why(folder)


def test_forged_recipes_are_refused_or_harmless(folder: Path):
    chance, path = random.Random(2), folder / "recipe.json"
    text = path.read_text()
    tried = 0
    while tried < 200:
        changed = damaged(text.encode(), chance)
        path.write_bytes(changed)
        try:
            reseal(folder)
        except (ValueError, KeyError):
            continue
        tried += 1
        assert loads_or_says_why(folder)


def test_weights_file_is_plain_safetensors(folder: Path):
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
