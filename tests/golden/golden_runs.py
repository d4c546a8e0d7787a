"""Commands run in this process, and the small runs that the golden files are of."""

from __future__ import annotations

import contextlib
import io
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from internals import main
from safetensors import safe_open
from safetensors.torch import save_file

import ifso

MODEL = "ifso:resnet8-digits"
WEIGHTS = "weights.safetensors"
TASK = ("--model", MODEL, "--weights", WEIGHTS, "--data", "digits")
COMMANDS: dict[str, tuple[str, ...]] = {
    "train": ("train", *TASK, "--epochs", "2", "--batch", "256", "--lr", "0.02", "--seed", "3", "--out", "trained"),
    "prune-staged": ("prune", *TASK, "--macs", "0.7", "--calibration", "128", "--seed", "1", "--out", "staged"),
    "prune-paper": (
        "prune", *TASK, "--preset", "paper", "--macs", "0.8", "--accumulate", "2", "--units-per-step", "6",
        "--batch", "64", "--weight-update", "1", "--seed", "2", "--out", "paper",
    ),
    "finetune": ("finetune", "paper", "--epochs", "2", "--batch", "256", "--lr", "0.02", "--distill"),
    "inspect": ("inspect", MODEL),
    "eval": ("eval", "paper", "--repeats", "1", "--latency-batch", "1", "--train-batch", "8"),
    "report": ("report", "paper"),
    "bench-score": ("bench", "score", "--models", MODEL, "--batch", "8", "--repeats", "1"),
}  # fmt: skip
"""What is run, in this order, in one folder."""

FOLDERS = {"train": "trained", "prune-staged": "staged", "prune-paper": "paper", "finetune": "paper/finetune"}
"""The folders that commands write."""


@dataclass(frozen=True)
class Done:
    """What a command answered."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Its one JSON document."""
        return json.loads(self.out)


def command(*arguments: object) -> Done:
    """Run ``ifso`` with these arguments, here and now."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 1
    return Done(status, out.getvalue(), err.getvalue())


def run_all(folder: Path) -> dict[str, Done]:
    """All commands in a folder that is empty, by name."""
    with contextlib.chdir(folder):
        write_weights(folder / WEIGHTS)
        done = {name: command(*arguments, "--json") for name, arguments in COMMANDS.items()}
    failed = {name: each.err for name, each in done.items() if each.status}
    assert not failed, failed
    return done


def write_weights(path: Path) -> None:
    """The weights that runs begin with: the same bits on every machine and in every version of torch."""
    generator = numpy.random.Generator(numpy.random.PCG64(0))
    tensors = {}
    for name, tensor in sorted(ifso.create_model(MODEL).state_dict().items()):
        tensors[name] = torch.zeros_like(tensor) if name.endswith("bias") else tensor.clone()
        if tensor.ndim > 1:
            drawn = generator.standard_normal(tuple(tensor.shape)) * (2 / tensor[0].numel()) ** 0.5
            tensors[name] = torch.from_numpy(drawn.astype("float32"))
    save_file(tensors, path)


def describe(path: Path) -> Any:
    """What is in a file of a run: JSON, lines of JSON, or the tensors of a safetensors file and what is beside them."""
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8"))
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {"metadata": _metadata(path), "tensors": _tensors(path)}


def _metadata(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        metadata = json.loads(file.read(length)).get("__metadata__", {})
    return {key: json.loads(text) if key == "state" else text for key, text in sorted(metadata.items())}


def _tensors(path: Path) -> dict[str, str]:
    """Name: ``dtype [shape]``."""
    with safe_open(path, framework="pt") as file:
        found = {name: file.get_tensor(name) for name in sorted(file.keys())}
    return {name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in found.items()}


def files_of(folder: Path) -> dict[str, Path]:
    """The files of a run, by their names in its folder; checkpoints are there, runs below it are not."""
    inside = (path for path in folder.rglob("*") if path.is_file())
    own = (path for path in inside if path.parent == folder or path.parent.name == "checkpoints")
    return {str(path.relative_to(folder)): path for path in sorted(own)}
