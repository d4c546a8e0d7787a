"""Run folders to look at: small real ones, and one that is written by hand with as many layers as wanted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ifso
from ifso.common.serialization import write_tensor_file
from ifso.pruning.events import Removal, Silent
from ifso.runs.folder import RunFolder

EVIL = "</script><script>self['hacked']=1</script><img src=x onerror=self['hacked']=1>&\"'"
"""A name that a module can have: everything but a dot."""


class Net(nn.Module):
    """Two convolutions whose outputs are added, one between them with a strange name, and a linear layer."""

    def __init__(self, name: str = "middle") -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.last = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(8, 6, 3, padding=1)
            self.add_module(name, nn.Conv2d(6, 8, 3, padding=1))
            self.fc = nn.Linear(6, 3)
        self._name = name

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return self.fc((x + self.last(getattr(self, self._name)(x).relu())).mean((2, 3)))


class Stop(Silent):
    """Interrupts a run after some removals."""

    def __init__(self, after: int) -> None:
        self._after = after

    def removed(self, removal: Removal) -> None:
        if removal.removal == self._after:
            raise KeyboardInterrupt


def prune(folder: Path, name: str = "middle", stop: int | None = None, **options: Any) -> None:
    """Prune the small network in ``folder``; with ``stop`` the run is interrupted after so many removals."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randn(4, 1, 5, 5, generator=generator), torch.tensor([0, 1, 2, 0])) for _ in range(3)]
    place = {} if "resume" in options else {"out": folder}
    settings: dict[str, Any] = {"criterion": "taylor", "accumulate": 1, "batches_per_score": 1, **options}
    try:
        ifso.prune(
            Net(name), batches, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
            budget=ifso.Budget(macs=0.5), example_inputs=batches[0][0], checkpoint_every=0.0,
            listener=Silent() if stop is None else Stop(stop), evaluate=_accuracy, **place, **settings,
        )  # fmt: skip
    except KeyboardInterrupt:
        assert stop is not None


def _accuracy(model: nn.Module) -> dict[str, float]:
    return {"accuracy": 50.0 + sum(parameter.numel() for parameter in model.parameters()) / 100}


def finetune(folder: Path, epochs: int, done: int | None = None) -> None:
    """A fine-tuning as ``ifso finetune`` writes it, finished unless only some epochs are ``done``."""
    settings = {"training": {"epochs": epochs, "lr": 0.1}, "data": "digits", "validation": 0}
    with RunFolder.create(folder / "finetune", {"settings": settings, "about": {"run": str(folder)}}) as run:
        for epoch in range(1, (done or epochs) + 1):
            line = {"epoch": epoch, "loss": 1 / epoch, "lr": 0.1, "seconds": 2.0, "top1": 90 + epoch, "eval_loss": 0.5}
            run.append(line)
        if done is None:
            last = {"last_top1": 90.0 + epochs, "split": "test", "before": {"pruned": 80.0}}
            run.finish({**last, "hardware": {"device": "a CPU"}, "torch": "2.15", "ifso": "0.1.0"})


def write_many(folder: Path, layers: int, units: int = 16) -> None:
    """A finished run of a network with so many layers, every third pair coupled, by hand."""
    names = [f"stages.{number // 12}.blocks.{number % 12}.conv" for number in range(layers)]
    groups, shapes = [], {}
    for number, name in enumerate(names):
        shapes[f"{name}.weight"] = [units, units, 3, 3]
        writer = {"parameter": f"{name}.weight", "dim": 0, "role": "produces", "positions": units}
        if number % 3 == 1:
            groups[-1]["members"].append(writer)
        else:
            groups.append({"name": name, "size": units, "flags": [], "members": [writer]})
    with RunFolder.create(folder, {"settings": {"criterion": {"name": "ifso"}, "budget": {"macs": 0.7}}}) as run:
        run.write_json("structure.json", {"groups": groups, "shapes": shapes, "frozen": [], "cost": {"macs": 10**9}})
        generator = torch.Generator().manual_seed(0)
        scores = {group["name"]: torch.rand(units, generator=generator) for group in groups}
        write_tensor_file(folder / "first_scores.safetensors", scores)
        total = len(groups) * units
        order = sorted((float(values[unit]), name, unit) for name, values in scores.items() for unit in range(units))
        lines = []
        for number, (score, name, unit) in enumerate(order[: total * 3 // 10], 1):
            share = 1 - number / total
            lines.append({
                "removal": number, "step": number, "units": {name: [unit]}, "score": score, "seconds": number / 10,
                "costs": {"macs": share * 1e9}, "shares": {"macs": share}, "loss": 0.1 + number / total,
            })  # fmt: skip
        run.rewrite(lines)
        run.finish({"before": {"macs": 10**9}, "after": {"macs": 7 * 10**8}, "shares": {"macs": 0.7}})


def data_of(page: str) -> dict[str, Any]:
    """The values that the charts of a page are drawn from."""
    _, _, rest = page.partition('<script type="application/json" id="data">')
    return json.loads(rest.partition("</script>")[0])
