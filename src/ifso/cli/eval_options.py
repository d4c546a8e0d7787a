"""What ``ifso eval`` is asked: which networks, on what, and how they are measured."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ifso.cli.eval_report import STAGES
from ifso.cli.inspect import add_pretrained, shape
from ifso.runs.open import LARGEST, add_unverified

USUAL: Mapping[str, Any] = {"batch": 500, "train_batch": 128, "latency_batch": (1, 128)}
BOXES: Mapping[str, Any] = {"batch": 8, "train_batch": 2, "latency_batch": (1, 8)}
"""Sizes of batches that are not given, and for data with boxes."""


def _either(name: str) -> str:
    return f"{USUAL[name]}; {BOXES[name]} with boxes"


def add_task(group: Any) -> None:
    """Networks and data."""
    group.add_argument(
        "folder", nargs="?", type=Path, metavar="RUN", help="a folder that ifso prune --out or ifso finetune --out made"
    )
    group.add_argument("--model", metavar="MODEL", help="torchvision:NAME, timm:NAME, ifso:NAME or file.py:factory")
    group.add_argument("--weights", metavar="FILE", help="trained weights of the unpruned network (those of the run)")
    add_pretrained(group)
    group.add_argument("--data", metavar="DATA", help="what ifso prune takes as --data (that of the run)")
    group.add_argument("--download", action="store_true", help="fetch CIFAR into the folder of --data if need be")
    group.add_argument(
        "--only", action="append", choices=STAGES, metavar="NAME", help=f"{', '.join(STAGES)}; repeat it (all)"
    )
    add_unverified(group)
    group.add_argument("--split", choices=("test", "validation"), default="test", help="which images (test)")
    group.add_argument(
        "--validation", type=share, metavar="SHARE", help="of the training set, or number of images, set apart"
    )
    group.add_argument("--seed", type=seed, metavar="N", help="that these were drawn with (that of the run)")


def add_measuring(group: Any) -> None:
    """Device, precision, and sizes of batches, which are left to the data where they are not given."""
    group.add_argument("--device", default="cpu", metavar="NAME", help="cpu or cuda (cpu)")
    group.add_argument("--precision", default="float32", metavar="NAME", help="float32, tf32, bf16 or fp16 (float32)")
    group.add_argument("--channels-last", action="store_true", help="channels-last memory layout")
    group.add_argument("--batch", type=positive, metavar="N", help=f"images at a time ({_either('batch')})")
    group.add_argument(
        "--latency-batch", action="append", type=positive, metavar="N",
        help="images to time; repeat it (1 and 128; 1 and 8 with boxes)",
    )  # fmt: skip
    group.add_argument(
        "--input",
        type=shape,
        metavar="1,3,32,32",
        help="that costs and time are measured on (the run's, or the data's)",
    )
    group.add_argument("--repeats", type=positive, default=15, metavar="N", help="timed runs of each (15)")
    group.add_argument(
        "--train-batch", type=positive, metavar="N",
        help=f"of the training step ({_either('train_batch')})",
    )  # fmt: skip
    group.add_argument("--threads", type=positive, metavar="N", help="of the CPU (as many as torch takes)")
    group.add_argument("--json", action="store_true", help="print one JSON document")
    group.add_argument("--out", type=Path, metavar="FILE", help="write the JSON document into a file, too")


def positive(text: str) -> int:
    """A whole number from 1 up."""
    if not text.isdecimal() or not text.isascii() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} will not do; give a whole number from 1 up")
    return int(text)


def seed(text: str) -> int:
    """A whole number that torch takes as a seed."""
    if not text.isdecimal() or not text.isascii() or len(text) > 19 or int(text) > LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r} will not do; give a whole number from 0 to {LARGEST}")
    return int(text)


def real(text: str) -> float:
    """A number that is finite."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise argparse.ArgumentTypeError(f"{text!r} is no finite number")
    return found


def share(text: str) -> float | int:
    """A share such as 0.1 or a number of images such as 5000.

    >>> share("0.1"), share("5000")
    (0.1, 5000)
    """
    try:
        return int(text) if text.isdecimal() else real(text)
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"{text!r} is no share such as 0.1 and no number of images") from None
