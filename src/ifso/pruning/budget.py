"""``ifso.Budget``: how much of a network may be kept."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from numbers import Real

from ifso.errors import BudgetError


@dataclass(frozen=True)
class Budget:
    """The share KEPT of each cost that is named; a run goes on until all of them are met.

    ``macs`` counts the multiply-adds of convolutions, linear layers and matrix products, ``conv_macs`` those of
    convolutions only (as in the paper), ``params`` the parameters, ``activations`` the numbers that these operations
    write, ``latency`` the seconds of one forward pass on the traced inputs.

    >>> Budget(macs=0.5, params=0.7).targets
    {'macs': 0.5, 'params': 0.7}
    >>> Budget(macs=50)
    Traceback (most recent call last):
    ifso.errors.BudgetError: macs=50 is not a share between 0 and 1; give the share KEPT: macs=0.5 keeps half
    """

    macs: float | None = None
    conv_macs: float | None = None
    params: float | None = None
    activations: float | None = None
    latency: float | None = None

    def __post_init__(self) -> None:
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        given = {name: value for name, value in named.items() if value is not None}
        if not given:
            known = ", ".join(named)
            raise BudgetError(f"an empty budget; give the share KEPT of at least one of {known}: macs=0.5 keeps half")
        for name, value in given.items():
            if not _is_share(value):
                raise BudgetError(
                    f"{name}={value!r} is not a share between 0 and 1; give the share KEPT: {name}=0.5 keeps half"
                )

    @property
    def targets(self) -> dict[str, float]:
        """The shares that were given, by the name of the cost."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: float(value) for name, value in named.items() if value is not None}


def _is_share(value: object) -> bool:
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    number = float(value)
    return math.isfinite(number) and 0 < number < 1
