"""The arguments that a run was begun with: what each may be, and where the files that they name are now."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ifso.common.text import shown
from ifso.errors import RunError
from ifso.runs.values import Kind, at, dict_of, is_number, is_text, is_truth, is_whole, list_of

EXECUTED = ("model", "data", "teacher")
"""Options whose value may name a program."""

PATHS = ("model", "weights", "data")
"""Options whose value may hold a path."""

TOLD = ("model", "weights", "data", "input")
"""What may be told of a run that Python begins."""

FINETUNE = "finetune"
"""The folder within a run in which ``ifso finetune`` works."""

LEVELS = 3
"""How many of the folders above a run are tried for a relative path; what lies higher is likely to be another's."""


def refuse_foreign(option: str, value: str, folders: Iterable[Path]) -> None:
    """RunError if acting on an option that a run tells would do what only the user may ask for by name.

    That is to execute a program in one of ``folders``, which hold what the run tells: by its name or by where links
    lead to. Or to load or download weights by options of a MODEL.
    """
    if option not in EXECUTED:
        return
    _, path, _ = parts_of(option, value)
    if path is not None and path.endswith(".py"):
        for folder in folders:
            if _lies_in(path, folder):
                raise RunError(came_with(folder, option, value))
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


def came_with(folder: Path, option: str, value: str) -> str:
    """What to say of a program that lies in the run which names it."""
    return (
        f"the run in {folder} would have the program {parts_of(option, value)[1]} executed, which came with it; "
        f"if you trust it, give --{option} {value}"
    )


def places_of(folder: Path, path: str) -> Iterator[Path]:
    """Where a path told by a run may lead: from here, or from one of the folders that the run lies in."""
    yield Path(path)
    if not Path(path).is_absolute():
        yield from (parent / path for parent in folder.resolve().parents[:LEVELS])


def run_around(folder: Path) -> Path | None:
    """The run in which ``folder`` is the network for one of several budgets, if it is in one."""
    from ifso.common.files import is_file
    from ifso.runs.files import CONFIG, NETWORKS

    run = folder.resolve().parent.parent
    return run if folder.resolve().parent.name == NETWORKS and is_file(run / CONFIG) else None


def opened_with(folder: Path, arguments: Mapping[str, Any]) -> list[Path]:
    """The folder of a run, and those of the network it began with, if that was another run's: one sender for all."""
    from ifso.common.files import is_folder

    around = run_around(folder)
    if around is not None:
        return [folder, *opened_with(around, arguments)]

    weights = arguments.get("weights")
    places = places_of(folder, weights) if isinstance(weights, str) else ()
    found = [place for place in places if is_folder(place)]
    return [folder, *found, *(place.parent for place in found if place.name == FINETUNE)]


def refuse_no_network(folder: Path) -> None:
    """RunError if a folder that is said to hold a fine-tuned network holds none."""
    from ifso.runs.files import is_there
    from ifso.surgery.store import RECIPE

    if not is_there(folder / RECIPE):
        raise RunError(
            f"--finetuned {folder} holds no network (no {RECIPE}); give a folder that ifso.save or ifso finetune wrote"
        )


def pruning_of(folder: Path, name: str | None) -> Path:
    """The run whose fine-tuning is in ``folder``, which calls it ``name`` or, without a name, lies in it."""
    from ifso.common.files import is_file
    from ifso.common.text import one_line
    from ifso.runs.files import CONFIG

    inside = next((place.parent for place in (folder, folder.resolve()) if place.name == FINETUNE), None)
    places = [*([inside] if inside else ()), *(places_of(folder, name) if name is not None else ())]
    for place in places:
        if is_file(place / CONFIG):
            return place
    where, tried = one_line(name or "the folder above"), one_line(", ".join(map(str, places)))
    raise RunError(
        f"{folder} is the fine-tuning of the run in {where}, which is not there any more (tried {tried}); "
        "put it back there"
    )


def parts_of(option: str, value: str) -> tuple[str, str | None, str]:
    """The path in a value, and what stands before and after it.

    >>> parts_of("data", "cifar10:sets/cifar.npz"), parts_of("model", "nets/small.py:make")
    (('cifar10:', 'sets/cifar.npz', ''), ('', 'nets/small.py', ':make'))
    >>> parts_of("data", "coco:sets/cells,size=480")
    ('coco:', 'sets/cells', ',size=480')
    >>> parts_of("model", "ifso:resnet32"), parts_of("data", "digits")
    (('', None, 'ifso:resnet32'), ('', None, 'digits'))
    """
    if option in ("weights", "teacher_weights"):
        return "", value, ""
    path = _program(option, value)
    if path is not None:
        return "", path, value.removeprefix(path)
    kind, colon, path = value.partition(":")
    if option == "data" and path:
        from ifso.data.base import path_and_options

        path, behind = path_and_options(kind, path)
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


def told_options(config: Mapping[str, Any], where: Path) -> dict[str, Any] | None:
    """The arguments that a run was begun with, by name; None if it does not tell them."""
    arguments = at(config, "about", "arguments")
    return _checked(arguments, where) if isinstance(arguments, dict) else None


def told_names(config: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """The same of a run that Python began: names of its network, weights and data, as far as ``about=`` told them."""
    about = config.get("about")
    found = {name: about[name] for name in TOLD if name in about} if isinstance(about, dict) else {}
    return _checked(found, where)


def _checked(arguments: Mapping[str, Any], where: Path) -> dict[str, Any]:
    for name, value in arguments.items():
        is_right, words = KINDS.get(name, (lambda _: True, ""))
        if not is_right(value):
            raise RunError(f"{where}: {name} must be {words}, got {shown(value)}; restore the file, or start anew")
    return dict(arguments)


def _is_shape(value: Any) -> bool:
    return list_of(is_whole)(value) and bool(value) and all(0 < size < 2**31 for size in value)


def _is_budget(value: Any) -> bool:
    return is_number(value) or (list_of(is_number)(value) and bool(value))


_TEXT, _WHOLE = (is_text, "a text"), (is_whole, "a whole number")

_NUMBER, _TRUTH = (is_number, "a number"), (is_truth, "true or false")

KINDS: Mapping[str, tuple[Kind, str]] = {
    **dict.fromkeys(
        ("model", "weights", "data", "device", "precision", "criterion", "schedule", "preset", "normalize",
         "accumulation", "recipe", "teacher", "teacher_weights", "opt"), _TEXT
    ),
    **dict.fromkeys(
        ("batch", "seed", "round_to", "recalibrate", "weight_update", "recover", "calibration",
         "accumulate", "batches_per_score", "units_per_step", "epochs", "warm_up_steps"), _WHOLE
    ),
    **dict.fromkeys(
        ("lr", "stop", "factor", "warm_up", "momentum", "weight_decay", "label_smoothing", "ema", "clip",
         "distill", "temperature", "cutmix", "mixup", "validation"), _NUMBER
    ),
    **dict.fromkeys(
        ("train_mode", "update", "channels_last", "nesterov", "decay_all", "compile", "padded"), _TRUTH
    ),
    **dict.fromkeys(
        ("macs", "conv_macs", "params", "activations", "latency"), (_is_budget, "a share, or a list of shares")
    ),
    **dict.fromkeys(("criterion_option", "ignore", "only"), (list_of(is_text), "a list of texts")),
    "min_units": (lambda value: is_whole(value) or dict_of(is_whole)(value), "a whole number, or one by layer"),
    "min_share": (lambda value: is_number(value) or dict_of(is_number)(value), "a number, or one by layer"),
    "evaluate_every": (lambda value: is_whole(value) and value > 0, "a whole number from 1 up"),
    "milestones": (list_of(is_number), "a list of numbers"),
    "input": (_is_shape, "a list of sizes"),
}  # fmt: skip
"""What the value of each option is, as JSON has it."""
