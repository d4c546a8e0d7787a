"""The names that notebooks and scripts are written against, and how they are called."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from golden_store import check_json
from internals import registries

import ifso
from ifso import errors


def described(value: Any) -> Any:
    """How a public name is used: a function's parameters; what a class is made with, and its public members."""
    if inspect.isclass(value):
        found: dict[str, Any] = {"bases": [base.__name__ for base in value.__mro__[1:-1]]}
        if issubclass(value, BaseException):
            return found
        found["made with"] = parameters(value)
        return found | {"members": {name: member(value, name) for name in sorted(dir(value)) if name[0] != "_"}}
    return parameters(value) if callable(value) else repr(value)


def parameters(function: Callable[..., Any]) -> dict[str, str]:
    """Name: kind, and default where there is one."""
    return {name: shown(each) for name, each in inspect.signature(function).parameters.items()}


def shown(parameter: inspect.Parameter) -> str:
    """``keyword-only = 0``."""
    default = "" if parameter.default is parameter.empty else f" = {plain(parameter.default)}"
    return f"{parameter.kind.description}{default}"


def member(kind: type, name: str) -> Any:
    """A method's parameters, or what else it is."""
    value = inspect.getattr_static(kind, name)
    if isinstance(value, (classmethod, staticmethod, FunctionType)):
        return parameters(getattr(kind, name))
    if isinstance(value, property):
        return "property"
    return f"value {plain(value)}" if isinstance(value, (int, float, str, tuple, type(None))) else "attribute"


def plain(value: Any) -> str:
    """A default without the address or the module of what it is."""
    if isinstance(value, enum.Enum) or dataclasses.is_dataclass(value):
        return repr(value)
    if callable(value) and hasattr(value, "__name__"):
        return value.__name__
    return "<default factory>" if "factory" in repr(value) else repr(value)


def test_public_names():
    check_json("public-names", {name: described(getattr(ifso, name)) for name in ifso.__all__ if name != "__version__"})


def test_errors():
    found = {name: value for name, value in vars(errors).items() if inspect.isclass(value)}
    check_json("errors", {
        name: {"bases": [base.__name__ for base in value.__mro__[1:-2]], "status": value.exit_status}
        for name, value in sorted(found.items())
    })  # fmt: skip


def test_names_to_choose_from():
    check_json("registries", {name: entries(value) for name, value in registries().items()})


def entries(value: Any) -> Any:
    """What is registered; classes with the options they take."""
    if isinstance(value, Mapping):
        return {key: parameters(part) if callable(part) else part for key, part in value.items()}
    return value
