"""In which precision a network computes: full float32, TF32, or bfloat16 under autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ifso.curvature.primal import conv_settings
from ifso.errors import IfsoError

PRECISIONS = ("float32", "tf32", "bf16")


def check_precision(name: str) -> None:
    """Refuse a name that is none of :data:`PRECISIONS`."""
    if name not in PRECISIONS:
        raise IfsoError(f"precision {name!r} is unknown; choose one of {', '.join(PRECISIONS)}")


@contextmanager
def tensor_cores(name: str) -> Iterator[None]:
    """Within it convolutions on a GPU round their factors to TF32 if ``name`` is ``"tf32"``, and otherwise do not."""
    check_precision(name)
    conv = conv_settings()
    before = conv.fp32_precision
    conv.fp32_precision = "tf32" if name == "tf32" else "ieee"
    try:
        yield
    finally:
        conv.fp32_precision = before


def autocast(name: str, device: torch.device | str) -> torch.autocast:
    """Within it layers compute in bfloat16 if ``name`` is ``"bf16"``; a new one for each use.

    >>> with autocast("bf16", "cpu"):
    ...     (torch.ones(1, 1) @ torch.ones(1, 1)).dtype
    torch.bfloat16
    """
    return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=name == "bf16")
