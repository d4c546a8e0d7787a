"""Modules of a model: those that a user names, by name, by pattern or as modules, and how each of them was built."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ifso.common.module_state import named_tensors
from ifso.errors import IfsoError, TraceError

WILD = frozenset("*?[")


def names_in(model: nn.Module, wanted: Any, option: str, error: type[IfsoError] = TraceError) -> tuple[str, ...]:
    """The names of modules and parameters that ``option`` asks for; TraceError if one is not there.

    ``error`` is raised for what is no collection of names. Of what a pattern stands for, all that is within a module
    goes by the name of the module.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> names_in(net, ["0", "*.bias", net[2]], "ignore")
    ('0', '2.bias', '2')
    >>> names_in(nn.Sequential(net, nn.ReLU()), ["0*"], "ignore")
    ('0',)
    """
    if isinstance(wanted, str) or not isinstance(wanted, (nn.Module, Iterable)):
        what = f"one string; give a tuple of names: {option}=({wanted!r},)" if isinstance(wanted, str) else "no tuple"
        raise error(f"{option}={wanted!r} is {what}")
    given = [wanted] if isinstance(wanted, nn.Module) else list(wanted)
    found: dict[str, None] = {}
    for each in given:
        for name in _named(model, each, option):
            if each == name or not is_under(name, found):
                found[name] = None
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
    """Return whether it stands for several names: ``*`` is anything, dots too, ``?`` one letter, ``[ab]`` one of some.

    >>> is_pattern("layer[12].*.conv?"), is_pattern("layer1.0")
    (True, False)
    """
    return not WILD.isdisjoint(name)


def is_under(name: str, modules: Collection[str]) -> bool:
    """Return whether a parameter belongs to one of these modules, or is one of these names.

    >>> is_under("layer1.0.conv1.weight", ["layer1"]), is_under("layer10.weight", ["layer1"])
    (True, False)
    """
    return any(name == module or name.startswith(module + ".") for module in modules)


def fits(name: str, wanted: str) -> bool:
    """Return whether a parameter is the one of that name, of that module, or of one that the pattern stands for.

    >>> fits("layer1.0.conv1.weight", "layer1"), fits("layer1.0.conv1.weight", "*.conv?"), fits("fc.weight", "*.conv?")
    (True, True, False)
    """
    if not is_pattern(wanted):
        return is_under(name, [wanted])
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), wanted) for end in range(1, len(parts) + 1))


Wiring = dict[str, tuple[Any, ...]]
"""By name of the module: its class and, for one of PyTorch's own, the numbers and words it was made with."""

_FREE = frozenset(("training", "inplace", "track_running_stats", "momentum"))
"""Attributes that change nothing about which channels belong together."""


def wiring_of(model: nn.Module) -> Wiring:
    """The modules of a model by name.

    >>> wiring_of(nn.Sequential(nn.Softmax(1)))["0"]
    ('torch.nn.modules.activation.Softmax', ('dim', 1))
    """
    return {name: (class_name(module), *_settings(module)) for name, module in model.named_modules()}


def modes_of(model: nn.Module) -> tuple[bool, ...]:
    """Which modules are in train mode."""
    return tuple(module.training for module in model.modules())


def wiring_difference(before: Wiring, now: Wiring) -> str | None:
    """The first module that is another one now, in words; None if all are as they were."""
    for name in (*before, *now):
        one, other = before.get(name), now.get(name)
        if one != other:
            return f"{name or 'the model'} was {_words(one, other)} and is {_words(other, one)}"
    return None


def _words(found: tuple[Any, ...] | None, other: tuple[Any, ...] | None) -> str:
    """The class of a module and the settings in which it differs from the other."""
    if found is None:
        return "not there"
    kind = str(found[0]).rpartition(".")[2]
    settings = ", ".join(f"{item[0]}={item[1]!r}" for item in found[1:] if item not in (other or ()))
    return f"{kind}({settings[:80]})" if settings else kind


def class_name(module: nn.Module) -> str:
    """The class of a module and where it is defined."""
    kind = type(module)
    return f"{kind.__module__}.{kind.__qualname__}"


def _settings(module: nn.Module) -> list[tuple[str, Any]]:
    if not type(module).__module__.startswith("torch.nn."):
        return []
    items = vars(module).items()
    return [(name, value) for name, value in items if not name.startswith("_") and name not in _FREE and _plain(value)]


def _plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_plain, value))
    return isinstance(value, (int, str)) or value is None
