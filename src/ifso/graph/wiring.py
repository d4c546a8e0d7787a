"""How a network is built, as far as its modules tell: what a graph must find again in the model it is used on."""

from __future__ import annotations

from typing import Any

from torch import nn

Wiring = dict[str, tuple[Any, ...]]
"""By name of the module: its class and, for one of PyTorch's own, the numbers and words it was made with."""

_FREE = frozenset(("training", "inplace", "track_running_stats"))
"""Attributes that change nothing about which channels belong together."""


def wiring_of(model: nn.Module) -> Wiring:
    """The modules of a model by name.

    >>> wiring_of(nn.Sequential(nn.Softmax(1)))["0"]
    ('torch.nn.modules.activation.Softmax', ('dim', 1))
    """
    return {name: (_class(module), *_settings(module)) for name, module in model.named_modules()}


def modes_of(model: nn.Module) -> tuple[bool, ...]:
    """Which modules are in train mode."""
    return tuple(module.training for module in model.modules())


def difference(before: Wiring, now: Wiring) -> str | None:
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


def _class(module: nn.Module) -> str:
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
