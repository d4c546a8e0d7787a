"""Tests over whatever criteria the registry holds."""

from __future__ import annotations

import pytest

from ifso.criteria import registry


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an argument ``any_criterion`` runs for every registered name."""
    if "any_criterion" in metafunc.fixturenames:
        metafunc.parametrize("any_criterion", registry.names())
