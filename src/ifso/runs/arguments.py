"""The arguments that a run was begun with: what each may be, and where the files that they name are now."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ifso.common.text import shown
from ifso.errors import RunError
from ifso.runs.values import at, is_kind

EXECUTED = ("model", "data", "teacher")
"""Options whose value may name a program."""

PATHS = ("model", "weights", "data")
"""Options whose value may hold a path."""

SPELLED = {"decay_all": "decay_norms", "schedule": "lr_schedule", "accumulate": "micro_batches"}
"""Settings of trainings whose options are called otherwise, as in ``ifso prune`` the same words are other things."""

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
    program = value.rpartition(":")[0] if option == "data" else ""
    if option != "data":
        from ifso.errors import ModelNotFound
        from ifso.models.registry import read_name

        with suppress(ModelNotFound):
            program = read_name(value).source
    if program.endswith(".py"):
        return "", program, value.removeprefix(program)
    kind, colon, path = value.partition(":")
    if option == "data" and path:
        from ifso.data.base import path_and_options

        path, behind = path_and_options(kind, path)
        return f"{kind}{colon}", path, behind
    return "", None, value


def without_folders(value: Any) -> Any:
    """A name without the folders of a path in it.

    >>> without_folders("cifar10:sets/cifar.npz"), without_folders("nets/small.py:make"), without_folders(8)
    ('cifar10:cifar.npz', 'small.py:make', 8)
    """
    return re.sub(r"[^:]*/", "", value) if isinstance(value, str) else value


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
        kind, words, *more = KINDS.get(name, (None, ""))
        if name in KINDS and not (is_kind(value, kind) and all(holds(value) for holds in more)):
            raise RunError(f"{where}: {name} must be {words}, got {shown(value)}; restore the file, or start anew")
    return dict(arguments)


KINDS: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("model", "weights", "data", "device", "precision", "criterion", "schedule", "preset", "normalize",
         "accumulation", "recipe", "teacher", "teacher_weights", "opt"), (str, "a text")
    ),
    **dict.fromkeys(
        ("batch", "seed", "round_to", "recalibrate", "weight_update", "recover", "calibration",
         "accumulate", "batches_per_score", "units_per_step", "epochs", "warm_up_steps"), (int, "a whole number")
    ),
    **dict.fromkeys(
        ("lr", "stop", "factor", "warm_up", "momentum", "weight_decay", "label_smoothing", "ema", "clip",
         "distill", "temperature", "cutmix", "mixup", "validation"), (float, "a number")
    ),
    **dict.fromkeys(
        ("train_mode", "update", "channels_last", "nesterov", "decay_all", "compile", "padded"), (bool, "true or false")
    ),
    **dict.fromkeys(
        ("macs", "conv_macs", "params", "activations", "latency"),
        ((float, [float]), "a share, or a list of shares", lambda value: value != []),
    ),
    **dict.fromkeys(("criterion_option", "ignore", "only"), ([str], "a list of texts")),
    "min_units": ((int, {str: int}), "a whole number, or one by layer"),
    "min_share": ((float, {str: float}), "a number, or one by layer"),
    "evaluate_every": (int, "a whole number from 1 up", lambda value: value > 0),
    "milestones": ([float], "a list of numbers"),
    "input": ([int], "a list of sizes", lambda value: value != [] and all(0 < size < 2**31 for size in value)),
}  # fmt: skip
"""What the value of each option is, as JSON has it: its kind, in words, and what else must hold."""
