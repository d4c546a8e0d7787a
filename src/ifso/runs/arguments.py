"""The arguments that a run was begun with: what each may be, and where the files that they name are now."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifso.errors import RunError

if TYPE_CHECKING:
    pass


EXECUTED = ("model", "data", "teacher")
"""Options whose value may name a program."""

PATHS = ("model", "weights", "data")
"""Options whose value may hold a path."""

LEVELS = 3
"""How many of the folders above a run are tried for a relative path; what lies higher is likely to be another's."""


def refuse_foreign(option: str, value: str, folders: Iterable[Path]) -> None:
    """RunError if acting on an option that a run tells would do what only the user may ask for by name.

    That is to execute a program in one of ``folders``, which hold what the run tells: by its name or by where links
    lead to. Or to load or download weights by options of a MODEL.
    """
    if option not in EXECUTED:
        return
    _, path, _ = _parts(option, value)
    if path is not None and path.endswith(".py"):
        for folder in folders:
            if _lies_in(path, folder):
                raise RunError(_came_with(folder, option, value))
    elif option != "data":
        from ifso.models.registry import loading

        if loading(value):
            raise RunError(
                f"the run would have {value} load or download weights; if you want that, "
                f"give --{option} {value} --pretrained"
            )


def _lies_in(path: str, folder: Path) -> bool:
    """As it is written, or where it leads to."""
    try:
        ways = (Path(os.path.abspath(path)), Path(path).resolve())  # noqa: PTH100
        places = (Path(os.path.abspath(folder)), folder.resolve())  # noqa: PTH100
    except (OSError, ValueError, RuntimeError) as error:
        raise RunError(f"{path!r}, which the run in {folder} names, is no path ({error})") from None
    return any(place in way.parents for way in ways for place in places)


def _came_with(folder: Path, option: str, value: str) -> str:
    return (
        f"the run in {folder} would have the program {_parts(option, value)[1]} executed, which came with it; "
        f"if you trust it, give --{option} {value}"
    )


def _places(folder: Path, path: str) -> Iterator[Path]:
    """Where a path told by a run may lead: from here, or from one of the folders that the run lies in."""
    yield Path(path)
    if not Path(path).is_absolute():
        yield from (parent / path for parent in folder.resolve().parents[:LEVELS])


def _parts(option: str, value: str) -> tuple[str, str | None, str]:
    """The path in a value, and what stands before and after it.

    >>> _parts("data", "cifar10:sets/cifar.npz"), _parts("model", "nets/small.py:make")
    (('cifar10:', 'sets/cifar.npz', ''), ('', 'nets/small.py', ':make'))
    >>> _parts("data", "coco:sets/cells,size=480")
    ('coco:', 'sets/cells', ',size=480')
    >>> _parts("model", "ifso:resnet32"), _parts("data", "digits")
    (('', None, 'ifso:resnet32'), ('', None, 'digits'))
    """
    if option in ("weights", "teacher_weights"):
        return "", value, ""
    path = _program(option, value)
    if path is not None:
        return "", path, value.removeprefix(path)
    kind, colon, path = value.partition(":")
    if option == "data" and path:
        path, behind = _before_options(kind, path)
        return f"{kind}{colon}", path, behind
    return "", None, value


def _program(option: str, value: str) -> str | None:
    """The Python file that a MODEL or DATA names, if it does, as those who open it read the name."""
    from ifso.errors import ModelNotFound
    from ifso.models.registry import read_name

    if option == "data":
        path = value.rpartition(":")[0]
    else:
        try:
            path = read_name(value).source
        except ModelNotFound:
            return None
    return path if path.endswith(".py") else None


def _before_options(kind: str, path: str) -> tuple[str, str]:
    from ifso.data.base import path_and_options

    return path_and_options(kind, path)


LARGEST = 2**63 - 1
"""The largest whole number that torch takes, as a seed among other things."""


def told_options(config: Mapping[str, Any], where: Path) -> dict[str, Any] | None:
    """The arguments that a run was begun with, by name; None if it does not tell them."""
    about = config.get("about")
    arguments = about.get("arguments") if isinstance(about, dict) else None
    if not isinstance(arguments, dict):
        return None
    for name, value in arguments.items():
        is_right, words = KINDS.get(name, (_is_anything, ""))
        if not is_right(value):
            raise RunError(f"{where}: {name} must be {words}, got {_shown(value)}; restore the file, or start anew")
    return dict(arguments)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


def _is_anything(_: object) -> bool:
    return True


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST


def _is_from_one(value: object) -> bool:
    return _is_whole(value) and bool(value) and value > 0  # type: ignore[operator]


def _is_number(value: object) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def _is_truth(value: object) -> bool:
    return isinstance(value, bool)


def _list_of(is_right: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(map(is_right, value))


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_whole(size) and 0 < size < 2**31 for size in value)


def _is_budget(value: object) -> bool:
    return _is_number(value) or (_list_of(_is_number)(value) and bool(value))


Kind = tuple[Callable[[object], bool], str]

_TEXT: Kind = (_is_text, "a text")

_WHOLE: Kind = (_is_whole, "a whole number")

_NUMBER: Kind = (_is_number, "a number")

_TRUTH: Kind = (_is_truth, "true or false")

KINDS: Mapping[str, Kind] = {
    **dict.fromkeys(
        ("model", "weights", "data", "device", "precision", "criterion", "schedule", "preset", "normalize",
         "accumulation", "recipe", "teacher", "teacher_weights"), _TEXT
    ),
    **dict.fromkeys(
        ("batch", "seed", "round_to", "min_units", "recalibrate", "weight_update", "recover", "calibration",
         "accumulate", "batches_per_score", "units_per_step", "epochs", "warm_up_steps"), _WHOLE
    ),
    **dict.fromkeys(
        ("lr", "min_share", "stop", "factor", "warm_up", "momentum", "weight_decay", "label_smoothing", "ema", "clip",
         "distill", "temperature", "cutmix", "validation"), _NUMBER
    ),
    **dict.fromkeys(
        ("train_mode", "update", "channels_last", "nesterov", "decay_all", "compile", "padded"), _TRUTH
    ),
    **dict.fromkeys(
        ("macs", "conv_macs", "params", "activations", "latency"), (_is_budget, "a share, or a list of shares")
    ),
    **dict.fromkeys(("criterion_option", "ignore", "only"), (_list_of(_is_text), "a list of texts")),
    "evaluate_every": (_is_from_one, "a whole number from 1 up"),
    "milestones": (_list_of(_is_number), "a list of numbers"),
    "input": (_is_shape, "a list of sizes"),
}  # fmt: skip
"""What the value of each option is, as JSON has it."""
