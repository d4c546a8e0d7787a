"""Help that ends with names which are looked up only when somebody asks for it."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable
from typing import Any

from ifso.errors import IfsoError


def add_help(parser: argparse.ArgumentParser, ending: Callable[[], str]) -> None:
    """Give a parser that was made with ``add_help=False`` an option for help, which ends with ``ending()``."""
    parser.formatter_class = _WholeNames
    parser.add_argument(
        "-h", "--help", action=_Help, const=ending, help="show this and the names to choose from, and exit"
    )


class _WholeNames(argparse.HelpFormatter):
    """Lines never end within ``resnet32-cifar10-50``, so that a name can be found and copied."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        words = " ".join(text.split())
        return textwrap.fill(words, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


class _Help(argparse.Action):
    """``const`` gives the words at the end."""

    def __init__(self, option_strings: Any, dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, **kwargs)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Print and leave; what stands in the way of the names is told in their place."""
        try:
            parser.epilog = self.const()
        except IfsoError as error:
            parser.epilog = str(error)
        parser.print_help()
        parser.exit()
