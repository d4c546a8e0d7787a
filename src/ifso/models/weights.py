"""Weights from a file into a network: safetensors or a plain tensor checkpoint, never arbitrary pickles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ifso.errors import WeightsError

WRAPPERS = ("state_dict", "model")
PREFIXES = ("module.", "model.", "_orig_mod.")
ALIASES = (("linear.", "fc."),)
"""Names other programs give to a layer that ours calls differently; used only where the model lacks the first."""

COUNTER = "num_batches_tracked"

State = Mapping[str, Tensor]


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Load ``path`` (.safetensors, .pt, .pth) into ``model``; every key must fit, else nothing is loaded.

    Wrappers (``state_dict``, ``model``), prefixes (``module.``, ``model.``, ``_orig_mod.``) and missing
    ``num_batches_tracked``, or those of batch norms that are frozen in ``model``, are taken care of.
    """
    path = Path(path)
    target = model.state_dict()
    state = _rename(read_state(path), target)
    counters = {key: value for key, value in target.items() if key.endswith(COUNTER)}
    state = {**counters, **{key: value for key, value in state.items() if not _is_of_frozen(key, target)}}
    check_fit(state, target, path)
    model.load_state_dict(state)


def _is_of_frozen(key: str, target: State) -> bool:
    """Is it the counter of a batch norm that is frozen in the model, and has none?"""
    norm = key.removesuffix(COUNTER)
    return key != norm and key not in target and f"{norm}running_mean" in target


def read_state(path: Path) -> State:
    """The tensors in a file, by name; without the wrapper they may be in."""
    if not path.is_file():
        raise WeightsError(f"no weight file {path}")
    readers = {".safetensors": _read_safetensors, ".pt": _read_checkpoint, ".pth": _read_checkpoint}
    if path.suffix not in readers:
        raise WeightsError(
            f"{path}: weights are read from {', '.join(readers)}, not from {path.suffix or 'this'} files"
        )
    return readers[path.suffix](path)


def _read_safetensors(path: Path) -> State:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} is damaged or no safetensors file: {error}") from error


def _read_checkpoint(path: Path) -> State:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise WeightsError(
            f"{path} is damaged or holds more than tensors ({reason}); save model.state_dict() and load that"
        ) from error
    return _unwrap(content, path)


def _unwrap(content: Any, path: Path) -> State:
    while isinstance(content, Mapping):
        inner = next((content[name] for name in WRAPPERS if isinstance(content.get(name), Mapping)), None)
        if inner is None:
            break
        content = inner
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise WeightsError(f"{path} holds no state dict (looked at the top level and under {', '.join(WRAPPERS)})")
    return content


def _rename(state: State, target: State) -> State:
    for prefix in _prefixes(state, target):
        state = {key.removeprefix(prefix): value for key, value in state.items()}
    for theirs, ours in ALIASES:
        if not _any_starts(target, theirs) and _any_starts(target, ours):
            state = {ours + key.removeprefix(theirs) if key.startswith(theirs) else key: state[key] for key in state}
    return state


def _prefixes(state: State, target: State) -> list[str]:
    """Prefixes that every key of ``state`` carries and no key of ``target`` does, outermost first."""
    found: list[str] = []
    keys = list(state)
    while keys:
        extra = [p for p in PREFIXES if all(key.startswith(p) for key in keys) and not _any_starts(target, p)]
        if not extra:
            break
        found.append(extra[0])
        keys = [key.removeprefix(extra[0]) for key in keys]
    return found


def _any_starts(keys: Iterable[str], prefix: str) -> bool:
    return any(key.startswith(prefix) for key in keys)


def check_fit(state: State, target: State, path: str | Path) -> None:
    """WeightsError unless both have the same names and shapes."""
    misfits = {
        "missing": [key for key in target if key not in state],
        "unexpected": [key for key in state if key not in target],
        "of another shape": [
            f"{key} {list(state[key].shape)} for {list(value.shape)}"
            for key, value in target.items()
            if key in state and state[key].shape != value.shape
        ],
    }
    faults = [f"{len(keys)} {what} ({_first(keys)})" for what, keys in misfits.items() if keys]
    if faults:
        raise WeightsError(f"{path} does not fit the model: {'; '.join(faults)}")


def _first(keys: list[str], limit: int = 3) -> str:
    return ", ".join(keys[:limit]) + (", …" if len(keys) > limit else "")
