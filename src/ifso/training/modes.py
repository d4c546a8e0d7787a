"""Eval mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ifso.common.torch_state import same_modes


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode within, and afterwards for every module the mode it had."""
    with same_modes(model):
        model.eval()
        yield
