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
    """Import ``path`` and call its ``factory``; without options, it is called without arguments."""
    model = call_from_file(path, factory, ModelNotFound, **options)
    if not isinstance(model, nn.Module):
        raise ModelNotFound(f"{path}:{factory} returned {type(model).__name__}; it must return a torch.nn.Module")
    return model


def call_from_file(path: str, factory: str, failure: type[IfsoError], **options: Any) -> Any:
    """What ``factory`` of the file ``path`` returns; whatever goes wrong is said by a ``failure``."""
    make = find_in_file(path, factory, failure)
    with blamed(f"{path}:{factory} failed", failure):
        return make(**options)


@contextmanager
def blamed(what: str, failure: type[IfsoError]) -> Iterator[None]:
    """Whatever a user's code raises within is a ``failure`` of one line, ``sys.exit`` too; Ctrl-C is not its own."""
    try:
        yield
    except (KeyboardInterrupt, IfsoError):
        raise
    except BaseException as error:
        said = f"{type(error).__name__}: {one_line(error) or 'no message'}{users_line(error)}"
        raise failure(f"{what}: {said}") from error


def find_in_file(path: str, factory: str, failure: type[IfsoError]) -> Callable[..., Any]:
    """The function ``factory`` of the file ``path``, which is imported; a ``failure`` says if there is none."""
    module = _import(Path(path), failure)
    make = getattr(module, factory, None)
    if not callable(make):
        raise failure(f"{path} has no function {factory!r}{_suggest(factory, module)}")
    return make


def _import(path: Path, failure: type[IfsoError]) -> ModuleType:
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


def _suggest(factory: str, module: ModuleType) -> str:
    callables = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    close = get_close_matches(factory, callables, n=3)
    return f"; did you mean {' or '.join(close)}?" if close else ""
