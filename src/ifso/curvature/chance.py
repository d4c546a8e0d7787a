"""Random numbers that a pass draws: what is captured as a CUDA graph must not depend on them unseen."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch


def draws(*, gpu: bool = True) -> Callable[[], bool]:
    """Ask the result later: have random numbers been drawn since, by torch or by Python? ``gpu=False``: on the host.

    >>> drawn = draws()
    >>> drawn()
    False
    >>> state = torch.get_rng_state()
    >>> _ = torch.rand(1)
    >>> drawn()
    True
    >>> torch.set_rng_state(state)
    """
    on_gpu = gpu and torch.cuda.is_available()
    python, host = random.getstate(), torch.get_rng_state()
    device = torch.cuda.get_rng_state() if on_gpu else None

    def drawn() -> bool:
        here = random.getstate() != python or not torch.equal(torch.get_rng_state(), host)
        return here or (device is not None and not torch.equal(torch.cuda.get_rng_state(), device))

    return drawn
