"""The checkpoint of a training: one safetensors file, written as a whole or not at all, and checks on resuming."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ifso.common.files import remove_provisional
from ifso.common.serialization import located, read_tensor_file, write_tensor_file
from ifso.common.text import few
from ifso.errors import RunError
from ifso.runs.files import differences
from ifso.training.settings import TrainSettings

FILE = "training.safetensors"

RNG = "rng."
"""The prefix of states of random generators, which torch wants on the CPU."""

_SHOWN = 3


def save_checkpoint(folder: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Replace the checkpoint in ``folder`` by ``tensors`` and JSON ``facts``, whole even if the process is killed."""
    with located(folder):
        folder.mkdir(parents=True, exist_ok=True)
        remove_provisional(folder / FILE)
    write_tensor_file(folder / FILE, tensors, facts)


def load_checkpoint(folder: Path, device: torch.device | str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The tensors on ``device`` and the facts of the checkpoint in ``folder``; None if there is none."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        tensors, facts = read_tensor_file(path)
        if not isinstance(facts, dict):
            raise RunError(f"{path}: holds no training")
    except RunError as error:
        raise RunError(f"{error}; to train from the beginning, delete the file") from error.__cause__
    return {name: tensor if name.startswith(RNG) else tensor.to(device) for name, tensor in tensors.items()}, facts


@torch.no_grad()
def copy_tensors_(live: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> None:
    """Copy stored tensors into those of the same names, in place; nothing is copied unless all of them fit.

    >>> weight = torch.zeros(2)
    >>> copy_tensors_({"weight": weight}, {"weight": torch.ones(3)})
    Traceback (most recent call last):
    ifso.errors.RunError: the checkpoint does not fit: weight is float32 [2] and was float32 [3]; resume with the...
    """
    check_same_tensors(_described(live), _described(stored), "the checkpoint does not fit")
    for name, tensor in live.items():
        tensor.copy_(stored[name])


def describe_model(model: nn.Module) -> dict[str, Any]:
    """What a checkpoint stores of a model: names, dtypes and shapes of its state, and a hash of them.

    >>> first, second, third = (describe_model(nn.Linear(2, outputs))["fingerprint"] for outputs in (3, 3, 4))
    >>> first == second, first == third
    (True, False)
    """
    tensors = _described({name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)})
    fingerprint = hashlib.sha256(json.dumps(sorted(tensors.items())).encode()).hexdigest()
    return {"fingerprint": fingerprint, "tensors": tensors}


def check_same_model(model: nn.Module, before: Mapping[str, Any], where: Path | str, advice: str | None = None) -> None:
    """Raise a RunError with the first differences if ``before`` (:func:`describe_model`) was another model."""
    now = describe_model(model)
    if now["fingerprint"] != before["fingerprint"]:
        check_same_tensors(now["tensors"], before["tensors"], f"the training in {where} is of another network", advice)


def check_same_tensors(now: Mapping[str, str], before: Mapping[str, str], what: str, advice: str | None = None) -> None:
    """Raise a RunError that begins with ``what`` and ends with ``advice`` if names, dtypes or shapes differ."""
    different = [
        f"{name} is {now.get(name, 'not there')} and was {before.get(name, 'not there')}"
        for name in {**now, **before}
        if now.get(name) != before.get(name)
    ]
    if different:
        advice = advice or "resume with the same network, or train in another folder"
        raise RunError(f"{what}: {few(different, _SHOWN, '; ')}; {advice}")


def check_same_settings(
    now: TrainSettings, before: Mapping[str, Any], where: Path | str, advice: str | None = None
) -> None:
    """Raise a RunError with the differences between ``now`` and the settings ``before``, as read from JSON."""
    different = differences(now.as_dict(), before)
    if different:
        advice = advice or "resume with the same, or train in another folder"
        raise RunError(f"the training in {where} has other settings: {few(different, _SHOWN, '; ')}; {advice}")


def rng_states(device: torch.device | str) -> dict[str, Tensor]:
    """The states of the random generators that training on ``device`` draws from, as tensors on the CPU."""
    states = {f"{RNG}cpu": torch.get_rng_state()}
    if torch.device(device).type == "cuda":
        states[f"{RNG}cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_rng(tensors: Mapping[str, Tensor], device: torch.device | str) -> None:
    """Restore :func:`rng_states` as far as they are among the ``tensors``."""
    if f"{RNG}cpu" in tensors:
        torch.set_rng_state(tensors[f"{RNG}cpu"])
    if torch.device(device).type == "cuda" and f"{RNG}cuda" in tensors:
        torch.cuda.set_rng_state(tensors[f"{RNG}cuda"], device)


def _described(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Dtype and shape of each.

    >>> _described({"weight": torch.zeros(2, 3)})
    {'weight': 'float32 [2, 3]'}
    """
    return {name: f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.") for name, tensor in tensors.items()}


START, TEACHER, DATA = "start", "teacher", "data"

_WORDS = {START: "another network", TEACHER: "another teacher", DATA: "other data"}


@dataclass(frozen=True)
class InputDigests:
    """Digests of the initial network (:data:`START`), the :data:`TEACHER` and the :data:`DATA`, where known.

    They are stored in checkpoints, so that a resume with other inputs is refused, with ``advice`` instead of the usual.
    """

    digests: Mapping[str, str] = field(default_factory=dict)
    advice: str | None = None

    def facts(self) -> dict[str, dict[str, str]]:
        """What a checkpoint stores of them."""
        return {"origin": dict(self.digests)} if self.digests else {}

    def refuse_other(self, before: Mapping[str, str], where: Path) -> None:
        """Raise a RunError that names what differs; what an older checkpoint lacks is taken to be the same.

        >>> InputDigests({"start": "a", "data": "b"}).refuse_other({"data": "b"}, Path("runs/x"))
        >>> InputDigests({"start": "a"}, "remove it").refuse_other({"start": "c", "data": "b"}, Path("runs/x"))
        Traceback (most recent call last):
        ifso.errors.RunError: the training in runs/x began with another network; remove it
        """
        other = [_WORDS[name] for name, digest in self.digests.items() if before.get(name, digest) != digest]
        if other:
            advice = self.advice or "train in another folder"
            raise RunError(f"the training in {where} began with {' and '.join(other)}; {advice}")
