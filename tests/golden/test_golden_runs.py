"""Run folders, training folders, and the JSON of commands."""

from __future__ import annotations

import pytest
from golden_runs import COMMANDS, FOLDERS, describe, files_of
from golden_store import blanked, check_json
from safetensors.torch import load_file

SCORES = ("scores.safetensors", "first_scores.safetensors")


@pytest.mark.parametrize("name", COMMANDS)
def test_json_of_a_command(name, runs):
    check_json(f"command-{name}", blanked(runs.done[name].document))


@pytest.mark.parametrize("name", FOLDERS)
def test_files_of_a_folder(name, runs):
    found = files_of(runs.folder / FOLDERS[name])
    found.pop("report.html", None)
    described = {key: describe(path) if path.suffix else None for key, path in found.items()}
    check_json(f"folder-{name}", blanked(described))


@pytest.mark.parametrize("file", SCORES)
@pytest.mark.parametrize("name", ["prune-staged", "prune-paper"])
def test_scores(name, file, runs):
    found = load_file(runs.folder / FOLDERS[name] / file)
    check_json(f"{file.split('.')[0]}-{name}", {group: found[group].tolist() for group in sorted(found)})


@pytest.mark.parametrize("name", FOLDERS)
def test_sizes_of_weights(name, runs):
    """Sum of absolute values and of squares, in float64, of every tensor of the network that was left."""
    found = load_file(runs.folder / FOLDERS[name] / "model.safetensors")
    tensors = {key: found[key].double() for key in sorted(found)}
    sums = {key: [float(tensor.abs().sum()), float(tensor.square().sum())] for key, tensor in tensors.items()}
    check_json(f"weights-{name}", sums)
