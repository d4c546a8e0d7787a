"""Readers of run folders: recipe, weights, checkpoints, settings, summaries, metrics, and all of them in a report."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import safetensors.torch
import torch
from binaries import mutated_checkpoint, mutated_safetensors
from contract import SENTINEL, Reader
from mutating import mutated_bytes, mutated_document, mutated_json, mutated_lines
from safetensors import SafetensorError
from seeds import EXAMPLE, Net, latencies, write_run

import ifso
from ifso.common.serialization import _digest, json_line, parsed, read_lines, read_tensor_file
from ifso.costs.latency import LatencyModel
from ifso.models.weights import load_weights
from ifso.pruning.finalize import finished_result
from ifso.report.page import render
from ifso.runs.files import read_config
from ifso.runs.folder import RunFolder
from ifso.runs.open import OpenedRun, open_run
from ifso.runs.reading import RunRecord, read_run
from ifso.runs.structure import Structure, from_document
from ifso.surgery.recipe import Recipe, recipe_of, shapes_of
from ifso.surgery.store import _seal, shapes_after
from ifso.training.checkpoint import load_checkpoint
from ifso.training.runs import finished_summary


def run_readers(root: Path) -> Iterator[Reader]:
    """All of them; their files lie in ``root``, as does the run they start from."""
    seed = root / "seed"
    write_run(seed)
    yield from _recipe_readers(root, seed)
    yield from _weight_readers(root, seed)
    yield from _json_readers(root, seed)
    yield from _report_readers(root, seed)


def _recipe_readers(root: Path, seed: Path) -> Iterator[Reader]:
    folder = root / "loaded"
    shutil.copytree(seed, folder)
    sealed = json.loads((seed / "recipe.json").read_text())
    weights = (seed / "model.safetensors").read_bytes()
    plain = {key: value for key, value in sealed.items() if not key.endswith("_sha256")}

    def with_recipe(random: Random) -> Path:
        (folder / "model.safetensors").write_bytes(weights)
        (folder / "recipe.json").write_bytes(_sealed_json(sealed, random))
        return folder

    def with_weights(random: Random) -> Path:
        data = mutated_safetensors(weights, random)
        (folder / "model.safetensors").write_bytes(data)
        (folder / "recipe.json").write_text(json.dumps(_sealed({**plain, "weights_sha256": _sha(data)})))
        return folder

    yield Reader(
        "recipe in memory", lambda random: mutated_document(plain, random), Recipe.from_json, _check_recipe, share=3
    )
    yield Reader("recipe.json", with_recipe, _load, _check_loaded, "loaded", share=0.7)
    yield Reader("model.safetensors", with_weights, _load, _check_loaded, "loaded", share=0.5)


def _sealed_json(document: dict[str, Any], random: Random) -> bytes:
    """Mostly with the hash that fits what was changed, as a forger would write it."""
    if random.random() < 0.2:
        return mutated_json(document, random)
    found = mutated_document(document, random)
    try:
        return json.dumps(_sealed(found)).encode()
    except (TypeError, ValueError, AttributeError, UnicodeError):
        return json.dumps(found).encode()


def _sealed(document: dict[str, Any]) -> dict[str, Any]:
    inner = {key: value for key, value in document.items() if key != "recipe_sha256"}
    return {**inner, "recipe_sha256": _seal(inner)}


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _load(folder: Path) -> Net:
    return ifso.load(folder, Net())


def _check_recipe(recipe: Recipe) -> None:
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe
    assert all(min((*change.before, *change.after), default=0) >= 0 for change in recipe.shapes.values())


def _check_loaded(model: Net) -> None:
    recipe = recipe_of(model)
    assert recipe is not None
    assert shapes_of(model) == shapes_after(recipe)


def _weight_readers(root: Path, seed: Path) -> Iterator[Reader]:
    base, pth, checkpoint = root / "base.safetensors", root / "base.pth", root / "training.safetensors"
    state = Net().state_dict()
    plain = safetensors.torch.save(state)
    torch.save({"state_dict": state}, pth)
    zipped = pth.read_bytes()
    stored = next((seed / "checkpoints").iterdir()).read_bytes()

    def checkpoint_file(random: Random) -> Path:
        checkpoint.write_bytes(_rehashed(mutated_safetensors(stored, random)))
        return checkpoint

    yield Reader(
        "weights.safetensors", _writer(base, lambda random: mutated_safetensors(plain, random)), _load_base, _check_net,
        base.name, share=0.7,
    )  # fmt: skip
    yield Reader(
        "weights.pth", _writer(pth, lambda random: mutated_checkpoint(zipped, random, str(root / SENTINEL))),
        _load_base,
        _check_net, pth.name, share=0.7,
    )  # fmt: skip
    yield Reader("checkpoint of a pruning", checkpoint_file, read_tensor_file, _check_tensors, checkpoint.name, share=2)
    yield Reader(
        "checkpoint of a training", checkpoint_file, lambda path: load_checkpoint(path.parent, "cpu"), _check_tensors,
        checkpoint.name, share=1,
    )  # fmt: skip


def _rehashed(data: bytes) -> bytes:
    """With the hash that fits, where there is still something to be hashed."""
    try:
        length = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + length])
        header["__metadata__"]["sha256"] = _digest(safetensors.torch.load(data), header["__metadata__"]["state"])
        text = json.dumps(header).encode()
    except (
        SafetensorError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        struct.error,
        RecursionError,
        RuntimeError,
    ):
        return data
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def _load_base(path: Path) -> Net:
    model = Net()
    load_weights(model, path)
    return model


def _check_net(model: Net) -> None:
    assert shapes_of(model) == shapes_of(Net())


def _check_tensors(found: tuple[dict[str, torch.Tensor], Any]) -> None:
    tensors, state = found
    assert all(isinstance(tensor, torch.Tensor) and tensor.numel() < 2**20 for tensor in tensors.values())
    json.dumps(state)


def _writer(path: Path, make: Callable[[Random], bytes]) -> Callable[[Random], Path]:
    def write(random: Random) -> Path:
        path.write_bytes(make(random))
        return path

    return write


def _json_readers(root: Path, seed: Path) -> Iterator[Reader]:
    folder = root / "documents"
    folder.mkdir()
    config, summary, structure = (
        json.loads((seed / f"{name}.json").read_text()) for name in ("config", "summary", "structure")
    )
    tuned = json.loads((seed / "finetune" / "summary.json").read_text())
    lines = read_lines(seed / "metrics.jsonl")[0]

    def written(name: str, document: Any) -> Callable[[Random], Path]:
        return _writer(folder / name, lambda random: mutated_json(document, random))

    yield Reader(
        "latency table",
        lambda random: mutated_document(latencies(), random),
        LatencyModel.from_json,
        _check_latency,
        share=10,
    )
    yield Reader("config.json", written("config.json", config), read_config, _check_config, "config.json", share=8)
    yield from _opened_readers(root, seed, config)
    yield Reader(
        "summary of a training",
        written("summary.json", tuned),
        lambda path: finished_summary(path.parent),
        _check_dict,
        "summary.json",
        share=8,
    )
    yield Reader(
        "metrics.jsonl",
        _writer(folder / "metrics.jsonl", lambda random: mutated_lines(lines, random)),
        read_lines,
        _check_lines,
        "metrics.jsonl",
        share=5,
    )
    yield Reader("structure.json", written("structure.json", structure), _structure, _check_structure, share=1)
    yield from _finished_readers(root, seed, summary)


def _opened_readers(root: Path, seed: Path, config: dict[str, Any]) -> Iterator[Reader]:
    folder = root / "opened"
    shutil.copytree(seed, folder)
    yield Reader(
        "run opened", _writer(folder / "config.json", lambda random: mutated_json(config, random)),
        lambda path: open_run(path.parent), _check_opened, "opened", share=2,
    )  # fmt: skip


def _finished_readers(root: Path, seed: Path, summary: dict[str, Any]) -> Iterator[Reader]:
    folder = root / "finished"
    shutil.copytree(seed, folder)
    example = torch.zeros(EXAMPLE)
    config = read_config(seed / "config.json")

    def reopened(path: Path) -> Any:
        model = Net()
        return finished_result(RunFolder(path.parent, config, None), model, ifso.trace(model, example))

    def shown(result: Any) -> None:
        assert str(result)
        json.dumps(result.summary())

    yield Reader(
        "summary of a pruning", _writer(folder / "summary.json", lambda random: mutated_json(summary, random)),
        reopened, shown,
        "summary.json", share=0.05,
    )  # fmt: skip


def _check_latency(model: LatencyModel) -> None:
    assert LatencyModel.from_json(json.loads(json.dumps(model.to_json()))) == model


def _check_config(config: dict[str, Any]) -> None:
    assert isinstance(config["settings"], dict)
    json.dumps(config)


def _check_opened(run: OpenedRun) -> None:
    assert all(isinstance(name, str) for name in run.arguments)


def _check_dict(found: Any) -> None:
    assert isinstance(found, dict)


def _check_lines(found: tuple[list[dict[str, Any]], int]) -> None:
    for line in found[0]:
        json_line(line)


def _structure(path: Path) -> Structure:
    return from_document(parsed(path.read_bytes()) or {}, {})


def _check_structure(structure: Structure) -> None:
    for group in structure.groups:
        assert 0 <= group.kept <= group.size
    assert all(0 <= number < len(structure.groups) for layer in structure.layers for number in layer.groups)
    assert set(structure.coupled) <= set(range(len(structure.groups)))


def _report_readers(root: Path, seed: Path) -> Iterator[Reader]:
    folder = root / "reported"
    shutil.copytree(seed, folder)
    whole = {
        path.relative_to(seed): path.read_bytes()
        for path in sorted(seed.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }

    def with_one_hurt(random: Random) -> Path:
        for path, data in whole.items():
            if not (folder / path).is_file() or (folder / path).read_bytes() != data:
                (folder / path).write_bytes(data)
        path = random.choice(list(whole))
        (folder / path).write_bytes(_hurt(path, whole[path], random))
        if random.random() < 0.3:
            (folder / "summary.json").unlink()
        return folder

    yield Reader("report of a run", with_one_hurt, read_run, _check_record, "reported", share=0.7)
    yield Reader(
        "page of a report", with_one_hurt, lambda path: render([read_run(path)]), _check_page, "reported", share=0.1
    )


def _hurt(path: Path, data: bytes, random: Random) -> bytes:
    if path.suffix == ".safetensors":
        return _rehashed(mutated_safetensors(data, random))
    if path.suffix == ".jsonl":
        return mutated_lines([json.loads(line) for line in data.splitlines()], random)
    return mutated_json(json.loads(data), random) if random.random() < 0.9 else mutated_bytes(data, random)


def _check_record(record: RunRecord) -> None:
    for name, value in vars(RunRecord).items():
        if isinstance(value, property):
            getattr(record, name)
    assert all("\n" not in problem for problem in record.problems)


def _check_page(page: str) -> None:
    page.encode()
    assert page.count("<script") == page.count("</script>")
