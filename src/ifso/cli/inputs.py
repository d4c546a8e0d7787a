"""What commands work on: networks that folders stand for, how data is opened, and inputs of a shape."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifso.errors import IfsoError, TraceError

if TYPE_CHECKING:
    from ifso.cli.distributed import World
    from ifso.data import Data


def name_networks(args: argparse.Namespace, run: Path | None = None) -> list[str]:
    """Put options that name its network in the place of a folder that is MODEL, ``--weights`` or ``--teacher``.

    ``run`` is such a folder, too, of which ``--model`` says the MODEL. What is to be said of each is returned.
    """
    from ifso.runs.open import holds_network, network_in, weights_in

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


def data_options(args: argparse.Namespace, world: World, seed: int | None, validation: float = 0) -> dict[str, Any]:
    """What data is opened with, by this rank."""
    return {
        "device": world.device, "seed": seed, "validation": validation, "rank": world.rank, "ranks": world.ranks,
        "download": args.download, "workers": args.workers,
    }  # fmt: skip


def report_notes(data: Data, say: Callable[[str], None]) -> None:
    """Report the notes of data: boxes that were left out, a file that stands in for another."""
    for note in getattr(data, "notes", ()):
        say(note)


def example_input(sizes: Sequence[int] | None, data: Data, device: str) -> Any:
    """What costs are counted on: zeros of the shape that was named, for a detector in a list, or the data's example."""
    import torch

    from ifso.data.base import detects

    if sizes is None:
        return data.example_inputs()
    if detects(data):
        return detector_images(sizes, device=device)
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
