"""Where numbers that are not finite come from."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from torch import nn

from ifso.common.module_state import named_tensors
from ifso.errors import WeightsError
from ifso.pruning.stream import not_finite

LOOK_FOR = 20.0
"""Seconds that are spent on looking for a bad batch after a training has failed."""


def refuse_spoilt_weights(model: nn.Module) -> None:
    """WeightsError that names the first parameter or buffer with NaN or infinity in it."""
    for name, tensor in named_tensors(model).items():
        if not tensor.is_meta and bool(not_finite(tensor)):
            raise WeightsError(f"{name} of the network holds NaN or infinity; give other weights")


def first_bad(batches: Iterable[Any]) -> int | None:
    """The number, from 0, of the first batch that holds NaN or infinity; None if none is found in good time."""
    began = time.monotonic()
    for number, batch in enumerate(batches):
        if bool(not_finite(batch)):
            return number
        if time.monotonic() - began > LOOK_FOR:
            return None
    return None
