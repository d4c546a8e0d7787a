"""The TOML files of ``repro/``: where they are, and reading them so strictly that no slip goes unnoticed."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ifso.errors import IfsoError

PACKAGED = Path(__file__).with_name("toml")
"""Where an installed package has them."""

CHECKOUT = Path(__file__).parents[3] / "repro"
"""Where a checkout has them."""

REQUIRED: Any = object()
LARGEST = 2**53
"""Whole numbers above it are no numbers of a study."""

KINDS = {str: "text", int: "a whole number", float: "a number", list: "a list", dict: "a table"}


def config_folder(packaged: Path = PACKAGED, checkout: Path = CHECKOUT) -> Path:
    """The folder of the shipped TOML files: beside the installed code, or at the root of a checkout."""
    for folder in (packaged, checkout):
        if any(folder.glob("*.toml")):
            return folder
    raise IfsoError(
        f"no rows of the paper found, neither in {packaged} nor in {checkout}; install ifso again, or run a checkout"
    )


def read_toml(path: Path) -> Section:
    """A file as a section, of which every key must be asked for."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise IfsoError(f"{path} cannot be read: {_one_line(error)}") from error
    except (ValueError, RecursionError) as error:
        raise IfsoError(f"{path} is no TOML: {_one_line(error)}") from error
    return Section(values, str(path))


class Section:
    """A table of a TOML file. What is missing, of another type or left over is an error that names file and key.

    >>> section = Section({"epochs": 200, "bacth": 128}, "some.toml")
    >>> section.take("epochs", int)
    200
    >>> section.done()
    Traceback (most recent call last):
    ifso.errors.IfsoError: some.toml: unknown key 'bacth'; known here: epochs
    """

    def __init__(self, values: Mapping[str, Any], file: str, inside: str = "") -> None:
        self._values, self._file, self._inside = dict(values), file, inside
        self._asked: list[str] = []

    @property
    def keys(self) -> tuple[str, ...]:
        """Every key there is."""
        return tuple(self._values)

    def take(self, key: str, kind: type, default: Any = REQUIRED, *, among: tuple[str, ...] = ()) -> Any:
        """The value of ``key``; a whole number will do for ``float``. ``among`` are the choices there are."""
        self._asked.append(key)
        if key not in self._values:
            if default is REQUIRED:
                raise self.error(f"key {self._name(key)!r} is missing; give {KINDS[kind]}")
            return default
        value = self._checked(self._values[key], kind, key)
        if among and value not in among:
            raise self.error(f"{self._name(key)} = {value!r} is unknown; choose one of {', '.join(among)}")
        return value

    def take_list(self, key: str, kind: type, default: Any = REQUIRED) -> tuple[Any, ...]:
        """The values of a list, all of one kind and none twice."""
        found = tuple(self._checked(value, kind, f"{key}[]") for value in self.take(key, list, default))
        if len(set(found)) < len(found):
            raise self.error(f"{self._name(key)} names something twice")
        return found

    def section(self, key: str) -> Section:
        """A table within this one; an empty one if it is not there."""
        return Section(self.take(key, dict, {}), self._file, self._name(key))

    def sections(self, key: str) -> list[Section]:
        """The tables of a list."""
        tables = [self._checked(value, dict, f"{key}[]") for value in self.take(key, list, [])]
        return [Section(table, self._file, f"{self._name(key)}[{number}]") for number, table in enumerate(tables)]

    def done(self) -> None:
        """Refuse keys that nobody asked for."""
        unknown = [key for key in self._values if key not in self._asked]
        if unknown:
            known = ", ".join(dict.fromkeys(self._asked))
            raise self.error(f"unknown key {self._name(unknown[0])!r}; known here: {known}")

    def error(self, what: str) -> IfsoError:
        """An error about this file."""
        return IfsoError(f"{self._file}: {_one_line(what)}")

    def _name(self, key: str) -> str:
        return f"{self._inside}.{key}" if self._inside else key

    def _checked(self, value: Any, kind: type, key: str) -> Any:
        if kind is float and type(value) is int and abs(value) < LARGEST:
            return float(value)
        if type(value) is not kind:
            raise self.error(f"{self._name(key)} = {value!r} will not do; give {KINDS[kind]}")
        return value


def _one_line(error: Exception | str) -> str:
    from ifso.common.text import one_line

    return one_line(error)
