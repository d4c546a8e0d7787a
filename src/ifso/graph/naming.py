"""Modules and parameters of a model that a user names: by name, by pattern, or as modules themselves."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ifso.common.module_state import named_tensors
from ifso.errors import TraceError

WILD = frozenset("*?[")


def names_in(model: nn.Module, wanted: Any, option: str) -> tuple[str, ...]:
    """The names of modules and parameters that ``option`` asks for; a TraceError if one of them is not there.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> names_in(net, ["0", "*.bias", net[2]], "ignore")
    ('0', '2.bias', '2')
    """
    if isinstance(wanted, str) or not isinstance(wanted, (nn.Module, Iterable)):
        what = f"one string; give a tuple of names: {option}=({wanted!r},)" if isinstance(wanted, str) else "no tuple"
        raise TraceError(f"{option}={wanted!r} is {what}")
    given = [wanted] if isinstance(wanted, nn.Module) else list(wanted)
    found: dict[str, None] = {}
    for each in given:
        names = _named(model, each, option)
        found.update(dict.fromkeys(name for name in names if each == name or not is_under(name, found)))
    return tuple(found)


def _named(model: nn.Module, wanted: Any, option: str) -> list[str]:
    if isinstance(wanted, nn.Module):
        names = [name for name, module in model.named_modules() if module is wanted]
        if not names:
            raise TraceError(f"{option} holds a {type(wanted).__name__} that is no part of {type(model).__name__}")
        return names
    if not isinstance(wanted, str):
        raise TraceError(f"{option} holds {wanted!r}; give names of modules, patterns such as 'layer1.*', or modules")
    known = [*(name for name, _ in model.named_modules()), *named_tensors(model)]
    if wanted in known:
        return [wanted]
    names = [name for name in known if name and fnmatchcase(name, wanted)] if is_pattern(wanted) else []
    if not names:
        close = get_close_matches(wanted, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise TraceError(f"{option} names {wanted!r}, which is no module or parameter of {type(model).__name__}{hint}")
    return names


def is_pattern(name: str) -> bool:
    """Does it stand for several names? ``*`` for anything, dots too, ``?`` for one character, ``[ab]`` for one of some.

    >>> is_pattern("layer[12].*.conv?"), is_pattern("layer1.0")
    (True, False)
    """
    return not WILD.isdisjoint(name)


def is_under(name: str, modules: Collection[str]) -> bool:
    """Does a parameter belong to one of these modules (or is it one of these names)?

    >>> is_under("layer1.0.conv1.weight", ["layer1"]), is_under("layer10.weight", ["layer1"])
    (True, False)
    """
    return any(name == module or name.startswith(module + ".") for module in modules)


def fits(name: str, wanted: str) -> bool:
    """Is a parameter the one of that name, of that module, or of one that the pattern stands for?

    >>> fits("layer1.0.conv1.weight", "layer1"), fits("layer1.0.conv1.weight", "*.conv?"), fits("fc.weight", "*.conv?")
    (True, True, False)
    """
    if not is_pattern(wanted):
        return is_under(name, [wanted])
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), wanted) for end in range(1, len(parts) + 1))
