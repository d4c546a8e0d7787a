"""Where data and networks can be put."""

from __future__ import annotations

import torch

from ifso.errors import DataError


def usable_device(name: torch.device | str) -> torch.device:
    """The device of that name, if something can be put there.

    >>> usable_device("cpu")
    device(type='cpu')
    """
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("it holds no numbers")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"device {str(name)!r} cannot be used: {reason}; use cpu or cuda") from error
    return device
