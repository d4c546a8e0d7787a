"""A network, or anything else, from a user's own file: ``path/file.py:factory``."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from ifso.common.files import is_file
from ifso.common.text import one_line
from ifso.errors import IfsoError, ModelNotFound, users_line


def build_from_file(path: str, factory: str, **options: Any) -> nn.Module:
    """What ``factory`` of the file ``path`` returns for the options: a network."""
    make = find_in_file(path, factory, ModelNotFound)
    with blamed(f"{path}:{factory} failed", ModelNotFound):
        model = make(**options)
    if not isinstance(model, nn.Module):
        raise ModelNotFound(f"{path}:{factory} returned {type(model).__name__}; it must return a torch.nn.Module")
    return model


@contextmanager
def blamed(what: str, failure: type[IfsoError]) -> Iterator[None]:
    """Raise a ``failure`` of one line for what a user's code raises within, ``sys.exit`` too, but not Ctrl-C."""
    try:
        yield
    except (KeyboardInterrupt, IfsoError):
        raise
    except BaseException as error:
        said = f"{type(error).__name__}: {one_line(error) or 'no message'}{users_line(error)}"
        raise failure(f"{what}: {said}") from error


def find_in_file(path: str, factory: str, failure: type[IfsoError]) -> Callable[..., Any]:
    """The function ``factory`` of the file ``path``, which is imported; a ``failure`` if there is none."""
    module = _import(Path(path), failure)
    make = getattr(module, factory, None)
    if not callable(make):
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        close = get_close_matches(factory, names, n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise failure(f"{path} has no function {factory!r}{hint}")
    return make


def _import(path: Path, failure: type[IfsoError]) -> ModuleType:
    """The file as a module; modules beside it can be imported while it is."""
    if not is_file(path):
        raise failure(f"no file {path}")
    spec = importlib.util.spec_from_file_location(f"_ifso_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise failure(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        with blamed(f"{path} cannot be imported", failure):
            spec.loader.exec_module(module)
    finally:
        with suppress(ValueError):
            sys.path.remove(folder)
    return module
