"""Options that several commands have: how they are declared, how their values are read, and inputs made of them."""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ifso.cli.console import complain
from ifso.errors import IfsoError, TraceError
from ifso.runs.open import holds_network, network_in, weights_in
from ifso.runs.values import LARGEST_WHOLE

MODEL = "torchvision:NAME, timm:NAME, ifso:NAME or file.py:factory; or the folder of a run, for its network"
WEIGHTS = "trained weights, or the folder of a run for those of its network"
DATA = (
    "digits, cifar10:PATH, cifar100:PATH, imagenet:PATH, folder:PATH, jpegs:FILE.npz, coco:PATH or file.py:factory; "
    "folder:PATH,size=64 makes the images so large"
)

BATCH = "images in one batch, however many processes share the work"


def add_option(group: Any, name: str, kind: Any, metavar: str, words: str, **more: Any) -> None:
    """Declare ``--name`` without a default; ``bool`` as the ``kind`` also declares ``--no-name``."""
    flag = f"--{name.replace('_', '-')}"
    if kind is bool:
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


def add_opening(group: Any) -> None:
    """How data is opened: ``--download`` and ``--workers``."""
    group.add_argument("--download", action="store_true", help="fetch CIFAR into the folder of --data if need be")
    words = "processes that decode images in files, 0 for none (as the cores allow)"
    group.add_argument("--workers", type=int, metavar="N", help=words)


def add_json(group: Any) -> None:
    """Declare ``--json``."""
    group.add_argument("--json", action="store_true", help="print one JSON document")


def add_pretrained(group: Any) -> None:
    """Declare ``--pretrained``."""
    words = "let torchvision and timm load published weights, and download them if need be"
    group.add_argument("--pretrained", action="store_true", help=words)


def name_networks(args: argparse.Namespace, run: Path | None = None) -> list[str]:
    """Put options that name its network in the place of a folder that is MODEL, ``--weights`` or ``--teacher``.

    ``run`` is such a folder, too, of which ``--model`` says the MODEL. What is to be said of each is returned.
    """
    said = []
    if run is None and args.model is not None and holds_network(args.model):
        run, args.model = Path(args.model), None
    if run is not None:
        if args.weights is not None:
            raise IfsoError(f"{run} brings weights of its own; leave --weights {args.weights} out")
        options, which = network_in(run, model=args.model, data=getattr(args, "data", None))
        for name, value in options.items():
            if getattr(args, name, None) is None:
                setattr(args, name, value)
        said.append(f"the network is {which}")
    elif args.weights is not None and holds_network(args.weights):
        args.weights, which = weights_in(Path(args.weights))
        said.append(f"the weights are those of {which}")
    teacher = getattr(args, "teacher", None)
    if teacher is not None and holds_network(teacher):
        options, which = network_in(Path(teacher))
        if "model" not in options:
            raise IfsoError(
                f"{teacher} does not say which MODEL it holds; write --teacher MODEL --teacher-weights {teacher}"
            )
        args.teacher, args.teacher_weights = options["model"], options["weights"]
        said.append(f"the teacher is {which}")
    return said


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


@contextmanager
def compute_threads(count: int | None) -> Iterator[None]:
    """Compute on so many threads for a while; None leaves their number as it is."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def zeros(sizes: Sequence[int], device: str) -> Any:
    """An input of that shape."""
    import torch

    check_size(sizes)
    return torch.zeros(tuple(sizes), device=device)


def detector_images(*shapes: Sequence[int], device: str = "cpu") -> Any:
    """What a detector takes for these shapes [N, 3, H, W] or [3, H, W]: a list of images of all of them."""
    from ifso.models.detectors import example_images

    images = []
    for sizes in shapes:
        check_size(sizes)
        if len(sizes) not in (3, 4) or sizes[-3] != 3:
            raise TraceError(
                f"--input {','.join(map(str, sizes))} is no shape of images for a detector; write N,3,H,W, "
                "for example 1,3,480,640"
            )
        images += example_images(*(sizes[:1] if len(sizes) == 4 else (1,)), *sizes[-2:], device=device)[0]
    return (images,)


def check_size(sizes: Sequence[int]) -> None:
    """Raise IfsoError for an input that would fill the memory."""
    from ifso.common.devices import refuse_too_large

    refuse_too_large(math.prod(sizes), f"--input {','.join(map(str, sizes))}")


def shapes_of(inputs: Any) -> str:
    """The shapes of all tensors in the inputs.

    >>> import torch
    >>> shapes_of(([torch.zeros(3, 48, 64), torch.zeros(3, 48, 64)],)), shapes_of(torch.zeros(1, 3, 32, 32))
    ('3x48x64 + 3x48x64', '1x3x32x32')
    """
    from ifso.common.tensors import tensors_in

    return " + ".join("x".join(map(str, tensor.shape)) or "scalar" for tensor in tensors_in(inputs))
