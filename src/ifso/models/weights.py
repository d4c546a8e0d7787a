"""Weights from a file into a network: safetensors or a plain tensor checkpoint, never arbitrary pickles."""

from __future__ import annotations

import argparse
import pickletools
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ifso.common.files import error_number, explained, is_file
from ifso.common.text import one_line
from ifso.errors import WeightsError

WRAPPERS = ("state_dict", "model", "model_state_dict", "state_dict_ema")
"""Under which names checkpoints hold the weights; the average (EMA) is taken where there is nothing else."""

PREFIXES = ("module.", "model.", "_orig_mod.")

ALIASES = (("linear.", "fc."),)
"""Names other programs give to a layer that ours calls differently; used only where the model lacks the first."""

COUNTER = "num_batches_tracked"

DEEPEST = 8
"""Wrappers one in the other."""

SAFE: list[Any] = [argparse.Namespace]
"""Classes of which a checkpoint may hold instances beside its tensors: they only keep values, and nothing is called."""

State = Mapping[str, Tensor]


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Load the file ``path`` into ``model``; every key must fit, else nothing is loaded.

    A file is known by what is in it: safetensors, or a checkpoint of torch. Wrappers (``state_dict``, ``model``,
    ``model_state_dict``, ``state_dict_ema``), prefixes (``module.``, ``model.``, ``_orig_mod.``) and missing
    ``num_batches_tracked``, or those of batch norms that are frozen in ``model``, are taken care of.
    """
    path = Path(path)
    target = model.state_dict()
    state = {key: value for key, value in _rename(read_state(path), target).items() if not _is_of_frozen(key, target)}
    state = {**{key: value for key, value in target.items() if key.endswith(COUNTER)}, **state}
    check_fit(state, target, path)
    model.load_state_dict(state)


def _is_of_frozen(key: str, target: State) -> bool:
    """Return whether it is the counter of a batch norm that is frozen in the model, and has none."""
    norm = key.removesuffix(COUNTER)
    return key != norm and key not in target and f"{norm}running_mean" in target


def read_state(path: Path) -> State:
    """The tensors in a file, by name; without the wrapper they may be in."""
    if not is_file(path):
        raise WeightsError(f"no weight file {path}")
    try:
        state = _read_safetensors(path) if _is_safetensors(path) else _read_checkpoint(path)
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {explained(error)}") from error
    for name, tensor in state.items():
        if not _is_plain(tensor):
            raise WeightsError(f"{path}: {one_line(name)} is no dense tensor with values; save those")
    return state


def _is_safetensors(path: Path) -> bool:
    """Return whether the file is named so, or begins with the length of a JSON header and that header."""
    with path.open("rb") as file:
        begin = file.read(9)
    return path.suffix == ".safetensors" or (begin[8:] == b"{" and begin[:4] != ZIP)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether it can be copied into a parameter."""
    strange = tensor.is_meta or tensor.is_nested or tensor.is_quantized
    return not strange and tensor.layout == torch.strided and type(tensor) in (Tensor, nn.Parameter)


def _read_safetensors(path: Path) -> State:
    try:
        return load_file(path)
    except (SafetensorError, OSError, UnicodeError) as error:
        if error_number(error) is not None:
            raise WeightsError(f"{path} cannot be read: {explained(error)}") from error
        raise WeightsError(f"{path} is damaged or no safetensors file: {one_line(error)}") from error


def _read_checkpoint(path: Path) -> State:
    try:
        refuse_costly(path)
        with torch.serialization.safe_globals(SAFE):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        raise WeightsError(
            f"{path} is damaged or holds more than tensors ({_reason(error)}); save model.state_dict() and load that"
        ) from error
    for _ in range(DEEPEST):
        held = content if isinstance(content, Mapping) else {}
        inner = next((held[name] for name in WRAPPERS if isinstance(held.get(name), Mapping)), None)
        if inner is None:
            break
        content = inner
    if not isinstance(content, Mapping) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in content.items()
    ):
        raise WeightsError(f"{path} holds no state dict (looked at the top level and under {', '.join(WRAPPERS)})")
    return content


def _reason(error: Exception) -> str:
    """What is wrong, without torch's advice to load the file all the same."""
    match = re.search(r"(?:WeightsUnpickler error: |Trying to load )([^\n]+?)(?:\.\s|\.?$)", str(error), re.MULTILINE)
    first = match[1] if match else next(iter(str(error).splitlines()), "")
    return type(error).__name__ if not first or "weights_only" in first else one_line(first)


def _rename(state: State, target: State) -> State:
    """Without prefixes that every key of ``state`` carries and no key of ``target`` does, and with our names."""
    while prefix := next((each for each in PREFIXES if state and all(key.startswith(each) for key in state)), ""):
        if _any_starts(target, prefix):
            break
        state = {key.removeprefix(prefix): value for key, value in state.items()}
    for theirs, ours in ALIASES:
        if not _any_starts(target, theirs) and _any_starts(target, ours):
            state = {ours + key.removeprefix(theirs) if key.startswith(theirs) else key: state[key] for key in state}
    return state


def _any_starts(keys: Iterable[str], prefix: str) -> bool:
    return any(key.startswith(prefix) for key in keys)


def check_fit(state: State, target: State, path: str | Path) -> None:
    """WeightsError unless both have the same names, shapes and kinds of numbers; precision may differ."""
    misfits = {
        "missing": [key for key in target if key not in state],
        "unexpected": [key for key in state if key not in target],
        "of another shape": [
            f"{key} {list(state[key].shape)} for {list(value.shape)}"
            for key, value in target.items()
            if key in state and state[key].shape != value.shape
        ],
        "of another kind": [
            f"{key} {_dtype(state[key])} for {_dtype(value)}"
            for key, value in target.items()
            if key in state and not key.endswith(COUNTER) and _kind(state[key]) != _kind(value)
        ],
    }
    faults = [f"{len(keys)} {what} ({_first(keys)})" for what, keys in misfits.items() if keys]
    if faults:
        raise WeightsError(f"{path} does not fit the model: {'; '.join(faults)}")


def _kind(tensor: Tensor) -> str:
    """What its numbers are; among those of one kind a copy changes no more than the precision."""
    if tensor.dtype == torch.bool:
        return "truth"
    if tensor.is_complex():
        return "complex"
    return "real" if tensor.is_floating_point() else "whole"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _first(keys: list[str], limit: int = 3) -> str:
    return one_line(", ".join(keys[:limit])) + (", …" if len(keys) > limit else "")


ZIP = b"PK\x03\x04"

PICKLES = 5
"""That stand one after the other in a file from before torch wrote zip files."""

MOST_BYTES = 2**28
"""Of the names and shapes in a file."""

MOST_ITEMS = 10**6
"""Of a tuple, those in tuples in it included, each as often as it is met."""

TUPLES = ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_TUPLE")


def refuse_costly(path: Path) -> None:
    """ValueError, in words that go on a sentence, if loading it could take far more than the file is large."""
    with path.open("rb") as file:
        if file.read(len(ZIP)) == ZIP:
            _refuse_in_zip(path)
            return
        file.seek(0)
        for _ in range(PICKLES):
            _refuse(file)


def _refuse_in_zip(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.filename.endswith(".pkl"):
                if entry.file_size > MOST_BYTES:
                    raise ValueError(f"it says more of its tensors than {MOST_BYTES} bytes")
                _refuse(archive.read(entry))


def _refuse(pickled: bytes | IO[bytes]) -> None:
    """A pickle that names ``bytearray``, or makes too large a tuple."""
    stack, marks, memo = [0], list[int](), dict[Any, int]()
    for opcode, argument, _ in pickletools.genops(pickled):
        if "bytearray" in str(argument)[:200]:
            raise ValueError("it makes arrays of bytes, of any length")
        if opcode.name == "MARK":
            marks.append(len(stack))
        elif "PUT" in opcode.name or opcode.name == "MEMOIZE":
            memo[len(memo) if argument is None else int(argument)] = stack[-1]
        elif "GET" in opcode.name:
            stack.append(memo.get(int(argument or 0), 1))
        else:
            stack += _made(opcode, stack, marks)


def _made(opcode: Any, stack: list[int], marks: list[int]) -> Iterator[int]:
    """Takes what an opcode needs from the stack; the items of what it puts there: 1 for all but tuples."""
    plain = [kind for kind in opcode.stack_before if kind not in (pickletools.markobject, pickletools.stackslice)]
    least = max(len(stack) - len(plain), 1)
    if len(plain) < len(opcode.stack_before):
        start = marks.pop() if marks else 1
        least = max(start - len(plain), 1)
    taken = stack[least:]
    del stack[least:]
    items = 1 + sum(taken) if opcode.name in TUPLES else 1
    if items > MOST_ITEMS:
        raise ValueError("it makes a tuple that holds itself too often")
    return iter(taken * 2 if opcode.name == "DUP" else [items] * len(opcode.stack_after))
