"""Options that several commands have: how they are declared and read, and those of a run that is resumed."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ifso.cli.console import chatter_to_stderr, complain
from ifso.errors import IfsoError, RunError
from ifso.runs.arguments import EXECUTED, refuse_foreign, told_options, without_folders
from ifso.runs.values import LARGEST_WHOLE

BATCH = "images in one batch, however many processes share the work"
MODEL = "torchvision:NAME, timm:NAME, ifso:NAME or file.py:factory; or the folder of a run, for its network"
WEIGHTS = "trained weights, or the folder of a run for those of its network"
DATA = (
    "digits, cifar10:PATH, cifar100:PATH, imagenet:PATH, folder:PATH, jpegs:FILE.npz, coco:PATH or file.py:factory; "
    "folder:PATH,size=64 makes the images so large"
)
SHARED: Mapping[str, tuple[Any, str, str]] = {
    "model": (str, "MODEL", MODEL),
    "data": (str, "DATA", DATA),
    "pretrained": (None, "", "let torchvision and timm load published weights, and download them if need be"),
    "download": (None, "", "fetch CIFAR into the folder of --data if need be"),
    "workers": (int, "N", "processes that decode images in files, 0 for none (as the cores allow)"),
    "finetuned": (
        Path, "DIR",
        "its fine-tuned network: a folder that ifso.save(model, DIR) wrote, or ifso finetune (RUN/finetune)",
    ),
    "unverified": (
        None, "",
        "take the network even if a check of it failed, or the files of the run do not belong together",
    ),
    "device": (str, "NAME", "cpu, cuda or auto: cuda where there is a GPU (auto)"),
    "channels_last": (None, "", "channels-last memory layout"),
    "json": (None, "", "print one JSON document"),
}  # fmt: skip
"""Options that mean the same in several commands: kind, metavar and help."""


def add_shared(group: Any, *names: str) -> None:
    """Declare options of :data:`SHARED`."""
    for name in names:
        add_option(group, name, *SHARED[name])


def add_option(group: Any, name: str, kind: Any, metavar: str, words: str, **more: Any) -> None:
    """Declare ``--name`` without a default; ``bool`` as the ``kind`` also declares ``--no-name``, None is a switch."""
    flag = f"--{name.replace('_', '-')}"
    if kind is None:
        group.add_argument(flag, action="store_true", help=words, **more)
    elif kind is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=words, **more)
    else:
        group.add_argument(flag, type=kind, metavar=metavar, help=words, **more)


def add_former(group: Any, former: str, name: str, kind: Any, **more: Any) -> None:
    """Declare ``--former``, which is not shown any more and does what ``--name`` does, after a line that says so."""

    class Renamed(argparse.Action):
        def __call__(self, *given: Any) -> None:
            complain(f"note: --{former} is called --{name} here")
            setattr(given[1], self.dest, given[2])

    group.add_argument(f"--{former}", type=kind, action=Renamed, help=argparse.SUPPRESS, **more)


def add_settings(group: Any, defaults: object, words: Mapping[str, tuple[str, str]], **spelled: str) -> None:
    """Declare an option for each attribute of ``defaults`` that ``words`` gives a metavar and a help text.

    They have no defaults, so that what is not given can be left to a recipe; ``{}`` in a text stands for the attribute.
    ``spelled`` are the names of options that are not those of their attributes.
    """
    for name, (metavar, text) in words.items():
        default = getattr(defaults, name)
        several = {"nargs": "+"} if isinstance(default, tuple) else {}
        kind = {float: real, tuple: real}.get(type(default), type(default))
        shown = " ".join(map(str, default)) if several else f"{default:g}" if kind is real else default
        add_option(group, spelled.get(name, name), kind, metavar, text.format(shown), dest=name, **several)


def add_help(parser: argparse.ArgumentParser, ending: Callable[[], str]) -> None:
    """Give a parser made with ``add_help=False`` a ``--help`` that ends with ``ending()``, asked for only then."""
    parser.formatter_class = _WholeNames
    parser.add_argument(
        "-h", "--help", action=_Help, const=ending, help="show this and the names to choose from, and exit"
    )


class _WholeNames(argparse.HelpFormatter):
    """Does not break lines within ``resnet32-cifar10-50``, so that the name can be copied."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        words = " ".join(text.split())
        return textwrap.fill(words, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


class _Help(argparse.Action):
    def __init__(self, option_strings: Any, dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, **kwargs)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Print and exit; an error that stands in the way of the names takes their place."""
        try:
            parser.epilog = self.const()
        except IfsoError as error:
            parser.epilog = str(error)
        parser.print_help()
        parser.exit()


def positive(text: str) -> int:
    """A whole number from 1 up."""
    if not text.isdecimal() or not text.isascii() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 up, got {text!r}")
    return int(text)


def seed(text: str) -> int:
    """A whole number that torch takes as a seed."""
    if not text.isdecimal() or not text.isascii() or len(text) > 19 or int(text) > LARGEST_WHOLE:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to {LARGEST_WHOLE}, got {text!r}")
    return int(text)


def real(text: str) -> float:
    """A finite number."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r} is no finite number")
    return number


def share(text: str) -> float | int:
    """A share such as 0.1 or a number of images such as 5000.

    >>> share("0.1"), share("5000")
    (0.1, 5000)
    """
    try:
        return int(text) if text.isdecimal() else real(text)
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"{text!r} is no share such as 0.1 and no number of images") from None


def shape(text: str) -> tuple[int, ...]:
    """A shape as it is written on the command line.

    >>> shape("1,3,224,224")
    (1, 3, 224, 224)
    """
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1 or max(sizes) >= 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape; write positive numbers, for example 1,3,224,224")
    return sizes


MAY_CHANGE = ("device",)
"""Options that a resumed run may have others of."""


def stored_options(run: Path, names: Sequence[str], command: str) -> dict[str, Any]:
    """The options of these names that ``command`` started a run with."""
    from ifso.runs.files import CONFIG, is_there, read_config

    if not is_there(run / CONFIG):
        raise RunError(f"{run} holds no run to resume; start it without --resume, or give its folder")
    arguments = told_options(read_config(run / CONFIG), run / CONFIG)
    if arguments is None:
        raise RunError(
            f"{run / CONFIG} does not say how {command} was called; "
            "resume the run in Python, or start it in another folder"
        )
    return {name: value for name, value in arguments.items() if name in names}


def check_same_options(given: Mapping[str, Any], stored: Mapping[str, Any], run: Path, *others: Path) -> None:
    """Raise RunError if a run is resumed with other options than it was started with.

    Files may have moved, so that only their names are compared. Programs that came with the run, or with one of
    ``others``, which are opened with it, must be given again.
    """
    for option in EXECUTED:
        if option in stored and option not in given:
            refuse_foreign(option, str(stored[option]), (run, *others))
    from ifso.runs.files import refuse_other

    new = {name: without_folders(value) for name, value in given.items() if name not in MAY_CHANGE}
    old = {name: without_folders(stored[name]) for name in new if name in stored}
    refuse_other(new, old, f"the run in {run}")


@contextmanager
def resumable(command: Sequence[str], *folders: Path, shown: bool) -> Iterator[None]:
    """Send what libraries print to standard error; after Ctrl-C print ``command``, if all ``folders`` can go on."""
    from ifso.runs.files import CONFIG

    try:
        with chatter_to_stderr():
            yield
    except KeyboardInterrupt:
        if shown and all((folder / CONFIG).is_file() for folder in folders):
            print(f"to go on: {shlex.join(['ifso', *command])}", file=sys.stderr)
        raise
